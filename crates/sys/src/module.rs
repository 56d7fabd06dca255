//! dmafile.ko: creates its dma-bufs, and moves bytes between files and the pages behind them
//! (kernel/uapi/dmafile.h).

use super::ioctl::{Argument, Opcode, opcode, request};
use super::{Errno, memfd, retry};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Its node.
pub const NODE: &str = "/dev/dmafile";

/// Required features: DMAFILE_FEATURE_ALLOC_READ, DMAFILE_FEATURE_READ.
pub const FEATURES: u64 = 0x1 | 0x2;
/// The feature required for saving (DMAFILE_FEATURE_WRITE).
pub const FEATURE_WRITE: u64 = 0x4;
/// All features with their names (DMAFILE_FEATURE_*).
pub const FEATURE_NAMES: [(u64, &str); 4] = [
    (0x1, "allocate and read in one step"),
    (0x2, "read"),
    (0x4, "write"),
    (0x8, "io_uring"),
];

const MAGIC: u8 = 0xDE;

const STRICT: u32 = 0x4;
const IN_ORDER: u32 = 0x8;
const READ: u32 = 0x10;
const WRITE: u32 = 0x20;

/// Bytes were read with O_DIRECT directly into the pages of the buffer (DMAFILE_MODE_DIRECT).
pub const DIRECT: u32 = 0x1;
/// Bytes were read with O_DIRECT and copied (DMAFILE_MODE_BOUNCED).
pub const BOUNCED: u32 = 0x2;
/// Through the page cache (DMAFILE_MODE_BUFFERED).
pub const BUFFERED: u32 = 0x4;

/// struct dmafile_info.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ModuleInfo {
    size: u32,
    /// Alignment of direct I/O in bytes, for files that do not need a larger one.
    pub align: u32,
    /// Its features.
    pub features: u64,
    /// The largest buffer, in bytes.
    pub max_buffer: u64,
    /// Default maximum size of a chunk in bytes.
    pub gather: u64,
    /// Largest chunk that a call may request.
    pub max_gather: u64,
    /// Maximum number of chunks in flight.
    pub depth: u32,
    reserved: u32,
}

// SAFETY: DMAFILE_IOC_INFO updates the structure, and has no addresses in it.
unsafe impl Argument for ModuleInfo {
    const OPCODE: Opcode = opcode::read_write::<Self>(MAGIC, 0);
}

/// struct dmafile_alloc.
#[repr(C)]
#[derive(Default)]
struct Alloc {
    size: u32,
    fd_flags: u32,
    length: u64,
    flags: u32,
    fd: i32,
    alloc_ns: u64,
}

// SAFETY: DMAFILE_IOC_ALLOC updates the structure, and has no addresses in it.
unsafe impl Argument for Alloc {
    const OPCODE: Opcode = opcode::read_write::<Self>(MAGIC, 1);
}

/// struct dmafile_alloc_read.
#[repr(C)]
#[derive(Default)]
struct AllocRead {
    size: u32,
    fd_flags: u32,
    flags: u32,
    file_fd: i32,
    file_offset: u64,
    length: u64,
    buffer_offset: u64,
    buffer_size: u64,
    gather: u64,
    progress: u64,
    fd: i32,
    mode: u32,
    bytes: u64,
    alloc_ns: u64,
    submit_ns: u64,
    wait_ns: u64,
    copy_ns: u64,
    align: u32,
    reserved: u32,
}

// SAFETY: DMAFILE_IOC_ALLOC_READ updates the structure. The only address in it is that of a
// `ModuleProgress`, which is borrowed for longer than the call, and whose members are atomic.
unsafe impl Argument for AllocRead {
    const OPCODE: Opcode = opcode::read_write::<Self>(MAGIC, 2);
}

/// struct dmafile_rw.
#[repr(C)]
#[derive(Default)]
struct Rw {
    size: u32,
    flags: u32,
    fd: i32,
    file_fd: i32,
    file_offset: u64,
    buffer_offset: u64,
    length: u64,
    gather: u64,
    progress: u64,
    mode: u32,
    align: u32,
    bytes: u64,
    submit_ns: u64,
    wait_ns: u64,
    copy_ns: u64,
}

// SAFETY: DMAFILE_IOC_RW updates the structure. The only address in it is that of a `ModuleProgress`, which
// is borrowed for longer than the call, and whose members are atomic.
unsafe impl Argument for Rw {
    const OPCODE: Opcode = opcode::read_write::<Self>(MAGIC, 3);
}

/// struct dmafile_progress: shared by a running request and its caller.
#[repr(C, align(8))]
#[derive(Debug, Default)]
pub struct ModuleProgress {
    bytes: AtomicU64,
    stop: AtomicU32,
    reserved: u32,
}

impl ModuleProgress {
    /// Number of bytes in place, counted from the first one.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Ends the request before its next chunk, with ECANCELED.
    pub fn stop(&self) {
        self.stop.store(1, Ordering::Relaxed);
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }
}

