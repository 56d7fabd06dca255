//! `struct dmafile_buffer`: memory that holds a file's bytes.

use crate::border::{self, Failure, Result, exclusive, shared};
use crate::options::word;
use dmafile::{HeldFile, Loaded, Report};
use libc::{c_char, c_int, c_void};
use std::ffi::CString;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// A filled buffer: the wanted bytes of a file, and around them zeros. Opaque.
///
/// Functions that take it `const` may be called by several threads at once; the others need it for
/// themselves alone. It belongs to no thread: any may use and free it.
pub struct Buffer {
    inner: Memory,
    /// What `inner` has, with its numbers.
    dma_bufs: Vec<DmaBuf>,
    report: Option<CString>,
}

/// The memory itself, and what has to last as long.
enum Memory {
    Own(dmafile::Buffer),
    /// Its holder counts this process as one that has it.
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

/// A dma-buf of a buffer. It belongs to the buffer; later versions may have more members behind
/// these, so use it where it is, by its pointer.
#[repr(C)]
pub struct DmaBuf {
    /// Its descriptor, under the rules of dmafile_buffer_fd.
    pub fd: c_int,
    /// Where it begins, counted from the first byte of the first: the wanted bytes start at
    /// dmafile_buffer_offset, so counted.
    pub at: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

impl Buffer {
    pub(crate) fn of(loaded: Loaded) -> Result<Self> {
        Self::of_source(loaded.buffer, Some(&loaded.report))
    }

    /// Of a source of a snapshot; one without a byte has not been loaded.
    pub(crate) fn of_source(inner: dmafile::Buffer, report: Option<&Report>) -> Result<Self> {
        let report = report.map(|report| {
            let json = serde_json::to_string(report).expect("a report is plain data");
            c_string(json)
        });
        Ok(Self::new(Memory::Own(inner), report.transpose()?))
    }

    /// What another process loaded.
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

    /// -EFBIG where one descriptor is not enough; `instead` gives all of them.
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

    /// Hands it to the caller.
    ///
    /// # Safety
    /// `place` is valid for writing.
    pub(crate) unsafe fn give(self, place: *mut *mut Self) {
        // SAFETY: as this function asks for.
        unsafe { place.write(Box::into_raw(Box::new(self))) };
    }
}

/// Text for C.
pub(crate) fn c_string(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|_| Failure::new(libc::EILSEQ, "text", "it has a NUL in it"))
}

/// A place for a handle, emptied, so that it holds NULL whatever happens.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn empty<T>(place: *mut *mut T, what: &str) -> Result<()> {
    if place.is_null() {
        return Err(Failure::new(libc::EINVAL, what, "it is NULL"));
    }
    // SAFETY: as this function asks for.
    unsafe { place.write(std::ptr::null_mut()) };
    Ok(())
}

/// The descriptor of a buffer, to be mapped, sent, or handed to a driver; its bytes start at
/// dmafile_buffer_offset. It stays the buffer's: do not close it, and use it no longer than the
/// buffer lives (dup(2) gives one of your own). Close-on-exec is set.
///
/// Returns the descriptor, or -EOPNOTSUPP for private memory, which has none, -EFBIG for several
/// dma-bufs, which have one each (dmafile_buffer_dma_buf); -EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_fd(buffer: *const Buffer) -> c_int {
    border::number(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        let what = "cannot give the descriptor";
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

/// Pins a buffer's memory for a device, "cuda:N" or "hip:N": all devices of its driver read it
/// directly, and write to it unless it is sealed. The pages of its bytes are pinned, and no more,
/// until dmafile_buffer_unpin or dmafile_buffer_free. Written for the drivers of GPUs, tested on a
/// double of them.
///
/// Returns 0; -EBUSY where it is pinned already; -EOPNOTSUPP where the driver pins no memory that is
/// mapped for reading alone, as a sealed buffer is; -ENODEV where the device cannot be used; -EINVAL
/// for NULL and an unknown word; else what the driver says.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_pin(buffer: *const Buffer, device: *const c_char) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        // SAFETY: the header asks for null or a string.
        let device = unsafe { word(device, "device")? };
        let none = || Failure::new(libc::EINVAL, "device", "it is NULL");
        Ok(buffer.inner.pin(device.ok_or_else(none)?)?)
    })
}

