//! `struct dmafile_buffer`: memory that holds a file's bytes.

use crate::border::{self, Failure, Result, exclusive, shared};
use crate::options::word;
use dmafile::{Loaded, Report};
use dmafile_gpu::Device;
use dmafile_hold::HeldFile;
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// A filled buffer: the requested bytes of a file, with zeros around them. Opaque.
///
/// Functions that take it `const` may be called by several threads at once; the others require exclusive
/// access. Any thread may use and free it.
pub struct Buffer {
    inner: Memory,
    /// The dma-bufs of `inner`, with their descriptors.
    dma_bufs: Vec<DmaBuf>,
    report: Option<CString>,
}

/// The memory, and whatever must live as long as it does.
enum Memory {
    Own(dmafile::Buffer),
    /// While it exists, its holder counts this process as a taker.
    Taken(Box<HeldFile>),
}

impl Deref for Memory {
    type Target = dmafile::Buffer;

    fn deref(&self) -> &dmafile::Buffer {
        match self {
            Self::Own(buffer) => buffer,
            Self::Taken(file) => &file.buffer,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut dmafile::Buffer {
        match self {
            Self::Own(buffer) => buffer,
            Self::Taken(file) => &mut file.buffer,
        }
    }
}

impl Memory {
    fn into_buffer(self) -> dmafile::Buffer {
        match self {
            Self::Own(buffer) => buffer,
            Self::Taken(file) => file.buffer,
        }
    }
}

/// One dma-buf of a buffer. It belongs to the buffer. Later versions may append members, so access it through
/// the pointer that the library returns, and do not copy or index it.
#[repr(C)]
pub struct DmaBuf {
    /// Its descriptor; the rules of dmafile_buffer_fd apply.
    pub fd: c_int,
    /// Offset of its first byte, counted from the first byte of the first dma-buf. The requested bytes start
    /// at dmafile_buffer_offset, counted from there too.
    pub at: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl Buffer {
    pub(crate) fn of(loaded: Loaded) -> Result<Self> {
        Self::of_source(loaded.buffer, Some(&loaded.report))
    }

    /// The buffer of a source of a snapshot. An empty source is not loaded, so it has no report.
    pub(crate) fn of_source(inner: dmafile::Buffer, report: Option<&Report>) -> Result<Self> {
        let report = report.map(|report| {
            let json = serde_json::to_string(report).expect("a report is plain data");
            c_string(json)
        });
        Ok(Self::new(Memory::Own(inner), report.transpose()?))
    }

    /// Memory that another process loaded.
    pub(crate) fn taken(file: HeldFile) -> Self {
        Self::new(Memory::Taken(Box::new(file)), None)
    }

    fn new(inner: Memory, report: Option<CString>) -> Self {
        let numbers = |one: &dmafile::DmaBuf| DmaBuf {
            fd: one.fd.as_raw_fd(),
            at: one.at,
            bytes: one.bytes,
        };
        Self {
            dma_bufs: inner.dma_bufs().iter().map(numbers).collect(),
            inner,
            report,
        }
    }

    /// -EFBIG if one descriptor is not enough; `instead` names the function that returns all of them.
    fn check_single(&self, what: &str, instead: &str) -> Result<()> {
        match self.dma_bufs.len() {
            0 | 1 => Ok(()),
            several => {
                let why = format!("it consists of {several} dma-bufs");
                let remedy = format!("use {instead}, or raise size_limit_mb of udmabuf");
                Err(Failure::new(libc::EFBIG, what, &why).remedy(&remedy))
            }
        }
    }

    /// Passes the buffer to the caller.
    ///
    /// # Safety
    /// `place` is valid for writing.
    pub(crate) unsafe fn give(self, place: *mut *mut Self) {
        // SAFETY: as this function requires.
        unsafe { place.write(Box::into_raw(Box::new(self))) };
    }
}

/// A C string.
pub(crate) fn c_string(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|_| Failure::new(libc::EILSEQ, "text", "it contains a NUL"))
}

/// Stores NULL at the place for a handle, so that it is set however the call ends.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn empty<T>(place: *mut *mut T, what: &str) -> Result<()> {
    if place.is_null() {
        return Err(Failure::new(libc::EINVAL, what, "it is NULL"));
    }
    // SAFETY: as this function requires.
    unsafe { place.write(std::ptr::null_mut()) };
    Ok(())
}

/// The descriptor of a buffer, to map, send, or pass to a driver. The requested bytes start at
/// dmafile_buffer_offset. The buffer owns the descriptor: do not close it, and do not use it after the buffer
/// is freed; dup(2) makes one that you own. Close-on-exec is set.
///
/// Returns the descriptor; -EOPNOTSUPP for private memory, which has none; -EFBIG if the buffer consists of
/// several dma-bufs, each with its own (dmafile_buffer_dma_buf); -EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_fd(buffer: *const Buffer) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        let what = "cannot return the descriptor";
        buffer.check_single(what, "dmafile_buffer_dma_buf")?;
        match buffer.inner.as_fd() {
            Some(fd) => Ok(fd.as_raw_fd()),
            None => Err(
                Failure::new(libc::EOPNOTSUPP, what, "private memory has none")
                    .remedy("load it to=\"memfd\""),
            ),
        }
    })
}

