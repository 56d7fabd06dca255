//! Hands slots to another thread, which returns each when it has finished with it.

use super::{Memory, Sink, Slot};
use crate::error::{Error, Result};
use crate::pin::{PinDevice, Pinned};
use crate::sync;
use crate::sys::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Returns a sink and its receiver, for programs that request bytes themselves instead of being called
/// with them. If `device` is given, the ring is pinned for it.
///
/// ```no_run
/// use dmafile::{Load, Ring, deliver};
///
/// let (mut sink, slots) = deliver(None);
/// std::thread::scope(|scope| {
///     let load = scope.spawn(move || Load::new("capture.bin").run_through(Ring::default(), &mut sink));
///     while let Some(piece) = slots.next() {
///         println!("{} bytes at {}", piece.bytes, piece.at);
///         slots.done(piece.slot);
///     }
///     load.join().expect("no panic")
/// })?;
/// # Ok::<(), dmafile::Error>(())
/// ```
pub fn deliver(device: Option<Arc<dyn PinDevice>>) -> (impl Sink + Send + 'static, SlotReceiver) {
    let shared = Arc::<DeliverShared>::default();
    let sink = Giver {
        shared: Arc::clone(&shared),
        device,
        ring: None,
        taken: 0,
        oldest: 0,
    };
    (sink, SlotReceiver(shared))
}

/// Wanted bytes in a slot of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivered {
    /// Offset of the first byte, counted in the same way as [`Piece::at`](super::Piece::at).
    pub at: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Address of the first byte. The bytes are valid until [`SlotReceiver::done`] has been called for all pieces
    /// of the slot.
    pub address: usize,
    /// The slot that they are in.
    pub slot: u64,
}

/// The receiver of the pieces.
#[derive(Debug)]
pub struct SlotReceiver(Arc<DeliverShared>);

#[derive(Debug, Default)]
struct DeliverShared {
    state: Mutex<HandedState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HandedState {
    waiting: VecDeque<Delivered>,
    /// For each slot that is out, the number of pieces that have not been returned.
    out: BTreeMap<u64, usize>,
    /// No more pieces will come.
    over: bool,
    /// The receiver takes no more pieces.
    gone: bool,
}

impl SlotReceiver {
    /// Waits for the next piece. None after the last one, or if the load has failed.
    ///
    /// This may wait until the oldest slot is returned. So a thread that returns the slots itself
    /// may hold only the newest ones when it calls this: at most half of the slots, less one.
    pub fn next(&self) -> Option<Delivered> {
        let mut state = sync::lock(&self.0.state);
        loop {
            if let Some(piece) = state.waiting.pop_front() {
                return Some(piece);
            }
            if state.over {
                return None;
            }
            state = sync::wait(&self.0.changed, state);
        }
    }

    /// Waits until [`SlotReceiver::next`] need not wait, at most this long; false on timeout.
    pub fn wait(&self, most: Duration) -> bool {
        let state = sync::lock(&self.0.state);
        let idle = |state: &HandedState| state.waiting.is_empty() && !state.over;
        if !idle(&state) {
            return true;
        }
        !idle(&sync::wait_for(&self.0.changed, state, most))
    }

    /// Returns one piece of a slot. When all pieces of a slot have been returned, it is filled again. The
    /// result is false if the receiver has no piece of that slot.
    pub fn done(&self, slot: u64) -> bool {
        let mut state = sync::lock(&self.0.state);
        let waiting = state.waiting.iter().filter(|piece| piece.slot == slot);
        let waiting = waiting.count();
        let Some(out) = state.out.get_mut(&slot).filter(|out| **out > waiting) else {
            return false;
        };
        *out -= 1;
        if *out == 0 {
            state.out.remove(&slot);
        }
        self.0.changed.notify_all();
        true
    }
}

impl SlotReceiver {
    /// Number of slots that are out: the sink has taken them, and they have not been returned.
    pub fn out(&self) -> usize {
        sync::lock(&self.0.state).out.len()
    }

    /// Stops receiving. The load no longer waits for slots, and fails with EPIPE unless the sink has taken
    /// all of them. Dropping the receiver does the same.
    pub fn leave(&self) {
        let mut state = sync::lock(&self.0.state);
        state.gone = true;
        state.out.clear();
        state.waiting.clear();
        self.0.changed.notify_all();
    }
}

impl Drop for SlotReceiver {
    fn drop(&mut self) {
        self.leave();
    }
}

struct Giver {
    shared: Arc<DeliverShared>,
    device: Option<Arc<dyn PinDevice>>,
    ring: Option<Box<dyn Pinned>>,
    /// Number of slots taken so far.
    taken: u64,
    /// Number of the oldest slot that [`Sink::done`] has not reported.
    oldest: u64,
}

/// Needed if the load fails before it calls the sink.
impl Drop for Giver {
    fn drop(&mut self) {
        sync::lock(&self.shared.state).over = true;
        self.shared.changed.notify_all();
    }
}

impl Sink for Giver {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        if let Some(device) = &self.device {
            self.ring = Some(device.pin(ring.as_ptr(), ring.len(), true)?);
        }
        Ok(())
    }

    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        let mut state = sync::lock(&self.shared.state);
        if state.gone {
            return Err(
                Error::os("cannot hand over bytes", Errno::PIPE).with_why("the receiver is gone")
            );
        }
        let number = self.taken;
        self.taken += 1;
        state.out.insert(number, slot.pieces().len());
        state
            .waiting
            .extend(slot.pieces().iter().map(|piece| Delivered {
                at: piece.at,
                bytes: piece.memory.len(),
                address: piece.memory.as_ptr().expose_provenance(),
                slot: number,
            }));
        state.over = slot.is_last();
        self.shared.changed.notify_all();
        Ok(())
    }

    fn done(&mut self, wait: bool) -> Result<bool> {
        let mut state = sync::lock(&self.shared.state);
        while state.out.contains_key(&self.oldest) {
            if !wait {
                return Ok(false);
            }
            state = sync::wait(&self.shared.changed, state);
        }
        self.oldest += 1;
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        let mut state = sync::lock(&self.shared.state);
        state.over = true;
        // After a failure, pieces that the receiver has not got yet are withdrawn.
        for piece in std::mem::take(&mut state.waiting) {
            if let Some(out) = state.out.get_mut(&piece.slot) {
                *out -= 1;
            }
        }
        state.out.retain(|_, out| *out > 0);
        self.shared.changed.notify_all();
        while !state.out.is_empty() {
            state = sync::wait(&self.shared.changed, state);
        }
        drop(state);
        self.ring.take().map_or(Ok(()), |ring| ring.end())
    }
}