/// Unpins a buffer, where it is pinned: no device may be reading it.
///
/// Returns 0; -EINVAL for NULL; what the driver says.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_unpin(buffer: *const Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        Ok(unsafe { shared(buffer, "buffer")? }.inner.unpin()?)
    })
}

/// How many dma-bufs a buffer consists of, one behind the other: 1, or more where the limit of the
/// kernel on one of "udmabuf" (its size_limit_mb) forced them; 0 where it is no dma-buf. 0 with errno
/// EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_dma_buf_count(buffer: *const Buffer) -> usize {
    // SAFETY: the header asks for null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.dma_bufs.len()))
}

/// The dma-buf of a number, from 0 to dmafile_buffer_dma_buf_count - 1, in the order in which they
/// lie in the buffer. It belongs to the buffer.
///
/// NULL with errno ERANGE for another number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_dma_buf(
    buffer: *const Buffer,
    index: usize,
) -> *const DmaBuf {
    border::pointer(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
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

/// Frees a buffer but for its descriptor, which is the caller's from now on, to be closed with
/// close(2). Ask for dmafile_buffer_offset and _len before. Close-on-exec is set.
///
/// The buffer is freed in every case; no other thread may be using it.
///
/// Returns the descriptor, or -EOPNOTSUPP for private memory, -EFBIG for several dma-bufs
/// (dmafile_buffer_into_fds), -EMFILE where a second descriptor is needed (for "fd:N") and none can
/// be had; -EINVAL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_into_fd(buffer: *mut Buffer) -> c_int {
    border::number(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        unsafe { shared(buffer, "buffer")? };
        // SAFETY: it is not null, so it came from `Box::into_raw`, and is given up here.
        let owned = unsafe { Box::from_raw(buffer) };
        owned.check_single("cannot hand the buffer on", "dmafile_buffer_into_fds")?;
        Ok(owned.inner.into_buffer().into_fd()?.into_raw_fd())
    })
}

/// As dmafile_buffer_into_fd, for a buffer that may consist of several dma-bufs: puts the descriptors
/// to `fds`, which has room for `room` of them, in the order of their bytes. Ask for
/// dmafile_buffer_dma_buf_count before: there are as many as it says, or 1 where that is 0.
///
/// The buffer is freed in every case; no other thread may be using it.
///
/// Returns how many descriptors there are, or, with `fds` as it was, -ERANGE where `room` is less,
/// -EOPNOTSUPP for private memory, -EMFILE as there; -EINVAL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_into_fds(
    buffer: *mut Buffer,
    fds: *mut c_int,
    room: usize,
) -> c_int {
    border::number(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        unsafe { shared(buffer, "buffer")? };
        // SAFETY: it is not null, so it came from `Box::into_raw`, and is given up here.
        let owned = unsafe { Box::from_raw(buffer) };
        border::check(fds.cast(), room, "fds")?;
        let given = owned.inner.into_buffer().into_fds()?;
        if given.len() > room {
            let why = format!("it has {} descriptors, and room is {room}", given.len());
            let failure = Failure::new(libc::ERANGE, "cannot hand the buffer on", &why);
            return Err(failure.remedy("ask for dmafile_buffer_dma_buf_count before"));
        }
        let count = c_int::try_from(given.len());
        let count = count.expect("descriptors are numbered by an int");
        for (index, fd) in given.into_iter().enumerate() {
            // SAFETY: not null where there is room; the header asks for `room` places to write.
            unsafe { fds.add(index).write(fd.into_raw_fd()) };
        }
        Ok(count)
    })
}

/// How many bytes were wanted, and are there; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_len(buffer: *const Buffer) -> u64 {
    // SAFETY: the header asks for null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.inner.len()))
}