/// Pins a buffer's memory for a device, "cuda:N" or "hip:N". All devices of the same driver can then
/// read it directly, and write to it unless it is sealed. Only the pages of the requested bytes are
/// pinned. They stay pinned until dmafile_buffer_unpin or dmafile_buffer_free. Tested on an H100,
/// and for AMD only with a test double.
///
/// Returns 0; -EBUSY if the buffer is already pinned; -EOPNOTSUPP if the driver cannot pin read-only
/// memory and the buffer is sealed, or if the memory has no address; -ENODEV if the device cannot be
/// used; -EINVAL for NULL or an unknown word; otherwise the driver's error.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_pin(buffer: *const Buffer, device: *const c_char) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        // SAFETY: the header requires null or a string.
        let device: Option<Device> = unsafe { word(device, "device")? };
        let none = || Failure::new(libc::EINVAL, "device", "it is NULL");
        Ok(buffer.inner.pin(&device.ok_or_else(none)?)?)
    })
}

/// Unpins a buffer; does nothing if it is not pinned. No device may be using the memory any more.
///
/// Returns 0; -EINVAL for NULL; otherwise the driver's error, if a second attempt failed too. The
/// memory then stays pinned and mapped until the process ends.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_unpin(buffer: *const Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        Ok(unsafe { shared(buffer, "buffer")? }.inner.unpin()?)
    })
}

/// The number of dma-bufs that a buffer consists of, back to back: 1, or more if a "udmabuf" exceeds the
/// kernel's limit for one (its size_limit_mb); 0 if the buffer is not a dma-buf. 0 with errno EINVAL for
/// NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_dma_buf_count(buffer: *const Buffer) -> usize {
    // SAFETY: the header requires null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.dma_bufs.len()))
}

/// The dma-buf with the given number, from 0 to dmafile_buffer_dma_buf_count - 1, in the order of their
/// bytes. It belongs to the buffer.
///
/// NULL with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_dma_buf(
    buffer: *const Buffer,
    index: usize,
) -> *const DmaBuf {
    border::pointer(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let dma_bufs = &unsafe { shared(buffer, "buffer")? }.dma_bufs;
        match dma_bufs.get(index) {
            Some(one) => Ok(one),
            None => Err(Failure::new(
                libc::ERANGE,
                "no such dma-buf",
                &format!("number {index} of {}, counted from 0", dma_bufs.len()),
            )),
        }
    })
}

/// Frees a buffer except for its descriptor, which the caller then owns and closes with close(2). Call
/// dmafile_buffer_offset and dmafile_buffer_len before. Close-on-exec is set.
///
/// The buffer is freed in every case; no other thread may be using it.
///
/// Returns the descriptor; -EOPNOTSUPP for private memory; -EFBIG for several dma-bufs (use
/// dmafile_buffer_into_fds); -EMFILE if a second descriptor is needed (for "fd:N") and cannot be created;
/// -EINVAL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_into_fd(buffer: *mut Buffer) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        unsafe { shared(buffer, "buffer")? };
        // SAFETY: it is not null, so it came from `Box::into_raw`, and is given up here.
        let owned = unsafe { Box::from_raw(buffer) };
        owned.check_single("cannot pass the buffer on", "dmafile_buffer_into_fds")?;
        Ok(owned.inner.into_buffer().into_fd()?.into_raw_fd())
    })
}

