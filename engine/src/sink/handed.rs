//! Hands slots to another thread, which gives each back when it likes.

use super::{Memory, Sink, Slot};
use crate::device::{Device, Pinned};
use crate::error::{Error, Result};
use crate::sync;
use crate::sys::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};

/// A sink, and the other end of it, for a program that wants to ask for bytes rather than be called with
/// them. With a device, the ring is pinned for it.
///
/// ```no_run
/// use dmafile::{Load, Ring, hand_over};
///
/// let (mut sink, hands) = hand_over(None);
/// std::thread::scope(|scope| {
///     let load = scope.spawn(move || Load::new("capture.bin").run_through(Ring::default(), &mut sink));
///     while let Some(piece) = hands.next() {
///         println!("{} bytes at {}", piece.bytes, piece.at);
///         hands.done(piece.slot);
///     }
///     load.join().expect("no panic")
/// })?;
/// # Ok::<(), dmafile::Error>(())
/// ```
pub fn hand_over(device: Option<Device>) -> (impl Sink + Send + 'static, Hands) {
    let shared = Arc::<Shared>::default();
    let sink = Giver {
        shared: Arc::clone(&shared),
        device,
        ring: None,
        taken: 0,
        oldest: 0,
    };
    (sink, Hands(shared))
}

/// Wanted bytes in a slot of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Handed {
    /// The first of them, as [`Piece::at`](super::Piece::at) counts.
    pub at: u64,
    /// How many there are.
    pub bytes: u64,
    /// Where they lie, until [`Hands::done`] is called with their slot for the last of its pieces.
    pub address: usize,
    /// Their slot.
    pub slot: u64,
}

/// What takes the pieces that a sink is given.
#[derive(Debug)]
pub struct Hands(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Handed>,
    /// Pieces of each slot that have not been given back.
    out: BTreeMap<u64, usize>,
    /// No more will come.
    over: bool,
    /// The receiver has gone away.
    gone: bool,
}

impl Hands {
    /// The next piece, once it is there; None where there is none any more, or the load has failed.
    pub fn next(&self) -> Option<Handed> {
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

    /// A piece of this slot is not needed any more; whether there was one that had been handed out.
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

impl Hands {
    /// How many slots are out: handed over, and not given back.
    pub fn out(&self) -> usize {
        sync::lock(&self.0.state).out.len()
    }

    /// Takes no more: the load ends with EPIPE, unless it has all bytes, and waits for no slot. What dropping
    /// it does, too.
    pub fn leave(&self) {
        let mut state = sync::lock(&self.0.state);
        state.gone = true;
        state.out.clear();
        state.waiting.clear();
        self.0.changed.notify_all();
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        self.leave();
    }
}

struct Giver {
    shared: Arc<Shared>,
    device: Option<Device>,
    ring: Option<Pinned>,
    /// Slots that were taken, and of which it has been said that they may be filled again.
    taken: u64,
    oldest: u64,
}

/// A load that has failed before it came to the sink.
impl Drop for Giver {
    fn drop(&mut self) {
        sync::lock(&self.shared.state).over = true;
        self.shared.changed.notify_all();
    }
}

impl Sink for Giver {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        if let Some(device) = self.device {
            self.ring = Some(Pinned::new(device, ring.as_ptr(), ring.len(), true)?);
        }
        Ok(())
    }

    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        let mut state = sync::lock(&self.shared.state);
        if state.gone {
            return Err(Error::os("cannot hand over bytes", Errno::PIPE)
                .with_why("the receiver has gone away"));
        }
        let number = self.taken;
        self.taken += 1;
        state.out.insert(number, slot.pieces().len());
        state
            .waiting
            .extend(slot.pieces().iter().map(|piece| Handed {
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
        // What was not handed out yet is not, after a failure.
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
        self.ring.take().map_or(Ok(()), Pinned::end)
    }
}
