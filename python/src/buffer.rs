//! The buffer, and what Python may ask of it.

use crate::dlpack;
use crate::error::{no_descriptor, raise, several_descriptors};
use dmafile::{HeldFile, Loaded, Report, Retired};
use pyo3::exceptions::{
    PyBlockingIOError, PyBufferError, PyMemoryError, PyTimeoutError, PyValueError,
};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyList;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::ffi::{c_int, c_void};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// Memory that Python objects share. Whoever exports it holds a clone: it is given back when the
/// last one goes.
pub(crate) struct Held {
    buffer: Memory,
    /// Nobody else can reach it.
    private: bool,
    /// It consists of dma-bufs: devices are told when the CPU reads it.
    announced: bool,
    /// It has been exported by the buffer protocol.
    exported: AtomicBool,
}

/// The memory itself, and what has to last as long.
enum Memory {
    Own(dmafile::Buffer),
    /// Its holder counts this process as one that has it.
    Taken(Box<HeldFile>),
    /// Pages of other memory, until they are written to.
    CopyOnWrite {
        buffer: dmafile::Buffer,
        _of: Arc<Held>,
    },
}

impl Deref for Memory {
    type Target = dmafile::Buffer;

    fn deref(&self) -> &dmafile::Buffer {
        match self {
            Self::Own(buffer) | Self::CopyOnWrite { buffer, .. } => buffer,
            Self::Taken(file) => &file.buffer,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut dmafile::Buffer {
        match self {
            Self::Own(buffer) | Self::CopyOnWrite { buffer, .. } => buffer,
            Self::Taken(file) => &mut file.buffer,
        }
    }
}

impl Memory {
    fn retire(self) -> Retired {
        match self {
            Self::Own(buffer) | Self::CopyOnWrite { buffer, .. } => buffer.retire(),
            Self::Taken(file) => file.buffer.retire(),
        }
    }
}

impl Held {
    /// Where its bytes lie and how many there are.
    fn bytes(&self) -> PyResult<(*mut u8, usize)> {
        let start = self.buffer.as_ptr().ok_or_else(|| {
            PyBufferError::new_err(
                "the owner of this memory may truncate it or punch holes into it, and touching what \
                 is gone would end the process; seal it against that (F_SEAL_SHRINK, F_SEAL_WRITE), \
                 or map its descriptor yourself",
            )
        })?;
        Ok((start.cast_mut(), self.buffer.len() as usize))
    }

    /// All bytes, in memory of their own.
    pub(crate) fn copy(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        let (mut bytes, len) = (Vec::new(), self.buffer.len() as usize);
        if bytes.try_reserve_exact(len).is_err() {
            let text = format!("no memory for a copy of {len} bytes");
            return Err(PyMemoryError::new_err(text));
        }
        let copied = py.detach(|| {
            bytes.resize(len, 0);
            self.buffer.access()?.read_at(0, &mut bytes).map(|()| bytes)
        });
        copied.map_err(|error| raise(py, &error, None))
    }

    pub(crate) fn buffer(&self) -> &dmafile::Buffer {
        &self.buffer
    }

    /// Calls `look` with all bytes, in order, in pieces.
    pub(crate) fn each(&self, mut look: impl FnMut(&[u8])) -> dmafile::Result<()> {
        let (access, len) = (self.buffer.access()?, self.buffer.len());
        // Small enough to stay in the CPU's cache.
        let mut piece = vec![0; 64 << 10];
        for at in (0..len).step_by(piece.len()) {
            let some = (len - at).min(piece.len() as u64) as usize;
            access.read_at(at, &mut piece[..some])?;
            look(&piece[..some]);
        }
        Ok(())
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.private
    }
}

/// An export of the memory: while it lives the CPU reads there, and of dma-bufs the devices know.
pub(crate) struct View(Arc<Held>);

impl View {
    /// And where the bytes lie, and how many there are.
    pub(crate) fn of(py: Python<'_>, held: Arc<Held>) -> PyResult<(Self, *mut u8, usize)> {
        let (start, len) = held.bytes()?;
        if held.announced {
            // It waits for devices that are still writing.
            let begun = py.detach(|| held.buffer.begin_access());
            // The buffer protocol wants this class.
            begun.map_err(|error| PyBufferError::new_err(error.to_string()))?;
        }
        Ok((Self(held), start, len))
    }

    fn into_raw(self) -> *const Held {
        let held = Arc::as_ptr(&self.0);
        std::mem::forget(self);
        held
    }

    /// # Safety
    /// `held` came from `into_raw`, and is taken back once.
    unsafe fn from_raw(held: *const Held) -> Self {
        // SAFETY: as this function asks for.
        Self(unsafe { Arc::from_raw(held) })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if self.0.announced {
            self.0.buffer.end_access();
        }
    }
}

/// A file's bytes in memory that devices and processes can share.
///
/// It has the buffer protocol (`memoryview(buffer)`, `numpy.frombuffer(buffer, ...)`) and DLPack.
/// Private memory (kind `anon`) is writable, all other memory read-only. A memoryview of memory
/// that is shared and not sealed shows what others write to it, as one of a `mmap.mmap` does. Devices
/// that share a dma-buf know of each view from when it is made until it is released
/// (DMA_BUF_IOCTL_SYNC): what they write meanwhile may not be seen in it.
///
/// As a context manager it closes itself. A closed buffer raises ValueError.
#[pyclass(frozen, weakref, module = "dmafile")]
pub(crate) struct Buffer {
    held: Mutex<Option<Arc<Held>>>,
    /// Bytes of the file.
    #[pyo3(get)]
    nbytes: u64,
    /// Where they start in the descriptor, in bytes.
    #[pyo3(get)]
    offset: u64,
    /// The kind of memory: `anon`, `memfd`, `fd:N`, ...
    #[pyo3(get)]
    kind: String,
    report_json: Option<String>,
    /// The addresses of closed memory that was exported: there are consumers of the buffer protocol
    /// that give the export back and go on reading, such as `numpy.ndarray(..., buffer=buffer)`.
    /// What they keep alive is this object.
    retired: OnceLock<Retired>,
}

impl Buffer {
    pub(crate) fn of(loaded: Loaded) -> Self {
        let report = serde_json::to_string(&loaded.report).expect("a report is plain data");
        Self::new(Memory::Own(loaded.buffer), Some(report))
    }

    /// A source of a snapshot, which has no report where it has no byte.
    pub(crate) fn of_source(buffer: dmafile::Buffer, report: Option<&Report>) -> Self {
        let json = report.map(|report| serde_json::to_string(report).expect("plain data"));
        Self::new(Memory::Own(buffer), json)
    }

    /// What another process loaded.
    pub(crate) fn taken(file: HeldFile) -> Self {
        Self::new(Memory::Taken(Box::new(file)), None)
    }

    fn new(mut buffer: Memory, report_json: Option<String>) -> Self {
        Self {
            nbytes: buffer.len(),
            offset: buffer.offset(),
            kind: buffer.kind().to_string(),
            held: Mutex::new(Some(Arc::new(Held {
                private: buffer.as_mut_slice().is_some(),
                announced: !buffer.dma_bufs().is_empty(),
                buffer,
                exported: AtomicBool::new(false),
            }))),
            report_json,
            retired: OnceLock::new(),
        }
    }

    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Option<Arc<Held>>> {
        let locked = self.held.lock_py_attached(py);
        locked.expect("no holder of this lock panics")
    }

    /// A share of the memory, for an export or for the time of a call.
    pub(crate) fn share(&self, py: Python<'_>) -> PyResult<Arc<Held>> {
        self.lock(py).clone().ok_or_else(closed)
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the buffer is closed")
}

fn in_use(what: &str, held: &Arc<Held>) -> PyErr {
    let exports = Arc::strong_count(held) - 1;
    PyBufferError::new_err(format!(
        "cannot {what} a buffer while {exports} of its exports are alive (memoryviews, arrays, tensors)"
    ))
}

#[pymethods]
impl Buffer {
    /// The number of its descriptor, which stays the buffer's: it is closed with it.
    ///
    /// Raises `dmafile.Error`: EOPNOTSUPP for private memory, which has none, EFBIG for several
    /// dma-bufs, which have one each (`dma_bufs`).
    fn fileno(&self, py: Python<'_>) -> PyResult<c_int> {
        let held = self.share(py)?;
        let fd = held.buffer.as_fd().map(|fd| fd.as_raw_fd());
        fd.ok_or_else(|| match held.buffer.dma_bufs().len() {
            0 => no_descriptor(py),
            several => several_descriptors(py, &self.kind, several),
        })
    }

    /// The dma-bufs that it consists of, one behind the other, as named tuples `(fd, at, bytes)`: the
    /// descriptor, which stays the buffer's; where it begins, counted from the first byte of the
    /// first, as `offset` is; how many bytes it has. One, or several where the limit of `/dev/udmabuf`
    /// (`size_limit_mb`) forced them; [] where it is no dma-buf.
    #[getter]
    fn dma_bufs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let held = self.share(py)?;
        let class = py.import("dmafile._dma_buf")?.getattr("DmaBuf")?;
        let all = held.buffer.dma_bufs().into_iter();
        let all = all.map(|one| class.call1((one.fd.as_raw_fd(), one.at, one.bytes)));
        PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)
    }

    /// How the load went, as `dmafile load --json` prints it, a new dict each time; None for a received buffer.
    #[getter]
    fn report(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let Some(json) = &self.report_json else {
            return Ok(None);
        };
        // By its text: there is no pythonize yet for this version of pyo3.
        let report = py.import("json")?.call_method1("loads", (json,))?;
        Ok(Some(report.unbind()))
    }

    /// Whether it has been closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        self.lock(py).is_none()
    }

