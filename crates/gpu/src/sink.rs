//! Copies slots into the memory of a device.

use crate::device::{Device, PinnedMemory};
use dmafile::{Error, Memory, Pinned, Result, Sink, Slot};
use dmafile_sys::Errno;
use dmafile_sys::driver::{Context, CopyStream, DeviceMemory, Event, Failure, OtherStream};
use std::collections::VecDeque;
use std::sync::Arc;

/// The destination of a range of wanted bytes in the memory of a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Place {
    /// Offset of the first byte, counted in the same way as [`Piece::at`](dmafile::Piece::at).
    pub at: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The memory that they are copied into.
    pub memory: Arc<DeviceMemory>,
    /// Offset of the first byte in that memory.
    pub offset: u64,
}

impl Place {
    /// `bytes` bytes, the first one at `at`, go to `memory`, the first one to byte `offset`.
    pub fn new(at: u64, bytes: u64, memory: &Arc<DeviceMemory>, offset: u64) -> Self {
        Self {
            at,
            bytes,
            memory: Arc::clone(memory),
            offset,
        }
    }
}

/// Copies wanted bytes into the memory of a device. The ring is registered with the device's driver.
/// Bytes that are adjacent both in a slot and in the device's memory are copied together, and several
/// slots are in flight.
///
/// ```no_run
/// use dmafile::{Load, Ring};
/// use dmafile_gpu::{Device, Place, ToDevice};
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
    // Fields are dropped in this order: the events and the stream before the reference to the context.
    events: Vec<Event>,
    taken: VecDeque<CopyingSlot>,
    ring: Option<PinnedMemory>,
    stream: CopyStream,
    context: Arc<Context>,
    after: Option<OtherStream>,
    places: Box<Places>,
    /// `places` has no more places.
    ended: bool,
    place: Option<Place>,
    /// Memory of places before `place`, until the next entry of `taken` keeps it alive.
    past: Vec<Arc<DeviceMemory>>,
    copied: Box<dyn FnMut(u64) + Send>,
    copied_upto: u64,
}

/// Returns the next place. The argument is whether to wait for one. If it was true, None means that there
/// are no more places; if it was false, there may just be none yet.
type Places = dyn FnMut(bool) -> Option<Place> + Send;

/// A slot that is being copied.
struct CopyingSlot {
    /// Completes when the slot has been copied.
    event: Event,
    /// All wanted bytes before this offset have been copied by then.
    end: u64,
    /// Keeps memory alive that the slot is copied into and that `place` no longer refers to.
    _memory: Vec<Arc<DeviceMemory>>,
}

impl ToDevice {
    /// `places` determine where the bytes go, in file order. Bytes for which there is no place are not
    /// copied.
    ///
    /// # Errors
    /// ENODEV if the device cannot be used; otherwise the driver's error.
    pub fn new(
        device: Device,
        places: impl IntoIterator<Item = Place, IntoIter: Send + 'static>,
    ) -> Result<Self> {
        let mut places = places.into_iter().fuse();
        Self::from_fn(device, move |_| places.next())
    }

    /// As [`ToDevice::new`], but with places that are created while earlier ones are being filled. `next`
    /// is called for the next place when the bytes for it arrive. Its argument is whether to wait for a
    /// place. It returns None if there are no more places or, if it should not wait, if there is none yet.
    /// Before it is called with `true`, all earlier bytes have been copied and reported to the function
    /// of [`ToDevice::on_copied`].
    ///
    /// # Errors
    /// As for [`ToDevice::new`].
    pub fn from_fn(
        device: Device,
        next: impl FnMut(bool) -> Option<Place> + Send + 'static,
    ) -> Result<Self> {
        let context = device.context()?;
        let stream = CopyStream::new(&context);
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
            copied: Box::new(|_| {}),
            copied_upto: 0,
        })
    }

    /// Makes the copies into each place wait for all work that is queued on `stream` when the bytes for
    /// that place arrive. Needed if the memory comes from an allocator that reuses memory while queued work
    /// may still be using it.
    pub fn after(mut self, stream: OtherStream) -> Self {
        self.after = Some(stream);
        self
    }

    /// Calls `copied` with an offset when all wanted bytes before that offset are in the device's memory. The
    /// calls come from the thread of the load.
    pub fn on_copied(mut self, copied: impl FnMut(u64) + Send + 'static) -> Self {
        self.copied = Box::new(copied);
        self
    }

    fn event(&mut self) -> Result<Event, Failure> {
        match self.events.pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.context),
        }
    }

    /// Advances to the place that contains byte `at`, or to the first one after it.
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
                    .with_why("its range is outside the device's memory"));
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
        // The next place may be created only after the earlier ones have been filled. A wait for
        // the stream itself would keep a CPU busy.
        let copied = self.event().and_then(|event| {
            event.record(&self.stream)?;
            event.wait()?;
            self.events.push(event);
            Ok(())
        });
        copied.map_err(|failure| self.failed(failure))?;
        self.tell(at);
        let place = (self.places)(true);
        self.ended = place.is_none();
        Ok(place)
    }

    fn tell(&mut self, upto: u64) {
        if upto > self.copied_upto {
            self.copied_upto = upto;
            (self.copied)(upto);
        }
    }

    fn failed(&self, failure: Failure) -> Error {
        self.device.failed("cannot copy to the device", failure)
    }
}

impl Sink for ToDevice {
    fn begin(&mut self, ring: Memory<'_>) -> Result<()> {
        self.ring = Some(PinnedMemory::new(
            self.device,
            ring.as_ptr(),
            ring.len(),
            true,
        )?);
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
                let from = piece.memory.region().part(at - piece.at, upto - at);
                let to = place.offset + (at - place.at);
                let copied = self.stream.copy(&place.memory, to, &from);
                copied.map_err(|failure| self.failed(failure))?;
                at = upto;
            }
        }
        let recorded = self.event().and_then(|event| {
            event.record(&self.stream)?;
            self.taken.push_back(CopyingSlot {
                event,
                end,
                _memory: std::mem::take(&mut self.past),
            });
            Ok(())
        });
        recorded.map_err(|failure| self.failed(failure))
    }

    fn done(&mut self, wait: bool) -> Result<bool> {
        let Some(CopyingSlot { event, .. }) = self.taken.front() else {
            return Ok(true);
        };
        let come = if wait {
            event.wait().map(|()| true)
        } else {
            event.has_come()
        };
        if !come.map_err(|failure| self.failed(failure))? {
            return Ok(false);
        }
        if let Some(CopyingSlot { event, end, .. }) = self.taken.pop_front() {
            self.events.push(event);
            self.tell(end);
        }
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        // Must come first, whatever else fails: the ring is about to be freed.
        let copied = self.stream.wait();
        // A second attempt may succeed.
        let over = copied.is_ok() || self.stream.wait().is_ok();
        let copied = copied.map_err(|failure| self.failed(failure));
        self.taken.clear();
        self.events.clear();
        let unpinned = match self.ring.take() {
            None => Ok(()),
            Some(ring) if over => Box::new(ring).end(),
            Some(ring) => {
                // Copies may still be running: the device would read whatever replaces the ring.
                ring.keep();
                Ok(())
            }
        };
        copied.and(unpinned)
    }
}
