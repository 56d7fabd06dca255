//! `struct dmafile_stream`: a file that is read through a ring of slots and does not stay in memory.

use crate::border::{self, Failure, Result};
use crate::buffer::empty;
use crate::options::{self, word};
use crate::{Options, load};
use dmafile::{Load, Report, Ring, SlotReceiver, deliver};
use dmafile_gpu::Device;
use libc::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// A file that is being read through a ring of slots. Opaque.
pub struct Stream {
    slots: SlotReceiver,
    load: Mutex<State>,
    /// The process that has the thread; a forked child does not.
    process: u32,
}

/// The load: the thread that runs it, or its result.
enum State {
    Running(JoinHandle<Result<Report, dmafile::Error>>),
    Ended(Result<()>),
}

/// Bytes of a file in a slot of the ring.
#[repr(C)]
pub struct Piece {
    /// Offset of the first byte in the file.
    pub at: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Address of the first byte; valid until the slot is returned or the stream is closed.
    pub data: *const c_void,
    /// The slot that they are in, for dmafile_stream_done.
    pub slot: u64,
}

/// Opens a stream: starts to read the file at `path` through a ring of slots, on a separate thread. If
/// `options` is NULL, the defaults apply; its `to` must be NULL. Everything that the options point to
/// must remain valid until dmafile_stream_close.
///
/// `ring` is the size of the ring in bytes, and `slots` the number of slots in it, 2 to 1024. 0 means
/// the default: 64 MiB and 16 slots. If `device` is "cuda:N" or "hip:N", the ring is pinned for that
/// device, so that copies from its slots can be queued; NULL means no device. Tested on an H100,
/// and for AMD only with a test double.
///
/// Returns 0 and stores the stream in `*stream`; close it with dmafile_stream_close. On failure, stores
/// NULL there and returns a negative errno: -EINVAL for a required argument that is NULL, an unknown
/// word, or a number out of range; -EAGAIN if no thread can be created. Errors of the file or of the
/// device are returned by dmafile_stream_next.
///
/// Thread-safe. A forked child cannot use the stream: there the functions return -EINVAL, and closing it does
/// nothing.
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
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(stream, "stream")? };
        // SAFETY: the header requires null or a string.
        let load = Load::new(unsafe { load::path(path)? });
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires strings, a token and a callback that remain valid until the
        // stream is closed.
        let load = unsafe { options.apply_elsewhere(load)? };
        load.check()?;
        // SAFETY: the header requires null or a string.
        let device: Option<Device> = unsafe { word(device, "device")? };
        let usual = Ring::default();
        let bytes = options::some(ring).unwrap_or(usual.bytes);
        let ring = Ring::new(bytes, options::some(slots).unwrap_or(usual.slots));
        ring.check()?;
        let (mut sink, slots) = deliver(device.map(Into::into));
        let thread = std::thread::Builder::new().name("dmafile".to_string());
        let thread = thread.spawn(move || load.run_through(ring, &mut sink));
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Failure::new(errno, "cannot start a thread", "the system allows no more")
                .remedy("raise the limit on processes: ulimit -u")
        })?;
        let made = Stream {
            slots,
            load: Mutex::new(State::Running(thread)),
            process: std::process::id(),
        };
        // SAFETY: not null, as checked above; the header requires a place for a pointer.
        unsafe { stream.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

/// Waits for the next bytes of the file, in file order.
///
/// Returns 1 and describes the bytes in `*piece`. Returns 0 if there are no more bytes, all slots have
/// been returned, and the load has succeeded; if a digest was requested, it was right. Otherwise
/// returns a negative errno: -EBUSY if no more bytes will come, but slots are still out (return them,
/// then call this again for the result); any other errno as for dmafile_load, or an error of the
/// device's driver.
///
/// Thread-safe. This may wait until the oldest slot is returned. So a thread that returns the slots
/// itself may hold only the newest ones when it calls this: at most half of the slots, less one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_next(stream: *const Stream, piece: *mut Piece) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a stream that is open.
        let stream = unsafe { border::shared(stream, "stream")? };
        stream.check_process()?;
        border::check(piece.cast(), 1, "piece")?;
        let Some(delivered) = stream.slots.next() else {
            return stream.end().map(|()| 0);
        };
        let given = Piece {
            at: delivered.at,
            bytes: delivered.bytes,
            data: std::ptr::with_exposed_provenance(delivered.address),
            slot: delivered.slot,
        };
        // SAFETY: not null; the header requires a place for one.
        unsafe { piece.write(given) };
        Ok(1)
    })
}

/// Returns a slot to the ring, to be filled again. Call this once for each piece of the slot, when
/// neither the program nor a device reads that piece any more.
///
/// Returns 0; -EINVAL for NULL, and for a slot that is not out.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_done(stream: *const Stream, slot: u64) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a stream that is open.
        let stream = unsafe { border::shared(stream, "stream")? };
        stream.check_process()?;
        if stream.slots.done(slot) {
            Ok(())
        } else {
            let why = format!("slot {slot} is not out");
            Err(Failure::new(libc::EINVAL, "cannot return a slot", &why))
        }
    })
}

/// Closes a stream: stops the load if it is still running, waits for its end, and frees everything.
/// Slots that are still out become invalid, so no device may be reading them any more. NULL is a no-op.
/// No other thread may be using the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_stream_close(stream: *mut Stream) {
    // SAFETY: the header requires null or a stream that is open.
    if unsafe { stream.as_ref() }.is_some_and(|stream| stream.check_process().is_err()) {
        // A thread that does not exist in this process may hold its locks.
        return;
    }
    // SAFETY: the header requires null or a stream from `dmafile_stream_open` that is closed once.
    unsafe { border::free(stream) };
}

impl Stream {
    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let why = "it belongs to the process that forked this one";
        Err(Failure::new(libc::EINVAL, "stream", why))
    }

    /// The result of the load, when no more bytes will come.
    fn end(&self) -> Result<()> {
        let mut state = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Running(_) = *state {
            let out = self.slots.out();
            if out > 0 {
                let why = format!("slots are still out: {out}");
                return Err(Failure::new(libc::EBUSY, "cannot end the stream", &why)
                    .remedy("return them first"));
            }
            // A placeholder until the result of the thread is known.
            let running = std::mem::replace(&mut *state, State::Ended(Ok(())));
            if let State::Running(thread) = running {
                *state = State::Ended(match thread.join() {
                    Ok(ended) => ended.map(drop).map_err(Failure::from),
                    Err(cause) => Err(Failure::panicked(&*cause)),
                });
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
        self.slots.leave();
        let state = self.load.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Running(thread) = std::mem::replace(state, State::Ended(Ok(()))) {
            // The result of a closed stream is not needed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_load_is_returned_by_every_call() {
        let (sink, slots) = deliver(None);
        let load = move || {
            let _sink = sink;
            panic!("of a test");
        };
        let stream = Box::into_raw(Box::new(Stream {
            slots,
            load: Mutex::new(State::Running(std::thread::spawn(load))),
            process: std::process::id(),
        }));
        let mut piece = std::mem::MaybeUninit::uninit();
        for _ in 0..3 {
            // SAFETY: an open stream, and a place for a piece.
            let next = unsafe { dmafile_stream_next(stream, piece.as_mut_ptr()) };
            assert_eq!(next, -libc::ENOTRECOVERABLE);
            border::last(|text| assert!(text.contains("of a test"), "{text}"));
        }
        // SAFETY: opened above, and closed once.
        unsafe { dmafile_stream_close(stream) };
    }
}
