//! Objects that are not files: every kind of memory gets the same bytes that sha256sum reads, from readers that
//! receive or copy them, and no reader can make a load hand out anything else.

use dmafile::{
    Algorithm, Buffer, CancelToken, CopyTo, ErrorKind, Io, Kind, Load, Method, Model, ObjectReader,
    Pages, ReadBuf, RemoteObject, Ring, Verify,
};
use dmafile_testkit::{buffer_digest, bytes_digest, cold, dir, dirty_memfd, file_digest, models};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How bytes get into a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// A peer writes them to a socket in pieces.
    Receive,
    /// They are read from the file in pieces of this many bytes.
    Fill(usize),
}

const WAYS: [Way; 3] = [Way::Receive, Way::Fill(4093), Way::Fill(usize::MAX)];
/// Those that take several calls for each extent.
const IN_PIECES: [Way; 2] = [Way::Receive, Way::Fill(4093)];

/// What a reader does instead of reading on, after some bytes of its extent.
#[derive(Debug)]
enum Fault {
    None,
    /// It truncates the memory, and reads on.
    Truncate(OwnedFd),
    Fail,
    Errno,
    Short,
    Panic,
    /// It waits until the load does not need the bytes any more.
    Wait,
}

/// A file behind the trait.
struct FileObject {
    path: PathBuf,
    way: Way,
    fault: Fault,
    readers: AtomicUsize,
}

impl FileObject {
    fn of(path: &Path, way: Way) -> Arc<Self> {
        Self::faulty(path, way, Fault::None)
    }

    fn faulty(path: &Path, way: Way, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            path: path.to_path_buf(),
            way,
            fault,
            readers: AtomicUsize::new(0),
        })
    }
}

impl RemoteObject for FileObject {
    fn name(&self) -> String {
        format!("test://{}", self.path.display())
    }

    fn size(&self) -> u64 {
        self.path.metadata().unwrap().len()
    }

    fn store(&self) -> String {
        "test".to_string()
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        self.readers.fetch_add(1, Ordering::Relaxed);
        let file = File::open(&self.path)?;
        Ok(Box::new(FileReader { object: self, file }))
    }
}

struct FileReader<'a> {
    object: &'a FileObject,
    file: File,
}

impl ObjectReader for FileReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        let (mut at, end) = (offset, offset + into.remaining());
        // The first extent is read, so that the load has begun.
        let stop = if offset > 0 {
            offset + into.remaining() / 2
        } else {
            end
        };
        if self.object.way == Way::Receive {
            let (near, mut far) = UnixStream::pair()?;
            let bytes = {
                let mut bytes = vec![0; into.remaining() as usize];
                self.file.read_exact_at(&mut bytes, offset)?;
                bytes
            };
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for piece in bytes.chunks(70_001) {
                        // It ends early if the other end is gone.
                        let _ = far.write_all(piece);
                    }
                });
                while into.remaining() > 0 {
                    if into.receive(near.as_fd(), 9_001)? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    at = end - into.remaining();
                    if at >= stop && self.fault(into)? {
                        return Ok(());
                    }
                }
                Ok(())
            })
        } else {
            let Way::Fill(most) = self.object.way else {
                unreachable!()
            };
            while into.remaining() > 0 {
                let got = into.fill(most, |memory| {
                    // By the CPU: a system call would return EFAULT where this raises a signal.
                    let mut bytes = vec![0; memory.len()];
                    self.file.read_exact_at(&mut bytes, at)?;
                    memory.copy_from_slice(&bytes);
                    Ok(memory.len())
                })?;
                at += got as u64;
                if at >= stop && self.fault(into)? {
                    return Ok(());
                }
            }
            Ok(())
        }
    }
}

impl FileReader<'_> {
    /// True if the reader is to return.
    fn fault(&self, into: &ReadBuf<'_>) -> io::Result<bool> {
        if into.remaining() == 0 {
            return Ok(false);
        }
        match &self.object.fault {
            Fault::None => Ok(false),
            Fault::Truncate(memory) => {
                rustix::fs::ftruncate(memory, 4096)?;
                Ok(false)
            }
            Fault::Fail => Err(io::Error::other("the store is on fire")),
            Fault::Errno => Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
            Fault::Short => Ok(true),
            Fault::Panic => panic!("the reader's own"),
            Fault::Wait => loop {
                into.check()?;
                std::thread::sleep(Duration::from_millis(5));
            },
        }
    }
}

fn load(object: &Arc<FileObject>) -> Load {
    Load::of_object(Arc::clone(object) as Arc<dyn RemoteObject>)
        .block(64 << 10)
        .chunk(1 << 20)
}

