//! dma-bufs on a kernel that has them; the test reads them through its own mappings. On other kernels,
//! these tests are skipped with a message; tests/vm/ runs them on a kernel with both device nodes.
#![allow(unsafe_code, reason = "the test reads through its own mapping")]

use dmafile::{Allocation, Buffer, Io, Kind, Load, Method, Pages};
use dmafile_testkit::{cached, cold, dir, evict};
use rustix::mm::{MapFlags, ProtFlags};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

const LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";
const LEN: u64 = (2 << 20) + 777;

/// A lock for one test at a time, because one of them changes a limit of the machine; None, with a message,
/// if this machine has no dma-bufs.
fn machine() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let there = ["/dev/udmabuf", "/dev/dma_heap/system"].map(|node| Path::new(node).exists());
    if there != [true, true] {
        let line = "SKIP: no dma-bufs on this kernel; tests/vm/ has one with them\n";
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    }
    Some(TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// The kinds of the kernel itself, and that of dmafile.ko if it is loaded.
fn kinds() -> impl Iterator<Item = &'static str> {
    let module = Path::new("/dev/dmafile").exists().then_some("module");
    ["udmabuf", "heap:system"].into_iter().chain(module)
}

fn load(path: &Path, kind: &str) -> Load {
    Load::new(path).to(kind.parse().unwrap())
}

/// Passes all bytes of a dma-buf to `see`.
fn with_bytes<T>(fd: BorrowedFd<'_>, see: impl FnOnce(&mut [u8]) -> T) -> T {
    let size = rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)).unwrap() as usize;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping of the whole dma-buf, used only by this thread until it is unmapped.
    unsafe {
        let base = rustix::mm::mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, fd, 0);
        let base = base.unwrap();
        let seen = see(std::slice::from_raw_parts_mut(base.cast(), size));
        rustix::mm::munmap(base, size).unwrap();
        seen
    }
}

/// All bytes of the dma-bufs of a buffer, in order.
fn bytes_of(buffer: &Buffer) -> Vec<u8> {
    let mut all = Vec::new();
    for one in buffer.dma_bufs() {
        assert_eq!(one.at, all.len() as u64);
        with_bytes(one.fd, |bytes| all.extend_from_slice(bytes));
    }
    all
}

fn assert_holds(buffer: &Buffer, want: &[u8], what: &str) {
    let all = bytes_of(buffer);
    let (start, end) = (
        buffer.offset() as usize,
        (buffer.offset() + buffer.len()) as usize,
    );
    assert!(all[start..end] == *want, "{what}: wrong bytes");
    assert!(
        all[..start]
            .iter()
            .chain(&all[end..])
            .all(|&byte| byte == 0),
        "{what}: not zero around them"
    );
}

/// Pages that are pinned on this machine.
fn pinned() -> i64 {
    // Each CPU has its own count until it is asked for it (admin-guide/sysctl/vm.rst).
    std::fs::write("/proc/sys/vm/stat_refresh", "1").unwrap();
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let count = |name: &str| -> i64 {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().parse().unwrap()
    };
    count("nr_foll_pin_acquired") - count("nr_foll_pin_released")
}

#[test]
fn only_the_given_part_of_a_dma_buf_is_filled() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let file = std::fs::read(&path).unwrap();
    for kind in kinds() {
        for (offset, at, len) in [
            (0_u64, 0_u64, 1_u64),
            (0, 4096, 8192),
            (0, 1, LEN),
            (777, 777, 5000),
            (511, 5000, (1 << 20) + 1),
            (LEN - 1, LEN + 8191, 1),
        ] {
            for (method, io) in [
                (Method::Auto, Io::Direct),
                (Method::Bounce, Io::Direct),
                (Method::Threads, Io::Buffered),
                (Method::Uring, Io::Buffered),
            ] {
                let what = format!("{len} bytes from {offset} to byte {at} of {kind} by {method}");
                evict(&path);
                let made = load(&cold(dir.path(), LEN as usize + 8192), kind);
                let fd = made.run().unwrap().buffer.into_fd().unwrap();
                let mut want = with_bytes(fd.as_fd(), |bytes| {
                    bytes.fill(0xa5);
                    bytes.to_vec()
                });
                let kept = fd.try_clone().unwrap();
                let part = Load::new(&path)
                    .to(Kind::fd_at(fd, at))
                    .method(method)
                    .io(io);
                let part = part.block(64 << 10).offset(offset).length(len).run();
                let part = part.unwrap_or_else(|error| panic!("{what}: {error}"));
                if io == Io::Direct {
                    assert_eq!(cached(&path), 0, "{what}");
                    assert_eq!(part.report.bytes_direct, len, "{what}");
                }
                assert_eq!(part.buffer.offset(), at);
                want[at as usize..][..len as usize]
                    .copy_from_slice(&file[offset as usize..][..len as usize]);
                let same = with_bytes(kept.as_fd(), |got| got == want);
                assert!(same, "{what}: wrong bytes, or others have changed");
            }
        }
    }
}

