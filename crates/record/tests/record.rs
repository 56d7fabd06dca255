//! An independent reader finds every recorded byte in the file. Acknowledged records survive any end of the
//! recorder, and no record is partial.

use dmafile::{ErrorKind, Io, Method, Origin, OriginPart};
use dmafile_record::{
    Note, Recorder, RecorderBuffer, RecorderOptions, Recording, Ticket, WhenFull,
};
use dmafile_testkit::{bytes_digest, dir, noise};
use rustix::fs::SealFlags;
use rustix::process::{Resource, Rlimit};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const MIB: usize = 1 << 20;

/// The reader in docs/recording.md, as a program.
fn reader(dir: &Path) -> PathBuf {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recording.md");
    let text = fs::read_to_string(docs).unwrap();
    let code = text.split("```python\n").last().unwrap();
    let path = dir.join("reader.py");
    fs::write(&path, code.split("```").next().unwrap()).unwrap();
    path
}

/// A line for each record of a file, from the reader in the documentation.
fn lines(reader: &Path, file: &Path) -> Vec<String> {
    let output = Command::new("python3").arg(reader).arg(file).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_string).collect()
}

fn memory(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let fd = dmafile_testkit::memfd(bytes.len() as u64);
    rustix::io::pwrite(&fd, bytes, 0).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn lent(bytes: &[u8]) -> RecorderBuffer {
    RecorderBuffer::of_memory(Arc::new(bytes.to_vec()))
}

fn note(number: u64) -> Note {
    let mut note = Note::default();
    (note.timestamp, note.tag) = (number as i64 * 1000 - 5, number << 33);
    note
}

fn append(
    recorder: &Recorder,
    buffer: &RecorderBuffer,
    (at, len): (usize, usize),
    n: u64,
) -> Ticket {
    let ticket = recorder.append(buffer, at as u64, len as u64, note(n));
    ticket.unwrap().expect("append waits for room")
}

fn errno(error: &dmafile::Error) -> Option<i32> {
    error.raw_os_error()
}

#[test]
fn the_documented_reader_reads_every_kind_of_memory_and_method() {
    let dir = dir();
    let reader = reader(dir.path());
    // Records larger than 4 MiB need several writes.
    let bytes = noise(5 * MIB + 7, 1);
    let parts = [
        (0, 0),
        (0, 1),
        (0, 4095),
        (0, 4096),
        (4096, 4097),
        (512, 70_000),
        (1, 8191),
        (4096, 2 * MIB),
        (0, 5 * MIB + 7),
        (77, 5 * MIB - 70),
    ];
    let file = dir.path().join("source");
    fs::write(&file, &bytes).unwrap();
    let sealed = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    let open = |fd| RecorderBuffer::open(&Origin::fd(fd, 0)).unwrap();
    // A second part that begins at a block boundary, and one that does not.
    let several = |middle: usize| {
        let (one, other) = bytes.split_at(middle);
        let part =
            |bytes: &[u8]| OriginPart::fd(memory(bytes, SealFlags::empty()), 0, bytes.len() as u64);
        RecorderBuffer::open(&Origin::Parts(vec![part(one), part(other)])).unwrap()
    };
    for method in [Method::Auto, Method::Uring, Method::Threads, Method::Bounce] {
        for io in [Io::Auto, Io::Buffered] {
            let buffers = [
                open(memory(&bytes, SealFlags::empty())),
                open(memory(&bytes, sealed)),
                lent(&bytes),
                RecorderBuffer::open(&Origin::File(file.clone())).unwrap(),
                several(MIB),
                several(MIB + 5),
            ];
            let path = dir.path().join(format!("{method}-{io}.rec"));
            let recorder = RecorderOptions::new(&path)
                .method(method)
                .io(io)
                .start()
                .unwrap();
            let mut expected = Vec::new();
            for (kind, buffer) in buffers.iter().enumerate() {
                // Files have no memory that these two methods could write from, and the allocator does not
                // align memory to blocks.
                let by_address = method == Method::Uring;
                if kind == 3 && matches!(method, Method::Uring | Method::Threads)
                    || kind == 2 && by_address
                {
                    continue;
                }
                for (at, len) in parts {
                    // Direct writes need memory that is aligned to a block.
                    if at % 512 != 0 && by_address {
                        continue;
                    }
                    append(&recorder, buffer, (at, len), expected.len() as u64);
                    expected.push((at, len));
                }
            }
            let done = recorder.finish().unwrap();
            assert_eq!(done.records, expected.len() as u64, "{method} {io}");
            assert_eq!((done.durable, done.files), (done.records, 1));
            assert_eq!(
                done.bytes,
                expected.iter().map(|part| part.1 as u64).sum::<u64>()
            );

            let recording = Recording::open(&path).unwrap();
            assert!(recording.is_complete());
            let lines = lines(&reader, &path);
            assert_eq!(
                (recording.records().len(), lines.len()),
                (expected.len(), expected.len())
            );
            for ((record, line), (at, len)) in recording.records().iter().zip(lines).zip(expected) {
                let bytes = &bytes[at..at + len];
                assert_eq!(
                    recording.read(record).unwrap(),
                    bytes,
                    "{method} {io} {record:?}"
                );
                let note = note(record.number);
                assert_eq!((record.timestamp, record.tag), (note.timestamp, note.tag));
                let want = format!(
                    "{} {} {len} {} {} 0 {:08x} {} {}",
                    record.number,
                    record.offset,
                    note.timestamp,
                    note.tag,
                    record.checksum.unwrap_or(0),
                    u32::from(record.checksum.is_some()),
                    bytes_digest(bytes),
                );
                assert_eq!(line, want);
                assert_eq!(record.checksum.is_some(), len > 0);
                assert_eq!(record.offset % 4096, 0);
            }
            // Reserved space past the end has been released.
            let last = recording.records().last().unwrap();
            let end = (last.offset + last.length).next_multiple_of(4096);
            assert_eq!(fs::metadata(&path).unwrap().len(), end);
        }
    }
}

#[test]
fn a_buffer_may_be_reused_as_soon_as_its_record_is_written() {
    let dir = dir();
    let path = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&path).in_flight(2).start().unwrap();
    let fds = [0, 1].map(|_| dmafile_testkit::memfd(MIB as u64));
    let buffers = fds
        .each_ref()
        .map(|fd| RecorderBuffer::open(&Origin::fd(fd.try_clone().unwrap(), 0)).unwrap());
    let frame = |number: u64| noise(MIB, number + 9);
    let mut tickets = [None, None];
    for number in 0..40 {
        let which = number as usize % 2;
        if let Some(ticket) = tickets[which].take() {
            Ticket::wait(&ticket).unwrap();
            assert!(ticket.is_written());
        }
        rustix::io::pwrite(&fds[which], &frame(number), 0).unwrap();
        let ticket = append(&recorder, &buffers[which], (0, MIB), number);
        assert_eq!(ticket.number(), number);
        tickets[which] = Some(ticket);
    }
    let last = tickets[1].take().unwrap();
    assert!(last.wait_durable(None).unwrap() && last.is_durable());
    recorder.finish().unwrap();
    let recording = Recording::open(&path).unwrap();
    assert_eq!(recording.records().len(), 40);
    for record in recording.records() {
        assert!(
            recording.read(record).unwrap() == frame(record.number),
            "{record:?}"
        );
    }
}

