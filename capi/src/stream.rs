//! `struct dmafile_stream`: a file that goes through a ring of slots and does not stay in memory.

use crate::border::{self, Failure, Result};
use crate::buffer::empty;
use crate::options::{self, word};
use crate::{Options, load};
use dmafile::{Device, Hands, Load, Report, Ring, hand_over};
use libc::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// A file that goes through a ring of slots. Opaque.
pub struct Stream {
    hands: Hands,
    load: Mutex<State>,
}

/// The load, on a thread of its own, and how it has ended.
enum State {
    Running(JoinHandle<Result<Report, dmafile::Error>>),
    Ended(Result<()>),
}

/// Bytes of a file in a slot of the ring.
#[repr(C)]
pub struct Piece {
    /// Where they begin in the file.
    pub at: u64,
    /// How many there are.
    pub bytes: u64,
    /// Where they lie; they may be read until their slot is given back.
    pub data: *const c_void,
    /// Their slot, for dmafile_stream_done.
    pub slot: u64,
}

/// Begins to read the file at `path` through a ring, as `options` say (their `to` has to be NULL);
/// NULL there is all defaults. What the options point to has to last until dmafile_stream_close.
///
/// `ring` is the size of the ring in bytes, cut into `slots` slots, 2 to 1024; 0 is 256 MiB and 16.
/// With `device`, "cuda:N" or "hip:N", the ring is pinned for that device, so that copies from it can
/// be queued; NULL is none. Written for the drivers of GPUs, tested on a double of them.
///
/// Returns 0, with the stream in `*stream`, to be closed with dmafile_stream_close; or a negative
/// errno, with NULL there: -EINVAL for NULL, an unknown word, a number out of its range; -EAGAIN
/// where no thread can be made. What is wrong with the file, or the device, dmafile_stream_next says.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_open(
    path: *const c_char,
    options: *const Options,
    device: *const c_char,
    ring: u64,
    slots: u32,
    stream: *mut *mut Stream,
) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a place for a pointer.
        unsafe { empty(stream, "stream")? };
        // SAFETY: the header asks for null or a string.
        let load = Load::new(unsafe { load::path(path)? });
        // SAFETY: the header asks for null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header asks for strings, a token and a callback that last until it is closed.
        let load = unsafe { options.apply_elsewhere(load)? };
        load.check()?;
        // SAFETY: the header asks for null or a string.
        let device: Option<Device> = unsafe { word(device, "device")? };
        let usual = Ring::default();
        let bytes = options::some(ring).unwrap_or(usual.bytes);
        let ring = Ring::new(bytes, options::some(slots).unwrap_or(usual.slots));
        ring.check()?;
        let (mut sink, hands) = hand_over(device);
        let thread = std::thread::Builder::new().name("dmafile".to_string());
        let thread = thread.spawn(move || load.run_through(ring, &mut sink));
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Failure::new(errno, "cannot make a thread", "the system has none left")
                .remedy("raise the limit on processes: ulimit -u")
        })?;
        let made = Stream {
            hands,
            load: Mutex::new(State::Running(thread)),
        };
        // SAFETY: it is not null, and so a place for a pointer.
        unsafe { stream.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

/// The next bytes of the file, once they are there, in its order.
///
/// Returns 1, with them in `*piece`; 0 where all have been given, and the checksum, if one was asked
/// for, is what it should be; or a negative errno: -EBUSY where no more come while slots are still
/// out (give them back, and ask again for how it has ended), else as dmafile_load, and what the
/// driver of the device says.
///
/// Thread-safe. It may wait for a slot to be given back: so the same thread may hold at most half of
/// the slots, less one, meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_next(stream: *const Stream, piece: *mut Piece) -> c_int {
    border::number(|| {
        // SAFETY: the header asks for null or a stream that is open.
        let stream = unsafe { border::shared(stream, "stream")? };
        border::check(piece.cast(), 1, "piece")?;
        let Some(handed) = stream.hands.next() else {
            return stream.end().map(|()| 0);
        };
        let given = Piece {
            at: handed.at,
            bytes: handed.bytes,
            data: std::ptr::with_exposed_provenance(handed.address),
            slot: handed.slot,
        };
        // SAFETY: not null; the header asks for a place for one.
        unsafe { piece.write(given) };
        Ok(1)
    })
}

/// Gives a slot back, to be filled again: once for each piece that was given with it, when nothing
/// reads it any more, a device included.
///
/// Returns 0; -EINVAL for a slot that is not out, and for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_done(stream: *const Stream, slot: u64) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a stream that is open.
        let stream = unsafe { border::shared(stream, "stream")? };
        match stream.hands.done(slot) {
            true => Ok(()),
            false => {
                let why = format!("slot {slot} is not out");
                Err(Failure::new(libc::EINVAL, "cannot give a slot back", &why))
            }
        }
    })
}

/// Closes a stream: ends the load if it has not ended, waits until it has, and frees all. Slots that
/// are out are gone. NULL is nothing to close. No thread may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_close(stream: *mut Stream) {
    // SAFETY: the header asks for null or what `dmafile_stream_open` gave, closed once.
    unsafe { border::free(stream) };
}

impl Stream {
    /// How the load has ended, of which nothing more comes.
    fn end(&self) -> Result<()> {
        let mut state = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Running(_) = *state {
            let out = self.hands.out();
            if out > 0 {
                let why = format!("{out} slots are still out");
                return Err(Failure::new(libc::EBUSY, "cannot end the stream", &why)
                    .remedy("give them back first"));
            }
            // In place of the thread, until it is known how it has ended.
            let running = std::mem::replace(&mut *state, State::Ended(Ok(())));
            if let State::Running(thread) = running {
                let ended = thread.join();
                let ended = ended.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
                *state = State::Ended(ended.map(drop).map_err(Failure::from));
            }
        }
        match &*state {
            State::Ended(ended) => ended.clone(),
            State::Running(_) => Ok(()),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The load no longer waits for slots.
        self.hands.leave();
        let state = self.load.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Running(thread) = std::mem::replace(state, State::Ended(Ok(()))) {
            // The result of a closed stream is not used.
            let _ = thread.join();
        }
    }
}