#[test]
fn a_dma_buf_is_filled_and_the_rest_of_it_is_zeroed() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), 70_001);
    let file = std::fs::read(&path).unwrap();
    for kind in kinds() {
        let made = load(&cold(dir.path(), LEN as usize), kind).run().unwrap();
        let fd = made.buffer.into_fd().unwrap();
        let filled = Load::new(&path).to(Kind::fd(fd)).run().unwrap();
        assert_holds(&filled.buffer, &file, kind);
        let error = load(&path, kind).run().unwrap().buffer.into_fd().unwrap();
        let error = Load::new(cold(dir.path(), 80_000))
            .to(Kind::fd(error))
            .run();
        let error = error.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(22), "{error}");
    }
}

#[test]
fn the_digest_is_computed_from_the_dma_buf() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let digest = dmafile_testkit::file_digest(&path, 0, LEN);
    for kind in kinds() {
        let right = format!("sha256={digest}").parse().unwrap();
        let loaded = load(&path, kind).verify(right).run().unwrap();
        assert_holds(&loaded.buffer, &std::fs::read(&path).unwrap(), kind);
        let wrong = format!("sha256={}", "0".repeat(64)).parse().unwrap();
        let error = load(&path, kind).verify(wrong).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(74), "{error}");
    }
}

#[test]
fn dma_bufs_are_sent_over_a_socket_with_offset_and_length() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let file = std::fs::read(&path).unwrap();
    let before = std::fs::read_to_string(LIMIT).unwrap();
    for (kind, limit, count) in [
        ("udmabuf", "64", 1),
        ("udmabuf", "1", 3),
        ("heap:system", "1", 1),
        ("module", "1", 1),
    ] {
        if !kinds().any(|one| one == kind) {
            continue;
        }
        std::fs::write(LIMIT, limit).unwrap();
        let loaded = load(&path, kind).offset(777).run();
        std::fs::write(LIMIT, &before).unwrap();
        let loaded = loaded.unwrap().buffer;
        assert_eq!(loaded.dma_bufs().len(), count);
        let (ours, theirs) = UnixStream::pair().unwrap();
        loaded.send(&ours).unwrap();
        drop(loaded);
        let received = Buffer::receive(&theirs).unwrap();
        assert_eq!(received.dma_bufs().len(), count);
        assert_eq!((received.offset(), received.len()), (777, LEN - 777));
        assert_holds(&received, &file[777..], kind);
        let mut bytes = [0; 5];
        received.access().unwrap().read_at(3, &mut bytes).unwrap();
        assert_eq!(bytes, file[780..785]);
        // A received buffer can be sent again.
        received.send(&theirs).unwrap();
        assert_holds(&Buffer::receive(&ours).unwrap(), &file[777..], kind);
    }
}

#[test]
fn a_dma_buf_is_read_and_written_with_sync_and_cannot_be_sealed() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    for kind in kinds() {
        let mut buffer = load(&path, kind).run().unwrap().buffer;
        buffer
            .access_mut()
            .unwrap()
            .write_at(LEN - 3, b"end")
            .unwrap();
        let mut bytes = [0; 3];
        buffer
            .access()
            .unwrap()
            .read_at(LEN - 3, &mut bytes)
            .unwrap();
        assert_eq!(&bytes, b"end");
        assert_eq!(&bytes_of(&buffer)[LEN as usize - 3..LEN as usize], b"end");
        assert!(buffer.as_slice().is_none(), "others may write to it");
        let error = buffer.seal().unwrap_err();
        let errno = if kind == "udmabuf" { 16 } else { 95 };
        assert_eq!(error.raw_os_error(), Some(errno), "{error}");
    }
}

#[test]
fn successful_and_failed_loads_leak_nothing() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), LEN as usize);
    let wrong = || format!("crc32c={}", "0".repeat(8)).parse().unwrap();
    let count = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mapped = maps
            .lines()
            .filter(|line| line.contains("dmabuf") || line.contains("memfd"));
        (fds, mapped.count(), pinned())
    };
    for kind in kinds() {
        load(&path, kind).run().unwrap();
        let before = count();
        for _ in 0..5 {
            load(&path, kind).run().unwrap();
            load(&path, kind).verify(wrong()).run().unwrap_err();
        }
        assert_eq!(count(), before, "{kind}");
    }
}

#[test]
fn a_udmabuf_is_created_during_the_reads() {
    let Some(_turn) = machine() else { return };
    let dir = dir();
    let path = cold(dir.path(), 32 << 20);
    // On any disk, thousands of consecutive reads take longer than the allocation.
    let load = load(&path, "udmabuf").pages(Pages::Base);
    let load = load.block(4096).queue_depth(1);
    let report = load.allocation(Allocation::Ahead).run().unwrap().report;
    // The udmabuf is created when all its memory is allocated, while reads into it continue.
    let made = report.phases["export"];
    let hidden = report.hidden_export;
    assert!(0.0 < hidden && hidden <= made, "{hidden} of {made} s");
}
