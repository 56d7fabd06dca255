//! Files to load, and independent readers that check the loaded bytes.

pub mod models;
pub mod page_cache;
pub mod server;

use dmafile::{Buffer, Method};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::fs::File;
use std::io::{IoSliceMut, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// A folder on the disk of the build folder, not on a tmpfs; or in DMAFILE_TEST_DIR, for machines that
/// cannot write there.
pub fn dir() -> tempfile::TempDir {
    // Loads may take huge pages from the pool. Tests of the command that rely on its size hold this
    // lock exclusively, so they do not run at the same time, in any process.
    static POOL: LazyLock<Option<File>> = LazyLock::new(|| {
        let pool = File::open("/proc/sys/vm/nr_hugepages").ok()?;
        rustix::fs::flock(&pool, rustix::fs::FlockOperation::LockShared).unwrap();
        Some(pool)
    });
    LazyLock::force(&POOL);
    let asked = std::env::var_os("DMAFILE_TEST_DIR");
    tempfile::tempdir_in(asked.map_or_else(target, PathBuf::from)).unwrap()
}

/// Cargo's folder for files of tests, on the disk of the build folder.
pub fn target() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    // It is target/PROFILE/deps/NAME.
    let target = program.ancestors().nth(3).unwrap().join("tmp");
    std::fs::create_dir_all(&target).unwrap();
    target
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

/// The default size of hugetlb pages, which depends on that of base pages.
pub fn default_huge_page() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let mut lines = text.lines();
    let size = lines.find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kilobytes = size.unwrap().trim().trim_end_matches(" kB");
    kilobytes.parse::<u64>().unwrap() << 10
}

/// Pseudo-random bytes, different in every 4 KiB, so that a block at a wrong offset is detected.
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

/// A file of `len` bytes without holes, on the disk and not in the page cache.
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

/// Keeps a range in the page cache until the returned value is dropped; `start` is page-aligned.
pub fn warm(path: &Path, start: u64, end: u64) -> page_cache::Warm {
    page_cache::Warm::range(&File::open(path).unwrap(), start..end)
}

/// Bytes of a file in the page cache, counted by fincore of util-linux.
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

/// The digest of a range of a file, computed by sha256sum.
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

/// The digest of a buffer, computed by sha256sum, through its descriptor if it has one.
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

/// The digest of a range of a descriptor, computed by sha256sum.
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

/// The digest of these bytes, computed by sha256sum.
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

/// Every method that loads files into any kind of memory on any kernel: `fetch` loads objects, `module` and `heap-read`
/// only fill their own dma-bufs, and `copy-file-range` and `premap` need patched kernels.
pub fn methods() -> impl Iterator<Item = Method> {
    let few = [
        Method::Module,
        Method::HeapRead,
        Method::CopyFileRange,
        Method::Premap,
        Method::Fetch,
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

/// A memfd full of ones, so that a byte that was not written is detected.
pub fn dirty_memfd(len: u64) -> OwnedFd {
    let fd = memfd(len);
    rustix::io::pwrite(fd.as_fd(), &vec![0xff; len as usize], 0).unwrap();
    fd
}

/// Receives a message, and returns the descriptors that came with it.
pub fn receive_fds(socket: BorrowedFd<'_>) -> Vec<OwnedFd> {
    let mut bytes = vec![0; 1 << 20];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(socket, into, &mut control, flags).unwrap();
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    fds
}

/// Checks that what is done to one descriptor of a file does not show in the others: the position, the flags and the
/// locks.
pub fn are_independent(fds: &[BorrowedFd<'_>]) {
    use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, fcntl_setfl, flock, seek, tell};
    for (number, fd) in fds.iter().enumerate() {
        let own = 10 + number as u64;
        seek(fd, rustix::fs::SeekFrom::Start(own)).unwrap();
        let before = fcntl_getfl(fd).unwrap();
        fcntl_setfl(fd, before | OFlags::NONBLOCK).unwrap();
        flock(fd, FlockOperation::NonBlockingLockExclusive).unwrap();
        for other in fds.iter().enumerate().filter(|(other, _)| *other != number) {
            assert_ne!(tell(other.1).unwrap(), own);
            assert!(!fcntl_getfl(other.1).unwrap().contains(OFlags::NONBLOCK));
            let locked = flock(other.1, FlockOperation::NonBlockingLockShared);
            assert_eq!(locked, Err(rustix::io::Errno::WOULDBLOCK));
        }
        flock(fd, FlockOperation::Unlock).unwrap();
        fcntl_setfl(fd, before).unwrap();
    }
}

/// A forked child that has every descriptor of this process, until it is dropped.
pub struct Forked(i32);

impl Forked {
    pub fn start() -> Self {
        // SAFETY: the child only makes system calls, and ends by itself if the test does not end it.
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
        // SAFETY: a child of this process, which nothing else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}
