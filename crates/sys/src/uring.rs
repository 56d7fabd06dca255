//! An io_uring that reads files into one region or into dma-bufs, and writes them from there.

use super::map::{Region, iovec};
use super::notifier::Notifier;
use super::{Errno, errno, last_errno, retry};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

/// struct io_uring_rsrc_update2 of linux/io_uring.h, with the flags of kernels that can map buffers once.
#[repr(C)]
struct Update {
    offset: u32,
    flags: u32,
    data: u64,
    tags: u64,
    nr: u32,
    resv2: u32,
}

const IORING_REGISTER_BUFFERS_UPDATE: u32 = 16;
/// `data` is an array of [`RegbufDesc`]; EINVAL if the kernel does not support it.
const IORING_RSRC_UPDATE_EXTENDED: u32 = 1 << 1;

/// struct io_uring_regbuf_desc.
#[repr(C)]
struct RegbufDesc {
    kind: u32,
    flags: u32,
    size: u64,
    uaddr: u64,
    dmabuf_fd: i32,
    target_fd: i32,
    resv: [u64; 6],
}

const IO_REGBUF_TYPE_EMPTY: u32 = 0;
const IO_REGBUF_TYPE_UADDR: u32 = 1;
const IO_REGBUF_TYPE_DMABUF: u32 = 2;
/// The buffer is mapped for `target_fd`.
const IO_REGBUF_PREMAP: u32 = 1 << 31;
/// `target_fd` is the number of a registered file.
const IO_REGBUF_TARGET_FIXED: u32 = 1 << 30;

/// Empties a slot.
const EMPTY: RegbufDesc = RegbufDesc {
    kind: IO_REGBUF_TYPE_EMPTY,
    flags: 0,
    size: 0,
    uaddr: 0,
    dmabuf_fd: 0,
    target_fd: 0,
    resv: [0; 6],
};

/// Windows of dma-bufs that are mapped begin and end at multiples of this.
pub const MAP_UNIT: u64 = 4096;
/// The maximum number of slots for registered buffers (IORING_MAX_REG_BUFFERS).
pub const MOST_SLOTS: usize = 1 << 14;

/// The destination of a read, or the source of a write.
#[derive(Clone, Copy)]
pub enum IoMemory<'m> {
    /// This byte of the region.
    Region(u64),
    /// The first byte of other memory, for writes.
    Memory(Region<'m>),
    /// This byte of the region, which the buffer in a slot covers.
    Registered(u64, u32),
    /// This byte of the window of a dma-buf that is mapped in a slot: not an address.
    Window(u64, u32),
}

/// A completed read or write.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The number that was passed when it was submitted.
    pub token: u64,
    pub result: Result<u64, Errno>,
}

/// The ring. Dropping it waits for operations in flight; the memory may be freed after that.
pub struct IoRing<'m> {
    ring: IoUring,
    region: Region<'m>,
    files: Vec<BorrowedFd<'m>>,
    registered_files: bool,
    slots: bool,
    in_flight: usize,
}

