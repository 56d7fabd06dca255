//! The buffer, and its Python interface.

use crate::call;
use crate::dlpack;
use crate::error::{no_descriptor, raise, several_descriptors};
use crate::job::{POLL_INTERVAL, as_dict};
use dmafile::{Loaded, Report, ReservedRange};
use dmafile_gpu::Device;
use dmafile_hold::HeldFile;
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

/// Memory that Python objects share: each export holds a clone, and the memory is freed with the last one.
pub(crate) struct Held {
    buffer: Memory,
    /// True if nothing else can reach it.
    private: bool,
    /// True if it consists of dma-bufs, so that CPU access must be announced to devices.
    announced: bool,
    /// True if it has been exported by the buffer protocol.
    exported: AtomicBool,
}

/// The memory, and whatever must live as long as it does.
enum Memory {
    Own(dmafile::Buffer),
    /// While it exists, its holder counts this process as a user.
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
    fn into_reserved(self) -> ReservedRange {
        match self {
            Self::Own(buffer) | Self::CopyOnWrite { buffer, .. } => buffer.into_reserved(),
            Self::Taken(file) => file.buffer.into_reserved(),
        }
    }
}

impl Held {
    /// Address and number of its bytes.
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

    /// Copies all bytes.
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

    /// Calls `look` with all bytes, in order, piece by piece.
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

/// An export of the memory: while it exists, the CPU reads there, which has been announced to devices if it
/// consists of dma-bufs.
pub(crate) struct View(Arc<Held>);

impl View {
    /// Also returns address and number of the bytes.
    pub(crate) fn of(py: Python<'_>, held: Arc<Held>) -> PyResult<(Self, *mut u8, usize)> {
        let (start, len) = held.bytes()?;
        if held.announced {
            // This waits for devices that are still writing.
            let begun = py.detach(|| held.buffer.begin_access());
            // The buffer protocol requires this exception.
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
    /// `held` came from `into_raw`, and is taken back only once.
    unsafe fn from_raw(held: *const Held) -> Self {
        // SAFETY: as this function requires.
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
/// Supports the buffer protocol (`memoryview(buffer)`, `numpy.frombuffer(buffer, ...)`) and DLPack. Private
/// memory (kind `anon`) is writable, all other memory is read-only. A memoryview of memory that is shared and
/// not sealed shows what others write to it, like that of a `mmap.mmap`. For a dma-buf, each view is one CPU
/// access (DMA_BUF_IOCTL_SYNC), from its creation until it is released: what devices write during that time may
/// not be visible in it.
///
/// As a context manager it closes itself. Using a closed buffer raises ValueError.
#[pyclass(frozen, weakref, module = "dmafile")]
pub(crate) struct Buffer {
    held: Mutex<Option<Arc<Held>>>,
    /// Number of bytes of the file.
    #[pyo3(get)]
    nbytes: u64,
    /// Where they start in the descriptor, in bytes.
    #[pyo3(get)]
    offset: u64,
    /// The kind of memory: `anon`, `memfd`, `fd:N`, ...
    #[pyo3(get)]
    kind: String,
    report_json: Option<String>,
    /// The address range of closed memory that was exported: some consumers of the buffer protocol release the
    /// export and continue to read, such as `numpy.ndarray(..., buffer=buffer)`. They keep this object alive.
    reserved: OnceLock<ReservedRange>,
}

impl Buffer {
    pub(crate) fn of(loaded: Loaded) -> Self {
        let report = serde_json::to_string(&loaded.report).expect("a report is plain data");
        Self::new(Memory::Own(loaded.buffer), Some(report))
    }

    /// The buffer of a source of a snapshot; an empty source has no report.
    pub(crate) fn of_source(buffer: dmafile::Buffer, report: Option<&Report>) -> Self {
        let json = report.map(|report| serde_json::to_string(report).expect("plain data"));
        Self::new(Memory::Own(buffer), json)
    }

    /// Memory that another process loaded.
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
            reserved: OnceLock::new(),
        }
    }

    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Option<Arc<Held>>> {
        let locked = self.held.lock_py_attached(py);
        locked.expect("no holder of this lock panics")
    }

    /// A reference to the memory, for an export or for the duration of a call.
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
    /// The number of its descriptor, which belongs to the buffer and is closed with it.
    ///
    /// Raises `dmafile.Error`: EOPNOTSUPP for private memory, which has none, EFBIG for several dma-bufs, each
    /// of which has its own (`dma_bufs`).
    fn fileno(&self, py: Python<'_>) -> PyResult<c_int> {
        let held = self.share(py)?;
        let fd = held.buffer.as_fd().map(|fd| fd.as_raw_fd());
        fd.ok_or_else(|| match held.buffer.dma_bufs().len() {
            0 => no_descriptor(py),
            several => several_descriptors(py, &self.kind, several),
        })
    }

    /// The dma-bufs that it consists of, back to back, as named tuples `(fd, at, bytes)`: the descriptor, which
    /// belongs to the buffer; its offset, counted from the first byte of the first one, like `offset`; its size
    /// in bytes. One, or several if the limit of `/dev/udmabuf` (`size_limit_mb`) required them; [] if it is
    /// not a dma-buf.
    #[getter]
    fn dma_bufs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let held = self.share(py)?;
        let class = call::import(py, c"dmafile._dma_buf", "DmaBuf")?;
        let all = held.buffer.dma_bufs().into_iter();
        let all = all.map(|one| call::call(&class, (one.fd.as_raw_fd(), one.at, one.bytes)));
        PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)
    }