    /// Whether its exports are read-only: all but those of private memory.
    #[getter]
    fn readonly(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(!self.share(py)?.is_writable())
    }

    /// Forbids any change of the contents, here and everywhere, for good (F_SEAL_WRITE).
    ///
    /// Raises BufferError while exports are alive; `dmafile.Error` with EBUSY while another
    /// process has it mapped for writing, and always for a `udmabuf`, EOPNOTSUPP for private memory
    /// and other dma-bufs, EPERM for an `fd:N` whose maker forbade seals.
    fn seal(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.lock(py);
        let held = state.as_mut().ok_or_else(closed)?;
        if Arc::get_mut(held).is_none() {
            return Err(in_use("seal", held));
        }
        let sealed = py.detach(|| {
            let held = Arc::get_mut(held).expect("shares are made under the lock that is held");
            held.buffer.seal()
        });
        sealed.map_err(|error| raise(py, &error, None))
    }

    /// Pins the memory for a device, `cuda:N` or `hip:N`: all devices of its driver read it directly, and
    /// write to it unless it is sealed. The pages of its bytes are pinned, and no more, until `unpin` or
    /// `close`. Written for the drivers of GPUs, tested on a double of them.
    ///
    /// Raises `dmafile.Error`: EBUSY where it is pinned already, EOPNOTSUPP where the driver pins no
    /// memory that is mapped for reading alone, as a sealed buffer is, ENODEV where the device cannot be
    /// used, else with what its driver says.
    #[pyo3(signature = (device="cuda:0"))]
    fn pin(&self, py: Python<'_>, device: &str) -> PyResult<()> {
        let held = self.share(py)?;
        let pinned = py.detach(|| held.buffer.pin(device.parse()?));
        pinned.map_err(|error| raise(py, &error, None))
    }