impl<'m> IoRing<'m> {
    /// A ring for `depth` concurrent reads of `files`, with the files registered if that works.
    ///
    /// EPERM if a sysctl or a seccomp filter forbids it, ENOSYS if the kernel has none.
    pub fn new(files: Vec<BorrowedFd<'m>>, region: Region<'m>, depth: u32) -> Result<Self, Errno> {
        // One more than the reads, for the event that wakes us.
        let entries = depth + 1;
        // Run completions only when we ask for them, in our thread (Linux 6.1); kernels without these flags get
        // a plain ring.
        let ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all()
            .build(entries)
            .or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => IoUring::builder().dontfork().build(entries),
                _ => Err(error),
            })
            .map_err(errno)?;
        let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let registered_files = ring.submitter().register_files(&numbers).is_ok();
        Ok(Self {
            ring,
            region,
            files,
            registered_files,
            slots: false,
            in_flight: 0,
        })
    }

    /// Checks that a ring can be created, supports reads (Linux 5.6), and works: a sandbox may refuse any of it.
    pub fn probe() -> Result<(), Errno> {
        let mut ring = IoUring::new(2).map_err(errno)?;
        let mut known = Probe::new();
        match ring.submitter().register_probe(&mut known).map_err(errno) {
            Ok(()) if known.is_supported(opcode::Read::CODE) => {}
            // The probe and reads were added in the same version.
            Ok(()) | Err(Errno::INVAL) => return Err(Errno::NOSYS),
            // Reads do not need what this sandbox refuses.
            Err(_) => {}
        }
        // SAFETY: doing nothing needs no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }
            .expect("the queue has two entries");
        ring.submit_and_wait(1).map(drop).map_err(errno)
    }

    /// Returns true if the kernel supports buffers that are mapped once for a file; probed by emptying an empty slot.
    pub fn maps_once() -> bool {
        static KNOWN: OnceLock<bool> = OnceLock::new();
        if let Some(known) = KNOWN.get() {
            return *known;
        }
        let asked = IoUring::new(2).and_then(|ring| {
            ring.submitter().register_buffers_sparse(1)?;
            Ok(update(&ring, 0, &EMPTY).is_ok())
        });
        match asked {
            Ok(known) => *KNOWN.get_or_init(|| known),
            // No ring now, for lack of descriptors or memory: there may be one later.
            Err(_) => false,
        }
    }

    /// Creates empty slots for registered buffers.
    pub fn open_slots(&mut self, slots: u32) -> Result<(), Errno> {
        self.ring
            .submitter()
            .register_buffers_sparse(slots)
            .map_err(errno)?;
        self.slots = true;
        Ok(())
    }

    /// Registers `len` bytes at `at` of the region in `slot`: they are pinned until the slot is filled again.
    /// ENOMEM above the limit on pinned memory.
    pub fn fill_slot(&mut self, slot: u32, at: u64, len: u64) -> Result<(), Errno> {
        let iov = iovec(self.region.span(at, len), len as usize);
        // SAFETY: the memory is in the region, which outlives the ring; the kernel pins it.
        unsafe {
            self.ring
                .submitter()
                .register_buffers_update(slot, &[iov], None)
        }
        .map_err(errno)
        .map(drop)
    }

    /// As [`IoRing::fill_slot`], and maps them for direct reads of the file with this number. EOPNOTSUPP if that
    /// file's driver does not support it.
    pub fn fill_slot_mapped(
        &mut self,
        slot: u32,
        at: u64,
        len: u64,
        file: usize,
    ) -> Result<(), Errno> {
        if !self.registered_files {
            return Err(Errno::BADF);
        }
        let buffer = RegbufDesc {
            kind: IO_REGBUF_TYPE_UADDR,
            flags: IO_REGBUF_PREMAP | IO_REGBUF_TARGET_FIXED,
            size: len,
            uaddr: self.region.span(at, len).addr() as u64,
            target_fd: file as i32,
            ..EMPTY
        };
        update(&self.ring, slot, &buffer)
    }

    /// Maps `len` bytes at `at` of a dma-buf, in multiples of [`MAP_UNIT`], for direct reads of the file with
    /// this number, until the slot is emptied.
    pub fn map_slot(
        &mut self,
        slot: u32,
        dma_buf: BorrowedFd<'_>,
        (at, len): (u64, u64),
        file: usize,
    ) -> Result<(), Errno> {
        let buffer = RegbufDesc {
            kind: IO_REGBUF_TYPE_DMABUF,
            size: len,
            uaddr: at,
            dmabuf_fd: dma_buf.as_raw_fd(),
            target_fd: self.files[file].as_raw_fd(),
            ..EMPTY
        };
        // The exporter may wait. A signal ends that, but does not mean that it cannot map the memory.
        retry(|| update(&self.ring, slot, &buffer))
    }

    /// Empties a slot: what is mapped in it is unmapped after the reads that use it, and no longer counts for limits
    /// some time later.
    pub fn empty_slot(&mut self, slot: u32) -> Result<(), Errno> {
        update(&self.ring, slot, &EMPTY)
    }

    /// Queues a read of `len` bytes to a destination, from an offset of the file with this number. A slot in it
    /// must cover the bytes. The caller must not exceed the ring's depth.
    pub fn read(&mut self, token: u64, landing: IoMemory<'m>, len: u64, place: (usize, u64)) {
        self.queue(false, token, landing, len, place);
    }

    /// As [`IoRing::read`], for a write.
    pub fn write(&mut self, token: u64, from: IoMemory<'m>, len: u64, place: (usize, u64)) {
        self.queue(true, token, from, len, place);
    }

    fn queue(
        &mut self,
        write: bool,
        token: u64,
        landing: IoMemory<'m>,
        len: u64,
        (file, offset): (usize, u64),
    ) {
        let (target, slot) = match landing {
            IoMemory::Region(at) => (self.region.span(at, len), None),
            IoMemory::Memory(memory) => (memory.span(0, len), None),
            IoMemory::Registered(at, slot) => (self.region.span(at, len), Some(slot)),
            // An offset in place of an address.
            IoMemory::Window(at, slot) => {
                (std::ptr::without_provenance_mut(at as usize), Some(slot))
            }
        };
        let len = u32::try_from(len).expect("a block is at most 64 MiB");
        // Registered and other files have different types.
        macro_rules! operation {
            ($fixed:ident, $plain:ident, $file:expr) => {
                match slot {
                    Some(slot) => opcode::$fixed::new($file, target, len, slot as u16)
                        .offset(offset)
                        .build(),
                    None => opcode::$plain::new($file, target, len)
                        .offset(offset)
                        .build(),
                }
            };
        }
        let (number, name) = (types::Fixed(file as u32), self.files[file].as_raw_fd());
        let entry = match (write, self.registered_files) {
            (false, true) => operation!(ReadFixed, Read, number),
            (false, false) => operation!(ReadFixed, Read, types::Fd(name)),
            (true, true) => operation!(WriteFixed, Write, number),
            (true, false) => operation!(WriteFixed, Write, types::Fd(name)),
        };
        self.push(&entry.user_data(token));
    }

    /// Completes `token` when the event is signalled.
    pub fn listen(&mut self, token: u64, notifier: &Notifier) {
        let fd = types::Fd(notifier.fd().as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
        self.push(&entry.user_data(token));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory of a read or write is in the region, or in another one; both outlive this ring,
        // and dropping the ring waits for the operation. Or it is in a dma-buf, which the slot holds, and the
        // kernel checks that it is inside the mapped range. An event is an eventfd and needs no memory.
        unsafe { self.ring.submission().push(entry) }
            .expect("the queue has an entry for each operation in flight");
        self.in_flight += 1;
    }

    /// Submits what is queued and waits for one completion, or for a signal (EINTR).
    pub fn submit_and_wait(&mut self) -> Result<(), Errno> {
        self.ring.submit_and_wait(1).map(drop).map_err(errno)
    }

    /// Submits what is queued.
    pub fn submit(&mut self) -> Result<(), Errno> {
        self.ring.submit().map(drop).map_err(errno)
    }

    /// Collects completed operations.
    pub fn completed(&mut self, into: &mut Vec<Completion>) {
        into.clear();
        into.extend(
            self.ring.completion().map(|entry| Completion {
                token: entry.user_data(),
                result: u64::try_from(entry.result())
                    .map_err(|_| Errno::from_raw_os_error(-entry.result())),
            }),
        );
        self.in_flight -= into.len();
    }
}

