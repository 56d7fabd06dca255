//! dma-bufs: creates them from a memfd or by a heap, and brackets CPU access (linux/udmabuf.h,
//! linux/dma-heap.h, linux/dma-buf.h).

use super::ioctl::{Argument, Opcode, opcode, request};
use super::{Errno, retry};
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

// SAFETY: UDMABUF_CREATE reads the structure, and has no addresses in it.
unsafe impl Argument for Create {
    const OPCODE: Opcode = opcode::write::<Self>(b'u', 0x42);
}

/// struct dma_heap_allocation_data of linux/dma-heap.h.
#[repr(C)]
struct HeapAllocation {
    size: Size,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

/// The size of a buffer: a number, or that of a file.
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

/// The buffer gets a file's size and contents, on a kernel with the series in kernel/linux-6.12.
const DMA_HEAP_ALLOC_AND_READ_FILE: u64 = 1;

// SAFETY: DMA_HEAP_IOCTL_ALLOC updates the structure, and has no addresses in it.
unsafe impl Argument for HeapAllocation {
    const OPCODE: Opcode = opcode::read_write::<Self>(b'H', 0);
}

/// struct dma_buf_sync of linux/dma-buf.h.
#[repr(C)]
struct Sync {
    flags: u64,
}

const DMA_BUF_SYNC_READ: u64 = 1;
const DMA_BUF_SYNC_WRITE: u64 = 2;
const DMA_BUF_SYNC_END: u64 = 4;

// SAFETY: DMA_BUF_IOCTL_SYNC reads the structure, and has no addresses in it.
unsafe impl Argument for Sync {
    const OPCODE: Opcode = opcode::write::<Self>(b'b', 0);
}

/// The maximum length of a name, including NUL (DMA_BUF_NAME_LEN).
const NAME_LEN: usize = 32;

/// A NUL-terminated name.
#[repr(transparent)]
struct Name([u8; NAME_LEN]);

// SAFETY: DMA_BUF_SET_NAME_B reads up to the NUL, or as much as fits into such an array.
unsafe impl Argument for Name {
    const OPCODE: Opcode = opcode::write::<u64>(b'b', 1);
}

/// The file system type of a dma-buf in fstatfs(2) (linux/magic.h).
const DMA_BUF_MAGIC: u64 = 0x444d_4142;

/// Opens `/dev/udmabuf`.
pub fn open_udmabuf() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::open("/dev/udmabuf", flags, Mode::empty()))
}

/// Creates a dma-buf of `size` bytes at `offset` of a memfd: whole pages, sealed against shrinking.
/// Missing pages are allocated and zeroed; all are pinned.
///
/// EINVAL above `size_limit_mb`, for a memfd without `F_SEAL_SHRINK` or with `F_SEAL_WRITE`.
pub fn udmabuf(
    node: BorrowedFd<'_>,
    memfd: BorrowedFd<'_>,
    offset: u64,
    size: u64,
) -> Result<OwnedFd, Errno> {
    let mut create = Create {
        memfd: memfd.as_raw_fd() as u32,
        flags: UDMABUF_FLAGS_CLOEXEC,
        offset,
        size,
    };
    let fd = retry(|| request(node, &mut create))?;
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The folder with the nodes of heaps.
pub const HEAPS: &str = "/dev/dma_heap";

/// Opens the node of a heap. Allocating only needs read permission.
pub fn open_heap(name: &str) -> Result<OwnedFd, Errno> {
    open_node(&Path::new(HEAPS).join(name))
}

/// Opens a node in [`HEAPS`].
pub fn open_node(node: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    retry(|| rustix::fs::open(node, flags, Mode::empty()))
}

/// The nodes of all heaps, in order.
pub fn heaps() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(HEAPS).into_iter().flatten().flatten();
    let mut nodes: Vec<_> = entries.map(|entry| entry.path()).collect();
    nodes.sort();
    nodes
}

/// Makes a heap allocate a dma-buf of `size` bytes, rounded up to whole pages, all zero.
pub fn allocate(heap: BorrowedFd<'_>, size: u64) -> Result<OwnedFd, Errno> {
    ask(heap, Size { len: size }, 0)
}

/// Returns true if a heap supports [`allocate_and_read`]; probed with an invalid descriptor.
pub fn reads_files(heap: BorrowedFd<'_>) -> bool {
    let nothing = FileOf {
        file_fd: u32::MAX,
        file_reserved: 0,
    };
    let asked = ask(heap, Size { file: nothing }, DMA_HEAP_ALLOC_AND_READ_FILE);
    // A kernel without the flag returns EINVAL before it looks at the descriptor.
    asked.is_err_and(|errno| errno == Errno::BADF)
}

/// Makes a heap allocate a dma-buf of the size of a file, rounded up to whole pages, with the
/// file's bytes followed by zeros. Bypasses the page cache if the file is open with O_DIRECT.
///
/// ENODATA for an empty file, or one that is truncated during the call; otherwise as [`allocate`],
/// and any error of reading the file.
pub fn allocate_and_read(heap: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let file = FileOf {
        file_fd: file.as_raw_fd() as u32,
        file_reserved: 0,
    };
    ask(heap, Size { file }, DMA_HEAP_ALLOC_AND_READ_FILE)
}

fn ask(heap: BorrowedFd<'_>, size: Size, heap_flags: u64) -> Result<OwnedFd, Errno> {
    let mut data = HeapAllocation {
        size,
        fd: 0,
        fd_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
        heap_flags,
    };
    retry(|| request(heap, &mut data))?;
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(data.fd as i32) })
}

/// Returns true if a descriptor is a dma-buf. Checks its link first: its file system may be an untrusted
/// daemon (FUSE) that never answers, which must not be queried.
pub fn is_one(fd: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    if link.is_ok_and(|link| !link.as_os_str().as_encoded_bytes().starts_with(b"/dmabuf:")) {
        return false;
    }
    rustix::fs::fstatfs(fd).is_ok_and(|fs| fs.f_type as u64 == DMA_BUF_MAGIC)
}

/// The size of a dma-buf, which never changes.
pub fn size(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    // It has no file position that this could change.
    rustix::fs::seek(fd, SeekFrom::End(0))
}

/// Names a dma-buf, so that its user can be found (`/proc/PID/fdinfo`, debugfs).
pub fn name(fd: BorrowedFd<'_>, name: &str) {
    let mut bytes = Name([0; NAME_LEN]);
    let name = name.bytes().filter(|&byte| byte != 0).take(NAME_LEN - 1);
    for (to, from) in bytes.0.iter_mut().zip(name) {
        *to = from;
    }
    // A kernel that does not support names works without.
    let _ = request(fd, &mut bytes);
}

/// Announces that the CPU begins (or ends) to read, or to read and write, the memory of a dma-buf.
pub fn sync(fd: BorrowedFd<'_>, write: bool, end: bool) -> Result<(), Errno> {
    loop {
        match try_sync(fd, write, end) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            done => return done,
        }
    }
}

/// As [`sync`], but a signal interrupts it (EINTR) while it waits for devices that are still
/// writing.
pub fn try_sync(fd: BorrowedFd<'_>, write: bool, end: bool) -> Result<(), Errno> {
    let mut flags = DMA_BUF_SYNC_READ;
    if write {
        flags |= DMA_BUF_SYNC_WRITE;
    }
    if end {
        flags |= DMA_BUF_SYNC_END;
    }
    let mut sync = Sync { flags };
    request(fd, &mut sync).map(drop)
}