    /// Unpins it, where it is pinned: nothing of a device may be reading it.
    fn unpin(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.share(py)?;
        let unpinned = py.detach(|| held.buffer.unpin());
        unpinned.map_err(|error| raise(py, &error, None))
    }

    /// The device that it is pinned for, `cuda:N` or `hip:N`; None where it is not.
    #[getter]
    fn pinned(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let device = self.share(py)?.buffer.pinned();
        Ok(device.map(|device| device.to_string()))
    }

    /// Sends the descriptor, or all of its dma-bufs, over a connected Unix socket (SCM_RIGHTS), for
    /// `Buffer.receive`.
    ///
    /// Keeps to the socket's timeout: TimeoutError, or BlockingIOError where it does not block, for
    /// one that stays full. Raises `dmafile.Error`: EOPNOTSUPP for private memory, E2BIG for more than
    /// 253 dma-bufs, which no message carries.
    fn send(&self, py: Python<'_>, sock: &Bound<'_, PyAny>) -> PyResult<()> {
        let held = self.share(py)?;
        Wait::on(sock)?.each(py, PollFlags::OUT, |stream| held.buffer.try_send(stream))
    }

    /// Receives what `send` sent, over a connected Unix socket; keeps to the socket's timeout.
    ///
    /// The sender is not trusted: raises `dmafile.Error` with EPROTO for anything but a memfd
    /// that cannot shrink, or dma-bufs, that hold the bytes they claim, ConnectionResetError where
    /// the sender went away.
    #[staticmethod]
    fn receive(py: Python<'_>, sock: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = Wait::on(sock)?.each(py, PollFlags::IN, dmafile::Buffer::try_receive)?;
        Ok(Self::new(Memory::Own(buffer), None))
    }