impl Drop for IoRing<'_> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            match retry(|| self.submit_and_wait()) {
                Ok(()) | Err(Errno::AGAIN | Errno::BUSY) => self.completed(&mut done),
                // The ring is broken; the kernel holds its own references to the pages.
                Err(_) => break,
            }
        }
        if self.slots {
            // Closing a ring unpins and unmaps its buffers some time later; this does so now, so that the limit
            // is free again, the memory can be sealed (F_SEAL_WRITE), and no device accesses it.
            let _ = self.ring.submitter().unregister_buffers();
        }
        if self.registered_files {
            // The same for files: otherwise their file system could not be unmounted yet.
            let _ = self.ring.submitter().unregister_files();
        }
    }
}

/// Registers a buffer in a slot, or empties it.
fn update(ring: &IoUring, slot: u32, buffer: &RegbufDesc) -> Result<(), Errno> {
    let update = Update {
        offset: slot,
        flags: IORING_RSRC_UPDATE_EXTENDED,
        data: std::ptr::from_ref(buffer).expose_provenance() as u64,
        tags: 0,
        nr: 1,
        resv2: 0,
    };
    // SAFETY: both structures have the kernel's layout, and it reads them during the call. Memory named in them
    // is in the region, which outlives the ring, and is pinned; a dma-buf is held.
    let done = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            IORING_REGISTER_BUFFERS_UPDATE,
            &raw const update,
            size_of::<Update>(),
        )
    };
    match done {
        0.. => Ok(()),
        _ => Err(last_errno()),
    }
}
