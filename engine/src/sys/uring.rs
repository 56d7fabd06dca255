//! One io_uring that reads files into one region.

use super::map::{Region, iovec};
use super::usage::Bell;
use super::{Errno, errno, retry};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A read that came back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    /// The number it was given when it was submitted.
    pub token: u64,
    pub result: Result<u64, Errno>,
}

/// The ring. Dropping it waits for what is in flight: the memory may be taken away after that.
pub(crate) struct Ring<'m> {
    ring: IoUring,
    region: Region<'m>,
    files: Vec<BorrowedFd<'m>>,
    registered_files: bool,
    slots: bool,
    in_flight: usize,
}

impl<'m> Ring<'m> {
    /// A ring for `depth` reads of `files` at once, with the files registered where that works.
    ///
    /// EPERM where a sysctl or a seccomp filter forbids it, ENOSYS where the kernel has none.
    pub(crate) fn new(
        files: Vec<BorrowedFd<'m>>,
        region: Region<'m>,
        depth: u32,
    ) -> Result<Self, Errno> {
        // One more than the reads: the bell that wakes us takes an entry too.
        let entries = depth + 1;
        // Run completions only when we ask for them, on our own thread (Linux 6.1); kernels that
        // do not know the flags get a plain ring.
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

    /// Whether a ring can be had at all, knows reads (Linux 5.6), and does anything: a sandbox may
    /// refuse any of it.
    pub(crate) fn probe() -> Result<(), Errno> {
        let mut ring = IoUring::new(2).map_err(errno)?;
        let mut known = Probe::new();
        match ring.submitter().register_probe(&mut known).map_err(errno) {
            Ok(()) if known.is_supported(opcode::Read::CODE) => {}
            // The question is as old as the answer.
            Ok(()) | Err(Errno::INVAL) => return Err(Errno::NOSYS),
            // Reads do not need what this sandbox keeps from us.
            Err(_) => {}
        }
        // SAFETY: doing nothing needs no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }
            .expect("the queue has two entries");
        ring.submit_and_wait(1).map(drop).map_err(errno)
    }

    /// Makes room for registered buffers, none of them filled.
    pub(crate) fn open_slots(&mut self, slots: u32) -> Result<(), Errno> {
        self.ring
            .submitter()
            .register_buffers_sparse(slots)
            .map_err(errno)?;
        self.slots = true;
        Ok(())
    }

    /// Registers `len` bytes at `at` of the region in `slot`: they are pinned until the slot is
    /// filled again. ENOMEM above the limit on pinned memory.
    pub(crate) fn fill_slot(&mut self, slot: u32, at: u64, len: u64) -> Result<(), Errno> {
        let iov = iovec(self.region.span(at, len), len as usize);
        // SAFETY: the memory lies in the region, which outlives the ring; the kernel pins it.
        unsafe {
            self.ring
                .submitter()
                .register_buffers_update(slot, &[iov], None)
        }
        .map_err(errno)
        .map(drop)
    }

    /// Queues a read of `len` bytes into `at` of the region, from an offset of the file with this
    /// number; through the registered buffer in `slot` when one is given, which must cover it. The
    /// caller keeps to the depth the ring was made for.
    pub(crate) fn read(
        &mut self,
        token: u64,
        at: u64,
        len: u64,
        (file, offset): (usize, u64),
        slot: Option<u32>,
    ) {
        let target = self.region.span(at, len);
        let len = u32::try_from(len).expect("a block is at most 64 MiB");
        // The two ways to name a file are two types.
        macro_rules! read {
            ($file:expr) => {
                match slot {
                    Some(slot) => opcode::ReadFixed::new($file, target, len, slot as u16)
                        .offset(offset)
                        .build(),
                    None => opcode::Read::new($file, target, len).offset(offset).build(),
                }
            };
        }
        let entry = match self.registered_files {
            true => read!(types::Fixed(file as u32)),
            false => read!(types::Fd(self.files[file].as_raw_fd())),
        };
        self.push(&entry.user_data(token));
    }

    /// Completes `token` when the bell rings.
    pub(crate) fn listen(&mut self, token: u64, bell: &Bell) {
        let fd = types::Fd(bell.fd().as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
        self.push(&entry.user_data(token));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory of a read lies in the region, which outlives this ring; dropping
        // the ring waits for it. A bell is an eventfd and needs no memory.
        unsafe { self.ring.submission().push(entry) }
            .expect("the queue has an entry for each read in flight");
        self.in_flight += 1;
    }

    /// Submits what is queued and waits for one completion, or for a signal (EINTR).
    pub(crate) fn submit_and_wait(&mut self) -> Result<(), Errno> {
        self.ring.submit_and_wait(1).map(drop).map_err(errno)
    }

    /// Submits what is queued.
    pub(crate) fn submit(&mut self) -> Result<(), Errno> {
        self.ring.submit().map(drop).map_err(errno)
    }

    /// What has completed.
    pub(crate) fn completed(&mut self, into: &mut Vec<Done>) {
        into.clear();
        into.extend(
            self.ring.completion().map(|entry| Done {
                token: entry.user_data(),
                result: u64::try_from(entry.result())
                    .map_err(|_| Errno::from_raw_os_error(-entry.result())),
            }),
        );
        self.in_flight -= into.len();
    }
}

impl Drop for Ring<'_> {
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
            // Closing a ring unpins its buffers some time later; this does so now, so that the
            // limit is free again and the memory can be sealed (F_SEAL_WRITE).
            let _ = self.ring.submitter().unregister_buffers();
        }
        if self.registered_files {
            // Likewise for the files, or their file system could not be unmounted yet.
            let _ = self.ring.submitter().unregister_files();
        }
    }
}
