//! Children that are forked at any time: they do not keep memory from being sealed, they have finished buffers, and
//! dropping there what has threads in the parent does not wait for those.

use dmafile::{Buffer, Kind, Load, Pages, Save};
use dmafile_hold::{Hold, Shared};
use dmafile_record::{Note, RecorderBuffer, RecorderOptions};
use dmafile_testkit::{Forked, cold, dir, file_digest, memfd};
use rustix::fs::SealFlags;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const LEN: usize = (5 << 20) + 77;

/// Children of one test would have the memory of others.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exit status of a child that runs `work`; -1 if it does not end by itself.
fn in_child(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: only this thread exists in the child, which ends in this function. `work` takes no lock that another
    // thread may hold.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::alarm(60);
            libc::_exit(if work() { 0 } else { 1 });
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
        if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            -1
        }
    }
}

/// Whether a child can read all bytes of a buffer, through its mapping.
fn child_has(buffer: &Buffer) -> bool {
    let bytes = buffer.as_ptr().unwrap();
    // SAFETY: only for offsets in the buffer, whose bytes are there; nothing writes to them.
    let byte = |at: u64| u64::from(unsafe { bytes.add(at as usize).read_volatile() });
    let sum = || (0..buffer.len()).map(byte).sum::<u64>();
    let want = sum();
    in_child(|| sum() == want) == 0
}

/// Forks when a load makes progress.
fn forks(child: &Arc<OnceLock<Forked>>) -> impl Fn(dmafile::Progress) + Send + Sync + use<> {
    let child = Arc::clone(child);
    move |_| {
        child.get_or_init(Forked::start);
    }
}

/// So that a load reports progress before it ends.
fn small_blocks(load: Load) -> Load {
    load.block(64 << 10)
}

fn sealable(path: &Path) -> [(Kind, Option<OwnedFd>); 2] {
    let len = std::fs::metadata(path)
        .unwrap()
        .len()
        .next_multiple_of(1 << 20);
    let fd = memfd(len);
    let dup = fd.try_clone().unwrap();
    [(Kind::Memfd, None), (Kind::fd(fd), Some(dup))]
}

#[test]
fn a_child_forked_during_a_load_does_not_keep_the_memory_from_being_sealed() {
    let _alone = alone();
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let digest = file_digest(&path, 0, LEN as u64);
    for (kind, _fd) in sealable(&path) {
        let child = Arc::default();
        let load = small_blocks(Load::new(&path).to(kind).pages(Pages::Base));
        let mut buffer = load.progress(forks(&child)).run().unwrap().buffer;
        assert!(child.get().is_some(), "nothing was forked");
        buffer.seal().unwrap();
        assert_eq!(dmafile_testkit::buffer_digest(&buffer), digest);
        assert!(child_has(&buffer));
    }
    let child = Arc::default();
    let hold = Hold::of([&path])
        .name("a")
        .socket(dir.path().join("socket"));
    let holder = hold.each(small_blocks).progress(forks(&child)).start();
    assert!(child.get().is_some() && holder.unwrap().files()[0].sealed);
    let child = Arc::default();
    let shared = Shared::of([&path]).folder(dir.path().join("shared"));
    let held = shared
        .each(small_blocks)
        .progress(forks(&child))
        .run()
        .unwrap();
    assert!(child.get().is_some());
    assert!(child_has(&held.files()[0].buffer));
}

/// Memory that is to be sealed has a mapping that no child gets, at no time.
#[test]
fn children_forked_all_the_time_do_not_keep_held_memory_from_being_sealed() {
    let _alone = alone();
    let dir = dir();
    let path = cold(dir.path(), 100_000);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut children = Vec::new();
            while !over.load(Ordering::Relaxed) {
                children.push(Forked::start());
                // They live for a while.
                if children.len() > 20 {
                    children.remove(0);
                }
            }
        });
        let ended = (0..300).try_for_each(|number| {
            let at = dir.path().join(format!("{number}"));
            match number % 3 {
                0 => drop(Hold::of([&path]).name("a").socket(&at).start()?),
                1 => drop(Shared::of([&path]).folder(&at).run()?),
                _ => match Shared::of([&path]).folder(&at).find()? {
                    dmafile_hold::Found::Vacant(vacant) => drop(vacant.fill(vec![copy(&path)])?),
                    dmafile_hold::Found::Held(_) => unreachable!("nothing is in a new folder"),
                },
            }
            Ok::<(), dmafile::Error>(())
        });
        over.store(true, Ordering::Relaxed);
        ended.unwrap();
    });
}