#[test]
fn memory_of_the_caller_is_referenced_only_until_it_is_written() {
    let dir = dir();
    let recorder = RecorderOptions::new(dir.path().join("a.rec"))
        .start()
        .unwrap();
    let owner = Arc::new(noise(100_000, 3));
    let ticket = append(
        &recorder,
        &RecorderBuffer::of_memory(owner.clone()),
        (0, 100_000),
        0,
    );
    ticket.wait().unwrap();
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn many_records_fill_many_blocks_of_the_index() {
    let dir = dir();
    let reader = reader(dir.path());
    let path = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&path)
        .checksum(false)
        .sync_interval(None);
    let recorder = recorder.start().unwrap();
    let bytes = noise(4096, 5);
    let buffer = lent(&bytes);
    // More than fit into an area of 64 blocks with 63 entries each.
    let count = 64 * 63 + 200;
    for number in 0..count {
        append(&recorder, &buffer, (0, (number % 50) as usize), number);
    }
    // Each of these is synced individually.
    for number in count..count + 70 {
        append(&recorder, &buffer, (0, 9), number);
        recorder.sync().unwrap();
    }
    recorder.finish().unwrap();
    let recording = Recording::open(&path).unwrap();
    assert_eq!(recording.records().len() as u64, count + 70);
    assert!(recording.is_complete());
    for record in recording.records() {
        let want = &bytes[..record.length as usize];
        assert_eq!(recording.read(record).unwrap(), want);
        assert_eq!(
            (record.checksum, record.tag),
            (None, note(record.number).tag)
        );
    }
    assert_eq!(lines(&reader, &path).len() as u64, count + 70);
}