fn check(loaded: &Buffer, path: &Path, (offset, len): (u64, u64), what: &str) {
    assert_eq!(loaded.len(), len, "{what}");
    assert_eq!(
        buffer_digest(loaded),
        file_digest(path, offset, len),
        "{what}"
    );
    let Some(fd) = loaded.as_fd() else { return };
    // Nothing but zeros around it.
    let size = rustix::fs::fstat(fd).unwrap().st_size as u64;
    for (from, to) in [(0, loaded.offset()), (loaded.offset() + len, size)] {
        let mut bytes = vec![1; (to - from) as usize];
        assert_eq!(
            rustix::io::pread(fd, &mut bytes, from).unwrap(),
            bytes.len()
        );
        assert!(bytes.iter().all(|&byte| byte == 0), "{what}: {from}..{to}");
    }
}

#[test]
fn every_kind_of_memory_gets_every_range() {
    let dir = dir();
    let size = (3 << 20) + 777_u64;
    let path = cold(dir.path(), size as usize);
    let ranges = [
        (0, size),
        (1, 1),
        (4095, 8194),
        (12_345, size - 12_345),
        (size - 1, 1),
    ];
    for way in WAYS {
        let object = FileObject::of(&path, way);
        for (offset, len) in ranges {
            let mut kinds: Vec<Kind> = vec![Kind::Anon, Kind::Memfd];
            // Full of ones, and larger.
            kinds.push(Kind::fd(dirty_memfd(len + 5000)));
            for kind in kinds {
                for pages in [Pages::Base, Pages::Thp] {
                    let what = format!("{way:?} {offset} {len} to {kind:?} {pages}");
                    let load = load(&object).offset(offset).length(len).to(kind.clone());
                    let existing = matches!(kind, Kind::Fd { .. });
                    let load = if existing { load } else { load.pages(pages) };
                    let loaded = load.run().unwrap_or_else(|error| panic!("{what}: {error}"));
                    check(&loaded.buffer, &path, (offset, len), &what);
                    assert_eq!(loaded.report.method, Method::Fetch, "{what}");
                }
            }
        }
    }
}

#[test]
fn only_a_part_of_a_memfd_and_memory_of_the_caller_are_filled() {
    let dir = dir();
    let path = cold(dir.path(), 300_001);
    for way in WAYS {
        let object = FileObject::of(&path, way);
        let fd = dirty_memfd(400_000);
        let other = fd.try_clone().unwrap();
        load(&object).to(Kind::fd_at(fd, 50_000)).run().unwrap();
        let mut all = vec![0; 400_000];
        rustix::io::pread(&other, &mut all, 0).unwrap();
        assert_eq!(
            bytes_digest(&all[50_000..350_001]),
            file_digest(&path, 0, 300_001)
        );
        let around = all[..50_000].iter().chain(&all[350_001..]);
        assert!(around.into_iter().all(|&byte| byte == 0xff));

        let mut memory = vec![0xff; 300_100];
        load(&object).run_into(&mut memory[7..300_050]).unwrap();
        assert_eq!(
            bytes_digest(&memory[7..300_008]),
            file_digest(&path, 0, 300_001)
        );
        assert!(memory[..7].iter().all(|&byte| byte == 0xff));
        assert!(memory[300_008..300_050].iter().all(|&byte| byte == 0));
        assert!(memory[300_050..].iter().all(|&byte| byte == 0xff));
    }
}

#[test]
fn objects_of_a_model_are_loaded_as_its_files_are() {
    let dir = dir();
    let shards = [("a", 5), ("b", 3), ("c", 8)];
    let shards = shards.map(|(name, count)| models::tensors(name, count, 100_000));
    models::sharded(dir.path(), &shards);
    let folder = Model::open(dir.path()).unwrap();
    let files: Vec<_> = folder
        .shards()
        .into_iter()
        .map(|shard| shard.file)
        .collect();
    let objects = files
        .iter()
        .map(|path| FileObject::of(path, Way::Receive) as _);
    let model = Model::open_objects("test://model", objects.collect()).unwrap();
    assert_eq!(model.tensors(), folder.tensors());
    let digest = |loaded: dmafile::Loaded| buffer_digest(&loaded.buffer);
    let [one, two] = [&model, &folder].map(|model| digest(model.load().run().unwrap()));
    assert_eq!(one, two);
    let name = folder.tensors().last().unwrap().name.clone();
    let some = [model, folder].map(|model| {
        let load = model.load_tensors(&[name.parse().unwrap()]).unwrap();
        let loaded = load.run().unwrap();
        let tensor = model.tensor(&name).unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        loaded
            .buffer
            .access()
            .unwrap()
            .read_at(tensor.at, &mut bytes)
            .unwrap();
        let mut part = vec![0; tensor.bytes as usize];
        model.read_part(tensor, 0, &mut part).unwrap();
        assert_eq!(part, bytes);
        bytes_digest(&bytes)
    });
    assert_eq!(some[0], some[1]);
}