/// Where bytes are in a file and in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleRange {
    pub file: u64,
    pub at: u64,
    pub len: u64,
}

/// How a request moves its bytes.
#[derive(Clone, Copy, Debug)]
pub struct MoveOptions {
    /// Bytes that are allocated, and passed to the file system, at a time; 0 for the module's default.
    pub chunk: u64,
    /// Fail with EINVAL rather than use the page cache or a copy.
    pub strict: bool,
    /// Allocate everything before the first read.
    pub in_order: bool,
}

impl MoveOptions {
    fn flags(self) -> u32 {
        let flag = |set, flag| if set { flag } else { 0 };
        flag(self.strict, STRICT) | flag(self.in_order, IN_ORDER)
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moved {
    pub bytes: u64,
    /// [`DIRECT`], [`BOUNCED`], [`BUFFERED`]; several if parts differ.
    pub mode: u32,
    pub alloc: Duration,
    pub submit: Duration,
    pub wait: Duration,
    pub copy: Duration,
}

/// Opens the node.
pub fn open() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    retry(|| rustix::fs::open(NODE, flags, Mode::empty()))
}

/// Its features and limits (DMAFILE_IOC_INFO).
pub fn info(node: BorrowedFd<'_>) -> Result<ModuleInfo, Errno> {
    let mut info = ModuleInfo {
        size: size_of::<ModuleInfo>() as u32,
        ..ModuleInfo::default()
    };
    call(node, &mut info)?;
    Ok(info)
}

/// Creates a dma-buf of `length` bytes, rounded up to whole pages, all zero (DMAFILE_IOC_ALLOC).
pub fn allocate(node: BorrowedFd<'_>, length: u64) -> Result<OwnedFd, Errno> {
    let mut alloc = Alloc {
        size: size_of::<Alloc>() as u32,
        fd_flags: FD_FLAGS,
        length,
        ..Alloc::default()
    };
    call(node, &mut alloc)?;
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(alloc.fd) })
}

/// Creates a dma-buf of `size` bytes with a range of a file in it, and zeros around it
/// (DMAFILE_IOC_ALLOC_READ). The file's O_DIRECT flag selects direct I/O; its position is ignored.
pub fn allocate_and_read(
    node: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    range: ModuleRange,
    size: u64,
    how: MoveOptions,
    progress: &ModuleProgress,
) -> Result<(OwnedFd, Moved), Errno> {
    let mut read = AllocRead {
        size: size_of::<AllocRead>() as u32,
        fd_flags: FD_FLAGS,
        flags: how.flags(),
        file_fd: file.as_raw_fd(),
        file_offset: range.file,
        length: range.len,
        buffer_offset: range.at,
        buffer_size: size,
        gather: how.chunk,
        progress: progress.address(),
        ..AllocRead::default()
    };
    call(node, &mut read)?;
    let moved = Moved {
        bytes: read.bytes,
        mode: read.mode,
        alloc: Duration::from_nanos(read.alloc_ns),
        submit: Duration::from_nanos(read.submit_ns),
        wait: Duration::from_nanos(read.wait_ns),
        copy: Duration::from_nanos(read.copy_ns),
    };
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok((unsafe { OwnedFd::from_raw_fd(read.fd) }, moved))
}

/// Reads a range of a file into one of its dma-bufs (DMAFILE_IOC_RW); returns what was moved, and how
/// the request ended. EXDEV for another exporter's dma-buf.
pub fn read(
    node: BorrowedFd<'_>,
    dma_buf: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    range: ModuleRange,
    how: MoveOptions,
    progress: &ModuleProgress,
) -> (Moved, Result<(), Errno>) {
    rw(READ, node, dma_buf, file, range, how, progress)
}

/// As [`read`], in the other direction: writes a range of a dma-buf to a file.
pub fn write(
    node: BorrowedFd<'_>,
    dma_buf: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    range: ModuleRange,
    how: MoveOptions,
    progress: &ModuleProgress,
) -> (Moved, Result<(), Errno>) {
    rw(WRITE, node, dma_buf, file, range, how, progress)
}

fn rw(
    direction: u32,
    node: BorrowedFd<'_>,
    dma_buf: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    range: ModuleRange,
    how: MoveOptions,
    progress: &ModuleProgress,
) -> (Moved, Result<(), Errno>) {
    let mut rw = Rw {
        size: size_of::<Rw>() as u32,
        flags: how.flags() | direction,
        fd: dma_buf.as_raw_fd(),
        file_fd: file.as_raw_fd(),
        file_offset: range.file,
        buffer_offset: range.at,
        length: range.len,
        gather: how.chunk,
        progress: progress.address(),
        ..Rw::default()
    };
    let end = call(node, &mut rw);
    let moved = Moved {
        bytes: rw.bytes,
        mode: rw.mode,
        alloc: Duration::ZERO,
        submit: Duration::from_nanos(rw.submit_ns),
        wait: Duration::from_nanos(rw.wait_ns),
        copy: Duration::from_nanos(rw.copy_ns),
    };
    (moved, end)
}