#[test]
fn files_are_rotated_by_size_and_read_as_one() {
    let dir = dir();
    let reader = reader(dir.path());
    let path = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&path)
        .rotate_bytes(Some(MIB as u64))
        .start();
    let recorder = recorder.unwrap();
    let bytes = noise(2 * MIB, 6);
    let buffer = lent(&bytes);
    for number in 0..20 {
        append(&recorder, &buffer, (number * 100, 300_000), number as u64);
    }
    // A record larger than the maximum size of a file gets its own file.
    append(&recorder, &buffer, (0, 2 * MIB), 20);
    append(&recorder, &buffer, (0, 5), 21);
    let done = recorder.finish().unwrap();
    let recording = Recording::open(&path).unwrap();
    assert!(recording.is_complete());
    assert_eq!(recording.files().len(), done.files as usize);
    assert_eq!(recording.records().len(), 22);
    for record in recording.records() {
        let start = if record.number < 20 {
            record.number as usize * 100
        } else {
            0
        };
        let want = &bytes[start..start + record.length as usize];
        assert!(recording.read(record).unwrap() == want, "{record:?}");
    }
    let [files @ .., _, _] = recording.files() else {
        panic!()
    };
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        assert!(fs::metadata(file).unwrap().len() <= MIB as u64);
    }
    let all = recording
        .files()
        .iter()
        .flat_map(|file| lines(&reader, file));
    assert_eq!(all.count(), 22);
    // One file by itself, and then a sequence with a missing file.
    let third = Recording::open(&recording.files()[2]).unwrap();
    assert_eq!(third.files().len(), 1);
    assert!(!third.is_complete() && !third.records().is_empty());
    fs::remove_file(&recording.files()[3]).unwrap();
    let cut = Recording::open(&path).unwrap();
    assert_eq!((cut.files().len(), cut.is_complete()), (3, false));
}

/// The folder's path may lead elsewhere during a recording, and files are then found by their own names.
#[test]
fn a_recording_stays_in_the_folder_that_was_opened() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("opened")).unwrap();
    fs::create_dir(at("other")).unwrap();
    std::os::unix::fs::symlink("opened", at("current")).unwrap();
    let recorder = RecorderOptions::new(at("current/a.rec"))
        .rotate_bytes(Some(1))
        .start()
        .unwrap();
    let buffer = lent(&noise(5000, 1));
    append(&recorder, &buffer, (0, 5000), 0);
    fs::remove_file(at("current")).unwrap();
    std::os::unix::fs::symlink("other", at("current")).unwrap();
    append(&recorder, &buffer, (0, 5000), 1);
    append(&recorder, &buffer, (0, 5000), 2);
    recorder.finish().unwrap();
    assert_eq!(
        dmafile_testkit::names(&at("opened")),
        ["a.rec", "a.rec.1", "a.rec.2"]
    );
    assert!(dmafile_testkit::names(&at("other")).is_empty());
    let recording = Recording::open(at("opened/a.rec")).unwrap();
    assert_eq!(recording.records().len(), 3);
}