    /// The report of the load, as `dmafile load --json` prints it; a new dict each time. None for a received
    /// buffer.
    #[getter]
    fn report(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let json = self.report_json.as_ref();
        json.map(|json| as_dict(py, Ok(json.clone()))).transpose()
    }

    /// True if it has been closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        self.lock(py).is_none()
    }

    /// True if its exports are read-only: true for everything but private memory.
    #[getter]
    fn readonly(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(!self.share(py)?.is_writable())
    }

    /// Permanently forbids every process to change the contents (F_SEAL_WRITE).
    ///
    /// Raises BufferError while exports exist; `dmafile.Error` with EBUSY while another process has it mapped
    /// for writing, such as a child that was forked since the load, and always for a `udmabuf`, EOPNOTSUPP for
    /// private memory and other dma-bufs, EPERM for an `fd:N` whose owner does not allow seals.
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

    /// Pins the memory for a device, `cuda:N` or `hip:N`. All devices of the same driver can then read it
    /// directly, and write to it unless it is sealed. Only the pages of the requested bytes are pinned. They
    /// stay pinned until `unpin` or `close`. Tested on an H100, and for AMD only with a
    /// test double.
    ///
    /// Raises `dmafile.Error`: EBUSY if it is already pinned, EOPNOTSUPP if the driver cannot pin memory
    /// that is mapped read-only (as a sealed buffer is), ENODEV if the device cannot be used; otherwise
    /// the driver's error.
    #[pyo3(signature = (device="cuda:0"))]
    fn pin(&self, py: Python<'_>, device: &str) -> PyResult<()> {
        let held = self.share(py)?;
        let pinned = py.detach(|| held.buffer.pin(&device.parse::<Device>()?));
        pinned.map_err(|error| raise(py, &error, None))
    }

    /// Unpins the memory; does nothing if it is not pinned. No device may be using it any more.
    fn unpin(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.share(py)?;
        let unpinned = py.detach(|| held.buffer.unpin());
        unpinned.map_err(|error| raise(py, &error, None))
    }