/// Where the wanted bytes start in the descriptor, in bytes: less than a page, or the file's direct
/// alignment where that is larger; for "fd:N@OFFSET" that offset; 0 with errno EINVAL for NULL.
///
/// dmafile_buffer_data, _read_at and _write_at count from the first wanted byte already.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_offset(buffer: *const Buffer) -> u64 {
    // SAFETY: the header asks for null or a buffer that is alive.
    border::value(|| Ok(unsafe { shared(buffer, "buffer")? }.inner.offset()))
}

/// The wanted bytes, dmafile_buffer_len of them, where nobody else can change them: in private
/// memory, and in a buffer that is sealed. Valid until the buffer is freed.
///
/// NULL with errno EACCES for memory that others can change: seal it, use dmafile_buffer_read_at,
/// or mmap(2) the descriptor at your own risk. NULL with errno EINVAL for NULL.
///
/// Thread-safe; but not beside dmafile_buffer_write_at or a writer through _data_mut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_data(buffer: *const Buffer) -> *const c_void {
    border::pointer(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        match buffer.inner.as_slice() {
            Some(bytes) => Ok(bytes.as_ptr().cast()),
            None => Err(Failure::new(
                libc::EACCES,
                "cannot give a pointer",
                "others can change this memory; seal it, use dmafile_buffer_read_at, \
                 or map the descriptor",
            )),
        }
    })
}

/// The wanted bytes, to be changed too, where nobody else can reach them: in private memory. Valid
/// until the buffer is freed.
///
/// NULL with errno EACCES for memory that others can reach (use dmafile_buffer_write_at, or mmap(2)
/// the descriptor at your own risk); NULL with errno EINVAL for NULL.
///
/// No other thread may be using the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_data_mut(buffer: *mut Buffer) -> *mut c_void {
    let found: *const c_void = border::pointer(|| {
        // SAFETY: the header asks for null or a buffer that nobody else is using.
        let buffer = unsafe { exclusive(buffer, "buffer")? };
        match buffer.inner.as_mut_slice() {
            Some(bytes) => Ok(bytes.as_mut_ptr().cast_const().cast()),
            None => Err(Failure::new(
                libc::EACCES,
                "cannot give a pointer to write by",
                "others can reach this memory, or it is sealed; use dmafile_buffer_write_at, \
                 or map the descriptor",
            )),
        }
    });
    found.cast_mut()
}

/// Copies `len` bytes out of a buffer, from `offset` of the wanted ones, to `into`; the access of
/// the CPU is announced to devices that share the memory. What somebody else writes meanwhile may
/// be seen or not, byte by byte.
///
/// Returns 0, or -EINVAL outside the wanted bytes (nothing is copied then) and for NULL; -EIO where
/// its owner has cut the memory of an "fd:N" short.
///
/// Thread-safe. `into` may not lie in the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_read_at(
    buffer: *const Buffer,
    offset: u64,
    into: *mut c_void,
    len: usize,
) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        border::check(into.cast(), len, "into")?;
        if len == 0 {
            return Ok(buffer.inner.access()?.read_at(offset, &mut [])?);
        }
        // SAFETY: not null; the header asks for `len` bytes to write, of C memory, which has bytes
        // of some value in it, and which lies outside the buffer.
        let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
        Ok(buffer.inner.access()?.read_at(offset, into)?)
    })
}

/// Copies `len` bytes at `from` into a buffer, to `offset` of the wanted ones; the access of the CPU
/// is announced to devices that share the memory.
///
/// Returns 0, or -EINVAL outside the wanted bytes (nothing is copied then) and for NULL; -EPERM for
/// a buffer that is sealed; -EIO as dmafile_buffer_read_at.
///
/// No other thread may be using the buffer. `from` may not lie in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_write_at(
    buffer: *mut Buffer,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that nobody else is using.
        let buffer = unsafe { exclusive(buffer, "buffer")? };
        border::check(from.cast(), len, "from")?;
        let from = if len == 0 {
            &[]
        } else {
            // SAFETY: not null; the header asks for `len` bytes to read, outside the buffer.
            unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) }
        };
        Ok(buffer.inner.access_mut()?.write_at(offset, from)?)
    })
}