#[test]
fn files_are_rotated_by_time() {
    let dir = dir();
    let path = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&path).rotate_after(Some(Duration::from_millis(20)));
    let recorder = recorder.start().unwrap();
    let buffer = lent(&noise(5000, 2));
    for number in 0..3 {
        append(&recorder, &buffer, (0, 5000), number);
        std::thread::sleep(Duration::from_millis(21));
    }
    assert_eq!(recorder.finish().unwrap().files, 3);
    assert_eq!(Recording::open(&path).unwrap().records().len(), 3);
}

#[test]
fn a_full_queue_delays_or_drops_appends() {
    let dir = dir();
    let bytes = noise(16 * MIB, 8);
    let buffer = lent(&bytes);
    for when_full in [WhenFull::Wait, WhenFull::Drop] {
        let path = dir.path().join(format!("{when_full:?}.rec"));
        let recorder = RecorderOptions::new(&path)
            .in_flight(1)
            .when_full(when_full);
        let recorder = recorder.start().unwrap();
        let (mut taken, mut turned_away) = (0, 0);
        // A write takes longer than an append, unless this thread is preempted in between.
        while turned_away < 3 && taken < 50 {
            let note = note(taken);
            let ticket = match when_full {
                WhenFull::Drop => recorder.append(&buffer, 0, 16 << 20, note),
                WhenFull::Wait => recorder.try_append(&buffer, 0, 16 << 20, note),
            };
            match ticket.unwrap() {
                Some(_) => taken += 1,
                None => {
                    turned_away += 1;
                    // Wait until the queue has room again.
                    while !recorder.wait_for_room(Duration::from_secs(1)) {}
                }
            }
        }
        assert_eq!(turned_away, 3);
        let dropped = match when_full {
            WhenFull::Drop => 3,
            WhenFull::Wait => {
                append(&recorder, &buffer, (0, 16 * MIB), taken);
                append(&recorder, &buffer, (0, 16 * MIB), taken + 1);
                taken += 2;
                0
            }
        };
        let done = recorder.finish().unwrap();
        assert_eq!((done.records, done.dropped), (taken, dropped));
        let recording = Recording::open(&path).unwrap();
        assert_eq!(recording.records().len() as u64, taken);
        let told: Vec<u64> = recording
            .records()
            .iter()
            .map(|record| record.dropped)
            .collect();
        assert!(
            told.is_sorted() && *told.last().unwrap() <= dropped,
            "{told:?}"
        );
        assert!(told.last().unwrap() + 1 >= dropped, "{told:?}");
        for record in recording.records() {
            assert!(recording.read(record).unwrap() == bytes);
        }
    }
}

#[test]
fn records_are_synced_after_a_number_and_after_a_time() {
    let dir = dir();
    let buffer = lent(&noise(5000, 2));
    let path = |name: &str| dir.path().join(name);
    let every = RecorderOptions::new(path("every"))
        .sync_interval(None)
        .sync_every(Some(3));
    let recorder = every.start().unwrap();
    let tickets: Vec<_> = (0..3)
        .map(|n| append(&recorder, &buffer, (0, 5000), n))
        .collect();
    while !tickets[2].is_durable() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(Recording::open(path("every")).unwrap().records().len(), 3);
    drop(recorder);

    let timed = RecorderOptions::new(path("time")).sync_interval(Some(Duration::from_millis(5)));
    let recorder = timed.start().unwrap();
    let ticket = append(&recorder, &buffer, (0, 5000), 0);
    while !ticket.is_durable() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let recording = Recording::open(path("time")).unwrap();
    assert_eq!(
        (recording.records().len(), recording.is_complete()),
        (1, false)
    );

    let never = RecorderOptions::new(path("never"))
        .sync_interval(None)
        .start()
        .unwrap();
    let ticket = append(&never, &buffer, (0, 5000), 0);
    ticket.wait().unwrap();
    assert!(!ticket.is_durable());
    assert_eq!(Recording::open(path("never")).unwrap().records().len(), 0);
    never.sync().unwrap();
    assert!(ticket.is_durable());
    assert_eq!(Recording::open(path("never")).unwrap().records().len(), 1);
}

