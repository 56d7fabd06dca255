//! `struct dmafile_options`: how a load should be done.

use crate::Token;
use crate::border::{self, Failure, Result};
use dmafile::{Allocation, Io, Kind, Load, Method, Progress};
use libc::{c_char, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Mutex;

/// For dmafile_options.flags: try even if the load exceeds available memory or a cgroup's limit, at the
/// risk of an out-of-memory kill. Without it such a load is refused early (-ENOMEM).
pub const DMAFILE_NO_CHECK_MEMORY: u32 = 1;

/// Options of a load. A member that is zero (0, NULL) selects its default, so an all-zero struct selects
/// all defaults.
///
/// Zero the whole struct, then set `size`, then the options you want (see the top of this file). `size`
/// tells the library which members the caller's header has. With an older header, members added later
/// have their defaults. With a newer header, setting a member that the library does not have is refused
/// (-E2BIG), and so is a `size` above 4096. A `size` of 0 with any member set is refused (-EINVAL).
///
/// Strings are the words of the command line, in UTF-8. The library keeps nothing of the struct after
/// the call returns, so the struct can be reused, also by several threads.
#[repr(C)]
pub struct Options {
    /// sizeof(struct dmafile_options), in bytes.
    pub size: usize,
    /// Kind of memory: "memfd" (default); "anon" (private, without a descriptor); "udmabuf"; "heap:NAME"
    /// (a dma-buf from /dev/dma_heap/NAME); "module" (a dma-buf of dmafile.ko); "dma-buf" (the best of
    /// those three that works here); "cuda-host", "cuda-host:N", "hip-host", "hip-host:N" (a memfd that is
    /// pinned for a GPU while it is filled); "fd:N" (fills the existing memfd or dma-buf N from its start; the
    /// buffer uses a duplicate of N); "fd:N@OFFSET" (fills a range of it, starting at byte OFFSET, and
    /// changes nothing else).
    pub to: *const c_char,
    /// Page size: "auto" (default), "base", "thp", "huge".
    pub pages: *const c_char,
    /// Method that moves the bytes: "auto" (default), "uring", "threads", "bounce", "module",
    /// "copy-file-range", "heap-read", "premap".
    pub method: *const c_char,
    /// Bypass or use the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// When pages are allocated: "auto" (default), "ahead" (of the reads), "in-read" (by the reads
    /// themselves), "before" (all of them before the first read).
    pub allocation: *const c_char,
    /// Checksum to compute: "crc32c", "xxh3", "blake3" or "sha256" adds it to the report; "sha256=HEX"
    /// and similar also fail the load if the digest differs (-EBADMSG). "hub" compares each file with
    /// the digest that names it in a Hugging Face cache, and fails if there is none (-EINVAL). Default:
    /// none.
    pub verify: *const c_char,
    /// First byte of the file to load; default 0.
    pub offset: u64,
    /// Number of bytes to load; default: up to the end of the file. A range that ends after the file is
    /// refused.
    pub length: u64,
    /// Maximum size of a chunk in bytes. Memory is allocated in chunks, each while the previous one is
    /// being read. At least one block; default 128 MiB.
    pub chunk: u64,
    /// Bytes per operation: 4 KiB to 64 MiB, a multiple of the file's direct I/O alignment; default:
    /// chosen by the plan.
    pub block: u64,
    /// Queue depth: operations in flight, 1 to 4096; default: chosen by the plan.
    pub queue_depth: u32,
    /// DMAFILE_NO_CHECK_MEMORY, or 0.
    pub flags: u32,
    /// Called at most 30 times a second, and once at the end, with the number of bytes in place and the
    /// total (holes do not count); NULL for none. Calls come from the calling thread or from others,
    /// never two at a time, never with a smaller `done` than before, and never after the load has
    /// returned. It should return quickly, and must not throw an exception or longjmp out.
    pub progress: Option<extern "C" fn(done: u64, total: u64, user: *mut c_void)>,
    /// Passed to `progress`.
    pub user: *mut c_void,
    /// Ends the load early (-ECANCELED) when it is set; NULL for none. It must stay valid until the load
    /// has returned.
    pub cancel: *const Token,
}

/// A versioned struct: all zeros is its default, and later versions add members at its end.
///
/// # Safety
/// The struct begins with its `size`, consists of numbers, pointers and callbacks without padding, and
/// is valid when all of it is zero.
pub(crate) unsafe trait Versioned {
    /// Its name in the header.
    const NAME: &'static str;
    /// Its size in version 0.1, in bytes: the smallest that a caller can have.
    const SMALLEST: usize;
}

// SAFETY: as the trait requires.
unsafe impl Versioned for Options {
    const NAME: &'static str = "dmafile_options";
    const SMALLEST: usize = offset_of!(Self, cancel) + size_of::<*const Token>();
}

/// Called with the bytes in place, the total, and the caller's `user`.
pub(crate) type ProgressCall = extern "C" fn(done: u64, total: u64, user: *mut c_void);

/// No version is larger: a greater number was not meant as a size.
const LARGEST: usize = 4096;

/// Copies the caller's struct; null means all defaults.
///
/// # Safety
/// `theirs` is null, or valid for reads of as many bytes as its `size` says, or of version 0.1 of the
/// struct if `size` is 0.
pub(crate) unsafe fn copy<T: Versioned>(theirs: *const T) -> Result<T> {
    let mut ours = MaybeUninit::<T>::zeroed();
    if theirs.is_null() {
        // SAFETY: valid when it is all zero.
        return Ok(unsafe { ours.assume_init() });
    }
    // SAFETY: `size` is the first member in every version.
    let size = unsafe { theirs.cast::<usize>().read() };
    let refuse = |errno, why: &str| Err(Failure::new(errno, "options.size", why));
    let name = T::NAME;
    if size != 0 && size < T::SMALLEST {
        let why = format!("it is {size}, less than the size of any {name}");
        return refuse(libc::EINVAL, &why);
    }
    if size > LARGEST {
        let why = format!("it is {size}, more than the size of any {name}");
        return refuse(libc::E2BIG, &why);
    }
    let known = if size == 0 { T::SMALLEST } else { size }.min(size_of::<T>());
    let is_set = |mut bytes: Range<usize>| {
        bytes.any(|at| {
            // SAFETY: inside the bytes that the caller says it has.
            unsafe { theirs.cast::<u8>().add(at).read() != 0 }
        })
    };
    if size == 0 && is_set(0..known) {
        let why = format!("it is 0, but options are set; set it to sizeof(struct {name})");
        return refuse(libc::EINVAL, &why);
    }
    // Members that only a newer header has must be at their defaults.
    if is_set(known..size) {
        return refuse(
            libc::E2BIG,
            "an option is set that this version of dmafile does not know",
        );
    }
    // SAFETY: the caller has that many bytes, and so do we; the rest is zero.
    unsafe {
        ours.as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(theirs.cast(), known);
        Ok(ours.assume_init())
    }
}

/// Refuses unknown bits.
pub(crate) fn check_flags(flags: u32, known: u32) -> Result<()> {
    if flags & !known == 0 {
        return Ok(());
    }
    let why = format!("it has unknown bits: {flags:#x}");
    Err(Failure::new(libc::EINVAL, "options.flags", &why))
}

/// A number that is not at its default.
pub(crate) fn some<N: Default + PartialEq>(number: N) -> Option<N> {
    (number != N::default()).then_some(number)
}

/// Wraps the caller's progress function for the engine.
pub(crate) fn teller(call: ProgressCall, user: *mut c_void) -> impl Fn(Progress) + Send + Sync {
    let (user, told) = (User(user), Mutex::new(0));
    move |progress: Progress| {
        // Calls do not overlap: while one is running, others are skipped, except for the last, which is
        // made when all threads are done.
        if let Ok(mut told) = told.try_lock()
            && *told <= progress.done
        {
            *told = progress.done;
            call(progress.done, progress.total, user.pointer());
        }
    }
}

impl Options {
    /// Applies the options to a load that allocates its memory.
    ///
    /// # Safety
    /// The strings are null or NUL-terminated; the token is null or valid until the load has returned;
    /// the callback accepts `user` in any thread.
    pub(crate) unsafe fn apply(&self, load: Load) -> Result<Load> {
        // SAFETY: as this function requires.
        let load = match unsafe { kind(self.to)? } {
            Some(kind) => load.to(kind),
            None => load,
        };
        // SAFETY: as this function requires.
        unsafe { self.apply_to_caller(load) }
    }

    /// Applies the options to a load into the caller's memory.
    ///
    /// # Safety
    /// As [`Options::apply`].
    pub(crate) unsafe fn apply_elsewhere(&self, load: Load) -> Result<Load> {
        if !self.to.is_null() {
            let why = "the memory is the caller's; leave it NULL";
            return Err(Failure::new(libc::EINVAL, "options.to", why));
        }
        // SAFETY: as this function requires.
        unsafe { self.apply_to_caller(load) }
    }

    /// Applies everything except the kind of memory.
    unsafe fn apply_to_caller(&self, load: Load) -> Result<Load> {
        // SAFETY: as `apply` requires.
        let mut load = unsafe { self.tuning()? }.tune(load.names(&crate::border::Header));
        // SAFETY: as `apply` requires.
        unsafe {
            if let Some(pages) = word(self.pages, "options.pages")? {
                load = load.pages(pages);
            }
            if let Some(verify) = word(self.verify, "options.verify")? {
                load = load.verify(verify);
            }
        }
        if let Some(offset) = some(self.offset) {
            load = load.offset(offset);
        }
        if let Some(length) = some(self.length) {
            load = load.length(length);
        }
        if let Some(call) = self.progress {
            load = load.progress(teller(call, self.user));
        }
        // SAFETY: as `apply` requires.
        if let Some(token) = unsafe { self.cancel.as_ref() } {
            load = load.cancel(token.0.clone());
        }
        Ok(load)
    }

    /// The options that say how bytes move.
    ///
    /// # Safety
    /// The strings are null or NUL-terminated.
    pub(crate) unsafe fn tuning(&self) -> Result<Tuning> {
        check_flags(self.flags, DMAFILE_NO_CHECK_MEMORY)?;
        // SAFETY: as this function requires.
        unsafe {
            Ok(Tuning {
                method: word(self.method, "options.method")?,
                io: word(self.io, "options.io")?,
                allocation: word(self.allocation, "options.allocation")?,
                chunk: some(self.chunk),
                block: some(self.block),
                queue_depth: some(self.queue_depth),
                check_memory: self.flags & DMAFILE_NO_CHECK_MEMORY == 0,
            })
        }
    }
}

/// The options of a load that say how bytes move, without pointers of the caller.
pub(crate) struct Tuning {
    method: Option<Method>,
    io: Option<Io>,
    allocation: Option<Allocation>,
    chunk: Option<u64>,
    block: Option<u64>,
    queue_depth: Option<u32>,
    check_memory: bool,
}

impl Tuning {
    pub(crate) fn tune(&self, mut load: Load) -> Load {
        if let Some(method) = self.method {
            load = load.method(method);
        }
        if let Some(io) = self.io {
            load = load.io(io);
        }
        if let Some(allocation) = self.allocation {
            load = load.allocation(allocation);
        }
        if let Some(chunk) = self.chunk {
            load = load.chunk(chunk);
        }
        if let Some(block) = self.block {
            load = load.block(block);
        }
        if let Some(queue_depth) = self.queue_depth {
            load = load.queue_depth(queue_depth);
        }
        load.check_memory(self.check_memory)
    }
}

/// The caller's `user`, passed back to its callback.
struct User(*mut c_void);

// SAFETY: the pointer is only passed to the callback, never dereferenced; the header says that the
// callback runs in other threads.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// A method, so that a closure captures the whole struct and not the bare pointer.
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// The kind of memory that `options.to` names; None if it is null.
///
/// # Safety
/// As [`border::optional`].
pub(crate) unsafe fn kind(to: *const c_char) -> Result<Option<Kind>> {
    // SAFETY: as this function requires.
    let text = unsafe { border::optional(to, "options.to")? };
    Ok(text.map(dmafile_gpu::parse_kind).transpose()?)
}

/// A word of the command line; None if it is null.
///
/// # Safety
/// As [`border::optional`].
pub(crate) unsafe fn word<T>(pointer: *const c_char, what: &str) -> Result<Option<T>>
where
    T: FromStr<Err = dmafile::Error>,
{
    // SAFETY: as this function requires.
    let text = unsafe { border::optional(pointer, what)? };
    Ok(text.map(str::parse).transpose()?)
}
