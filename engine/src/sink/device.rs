//! Copies slots into the memory of a device.

use super::{Memory, Sink, Slot};
use crate::device::{Device, Pinned};
use crate::error::{Error, Result};
use crate::sys::Errno;
use crate::sys::driver::{Context, DeviceMemory, Event, Failure, OtherStream, Stream};
use std::collections::VecDeque;
use std::sync::Arc;

/// Where wanted bytes go in the memory of a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Place {
    /// The first of the bytes, as [`Piece::at`](super::Piece::at) counts, and how many there are.
    pub at: u64,
    /// How many there are.
    pub bytes: u64,
    /// Into which memory.
    pub memory: Arc<DeviceMemory>,
    /// Where they begin in it.
    pub offset: u64,
}

impl Place {
    /// `bytes` bytes that begin at `at` go to byte `offset` of `memory`.
    pub fn new(at: u64, bytes: u64, memory: &Arc<DeviceMemory>, offset: u64) -> Self {
        Self {
            at,
            bytes,
            memory: Arc::clone(memory),
            offset,
        }
    }
}

/// Copies wanted bytes into the memory of a device: from a ring that is registered with it, one copy for
/// all that lies together, several slots in flight.
///
/// ```no_run
/// use dmafile::{Device, Load, Place, Ring, ToDevice};
///
/// let device: Device = "cuda:0".parse()?;
/// let memory = device.allocate(1 << 30)?.into();
/// let places = [Place::new(0, 1 << 30, &memory, 0)];
/// let mut sink = ToDevice::new(device, places)?;
/// Load::new("model.safetensors").length(1 << 30).run_through(Ring::default(), &mut sink)?;
/// # Ok::<(), dmafile::Error>(())
/// ```
pub struct ToDevice {
    device: Device,
    // Dropped in this order: a stream has ended before the context is let go of.
    events: Vec<Event>,
    taken: VecDeque<Taken>,
    ring: Option<Pinned>,
    stream: Stream,
    context: Arc<Context>,
    after: Option<OtherStream>,
    places: Box<Places>,
    /// There are no more of them.
    ended: bool,
    place: Option<Place>,
    /// Memory of places that are filled, for the next of `taken`.
    past: Vec<Arc<DeviceMemory>>,
    told: Box<dyn FnMut(u64) + Send>,
    told_upto: u64,
}

/// Gives the next place, or None: for good where it was to wait, else perhaps only for now.
type Places = dyn FnMut(bool) -> Option<Place> + Send;

/// A slot that is being copied.
struct Taken {
    /// It has been.
    event: Event,
    /// All before this place of the file has been.
    end: u64,
    /// What it is copied into, as far as nothing else keeps it.
    _memory: Vec<Arc<DeviceMemory>>,
}

impl ToDevice {
    /// `places`, in the order of the file, say where bytes go; those that none names are left out.
    ///
    /// # Errors
    /// ENODEV where the device cannot be used; what its driver says.
    pub fn new(
        device: Device,
        places: impl IntoIterator<Item = Place, IntoIter: Send + 'static>,
    ) -> Result<Self> {
        let mut places = places.into_iter().fuse();
        Self::asking(device, move |_| places.next())
    }

    /// As [`ToDevice::new`], of places that are made while others are filled: `next` gives the next one
    /// when bytes have come to it, and waits for it where that is asked for; None where it need not wait
    /// and there is none now, or there is none any more. What has come is in place, and
    /// [`ToDevice::told`], before it is to wait.
    ///
    /// # Errors
    /// As there.
    pub fn asking(
        device: Device,
        next: impl FnMut(bool) -> Option<Place> + Send + 'static,
    ) -> Result<Self> {
        let context = device.context()?;
        let stream = Stream::new(&context);
        let stream = stream.map_err(|failure| device.failed("cannot use the device", failure))?;
        Ok(Self {
            device,
            events: Vec::new(),
            taken: VecDeque::new(),
            ring: None,
            stream,
            context,
            after: None,
            places: Box::new(next),
            ended: false,
            place: None,
            past: Vec::new(),
            told: Box::new(|_| {}),
            told_upto: 0,
        })
    }

