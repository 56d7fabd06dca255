//! dma-bufs: making them of a memfd or by a heap, and bracketing access by the CPU
//! (linux/udmabuf.h, linux/dma-heap.h, linux/dma-buf.h).

use super::{Errno, last_errno, retry};
use rustix::fs::{Mode, OFlags, SeekFrom};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

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

/// struct dma_heap_allocation_data of linux/dma-heap.h.
#[repr(C)]
struct Allocation {
    size: Size,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

/// How large a buffer shall be: as it is said, or as a file is.
#[repr(C)]
union Size {
    len: u64,
    file: FileOf,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FileOf {
    file_fd: u32,
    file_reserved: u32,
}

/// The buffer has a file's size and content, on a kernel with the series in kernel/linux-6.12.
const DMA_HEAP_ALLOC_AND_READ_FILE: u64 = 1;

const DMA_HEAP_IOCTL_ALLOC: libc::Ioctl = libc::_IOWR::<Allocation>(b'H' as u32, 0);

/// struct dma_buf_sync of linux/dma-buf.h.
#[repr(C)]
struct Sync {
    flags: u64,
}

const DMA_BUF_SYNC_READ: u64 = 1;
const DMA_BUF_SYNC_WRITE: u64 = 2;
const DMA_BUF_SYNC_END: u64 = 4;
const DMA_BUF_IOCTL_SYNC: libc::Ioctl = libc::_IOW::<Sync>(b'b' as u32, 0);
const DMA_BUF_SET_NAME_B: libc::Ioctl = libc::_IOW::<u64>(b'b' as u32, 1);
/// The longest name, its NUL included (DMA_BUF_NAME_LEN).
const NAME_LEN: usize = 32;

/// What fstatfs(2) says of a dma-buf (linux/magic.h).
const DMA_BUF_MAGIC: u64 = 0x444d_4142;

/// Opens `/dev/udmabuf`.
pub(crate) fn open_udmabuf() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::open("/dev/udmabuf", flags, Mode::empty()))
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
    retry(|| {
        // SAFETY: the structure is the kernel's own and lives through the call.
        match unsafe { libc::ioctl(node.as_raw_fd(), UDMABUF_CREATE, &raw const create) } {
            // SAFETY: a descriptor that the kernel has just made for us.
            fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(last_errno()),
        }
    })
}

/// Where the nodes of heaps are.
pub(crate) const HEAPS: &str = "/dev/dma_heap";

/// Opens the node of a heap. Reading it is all that allocating takes.
pub(crate) fn open_heap(name: &str) -> Result<OwnedFd, Errno> {
    open_node(&Path::new(HEAPS).join(name))
}

/// Opens a node in [`HEAPS`].
pub(crate) fn open_node(node: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    retry(|| rustix::fs::open(node, flags, Mode::empty()))
}

/// The nodes of the heaps that there are, in order.
pub(crate) fn heaps() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(HEAPS).into_iter().flatten().flatten();
    let mut nodes: Vec<_> = entries.map(|entry| entry.path()).collect();
    nodes.sort();
    nodes
}

/// Has a heap make a dma-buf of `size` bytes, rounded up to whole pages, all of them zero.
pub(crate) fn allocate(heap: BorrowedFd<'_>, size: u64) -> Result<OwnedFd, Errno> {
    request(heap, Size { len: size }, 0)
}

/// Whether a heap knows [`allocate_and_read`]: asked for a file that there isn't.
pub(crate) fn reads_files(heap: BorrowedFd<'_>) -> bool {
    let nothing = FileOf {
        file_fd: u32::MAX,
        file_reserved: 0,
    };
    let asked = request(heap, Size { file: nothing }, DMA_HEAP_ALLOC_AND_READ_FILE);
    // Who doesn't know the flag says EINVAL, before anything else.
    asked.is_err_and(|errno| errno == Errno::BADF)
}

/// Has a heap make a dma-buf that is as large as a file, rounded up to whole pages, with its bytes
/// in it and zeros behind them; past the page cache if the file is open that way.
///
/// ENODATA for a file that is empty, or that is cut short meanwhile; otherwise as [`allocate`], and
/// what reading the file says.
pub(crate) fn allocate_and_read(
    heap: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
) -> Result<OwnedFd, Errno> {
    let file = FileOf {
        file_fd: file.as_raw_fd() as u32,
        file_reserved: 0,
    };
    request(heap, Size { file }, DMA_HEAP_ALLOC_AND_READ_FILE)
}

fn request(heap: BorrowedFd<'_>, size: Size, heap_flags: u64) -> Result<OwnedFd, Errno> {
    let mut data = Allocation {
        size,
        fd: 0,
        fd_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
        heap_flags,
    };
    retry(|| {
        // SAFETY: the structure is the kernel's own and lives through the call.
        match unsafe { libc::ioctl(heap.as_raw_fd(), DMA_HEAP_IOCTL_ALLOC, &raw mut data) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    })?;
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(data.fd as i32) })
}

/// Whether a descriptor is a dma-buf. Its link is looked at first: whose file system may be a
/// stranger's daemon (FUSE), which might never answer, is not asked.
pub(crate) fn is_one(fd: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    if link.is_ok_and(|link| !link.as_os_str().as_encoded_bytes().starts_with(b"/dmabuf:")) {
        return false;
    }
    rustix::fs::fstatfs(fd).is_ok_and(|fs| fs.f_type as u64 == DMA_BUF_MAGIC)
}

/// The size of a dma-buf, which never changes.
pub(crate) fn size(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    // It has no position that this would move.
    rustix::fs::seek(fd, SeekFrom::End(0))
}

/// Names a dma-buf, for those who look for who holds memory (`/proc/PID/fdinfo`, debugfs).
pub(crate) fn name(fd: BorrowedFd<'_>, name: &str) {
    let mut bytes = [0_u8; NAME_LEN];
    let name = name.bytes().filter(|&byte| byte != 0).take(NAME_LEN - 1);
    for (to, from) in bytes.iter_mut().zip(name) {
        *to = from;
    }
    // SAFETY: the kernel reads up to the NUL, inside an array that lives through the call. A kernel
    // that takes no names loses nothing but the name.
    let _ = unsafe { libc::ioctl(fd.as_raw_fd(), DMA_BUF_SET_NAME_B, bytes.as_ptr()) };
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