    /// The same bytes as private memory, for arrays that cannot be read-only: the pages are those of this
    /// buffer until they are written to. Raises `dmafile.Error` with EPERM for memory that others can change.
    fn _private(&self, py: Python<'_>) -> PyResult<Self> {
        let held = self.share(py)?;
        let made = py.detach(|| held.buffer.copy_on_write());
        let buffer = made.map_err(|error| raise(py, &error, None))?;
        Ok(Self::new(Memory::CopyOnWrite { buffer, _of: held }, None))
    }

    /// The bytes as a DLPack capsule: one dimension of uint8 on the CPU.
    ///
    /// Raises BufferError where the consumer asks for another device or cannot be told that the
    /// memory is read-only (it must know DLPack 1.0: `max_version=(1, 0)`).
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("memory of the CPU has no streams"));
        }
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err("the memory is the CPU's"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::export(py, self.share(py)?, versioned, copy == Some(true))
    }

    /// The device of `__dlpack__`: the CPU.
    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        self.share(py).map(|_| dlpack::CPU)
    }

    /// Gives the memory back and closes the descriptor. More than once does nothing.
    ///
    /// Raises BufferError while exports are alive: memoryviews, arrays, tensors. An array that was
    /// made of it and holds no export (`numpy.ndarray(..., buffer=buffer)`) shows zeros from then
    /// on, and is not to be written to.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.lock(py);
        match state.take().map(Arc::try_unwrap) {
            None => Ok(()),
            Some(Ok(held)) => {
                drop(state);
                let exported = held.exported.into_inner();
                let retired = py.detach(|| {
                    let buffer = held.buffer;
                    exported.then(|| buffer.retire())
                });
                if let Some(retired) = retired {
                    // It was taken out under the lock, which happens once.
                    let _ = self.retired.set(retired);
                }
                Ok(())
            }
            Some(Err(held)) => Err(in_use("close", state.insert(held))),
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.share(slf.py())?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.share(py)?;
        Ok(self.nbytes as usize)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (kind, nbytes) = (&self.kind, self.nbytes);
        let state = match self.share(py) {
            Err(_) => " closed".to_string(),
            Ok(held) => match (held.buffer.as_fd(), held.buffer.dma_bufs().len()) {
                (Some(fd), _) => format!(" fd={}", fd.as_raw_fd()),
                (None, 0) => String::new(),
                (None, several) => format!(" dma_bufs={several}"),
            },
        };
        format!("<dmafile.Buffer kind={kind} nbytes={nbytes}{state}>")
    }

    /// Fills a view in for the interpreter.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the interpreter hands in a view, and wants it without an object after an error.
        unsafe { (*view).obj = std::ptr::null_mut() };
        let (shown, start, len) = View::of(slf.py(), slf.get().share(slf.py())?)?;
        let readonly = c_int::from(!shown.0.is_writable());
        // SAFETY: the view is there to be filled; the memory stays where it is for as long as the
        // share that the view gets.
        unsafe {
            let (start, len) = (start.cast::<c_void>(), len as isize);
            if ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, readonly, flags) != 0 {
                return Err(PyErr::fetch(slf.py()));
            }
            shown.0.exported.store(true, Ordering::Relaxed);
            (*view).internal = shown.into_raw().cast_mut().cast();
        }
        Ok(())
    }

    /// Takes the share of a view back.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is what `__getbuffer__` put there, and each view is released once.
        drop(unsafe { View::from_raw((*view).internal.cast::<Held>()) });
    }
}