/// As dmafile_buffer_into_fd, for a buffer that may consist of several dma-bufs: stores the descriptors in
/// `fds`, which has room for `room` of them, in the order of their bytes. Call dmafile_buffer_dma_buf_count
/// before: there are as many as it returns, or 1 if it returns 0.
///
/// The buffer is freed in every case; no other thread may be using it.
///
/// Returns the number of descriptors; or, with `fds` unchanged, -ERANGE if `room` is too small, -EOPNOTSUPP
/// for private memory, -EMFILE as dmafile_buffer_into_fd, -EINVAL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_into_fds(
    buffer: *mut Buffer,
    fds: *mut c_int,
    room: usize,
) -> c_int {
    border::number(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        unsafe { shared(buffer, "buffer")? };
        // SAFETY: it is not null, so it came from `Box::into_raw`, and is given up here.
        let owned = unsafe { Box::from_raw(buffer) };
        border::check(fds.cast(), room, "fds")?;
        let given = owned.inner.into_buffer().into_fds()?;
        if given.len() > room {
            let why = format!(
                "it has {} descriptors, but fds has room for {room}",
                given.len()
            );
            let failure = Failure::new(libc::ERANGE, "cannot pass the buffer on", &why);
            return Err(failure.remedy("call dmafile_buffer_dma_buf_count first"));
        }
        let count = c_int::try_from(given.len());
        let count = count.expect("descriptors are numbered by an int");
        for (index, fd) in given.into_iter().enumerate() {
            // SAFETY: not null if there is room; the header requires `room` writable places.
            unsafe { fds.add(index).write(fd.into_raw_fd()) };
        }
        Ok(count)
    })
}

/// The number of requested bytes, all of which are in the buffer; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_len(buffer: *const Buffer) -> u64 {
    // SAFETY: the header requires null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.inner.len()))
}

/// Where the requested bytes start in the descriptor, in bytes: less than a page, or less than the file's
/// direct I/O alignment if that is larger; for "fd:N@OFFSET" it is OFFSET. 0 with errno EINVAL for NULL.
///
/// dmafile_buffer_data, dmafile_buffer_read_at and dmafile_buffer_write_at already count from the first
/// requested byte.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_offset(buffer: *const Buffer) -> u64 {
    // SAFETY: the header requires null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.inner.offset()))
}

/// The requested bytes, dmafile_buffer_len of them, if nothing else can change them: in private memory, and
/// in a sealed buffer. Valid until the buffer is freed.
///
/// NULL with errno EACCES for memory that others can change: seal it, use dmafile_buffer_read_at, or mmap(2)
/// the descriptor at your own risk. NULL with errno EINVAL for NULL.
///
/// Thread-safe, but not concurrently with dmafile_buffer_write_at or with writes through the pointer of
/// dmafile_buffer_data_mut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_data(buffer: *const Buffer) -> *const c_void {
    border::pointer(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        match buffer.inner.as_slice() {
            Some(bytes) => Ok(bytes.as_ptr().cast()),
            None => Err(Failure::new(
                libc::EACCES,
                "cannot return a pointer",
                "others can change this memory; seal it, use dmafile_buffer_read_at, \
                 or map the descriptor",
            )),
        }
    })
}

/// The requested bytes, writable, if nothing else can reach them: in private memory. Valid until the buffer
/// is freed.
///
/// NULL with errno EACCES for memory that others can reach: use dmafile_buffer_write_at, or mmap(2) the
/// descriptor at your own risk. NULL with errno EINVAL for NULL.
///
/// No other thread may be using the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_data_mut(buffer: *mut Buffer) -> *mut c_void {
    let found: *const c_void = border::pointer(|| {
        // SAFETY: the header requires null or a buffer that nothing else is using.
        let buffer = unsafe { exclusive(buffer, "buffer")? };
        match buffer.inner.as_mut_slice() {
            Some(bytes) => Ok(bytes.as_mut_ptr().cast_const().cast()),
            None => Err(Failure::new(
                libc::EACCES,
                "cannot return a writable pointer",
                "others can reach this memory, or it is sealed; use dmafile_buffer_write_at, \
                 or map the descriptor",
            )),
        }
    });
    found.cast_mut()
}

/// Copies `len` bytes from a buffer to `into`, starting at `offset` within the requested bytes. The CPU
/// access is announced to devices that share the memory (DMA_BUF_IOCTL_SYNC). Concurrent writes by others may
/// or may not be visible, byte by byte.
///
/// Returns 0; -EINVAL for a range outside the requested bytes (nothing is copied) and for NULL; -EIO if the
/// memory of an "fd:N" was truncated by its owner.
///
/// Thread-safe. `into` must not overlap the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_read_at(
    buffer: *const Buffer,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        border::check(into.cast(), len, "into")?;
        if len == 0 {
            return Ok(buffer.inner.access()?.read_at(offset, &mut [])?);
        }
        // SAFETY: not null; the header requires `len` writable bytes outside the buffer. They are C memory,
        // so every byte has some value.
        let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
        Ok(buffer.inner.access()?.read_at(offset, into)?)
    })
}