#[test]
fn a_ring_passes_all_of_an_object() {
    let dir = dir();
    let path = cold(dir.path(), (5 << 20) + 13);
    for way in WAYS {
        let object = FileObject::of(&path, way);
        let mut memory = vec![0; (5 << 20) + 13];
        let ring = Ring::new(1 << 20, 4);
        let verify = Verify::compute(Algorithm::Sha256);
        let report = load(&object)
            .verify(verify)
            .run_through(ring, &mut CopyTo::new(&mut memory, 0))
            .unwrap();
        assert_eq!(bytes_digest(&memory), file_digest(&path, 0, (5 << 20) + 13));
        assert_eq!(report.verify[0].digest, bytes_digest(&memory));
    }
}

#[test]
fn a_digest_is_of_the_bytes_in_memory() {
    let dir = dir();
    let path = cold(dir.path(), (9 << 20) + 5);
    let digest = file_digest(&path, 0, (9 << 20) + 5);
    let object = FileObject::of(&path, Way::Receive);
    let loaded = load(&object)
        .verify(format!("sha256={digest}").parse().unwrap())
        .run()
        .unwrap();
    assert_eq!(loaded.report.verify[0].digest, digest);
    let other = digest.replace(|c: char| c.is_ascii_digit(), "0");
    let error = load(&object)
        .verify(format!("sha256={other}").parse().unwrap())
        .run()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");
}

#[test]
fn a_reader_that_fails_ends_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    for way in IN_PIECES {
        let run = |fault| {
            load(&FileObject::faulty(&path, way, fault))
                .run()
                .unwrap_err()
        };
        let error = run(Fault::Fail);
        let text = error.to_string();
        assert!(text.starts_with("cannot read: test:///"), "{text}");
        assert!(
            text.contains(" at byte ") && text.ends_with(": the store is on fire"),
            "{text}"
        );
        assert_eq!(run(Fault::Errno).raw_os_error(), Some(libc::EHOSTUNREACH));
        let error = run(Fault::Short);
        assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{error}");
        let panicked = std::panic::catch_unwind(|| run(Fault::Panic));
        assert!(panicked.is_err());
    }
}

#[test]
fn readers_that_wait_are_cancelled() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    for way in IN_PIECES {
        let object = FileObject::faulty(&path, way, Fault::Wait);
        let token = CancelToken::new();
        let load = load(&object).cancel(token.clone());
        let error = std::thread::scope(|scope| {
            let loading = scope.spawn(|| load.run().unwrap_err());
            // Half of each extent has arrived, and the rest never does.
            std::thread::sleep(Duration::from_millis(300));
            assert!(!loading.is_finished());
            token.cancel();
            loading.join().unwrap()
        });
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    }
}

#[test]
fn memory_that_its_owner_truncates_is_an_error_and_not_a_signal() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    for way in IN_PIECES {
        let fd = dirty_memfd(8 << 20);
        let owner = Fault::Truncate(fd.try_clone().unwrap());
        let object = FileObject::faulty(&path, way, owner);
        let error = load(&object).to(Kind::fd(fd)).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{way:?}: {error}");
    }
}

#[test]
fn readers_are_as_many_as_are_asked_for_and_needed() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    for (depth, size, most) in [(1, 8 << 20, 1), (4, 8 << 20, 4), (16, 100_000, 2)] {
        let object = FileObject::of(&path, Way::Fill(usize::MAX));
        load(&object).queue_depth(depth).length(size).run().unwrap();
        let readers = object.readers.load(Ordering::Relaxed);
        assert!((1..=most).contains(&readers), "{readers} for {depth}");
    }
}

#[test]
fn methods_for_files_are_refused_with_the_reason() {
    let dir = dir();
    let path = cold(dir.path(), 1 << 20);
    let object = FileObject::of(&path, Way::Receive);
    for load in [
        load(&object).method(Method::Uring),
        load(&object).method(Method::Threads),
        load(&object).io(Io::Direct),
    ] {
        let error = load.run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(
            error.to_string().contains("an object is received"),
            "{error}"
        );
    }
    let error = Load::new(&path).method(Method::Fetch).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    let plan = load(&object).plan().unwrap();
    assert_eq!(plan.first().to_string(), "fetch");
    let empty = dir.path().join("empty");
    File::create(&empty).unwrap();
    let error = load(&FileObject::of(&empty, Way::Receive))
        .run()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{error}");
}