/// A second descriptor of a Python socket, and how long it may be waited for.
struct Wait {
    stream: UnixStream,
    /// 0: not at all; None: for ever.
    timeout: Option<Duration>,
    begin: Instant,
    /// It has been looked at.
    looked: bool,
}

impl Wait {
    fn on(sock: &Bound<'_, PyAny>) -> PyResult<Self> {
        let number: c_int = sock.call_method0("fileno")?.extract()?;
        if number < 0 {
            return Err(PyValueError::new_err("the socket is closed"));
        }
        // SAFETY: the socket is open and borrowed for the time of this copy.
        let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?;
        let timeout: Option<f64> = sock.call_method0("gettimeout")?.extract()?;
        Ok(Self {
            stream: fd.into(),
            // What is no time, or longer than any, is for ever.
            timeout: timeout.and_then(|all| Duration::try_from_secs_f64(all.max(0.0)).ok()),
            begin: Instant::now(),
            looked: false,
        })
    }

    /// What is left of the time.
    fn left(&self) -> Option<Duration> {
        let elapsed = self.begin.elapsed();
        self.timeout.map(|all| all.saturating_sub(elapsed))
    }

    /// Tries each time that it can be read or written, until that comes to something; EAGAIN says
    /// that it has not.
    fn each<T: Send>(
        &mut self,
        py: Python<'_>,
        wanted: PollFlags,
        attempt: impl Fn(&UnixStream) -> dmafile::Result<T> + Sync,
    ) -> PyResult<T> {
        loop {
            self.until(py, wanted)?;
            match py.detach(|| attempt(&self.stream)) {
                Ok(made) => return Ok(made),
                // Somebody else was faster.
                Err(error) if error.raw_os_error() == Some(AGAIN) => {}
                Err(error) => return Err(raise(py, &error, None)),
            }
        }
    }

    /// Waits until it can be read or written, and looks after signals meanwhile.
    fn until(&mut self, py: Python<'_>, wanted: PollFlags) -> PyResult<()> {
        loop {
            let left = self.left();
            if self.looked && left == Some(Duration::ZERO) {
                return Err(match self.timeout {
                    Some(Duration::ZERO) => {
                        PyBlockingIOError::new_err((AGAIN, "the socket is not ready"))
                    }
                    _ => PyTimeoutError::new_err("timed out"),
                });
            }
            self.looked = true;
            let glance = Timespec {
                tv_sec: 0,
                tv_nsec: left
                    .map_or(GLANCE, |left| left.min(GLANCE))
                    .subsec_nanos()
                    .into(),
            };
            let ready = py.detach(|| {
                let mut polled = [PollFd::new(&self.stream, wanted)];
                rustix::event::poll(&mut polled, Some(&glance))
            });
            match ready {
                Ok(1..) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => py.check_signals()?,
                Err(errno) => return Err(std::io::Error::from(errno).into()),
            }
        }
    }
}

const AGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();

/// How often a wait for a socket looks after signals.
const GLANCE: Duration = Duration::from_millis(50);