/// A memfd with the bytes of a file, never mapped.
fn copy(path: &Path) -> OwnedFd {
    let bytes = std::fs::read(path).unwrap();
    let fd = memfd(bytes.len() as u64);
    rustix::io::pwrite(&fd, &bytes, 0).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

#[test]
fn a_child_forked_during_a_save_does_not_keep_its_source_from_being_sealed() {
    let _alone = alone();
    let dir = dir();
    let source = copy(&cold(dir.path(), LEN));
    let fd = source.try_clone().unwrap();
    let child = Arc::default();
    let save = Save::new(dmafile::Origin::fd(fd, 0), dir.path().join("copy"));
    let save = save.block(64 << 10).progress(forks(&child));
    save.run().unwrap();
    assert!(child.get().is_some(), "nothing was forked");
    rustix::fs::fcntl_add_seals(&source, SealFlags::WRITE).unwrap();
}

#[test]
fn a_child_has_buffers_of_its_parent() {
    let _alone = alone();
    let dir = dir();
    let path = cold(dir.path(), LEN);
    for kind in [Kind::Anon, Kind::Memfd] {
        let mut buffer = Load::new(&path).to(kind.clone()).run().unwrap().buffer;
        assert!(child_has(&buffer), "{kind}");
        if matches!(kind, Kind::Memfd) {
            // What cannot be sealed is as before.
            let child = Forked::start();
            let error = buffer.seal().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
            assert!(
                error.to_string().contains("children that were forked"),
                "{error}"
            );
            assert!(child_has(&buffer));
            drop(child);
            buffer.seal().unwrap();
            assert!(child_has(&buffer));
        }
    }
    let shared = Shared::of([&path])
        .folder(dir.path().join("shared"))
        .writable(true);
    assert!(child_has(&shared.run().unwrap().files()[0].buffer));
    let fd = memfd(LEN.next_multiple_of(1 << 20) as u64);
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    assert!(child_has(
        &Load::new(&path).to(Kind::fd(fd)).run().unwrap().buffer
    ));
}

#[test]
fn a_child_can_record_memory_that_its_parent_attached() {
    let _alone = alone();
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let buffer = Load::new(&path).run().unwrap().buffer;
    let fd = buffer.as_fd().unwrap().try_clone_to_owned().unwrap();
    let attached = RecorderBuffer::open(&dmafile::Origin::fd(fd, buffer.offset())).unwrap();
    let to = dir.path().join("record");
    let done = in_child(|| {
        let recorder = RecorderOptions::new(&to).start().unwrap();
        let length = attached.bytes().min(LEN as u64);
        recorder
            .append(&attached, 0, length, Note::default())
            .unwrap();
        recorder.finish().is_ok()
    });
    assert_eq!(done, 0);
    let recording = dmafile_record::Recording::open(&to).unwrap();
    assert!(recording.read(&recording.records()[0]).unwrap() == std::fs::read(&path).unwrap());
}

/// The threads that it would wait for, and that may hold its locks, are the parent's.
#[test]
fn a_forked_child_drops_a_recorder_and_its_tickets_without_waiting() {
    let _alone = alone();
    let dir = dir();
    let to = dir.path().join("record");
    let recorder = RecorderOptions::new(&to).start().unwrap();
    let frame: Arc<Vec<u8>> = Arc::new(dmafile_testkit::noise(1 << 20, 3));
    let append = || {
        let memory = RecorderBuffer::of_memory(Arc::clone(&frame) as _);
        recorder
            .append(&memory, 0, 1 << 20, Note::default())
            .unwrap()
    };
    let ticket = append().unwrap();
    let status = in_child(|| {
        // SAFETY: the child ends without using the originals again.
        let (own, ticket) = unsafe { (std::ptr::read(&raw const recorder), ticket.clone()) };
        let refused = |error: dmafile::Error| error.raw_os_error() == Some(libc::EINVAL);
        let refused = own.sync().is_err_and(refused)
            && own.finish().is_err_and(refused)
            && ticket.wait().is_err_and(refused)
            && ticket.wait_durable(None).is_err_and(refused);
        drop((own, ticket));
        refused
    });
    assert_eq!(status, 0, "-1: it waited in vain");
    append().unwrap();
    assert_eq!(recorder.finish().unwrap().records, 2);
    let recording = dmafile_record::Recording::open(&to).unwrap();
    assert!(recording.is_complete() && recording.records().len() == 2);
    assert!(recording.read(&recording.records()[1]).unwrap() == *frame);
}

#[test]
fn a_forked_child_does_not_release_what_its_parent_is_loading_for_all() {
    let _alone = alone();
    let dir = dir();
    let path = cold(dir.path(), 100_000);
    let find = || Shared::of([&path]).folder(dir.path().join("shared")).find();
    let found = find().unwrap();
    let status = in_child(|| {
        // SAFETY: the child ends without using the original again.
        drop(unsafe { std::ptr::read(&raw const found) });
        true
    });
    assert_eq!(status, 0);
    let Err(error) = find() else {
        panic!("another process would load it, too");
    };
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "{error}");
    drop(found);
    find().unwrap();
}