/// Copies `len` bytes from `from` into a buffer, starting at `offset` within the requested bytes. The CPU
/// access is announced to devices that share the memory (DMA_BUF_IOCTL_SYNC).
///
/// Returns 0; -EINVAL for a range outside the requested bytes (nothing is copied) and for NULL; -EPERM for a
/// sealed buffer; -EIO as dmafile_buffer_read_at.
///
/// No other thread may be using the buffer. `from` must not overlap it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_write_at(
    buffer: *mut Buffer,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that nothing else is using.
        let buffer = unsafe { exclusive(buffer, "buffer")? };
        border::check(from.cast(), len, "from")?;
        let from = if len == 0 {
            &[]
        } else {
            // SAFETY: not null; the header requires `len` bytes to read, outside the buffer.
            unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) }
        };
        Ok(buffer.inner.access_mut()?.write_at(offset, from)?)
    })
}

/// Permanently forbids every process to change the contents and size of a buffer (F_SEAL_WRITE, see
/// fcntl(2)). dmafile_buffer_data works from then on.
///
/// Returns 0; -EBUSY while it is mapped for writing, as in a child that was forked since the load, or pinned, and
/// for a "udmabuf"; -EOPNOTSUPP for private memory and for other dma-bufs; -EPERM for an "fd:N" that may not be
/// sealed; -EINVAL for NULL.
///
/// No other thread may be using the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_seal(buffer: *mut Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that nothing else is using.
        Ok(unsafe { exclusive(buffer, "buffer")? }.inner.seal()?)
    })
}

/// Sends a buffer over the Unix stream socket `socket` (SCM_RIGHTS, see unix(7)). The receiver gets the same
/// memory, not a copy, and a memfd as an open file of its own: position, flags and locks are not shared (except
/// without /proc; those of dma-bufs are). The caller keeps the buffer. Does not raise SIGPIPE.
///
/// Returns 0; -EOPNOTSUPP for private memory; -E2BIG for more than 253 dma-bufs, which do not fit into a
/// message; -EBADF or -ENOTSOCK if `socket` is not a socket; -EINVAL for NULL; any error of sendmsg(2).
///
/// Thread-safe, but only one thread at a time may use a socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_send(buffer: *const Buffer, socket: c_int) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        Ok(buffer.inner.send(&stream(socket)?)?)
    })
}

/// Receives a buffer that was sent over the Unix stream socket `socket`, by dmafile_buffer_send or by dmafile
/// in another language. Waits for it if the socket is blocking. The sender is not trusted: its memory must be
/// a memfd that cannot shrink, or dma-bufs, and must contain the bytes that the message claims.
///
/// Returns 0 and stores the buffer in `*buffer`; free it with dmafile_buffer_free. On failure stores NULL and
/// returns -EPROTO if anything other than a buffer arrives, -ECONNRESET if the sender is gone, -EBADF or
/// -ENOTSOCK if `socket` is not a socket, -EINVAL for NULL, or any error of recvmsg(2).
///
/// Thread-safe, but only one thread at a time may use a socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_receive(socket: c_int, buffer: *mut *mut Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        let inner = dmafile::Buffer::receive(&stream(socket)?)?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { Buffer::new(Memory::Own(inner), None).give(buffer) };
        Ok(())
    })
}

/// Duplicates the caller's socket, so that a descriptor that is closed or not a socket gives an error.
fn stream(socket: RawFd) -> Result<UnixStream> {
    let fail = |errno| Failure::new(errno, "socket", "cannot use the descriptor");
    if socket < 0 {
        return Err(fail(libc::EBADF));
    }
    // SAFETY: it is borrowed only to be duplicated, which fails if it is not open.
    let theirs = unsafe { BorrowedFd::borrow_raw(socket) };
    let ours = theirs.try_clone_to_owned();
    let ours = ours.map_err(|error| fail(error.raw_os_error().unwrap_or(libc::EBADF)))?;
    Ok(UnixStream::from(ours))
}

/// The report of the load as one JSON object: what `dmafile load --json` prints. It belongs to the buffer and
/// is valid until that is freed.
///
/// NULL with errno ENODATA for a buffer that was received or taken; NULL with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_report_json(buffer: *const Buffer) -> *const c_char {
    border::pointer(|| {
        // SAFETY: the header requires null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        match &buffer.report {
            Some(text) => Ok(text.as_ptr()),
            None => Err(Failure::new(
                libc::ENODATA,
                "cannot return a report",
                "this buffer was loaded by another process",
            )),
        }
    })
}

/// Frees a buffer: unmaps its memory and closes its descriptor; NULL is a no-op. No other thread may be using
/// it. The memory lives on in processes that received or duplicated the descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_free(buffer: *mut Buffer) {
    // SAFETY: the header requires null or a buffer that is alive, freed once.
    unsafe { border::free(buffer) };
}
