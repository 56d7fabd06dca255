//! memfd: memory with a descriptor, and its seals (memfd_create(2), fcntl(2)).

use super::{Errno, file, last_errno, retry, sandbox};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

/// A sealable memfd named `name`; `huge` takes its pages from the hugetlb pool.
pub fn create(name: &str, huge: bool) -> Result<OwnedFd, Errno> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    flags.set(MemfdFlags::HUGETLB, huge);
    // Systems with vm.memfd_noexec=2 refuse memfds that may become executable; kernels before
    // 6.3 do not support the flag.
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        done => done,
    }
}

/// Sets the size. If RLIMIT_FSIZE forbids it, returns EFBIG without the signal that the kernel
/// would send.
pub fn resize(fd: BorrowedFd<'_>, size: u64) -> Result<(), Errno> {
    if file::size_limit().is_some_and(|limit| size > limit) {
        return Err(Errno::FBIG);
    }
    match retry(|| rustix::fs::ftruncate(fd, size)) {
        Err(errno) if sandbox::FTRUNCATE.refuses(errno) => {
            let link = super::place::link_of(fd).into_os_string().into_vec();
            let link = CString::new(link).map_err(|_| Errno::INVAL)?;
            retry(|| {
                // SAFETY: a string that ends with NUL.
                match unsafe { libc::truncate64(link.as_ptr(), size as libc::off64_t) } {
                    0 => Ok(()),
                    _ => Err(last_errno()),
                }
            })
            // Not that /proc is missing: what has to be allowed is ftruncate.
            .map_err(|_| errno)
        }
        done => done,
    }
}

/// Returns true if the descriptor can be mapped for writing: it must be open for reading and writing.
pub fn is_writable(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(flags & OFlags::ACCMODE == OFlags::RDWR)
}

/// Returns true if writes go to its end, whatever their offset (BUGS in pwrite(2)).
pub fn appends(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(rustix::fs::fcntl_getfl(fd)?.contains(OFlags::APPEND))
}

/// The seals of a memfd; EINVAL for anything else.
pub fn seals(fd: BorrowedFd<'_>) -> Result<SealFlags, Errno> {
    rustix::fs::fcntl_get_seals(fd)
}

/// A second descriptor that is open only for reading: its receiver cannot add seals.
pub fn read_only(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    reopen(fd, OFlags::RDONLY)
}

/// A descriptor of the same memfd, with the same access, whose offset, flags and locks no other descriptor
/// shares (open(2): *open file description*). None for anything but a memfd, and if it cannot be opened, as
/// without `/proc`. EMFILE, ENFILE and ENOMEM may be over in a moment.
pub fn again(fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    if seals(fd).is_err() {
        return Ok(None);
    }
    match reopen(fd, rustix::fs::fcntl_getfl(fd)? & OFlags::ACCMODE) {
        Ok(again) => Ok(Some(again)),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(errno),
        Err(_) => Ok(None),
    }
}

fn reopen(fd: BorrowedFd<'_>, access: OFlags) -> Result<OwnedFd, Errno> {
    let link = super::place::link_of(fd);
    retry(|| rustix::fs::open(&link, access | OFlags::CLOEXEC, Mode::empty()))
}

/// How often `F_SEAL_WRITE` waits for references to pages; the kernel itself waits about 150 ms each time.
const WAITS: usize = 20;

/// Adds seals. EBUSY for `F_SEAL_WRITE` while a writable mapping exists, or if pages are still referenced after 3
/// seconds. Pages that the kernel is moving (compaction) are, too, and on a busy machine the process that moves
/// them may not run for longer than the kernel waits.
pub fn seal(fd: BorrowedFd<'_>, seals: SealFlags) -> Result<(), Errno> {
    for _ in 0..WAITS {
        let began = Instant::now();
        match rustix::fs::fcntl_add_seals(fd, seals) {
            // For a writable mapping the kernel does not wait.
            Err(Errno::BUSY) if began.elapsed() > Duration::from_millis(50) => {}
            done => return done,
        }
    }
    Err(Errno::BUSY)
}

/// Returns true if its bytes can neither be changed nor truncated any more.
pub fn is_sealed(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(seals(fd)?.contains(SealFlags::WRITE | SealFlags::SHRINK))
}
