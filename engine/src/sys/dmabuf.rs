//! dma-bufs: making them of a memfd, and bracketing access by the CPU (linux/udmabuf.h,
//! linux/dma-buf.h).

use super::{Errno, file, last_errno};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// struct udmabuf_create of linux/udmabuf.h.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

const UDMABUF_FLAGS_CLOEXEC: u32 = 1;
const UDMABUF_CREATE: libc::Ioctl = libc::_IOW::<Create>(b'u' as u32, 0x42);

/// struct dma_buf_sync of linux/dma-buf.h.
#[repr(C)]
struct Sync {
    flags: u64,
}

const DMA_BUF_SYNC_READ: u64 = 1;
const DMA_BUF_SYNC_WRITE: u64 = 2;
const DMA_BUF_SYNC_END: u64 = 4;
const DMA_BUF_IOCTL_SYNC: libc::Ioctl = libc::_IOW::<Sync>(b'b' as u32, 0);

/// Opens `/dev/udmabuf`.
pub(crate) fn open_udmabuf() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    file::retry(|| rustix::fs::open("/dev/udmabuf", flags, Mode::empty()))
}

/// Makes a dma-buf of `size` bytes at `offset` of a memfd, whole pages that are sealed against
/// shrinking. Pages that are not there yet come into being, zeroed; all are pinned.
///
/// EINVAL above `size_limit_mb`, for a memfd without `F_SEAL_SHRINK` or with `F_SEAL_WRITE`.
pub(crate) fn udmabuf(
    node: BorrowedFd<'_>,
    memfd: BorrowedFd<'_>,
    offset: u64,
    size: u64,
) -> Result<OwnedFd, Errno> {
    let create = Create {
        memfd: memfd.as_raw_fd() as u32,
        flags: UDMABUF_FLAGS_CLOEXEC,
        offset,
        size,
    };
    file::retry(|| {
        // SAFETY: the structure is the kernel's own and lives through the call.
        match unsafe { libc::ioctl(node.as_raw_fd(), UDMABUF_CREATE, &raw const create) } {
            // SAFETY: a descriptor that the kernel has just made for us.
            fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(last_errno()),
        }
    })
}

/// Says that the CPU begins (or ends) to read, or to read and write, the memory of a dma-buf.
pub(crate) fn sync(fd: BorrowedFd<'_>, write: bool, end: bool) -> Result<(), Errno> {
    let mut flags = DMA_BUF_SYNC_READ;
    if write {
        flags |= DMA_BUF_SYNC_WRITE;
    }
    if end {
        flags |= DMA_BUF_SYNC_END;
    }
    let sync = Sync { flags };
    loop {
        // SAFETY: the structure is the kernel's own and lives through the call.
        match unsafe { libc::ioctl(fd.as_raw_fd(), DMA_BUF_IOCTL_SYNC, &raw const sync) } {
            0 => return Ok(()),
            _ => match last_errno() {
                Errno::INTR | Errno::AGAIN => {}
                errno => return Err(errno),
            },
        }
    }
}