/// Forbids any change of the contents and the size of a buffer, by anybody, for good (F_SEAL_WRITE,
/// fcntl(2)). dmafile_buffer_data works from then on.
///
/// Returns 0, or -EBUSY while somebody has it mapped for writing or pinned, -EOPNOTSUPP for private
/// memory and for dma-bufs but those of "udmabuf" (-EBUSY), -EPERM for an "fd:N" that may not be sealed; -EINVAL for NULL.
///
/// No other thread may be using the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_seal(buffer: *mut Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that nobody else is using.
        Ok(unsafe { exclusive(buffer, "buffer")? }.inner.seal()?)
    })
}

/// Sends a buffer over the Unix stream socket `socket` (SCM_RIGHTS, unix(7)); the other side has the
/// same memory then, not a copy. The buffer stays the caller's. Does not raise SIGPIPE.
///
/// Returns 0, or -EOPNOTSUPP for private memory, -E2BIG for more than 253 dma-bufs, which no message
/// carries, -EBADF or -ENOTSOCK where `socket` is none, what sendmsg(2) gives; -EINVAL for NULL.
///
/// Thread-safe; but one thread at a time for one socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_send(buffer: *const Buffer, socket: c_int) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        Ok(buffer.inner.send(&stream(socket)?)?)
    })
}

/// Receives what dmafile_buffer_send, or the library in another language, sent over the Unix stream
/// socket `socket`, and waits for it where that blocks. The sender is not trusted: its memory has to
/// be a memfd that cannot shrink, or dma-bufs, and to hold the bytes that are claimed.
///
/// Returns 0, with the buffer in `*buffer`, to be freed with dmafile_buffer_free; or, with NULL
/// there, -EPROTO for anything else than a buffer, -ECONNRESET where the sender went away, -EBADF or
/// -ENOTSOCK where `socket` is none, what recvmsg(2) gives; -EINVAL for NULL.
///
/// Thread-safe; but one thread at a time for one socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_receive(socket: c_int, buffer: *mut *mut Buffer) -> c_int {
    border::status(|| {
        // SAFETY: the header asks for null or a place for a pointer.
        unsafe { empty(buffer, "buffer")? };
        let inner = dmafile::Buffer::receive(&stream(socket)?)?;
        // SAFETY: it is not null, and so a place for a pointer.
        unsafe { Buffer::new(Memory::Own(inner), None).give(buffer) };
        Ok(())
    })
}

/// A descriptor of our own for the caller's socket, so that one that is none, or not open, is an
/// error and not a mistake.
fn stream(socket: RawFd) -> Result<UnixStream> {
    let fail = |errno| Failure::new(errno, "socket", "cannot use the descriptor");
    if socket < 0 {
        return Err(fail(libc::EBADF));
    }
    // SAFETY: it is borrowed to be duplicated only, which says so where it is not open.
    let theirs = unsafe { BorrowedFd::borrow_raw(socket) };
    let ours = theirs.try_clone_to_owned();
    let ours = ours.map_err(|error| fail(error.raw_os_error().unwrap_or(libc::EBADF)))?;
    Ok(UnixStream::from(ours))
}

/// How the load went, as one JSON object: what `dmafile load --json` prints. It belongs to the
/// buffer and is valid until that is freed.
///
/// NULL with errno ENODATA for a buffer that was received or taken; NULL with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_report_json(buffer: *const Buffer) -> *const c_char {
    border::pointer(|| {
        // SAFETY: the header asks for null or a buffer that is alive.
        let buffer = unsafe { shared(buffer, "buffer")? };
        match &buffer.report {
            Some(text) => Ok(text.as_ptr()),
            None => Err(Failure::new(
                libc::ENODATA,
                "cannot give a report",
                "this buffer was loaded by another process",
            )),
        }
    })
}

/// Frees a buffer: unmaps its memory and closes its descriptor; NULL is nothing to free. No other
/// thread may be using it. Who has received or duplicated the descriptor keeps the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_buffer_free(buffer: *mut Buffer) {
    // SAFETY: the header asks for null or a buffer that is alive, freed once.
    unsafe { border::free(buffer) };
}