#[test]
fn invalid_requests_are_refused_with_one_message() {
    let dir = dir();
    let path = dir.path().join("a.rec");
    let start = |path: &Path| RecorderOptions::new(path).start();
    let recorder = start(&path).unwrap();
    let error = start(&path).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EBUSY));
    assert!(
        error.to_string().contains("another recorder writes to it"),
        "{error}"
    );
    recorder.finish().unwrap();
    let again = recorder.finish().unwrap();
    assert_eq!(again, recorder.recorded());
    let buffer = lent(b"abc");
    let error = recorder.append(&buffer, 0, 3, note(0)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the recording is finished (EINVAL)"),
        "{error}"
    );
    drop(recorder);
    let error = start(&path).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EEXIST));

    let error = start(&dir.path().join("none/a.rec")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::ENOENT));
    let error = start(&dir.path().join("folder/")).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EISDIR));
    let other = dir.path().join("b.rec");
    fs::write(dir.path().join("b.rec.1"), b"").unwrap();
    let error = RecorderOptions::new(&other)
        .rotate_bytes(Some(1))
        .start()
        .unwrap_err();
    assert_eq!(errno(&error), Some(libc::EEXIST));
    assert!(!other.exists());

    let usage = [
        RecorderOptions::new(&other).in_flight(0),
        RecorderOptions::new(&other).in_flight(65),
        RecorderOptions::new(&other).sync_every(Some(0)),
        RecorderOptions::new(&other).rotate_bytes(Some(0)),
        RecorderOptions::new(&other).sync_interval(Some(Duration::ZERO)),
        RecorderOptions::new(&other).rotate_after(Some(Duration::ZERO)),
    ];
    for capture in usage {
        assert_eq!(capture.start().unwrap_err().kind(), ErrorKind::Usage);
    }

    let recorder = start(&other).unwrap();
    for (at, length) in [(0, 4), (4, 0), (3, 1), (u64::MAX, 2)] {
        let error = recorder.append(&buffer, at, length, note(0)).unwrap_err();
        assert_eq!(errno(&error), Some(libc::EINVAL), "{error}");
    }
    let (pipe, _write) = std::io::pipe().unwrap();
    let error = RecorderBuffer::open(&Origin::fd(pipe.into(), 0)).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EINVAL));
    // A method that cannot write this source ends the recording with an error.
    let uring = RecorderOptions::new(dir.path().join("c.rec")).method(Method::Uring);
    let recorder = uring.start().unwrap();
    let (file, len) = (dir.path().join("file"), 2 * rustix::param::page_size());
    fs::write(&file, noise(len, 1)).unwrap();
    let file = RecorderBuffer::open(&Origin::File(file)).unwrap();
    let ticket = append(&recorder, &file, (0, len), 0);
    assert_eq!(errno(&ticket.wait().unwrap_err()), Some(libc::EOPNOTSUPP));
    let error = recorder.append(&file, 0, 1, note(1)).unwrap_err();
    assert_eq!(errno(&error), Some(libc::EOPNOTSUPP));

    let text = dir.path().join("text");
    for bytes in [&b""[..], b"short", &[b'x'; 5000]] {
        fs::write(&text, bytes).unwrap();
        let error = Recording::open(&text).unwrap_err();
        assert_eq!(errno(&error), Some(libc::EBADMSG), "{error}");
    }
}

#[test]
fn truncated_memory_ends_the_recording_and_keeps_earlier_records() {
    let dir = dir();
    let path = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&path).start().unwrap();
    let bytes = noise(2 * MIB, 3);
    let fd = memory(&bytes, SealFlags::empty());
    let buffer = RecorderBuffer::open(&Origin::fd(fd.try_clone().unwrap(), 0)).unwrap();
    append(&recorder, &buffer, (0, 2 * MIB), 0).wait().unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    let error = append(&recorder, &buffer, (0, 2 * MIB), 1)
        .wait()
        .unwrap_err();
    assert_eq!(errno(&error), Some(libc::ENODATA), "{error}");
    assert_eq!(errno(&recorder.sync().unwrap_err()), Some(libc::ENODATA));
    assert_eq!(errno(&recorder.finish().unwrap_err()), Some(libc::ENODATA));
    let recording = Recording::open(&path).unwrap();
    assert!(!recording.is_complete());
    assert_eq!(recording.records().len(), 1);
    assert!(recording.read(&recording.records()[0]).unwrap() == bytes);
}

