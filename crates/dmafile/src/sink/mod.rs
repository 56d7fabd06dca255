//! Sinks: where bytes go that do not stay in memory. A sink takes filled slots of a ring, and reports when
//! each may be filled again.

mod copy;
mod deliver;

use crate::error::{Error, Result};
use crate::message::Opt;
use crate::sys::map::{Region, page_size};

pub use copy::CopyTo;
pub use deliver::{Delivered, SlotReceiver, deliver};

/// Default size of a ring, in bytes.
pub const DEFAULT_RING: u64 = 64 << 20;
/// Default number of slots in a ring.
pub const DEFAULT_SLOTS: u32 = 16;

/// The ring that a load goes through ([`Load::run_through`](crate::Load::run_through)): memory, in huge
/// pages if available, that is allocated once and filled again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ring {
    /// Size in bytes; the ring is smaller if the load is.
    pub bytes: u64,
    /// Number of slots, 2 to 1024. A slot holds at least one block.
    pub slots: u32,
}

impl Default for Ring {
    fn default() -> Self {
        Self {
            bytes: DEFAULT_RING,
            slots: DEFAULT_SLOTS,
        }
    }
}

impl Ring {
    /// A ring of `bytes` bytes in `slots` slots.
    pub const fn new(bytes: u64, slots: u32) -> Self {
        Self { bytes, slots }
    }

    /// Checks that the numbers are in range. Every load through the ring checks them, too.
    ///
    /// # Errors
    /// Kind [`Usage`](crate::ErrorKind::Usage).
    pub fn check(self) -> Result<()> {
        let out = |value: u64, range: &str| {
            Error::usage(Opt::Ring, format!("{value} is out of range: {range}"))
        };
        if !(2..=1024).contains(&self.slots) {
            return Err(out(self.slots.into(), "2 to 1024 slots"));
        }
        let slots = u64::from(self.slots);
        if !(slots * 4096..=1 << 40).contains(&self.bytes) {
            return Err(out(self.bytes, "4096 bytes a slot to 1 TiB"));
        }
        Ok(())
    }

    /// The ring for `bytes` bytes, counted from the beginning of a slot, with blocks of this size. If the
    /// ring has room for all of them, its last slot ends with the page at `end`, where reads end.
    pub(crate) fn shape(self, block: u64, bytes: u64, end: u64) -> Result<Shape> {
        self.check()?;
        let slot = self.bytes / u64::from(self.slots);
        let slot = (slot - slot % block).max(block);
        let slots = bytes.div_ceil(slot).min(self.slots.into());
        let all = slots * slot;
        let once = bytes <= all;
        let bytes = if once {
            end.next_multiple_of(page_size()).min(all)
        } else {
            all
        };
        Ok(Shape {
            slot,
            slots,
            bytes,
            once,
        })
    }
}

/// A ring for one load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Size of a slot in bytes; the last one may be smaller.
    pub(crate) slot: u64,
    pub(crate) slots: u64,
    /// Size of the ring in bytes.
    pub(crate) bytes: u64,
    /// No slot is filled a second time.
    once: bool,
}

impl Shape {
    /// The slots, in words.
    pub(crate) fn words(self) -> String {
        let Self { slot, slots, .. } = self;
        match (slots, self.once) {
            (1, _) => "1 slot, filled once".to_string(),
            (_, true) => format!("{slots} slots of at most {slot} bytes, each filled once"),
            (_, false) => format!("{slots} slots of {slot} bytes, reused"),
        }
    }
}

/// Receives the bytes of a load that does not keep them in memory.
///
/// All calls come from the thread of the load, one after the other: first [`Sink::begin`], then
/// [`Sink::take`] for each slot that has wanted bytes, in file order, with calls of [`Sink::done`] in
/// between, and finally [`Sink::finish`].
pub trait Sink {
    /// Called once, before the first slot, with the ring that all slots are in: a sink can register it
    /// with a device. Reads into the ring are already in flight.
    ///
    /// # Errors
    /// An error of the sink becomes the error of the load.
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        let _ = ring;
        Ok(())
    }

    /// Takes a filled slot. The sink may continue to use the slot after this returns: its bytes do not
    /// change until [`Sink::done`] has returned true for it.
    ///
    /// # Errors
    /// As for [`Sink::begin`].
    fn take(&mut self, slot: &Slot<'_>) -> Result<()>;

    /// Returns whether the oldest slot in use may be filled again; if so, it is no longer in use. With
    /// `wait`, waits until it may.
    ///
    /// # Errors
    /// As for [`Sink::begin`].
    fn done(&mut self, wait: bool) -> Result<bool>;

    /// Called once, when no more slots will come: all have been taken, or the load has failed. When this
    /// returns, the sink must not use any slot, nor the ring, any more. It is called whenever
    /// [`Sink::begin`] was called, even if that failed.
    ///
    /// # Errors
    /// As for [`Sink::begin`]; ignored if the load has already failed.
    fn finish(&mut self) -> Result<()>;
}

/// A sink whose bytes only pass by: for loads that verify.
#[derive(Clone, Copy, Debug)]
pub struct Discard;

impl Sink for Discard {
    fn take(&mut self, _: &Slot<'_>) -> Result<()> {
        Ok(())
    }

    fn done(&mut self, _: bool) -> Result<bool> {
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A range of this process's memory.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'m>(Region<'m>);

impl<'m> Memory<'m> {
    pub(crate) fn of(region: Region<'m>) -> Self {
        Self(region)
    }

    /// What a driver copies from.
    #[doc(hidden)]
    pub fn region(&self) -> Region<'m> {
        self.0
    }

    /// The address of its first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.start()
    }

    /// Number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Copies its first `into.len()` bytes.
    ///
    /// # Panics
    /// If `into` is larger than the memory.
    pub fn copy_to(&self, into: &mut [u8]) {
        self.0.copy_out(0, into);
    }
}

/// A filled slot.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'s> {
    pub(crate) pieces: &'s [Piece<'s>],
    pub(crate) last: bool,
}

impl<'s> Slot<'s> {
    /// The wanted bytes in the slot, in file order: one piece, or several if unwanted bytes separate them.
    pub fn pieces(&self) -> &'s [Piece<'s>] {
        self.pieces
    }

    /// Returns `true` if these are the last requested bytes.
    pub fn is_last(&self) -> bool {
        self.last
    }
}

/// A contiguous range of wanted bytes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Piece<'s> {
    /// Offset of the first byte in the file; in a model, it is counted in the same way as
    /// [`Tensor::at`](crate::Tensor::at).
    pub at: u64,
    /// The bytes, in the ring.
    pub memory: Memory<'s>,
}
