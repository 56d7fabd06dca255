//! Files to load, and readers that are not ours to check what came.
#![allow(dead_code, reason = "each test program uses a part of it")]

mod page_cache;

use dmafile::{Buffer, Method};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// A directory on the disk that holds the build, not on a tmpfs; or where DMAFILE_TEST_DIR says, on
/// machines that cannot write there.
pub fn dir() -> tempfile::TempDir {
    // Loads may take huge pages from the pool. A test of the command that fills it, in whatever
    // process, holds this lock alone, and does not meet ours.
    static POOL: LazyLock<Option<File>> = LazyLock::new(|| {
        let pool = File::open("/proc/sys/vm/nr_hugepages").ok()?;
        rustix::fs::flock(&pool, rustix::fs::FlockOperation::LockShared).unwrap();
        Some(pool)
    });
    LazyLock::force(&POOL);
    let asked = std::env::var_os("DMAFILE_TEST_DIR");
    tempfile::tempdir_in(asked.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into())).unwrap()
}

/// The names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Pseudo-random bytes that differ in every 4 KiB, so that a block in the wrong place shows.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A file of `len` bytes without holes, on the disk and out of the page cache.
pub fn cold(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join(format!("noise-{len}"));
    std::fs::write(&path, noise(len, len as u64)).unwrap();
    evict(&path);
    path
}

/// A file of `len` bytes with data only in `data`.
pub fn sparse(dir: &Path, len: u64, data: &[(u64, u64)]) -> PathBuf {
    let path = dir.join(format!("sparse-{len}-{}", data.len()));
    let mut file = File::create(&path).unwrap();
    for &(start, end) in data {
        file.seek(SeekFrom::Start(start)).unwrap();
        file.write_all(&noise((end - start) as usize, start))
            .unwrap();
    }
    file.set_len(len).unwrap();
    evict(&path);
    path
}

/// Writes a file out and drops it from the page cache.
pub fn evict(path: &Path) {
    page_cache::evict(&File::open(path).unwrap());
}

/// Has a range in the page cache until what comes back is dropped; it starts at a page.
pub fn warm(path: &Path, start: u64, end: u64) -> page_cache::Warm {
    page_cache::Warm::range(&File::open(path).unwrap(), start..end)
}

/// Bytes of a file in the page cache, as util-linux's fincore counts them.
pub fn cached(path: &Path) -> u64 {
    let out = Command::new("fincore")
        .args(["--bytes", "--noheadings", "--output", "RES"])
        .arg(path)
        .output()
        .expect("fincore is part of util-linux");
    String::from_utf8(out.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

/// What sha256sum says of a range of a file.
pub fn file_digest(path: &Path, offset: u64, len: u64) -> String {
    let script = format!("tail -c +{} \"$0\" | head -c {len} | sha256sum", offset + 1);
    let out = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(path)
        .output()
        .unwrap();
    first_word(&out.stdout)
}

/// What sha256sum, another process, says of the buffer's wanted bytes; through its descriptor
/// where it has one.
pub fn buffer_digest(buffer: &Buffer) -> String {
    match buffer.as_fd() {
        Some(fd) => descriptor_digest(
            fd.try_clone_to_owned().unwrap(),
            buffer.offset(),
            buffer.len(),
        ),
        None => bytes_digest(buffer.as_slice().expect("private memory has a slice")),
    }
}

/// What sha256sum says of a range of a descriptor's contents.
pub fn descriptor_digest(fd: OwnedFd, offset: u64, len: u64) -> String {
    let mut file = File::from(fd);
    file.seek(SeekFrom::Start(0)).unwrap();
    let script = format!("tail -c +{} | head -c {len} | sha256sum", offset + 1);
    let out = Command::new("sh")
        .arg("-c")
        .arg(script)
        .stdin(file)
        .output()
        .unwrap();
    first_word(&out.stdout)
}

/// What sha256sum says of these bytes.
pub fn bytes_digest(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    first_word(&child.wait_with_output().unwrap().stdout)
}

fn first_word(text: &[u8]) -> String {
    let word = String::from_utf8_lossy(text)
        .split_whitespace()
        .next()
        .unwrap()
        .to_string();
    assert_eq!(word.len(), 64, "a digest of sha256sum");
    word
}

/// Every method that fills memory of whatever kind, on any kernel; `module` and `heap-read` fill
/// dma-bufs of their own, and `premap` is of kernels that map buffers.
pub fn methods() -> impl Iterator<Item = Method> {
    let few = [
        Method::Module,
        Method::HeapRead,
        Method::CopyFileRange,
        Method::Premap,
    ];
    let any = move |method: &Method| !few.contains(method);
    Method::ALL.iter().copied().filter(any)
}

/// A memfd of `len` bytes, as another program would make it.
pub fn memfd(len: u64) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

/// A memfd full of ones, so that a byte that was forgotten shows.
pub fn dirty_memfd(len: u64) -> OwnedFd {
    let fd = memfd(len);
    rustix::io::pwrite(fd.as_fd(), &vec![0xff; len as usize], 0).unwrap();
    fd
}

/// A forked child that has every descriptor of this process, until it is dropped.
pub struct Forked(i32);

impl Forked {
    pub fn new() -> Self {
        // SAFETY: the child makes system calls alone, and ends by itself if the test does not end it.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above.
            unsafe {
                libc::alarm(60);
                libc::pause();
                libc::_exit(0);
            }
        }
        assert!(pid > 0, "{}", std::io::Error::last_os_error());
        Self(pid)
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: our own child, which nothing else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}