/// A recording whose tail is lost from each block on: records that can be read are correct, and the others
/// are missing or reported as damaged.
#[test]
fn a_torn_tail_leaves_only_whole_records() {
    let dir = dir();
    let path = dir.path().join("whole.rec");
    let recorder = RecorderOptions::new(&path)
        .sync_interval(None)
        .start()
        .unwrap();
    let bytes = noise(200_000, 4);
    let buffer = lent(&bytes);
    let part = |number: u64| (number as usize * 3, 3 + number as usize * 331 % 50_000);
    for number in 0..120 {
        append(&recorder, &buffer, part(number), number);
        if number % 2 == 0 {
            recorder.sync().unwrap();
        }
    }
    recorder.finish().unwrap();
    let whole = fs::read(&path).unwrap();
    let torn = dir.path().join("torn.rec");
    let first = whole.len().saturating_sub(MIB).next_multiple_of(4096);
    let mut seen = std::collections::BTreeSet::new();
    for cut in (first..whole.len()).step_by(4096) {
        for zeroed in [false, true] {
            let mut bytes_of_it = whole[..cut].to_vec();
            if zeroed {
                bytes_of_it.resize(whole.len(), 0);
            }
            fs::write(&torn, &bytes_of_it).unwrap();
            let recording = Recording::open(&torn).unwrap();
            seen.insert(recording.records().len());
            for record in recording.records() {
                let (at, len) = part(record.number);
                let lost = (record.offset + record.length) as usize > cut;
                match recording.read(record) {
                    Ok(read) => assert!(!lost && read == bytes[at..at + len], "{cut} {record:?}"),
                    Err(error) => {
                        assert!(lost && zeroed, "{cut} {record:?} {error}");
                        assert_eq!(errno(&error), Some(libc::EBADMSG));
                    }
                }
            }
            // Every record before the cut is found.
            let there = Recording::open(&path).unwrap();
            let there = there.records().iter();
            let there = there.take_while(|record| (record.offset + record.length) as usize <= cut);
            assert!(recording.records().len() >= there.count() * usize::from(cut > MIB / 2));
        }
    }
    assert!(seen.len() > 10, "{seen:?}");
}