    /// Copies into a place begin after all that is queued on `stream` when bytes have come to it: the last
    /// use of memory that an allocator hands out again.
    pub fn after(mut self, stream: OtherStream) -> Self {
        self.after = Some(stream);
        self
    }

    /// Calls `told` when all wanted bytes before a place of the file are in the device's memory, from the
    /// thread of the load.
    pub fn told(mut self, told: impl FnMut(u64) + Send + 'static) -> Self {
        self.told = Box::new(told);
        self
    }

    fn event(&mut self) -> Result<Event, Failure> {
        match self.events.pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.context),
        }
    }

    /// Goes on to the place that holds a byte, or to the first behind it.
    fn place_of(&mut self, at: u64) -> Result<()> {
        while self
            .place
            .as_ref()
            .is_none_or(|place| place.at + place.bytes <= at)
        {
            self.past
                .extend(self.place.take().map(|place| place.memory));
            let Some(next) = self.next_place(at)? else {
                return Ok(());
            };
            let end = next.offset.checked_add(next.bytes);
            if end.is_none_or(|end| end > next.memory.len()) {
                return Err(Error::os("cannot copy to the device", Errno::INVAL)
                    .at(format!("{}, byte {}", self.device, next.at))
                    .with_why("its place is outside the device's memory"));
            }
            self.place = Some(next);
            if let Some(other) = self.after {
                let follow = self.event().and_then(|event| {
                    self.stream.follow(other, &event)?;
                    self.events.push(event);
                    Ok(())
                });
                follow.map_err(|failure| self.failed(failure))?;
            }
        }
        Ok(())
    }

    fn next_place(&mut self, at: u64) -> Result<Option<Place>> {
        if self.ended {
            return Ok(None);
        }
        if let Some(place) = (self.places)(false) {
            return Ok(Some(place));
        }
        // The next one may depend on those before it.
        let copied = self.stream.wait();
        copied.map_err(|failure| self.failed(failure))?;
        self.tell(at);
        let place = (self.places)(true);
        self.ended = place.is_none();
        Ok(place)
    }

    fn tell(&mut self, upto: u64) {
        if upto > self.told_upto {
            self.told_upto = upto;
            (self.told)(upto);
        }
    }

    fn failed(&self, failure: Failure) -> Error {
        self.device.failed("cannot copy to the device", failure)
    }
}

impl Sink for ToDevice {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        self.ring = Some(Pinned::new(self.device, ring.as_ptr(), ring.len(), true)?);
        Ok(())
    }

    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        let mut end = 0;
        for piece in slot.pieces() {
            end = piece.at + piece.memory.len();
            let mut at = piece.at;
            while at < end {
                self.place_of(at)?;
                let Some(place) = self.place.as_ref().filter(|place| place.at < end) else {
                    break;
                };
                at = at.max(place.at);
                let upto = end.min(place.at + place.bytes);
                let from = piece.memory.0.part(at - piece.at, upto - at);
                let to = place.offset + (at - place.at);
                let copied = self.stream.copy(&place.memory, to, &from);
                copied.map_err(|failure| self.failed(failure))?;
                at = upto;
            }
        }
        let recorded = self.event().and_then(|event| {
            event.record(&self.stream)?;
            self.taken.push_back(Taken {
                event,
                end,
                _memory: std::mem::take(&mut self.past),
            });
            Ok(())
        });
        recorded.map_err(|failure| self.failed(failure))
    }

    fn done(&mut self, wait: bool) -> Result<bool> {
        let Some(Taken { event, .. }) = self.taken.front() else {
            return Ok(true);
        };
        let come = match wait {
            true => event.wait().map(|()| true),
            false => event.has_come(),
        };
        if !come.map_err(|failure| self.failed(failure))? {
            return Ok(false);
        }
        if let Some(Taken { event, end, .. }) = self.taken.pop_front() {
            self.events.push(event);
            self.tell(end);
        }
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        // First, whatever else fails: the ring is about to go.
        let copied = self.stream.wait();
        if copied.is_err() {
            // What was refused once may not be again.
            let _ = self.stream.wait();
        }
        let copied = copied.map_err(|failure| self.failed(failure));
        self.taken.clear();
        self.events.clear();
        let unpinned = self.ring.take().map_or(Ok(()), Pinned::end);
        copied.and(unpinned)
    }
}