    /// The device that it is pinned for, `cuda:N` or `hip:N`; None if it is not pinned.
    #[getter]
    fn pinned(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.share(py)?.buffer.pinned())
    }

    /// Sends the descriptor, or all of its dma-bufs, over a connected Unix socket (SCM_RIGHTS), for
    /// `Buffer.receive`. A memfd is sent as an open file of its own: its position, flags and locks are not
    /// shared, except without `/proc`; those of dma-bufs are.
    ///
    /// Respects the socket's timeout: if the socket stays full, raises TimeoutError, or BlockingIOError if it
    /// is non-blocking. Raises `dmafile.Error`: EOPNOTSUPP for private memory, E2BIG for more than 253
    /// dma-bufs, which do not fit into a message.
    fn send(&self, py: Python<'_>, sock: &Bound<'_, PyAny>) -> PyResult<()> {
        let held = self.share(py)?;
        Wait::on(sock)?.each(py, PollFlags::OUT, |stream| held.buffer.try_send(stream))
    }

    /// Receives what `send` sent, over a connected Unix socket; respects the socket's timeout.
    ///
    /// The sender is not trusted: raises `dmafile.Error` with EPROTO for anything but a memfd that cannot
    /// shrink, or dma-bufs, that contain the claimed bytes; ConnectionResetError if the sender is gone.
    #[staticmethod]
    fn receive(py: Python<'_>, sock: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = Wait::on(sock)?.each(py, PollFlags::IN, dmafile::Buffer::try_receive)?;
        Ok(Self::new(Memory::Own(buffer), None))
    }

    /// The same bytes as private memory (copy-on-write), for arrays that cannot be read-only: a page is shared
    /// with this buffer until it is written to. Raises `dmafile.Error` with EPERM for memory that others can
    /// change.
    fn _private(&self, py: Python<'_>) -> PyResult<Self> {
        let held = self.share(py)?;
        let made = py.detach(|| held.buffer.copy_on_write());
        let buffer = made.map_err(|error| raise(py, &error, None))?;
        Ok(Self::new(Memory::CopyOnWrite { buffer, _of: held }, None))
    }

    /// The bytes as a DLPack capsule: one dimension of uint8 on the CPU.
    ///
    /// Raises BufferError if the consumer requests another device, or does not support read-only memory (which
    /// needs DLPack 1.0: `max_version=(1, 0)`).
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
            return Err(PyBufferError::new_err("CPU memory has no stream"));
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

    /// Frees the memory and closes the descriptor. Calling it again does nothing.
    ///
    /// Raises BufferError while exports exist: memoryviews, arrays, tensors. An array that was made from it
    /// without holding an export (`numpy.ndarray(..., buffer=buffer)`) shows zeros afterwards, and must not be
    /// written to.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.lock(py);
        match state.take().map(Arc::try_unwrap) {
            None => Ok(()),
            Some(Ok(held)) => {
                drop(state);
                let exported = held.exported.into_inner();
                let reserved = py.detach(|| {
                    let buffer = held.buffer;
                    exported.then(|| buffer.into_reserved())
                });
                if let Some(reserved) = reserved {
                    // The memory was taken out under the lock, which happens only once.
                    let _ = self.reserved.set(reserved);
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
        // SAFETY: the view is valid for writing; the memory stays in place for as long as the reference that
        // the view gets.
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

    /// Releases the reference that a view has.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is what `__getbuffer__` put there, and each view is released once.
        drop(unsafe { View::from_raw((*view).internal.cast::<Held>()) });
    }
}

/// A duplicate of a Python socket's descriptor, and its timeout.
struct Wait {
    stream: UnixStream,
    /// 0: do not wait; None: wait without limit.
    timeout: Option<Duration>,
    begin: Instant,
    /// True if it has been tried once.
    looked: bool,
}

impl Wait {
    fn on(sock: &Bound<'_, PyAny>) -> PyResult<Self> {
        let number: c_int = call::method(sock, "fileno")?.extract()?;
        if number < 0 {
            return Err(PyValueError::new_err("the socket is closed"));
        }
        // SAFETY: the socket is open and borrowed for the time of this copy.
        let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()?;
        let timeout: Option<f64> = call::method(sock, "gettimeout")?.extract()?;
        Ok(Self {
            stream: fd.into(),
            // A value that is not a valid duration means no limit.
            timeout: timeout.and_then(|all| Duration::try_from_secs_f64(all.max(0.0)).ok()),
            begin: Instant::now(),
            looked: false,
        })
    }

    /// The remaining time.
    fn left(&self) -> Option<Duration> {
        let elapsed = self.begin.elapsed();
        self.timeout.map(|all| all.saturating_sub(elapsed))
    }

    /// Calls `attempt` whenever the socket is ready, until the result is not EAGAIN.
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
                // Another thread was faster.
                Err(error) if error.raw_os_error() == Some(AGAIN) => {}
                Err(error) => return Err(raise(py, &error, None)),
            }
        }
    }

    /// Waits until the socket is ready, and handles signals while waiting.
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
            let interval = Timespec {
                tv_sec: 0,
                tv_nsec: left
                    .map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL))
                    .subsec_nanos()
                    .into(),
            };
            let ready = py.detach(|| {
                let mut polled = [PollFd::new(&self.stream, wanted)];
                rustix::event::poll(&mut polled, Some(&interval))
            });
            match ready {
                Ok(1..) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => call::handle_signals(py)?,
                Err(errno) => return Err(std::io::Error::from(errno).into()),
            }
        }
    }
}

const AGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();