/// This program, as a child that runs one of the ignored tests below.
fn child(name: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env("DMAFILE_TEST_RECORDING", path);
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

fn asked() -> PathBuf {
    std::env::var_os("DMAFILE_TEST_RECORDING").unwrap().into()
}

/// The record with a number in the recordings of killed programs.
fn killed_record(number: u64) -> Vec<u8> {
    noise(1 + (number as usize * 7919) % 300_000, number + 1)
}

#[test]
#[ignore = "it is killed by a_killed_recorder_leaves_every_acknowledged_record"]
fn records_until_it_is_killed() {
    let recorder = RecorderOptions::new(asked())
        .rotate_bytes(Some(4 << 20))
        .sync_every(Some(5));
    let recorder = recorder.start().unwrap();
    for number in 0.. {
        append(
            &recorder,
            &lent(&killed_record(number)),
            (0, killed_record(number).len()),
            number,
        );
        // Not println!, which may buffer a line.
        use std::io::Write;
        writeln!(std::io::stdout(), "durable {}", recorder.recorded().durable).unwrap();
    }
}

#[test]
fn a_killed_recorder_leaves_every_acknowledged_record() {
    let dir = dir();
    let mut random = noise(30, u64::from(std::process::id())).into_iter();
    let mut acknowledged = 0;
    for round in 0..30 {
        let path = dir.path().join(format!("{round}.rec"));
        let mut command = child("records_until_it_is_killed", &path);
        let mut running: Child = command.spawn().unwrap();
        let output = BufReader::new(running.stdout.take().unwrap());
        let mut lines = output.lines().map_while(Result::ok);
        let durable = |line: &str| line.rsplit_once("durable ")?.1.parse::<u64>().ok();
        // Killed between the start and some hundred records; in odd rounds after at least 10 are
        // acknowledged.
        let most = usize::from(random.next().unwrap());
        if round % 2 == 1 {
            let enough = |line: &String| durable(line).is_some_and(|durable| durable >= 10);
            assert!(lines.any(|line| enough(&line)));
        }
        let mut last = lines
            .by_ref()
            .take(most)
            .filter_map(|line| durable(&line))
            .last();
        running.kill().unwrap();
        running.wait().unwrap();
        last = lines.filter_map(|line| durable(&line)).last().or(last);
        let last = last.unwrap_or(if round % 2 == 1 { 10 } else { 0 });
        let recording = match Recording::open(&path) {
            Ok(recording) => recording,
            Err(error) => {
                assert!(last == 0, "{error}");
                continue;
            }
        };
        let there = recording.records();
        assert!(there.len() as u64 >= last, "{last} of {}", there.len());
        assert!(!recording.is_complete());
        for (number, record) in there.iter().enumerate() {
            assert_eq!(record.number, number as u64);
            assert!(recording.read(record).unwrap() == killed_record(record.number));
        }
        acknowledged += last;
        for file in recording.files() {
            fs::remove_file(file).unwrap();
        }
    }
    assert!(acknowledged >= 150, "{acknowledged}");
}

#[test]
#[ignore = "it runs with a limit, for a_limit_on_file_size_fails_the_append"]
fn records_with_a_limit() {
    let limit = Rlimit {
        current: Some(2 << 20),
        maximum: None,
    };
    rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
    let recorder = RecorderOptions::new(asked()).start().unwrap();
    fill(&recorder, libc::EFBIG);
    recorder.finish().unwrap();
}

/// Appends until there is no room; a small record still fits then.
fn fill(recorder: &Recorder, full: i32) {
    let bytes = noise(MIB, 1);
    let buffer = lent(&bytes);
    let mut number = 0;
    let error = loop {
        match recorder.append(&buffer, 0, 300_000, note(number)) {
            Ok(ticket) => ticket.unwrap().wait().unwrap(),
            Err(error) => break error,
        }
        number += 1;
        assert!(number < 100);
    };
    assert_eq!(errno(&error), Some(full), "{error}");
    assert!(error.to_string().starts_with("cannot write: "), "{error}");
    append(recorder, &buffer, (0, 1), number).wait().unwrap();
    assert_eq!(recorder.recorded().records, number + 1);
}

/// What [`fill`] has recorded.
fn check_filled(recording: &Recording) {
    let bytes = noise(MIB, 1);
    let records = recording.records();
    assert!(records.len() > 2);
    for record in records {
        let is_last = record.number as usize + 1 == records.len();
        assert_eq!(record.length, if is_last { 1 } else { 300_000 });
        assert!(recording.read(record).unwrap() == bytes[..record.length as usize]);
    }
}

#[test]
fn a_limit_on_file_size_fails_the_append() {
    let dir = dir();
    let path = dir.path().join("a.rec");
    let status = child("records_with_a_limit", &path).status().unwrap();
    assert!(status.success(), "{status}");
    let recording = Recording::open(&path).unwrap();
    assert!(recording.is_complete());
    check_filled(&recording);
}

#[test]
#[ignore = "it runs on a small file system, for a_full_file_system_fails_the_append_or_finish"]
fn records_on_a_small_file_system() {
    let recorder = RecorderOptions::new(asked()).start().unwrap();
    fill(&recorder, libc::ENOSPC);
    // Finish the first recording and free its space.
    let other = asked().with_extension("other");
    recorder.finish().unwrap();
    check_filled(&Recording::open(asked()).unwrap());
    fs::remove_file(asked()).unwrap();

    if rustix::param::page_size() != 4096 {
        return eprintln!("SKIP: the numbers below are those of blocks of 4 KiB");
    }
    // The index has one block left, and needs two to finish.
    let recorder = RecorderOptions::new(&other)
        .sync_interval(None)
        .start()
        .unwrap();
    let buffer = lent(&noise(4096, 1));
    for number in 0..63 {
        append(&recorder, &buffer, (0, 10), number);
        recorder.sync().unwrap();
    }
    for number in 63..163 {
        append(&recorder, &buffer, (0, 10), number).wait().unwrap();
    }
    let filler = File::create(other.with_extension("filler")).unwrap();
    let mut at = 0;
    while filler.write_all_at(&[1; 4096], at).is_ok() {
        at += 4096;
    }
    let error = recorder.finish().unwrap_err();
    assert_eq!(errno(&error), Some(libc::ENOSPC), "{error}");
    let recording = Recording::open(&other).unwrap();
    assert_eq!(
        (recording.records().len(), recording.is_complete()),
        (63, false)
    );
    for record in recording.records() {
        assert_eq!(recording.read(record).unwrap(), noise(4096, 1)[..10]);
    }
}

#[test]
fn a_full_file_system_fails_the_append_or_finish() {
    let dir = dir();
    let mount = "mount -t tmpfs -o size=4m none \"$0\" && exec \"$@\"";
    let words = |test: &Command| {
        let words = std::iter::once(test.get_program()).chain(test.get_args());
        words.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let unshare = |words: &[std::ffi::OsString]| {
        let mut command = Command::new("unshare");
        command
            .args(["-Urm", "sh", "-c", mount])
            .arg(dir.path())
            .args(words);
        command
    };
    if !unshare(&["true".into()])
        .status()
        .is_ok_and(|status| status.success())
    {
        eprintln!("skipped: this user cannot mount a file system");
        return;
    }
    let path = dir.path().join("a.rec");
    let test = child("records_on_a_small_file_system", &path);
    let output = unshare(&words(&test))
        .env("DMAFILE_TEST_RECORDING", &path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Memory of a caller whose code panics when a thread of the recorder releases it.
struct Unreleasable(std::thread::ThreadId);

impl AsRef<[u8]> for Unreleasable {
    fn as_ref(&self) -> &[u8] {
        &[7; 100]
    }
}

impl Drop for Unreleasable {
    fn drop(&mut self) {
        assert_eq!(std::thread::current().id(), self.0, "of a test");
    }
}

#[test]
fn a_panic_of_a_recorders_thread_is_an_error_of_every_record_and_call_after_it() {
    let dir = dir();
    let to = dir.path().join("a.rec");
    let recorder = RecorderOptions::new(&to).in_flight(2).start().unwrap();
    append(&recorder, &lent(&noise(100, 1)), (0, 100), 0);
    recorder.sync().unwrap();
    let me = std::thread::current().id();
    let mut tickets = Vec::new();
    // This thread may be the last one that has the memory, but rarely.
    let failed = (0..10_000).any(|_| {
        let memory = RecorderBuffer::of_memory(Arc::new(Unreleasable(me)));
        let taken = recorder.append(&memory, 0, 100, Note::default());
        taken.map(|ticket| tickets.extend(ticket)).is_err()
    });
    assert!(failed && !tickets.is_empty());
    let long = Some(Duration::from_secs(60));
    let mut errors = Vec::new();
    for ticket in tickets.iter().chain(&tickets) {
        match ticket.wait_for(long) {
            Ok(in_time) => assert!(in_time, "it waited in vain"),
            Err(error) => errors.push(error.to_string()),
        }
    }
    assert!(errors.len() >= 2 && errors.len() % 2 == 0, "{errors:?}");
    assert!(
        errors.iter().all(|error| error.contains("panicked")),
        "{errors:?}"
    );
    for _ in 0..2 {
        recorder.sync().unwrap_err();
        recorder.finish().unwrap_err();
    }
    assert!(!Recording::open(&to).unwrap().is_complete());
}
