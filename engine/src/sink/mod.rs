//! Where the bytes of a load go that are not to stay in memory: a sink takes filled slots of a ring, and
//! says when each may be filled again.

mod copy;
mod device;
mod handed;

use crate::error::{Error, Result};
use crate::message::Opt;
use crate::sys::map::Region;

pub use copy::CopyTo;
pub use device::{Place, ToDevice};
pub use handed::{Handed, Hands, hand_over};

/// Bytes of a ring, unless asked otherwise.
pub const DEFAULT_RING: u64 = 256 << 20;
/// Into how many slots a ring is cut, unless asked otherwise.
pub const DEFAULT_SLOTS: u32 = 16;

/// The ring that a load goes through ([`Load::run_through`](crate::Load::run_through)): memory in huge
/// pages where they can be had, made once and filled again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ring {
    /// All of it, in bytes; less where the load is smaller.
    pub bytes: u64,
    /// Into how many slots it is cut, 2 to 1024. A slot has at least one block.
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

    /// Checks that its numbers are in range; every load through it begins with that.
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

    /// The size of a slot, where one operation moves `block` bytes.
    pub(crate) fn slot(self, block: u64) -> Result<u64> {
        self.check()?;
        let slot = self.bytes / u64::from(self.slots);
        Ok((slot - slot % block).max(block))
    }
}

/// Where the bytes of a load go that does not keep them in memory.
///
/// The calls come from the thread that loads, one after the other: [`Sink::begin`] and
/// [`Sink::finish`] once each, between them [`Sink::take`] for every slot with wanted bytes, in the
/// order of the file.
pub trait Sink {
    /// The ring that slots will come from, before the first of them: to be registered with a device.
    /// Reads into it are in flight already.
    ///
    /// # Errors
    /// Its error becomes that of the load.
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        let _ = ring;
        Ok(())
    }

    /// Takes a filled slot, and need not have done with it when it returns: its bytes stay as they are
    /// until [`Sink::done`] has said so.
    ///
    /// # Errors
    /// As [`Sink::begin`].
    fn take(&mut self, slot: &Slot<'_>) -> Result<()>;

    /// Whether the oldest slot that was taken, and of which it has not been said yet, may be filled
    /// again. With `wait`, once it may.
    ///
    /// # Errors
    /// As [`Sink::begin`].
    fn done(&mut self, wait: bool) -> Result<bool>;

    /// Nothing more will come, because all has been taken or the load has failed: when it returns, no
    /// slot is in use any more, and the ring is let go of. Called where [`Sink::begin`] was, however
    /// that ended.
    ///
    /// # Errors
    /// As [`Sink::begin`], unless the load has failed before.
    fn finish(&mut self) -> Result<()>;
}

/// Memory of this process by its address.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'m>(Region<'m>);

impl<'m> Memory<'m> {
    pub(crate) fn of(region: Region<'m>) -> Self {
        Self(region)
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.start()
    }

    /// How many bytes it has.
    #[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Copies the first bytes of it.
    ///
    /// # Panics
    /// Where `into` is larger.
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
    /// The wanted bytes in it, in the order of the file: one piece, or several where others lie between
    /// them.
    pub fn pieces(&self) -> &'s [Piece<'s>] {
        self.pieces
    }

    /// No wanted bytes come after these.
    pub fn is_last(&self) -> bool {
        self.last
    }
}

/// Wanted bytes that lie together.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Piece<'s> {
    /// The first of them, counted from the first byte of the file; of a model, as
    /// [`Tensor::at`](crate::Tensor::at) counts.
    pub at: u64,
    /// The bytes, in the ring.
    pub memory: Memory<'s>,
}