/// Returns true if a dma-buf is one of its own. Probed with a write at an offset that no file can have: only
/// for its own dma-bufs the result is EOVERFLOW, and it does not wait for devices before that.
pub fn is_its_own(node: BorrowedFd<'_>, dma_buf: BorrowedFd<'_>) -> bool {
    let Ok(drain) = memfd::create("dmafile-probe", false) else {
        return false;
    };
    let mut rw = Rw {
        size: size_of::<Rw>() as u32,
        flags: WRITE,
        fd: dma_buf.as_raw_fd(),
        file_fd: drain.as_fd().as_raw_fd(),
        file_offset: i64::MAX as u64,
        length: 1,
        ..Rw::default()
    };
    call(node, &mut rw) == Err(Errno::OVERFLOW)
}

/// The flags of new descriptors.
const FD_FLAGS: u32 = (libc::O_RDWR | libc::O_CLOEXEC) as u32;

/// Repeats a request that a signal has interrupted: one that ends with EINTR has left nothing behind,
/// and a process that is killed does not return here.
fn call(node: BorrowedFd<'_>, data: &mut impl Argument) -> Result<(), Errno> {
    retry(|| request(node, data)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::process::Command;

    /// Sizes, offsets of members and constants, as a C compiler reads them from the header.
    #[test]
    fn structures_and_constants_equal_those_of_the_header() {
        macro_rules! members {
            ($rust:ident, $c:literal: $($member:ident),+) => {{
                let mut list = vec![(format!("sizeof(struct {})", $c), size_of::<$rust>() as u64)];
                $(list.push((
                    format!("offsetof(struct {}, {})", $c, stringify!($member)),
                    offset_of!($rust, $member) as u64,
                ));)+
                list
            }};
        }
        let mut all = members!(ModuleInfo, "dmafile_info": size, align, features, max_buffer, gather,
            max_gather, depth, reserved);
        all.extend(members!(Alloc, "dmafile_alloc": size, fd_flags, length, flags, fd, alloc_ns));
        all.extend(
            members!(AllocRead, "dmafile_alloc_read": size, fd_flags, flags, file_fd, file_offset,
            length, buffer_offset, buffer_size, gather, progress, fd, mode, bytes, alloc_ns,
            submit_ns, wait_ns, copy_ns, align, reserved),
        );
        all.extend(
            members!(Rw, "dmafile_rw": size, flags, fd, file_fd, file_offset, buffer_offset,
            length, gather, progress, mode, align, bytes, submit_ns, wait_ns, copy_ns),
        );
        all.extend(members!(ModuleProgress, "dmafile_progress": bytes, stop, reserved));
        let numbers = [
            ("DMAFILE_IOC_INFO", ModuleInfo::OPCODE.into()),
            ("DMAFILE_IOC_ALLOC", Alloc::OPCODE.into()),
            ("DMAFILE_IOC_ALLOC_READ", AllocRead::OPCODE.into()),
            ("DMAFILE_IOC_RW", Rw::OPCODE.into()),
            ("DMAFILE_FEATURE_ALLOC_READ", FEATURE_NAMES[0].0),
            ("DMAFILE_FEATURE_READ", FEATURE_NAMES[1].0),
            ("DMAFILE_FEATURE_WRITE", FEATURE_NAMES[2].0),
            ("DMAFILE_FEATURE_WRITE", FEATURE_WRITE),
            ("DMAFILE_FEATURE_URING_CMD", FEATURE_NAMES[3].0),
            (
                "DMAFILE_FEATURE_ALLOC_READ | DMAFILE_FEATURE_READ",
                FEATURES,
            ),
            ("DMAFILE_STRICT", STRICT.into()),
            ("DMAFILE_IN_ORDER", IN_ORDER.into()),
            ("DMAFILE_READ", READ.into()),
            ("DMAFILE_WRITE", WRITE.into()),
            ("DMAFILE_MODE_DIRECT", DIRECT.into()),
            ("DMAFILE_MODE_BOUNCED", BOUNCED.into()),
            ("DMAFILE_MODE_BUFFERED", BUFFERED.into()),
        ];
        all.extend(numbers.map(|(name, value)| (name.to_string(), value)));

        let dir = tempfile::tempdir().unwrap();
        let (source, object) = (dir.path().join("check.c"), dir.path().join("check.o"));
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/uapi/dmafile.h");
        let mut text = format!("#include <stddef.h>\n#include \"{header}\"\n");
        for (what, value) in &all {
            text += &format!("_Static_assert(({what}) == {value}ULL, \"{what}\");\n");
        }
        std::fs::write(&source, text).unwrap();
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
        let built = Command::new(cc)
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(&object)
            .output();
        let built = built.expect("a C compiler");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
    }
}
