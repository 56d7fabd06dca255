//! `struct dmafile_options`: how a load should be done.

use crate::Token;
use crate::border::{self, Failure, Result};
use dmafile::{Allocation, Io, Load, Method, Progress};
use libc::{c_char, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Mutex;

/// For dmafile_options.flags: try even what exceeds available memory or a cgroup's limit, at the
/// risk of an out-of-memory kill. Without it such a load is refused early (-ENOMEM).
pub const DMAFILE_NO_MEMORY_CHECK: u32 = 1;

/// How a load should be done. Every member that is zero (0, NULL) stands for its default; a struct
/// that is all zero asks for all defaults.
///
/// Initialise all of it, then set `size`, then what you want (see the top of this file). `size`
/// tells the library which members its caller knows. A caller of an older header gets defaults for
/// members that were added since; a newer one is refused (-E2BIG) where it sets members that the
/// library does not know, and so is a `size` of more than 4096, which no version has. A `size` of 0
/// beside members that are set is refused (-EINVAL).
///
/// The strings are the words of the command line, in UTF-8. Nothing in it is kept after the call
/// that it is handed to has returned, so that it may be used again, by several threads too.
#[repr(C)]
pub struct Options {
    /// sizeof(struct dmafile_options), in bytes.
    pub size: usize,
    /// Kind of memory: "memfd" (default), "anon" (private, without a descriptor), "fd:N" (fills the
    /// memfd or dma-buf N, from its start; the buffer uses a duplicate of N), "fd:N@OFFSET" (a part of
    /// it, from byte OFFSET on, and nothing else of it), "udmabuf", "heap:NAME",
    /// "dmafile" (a dma-buf of dmafile.ko), "dma-buf" (the best of those three that works here),
    /// "cuda-host", "cuda-host:N", "hip-host", "hip-host:N" (a memfd that is pinned for a GPU).
    pub to: *const c_char,
    /// Size of its pages: "auto" (default), "4k", "thp", "huge".
    pub pages: *const c_char,
    /// How bytes move: "auto" (default), "uring", "threads", "read", "mmap", "bounce", "sendfile",
    /// "splice", "module", "copy-file-range", "heap-read", "premap".
    pub method: *const c_char,
    /// Past or through the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// When pages come into being: "auto" (default), "ahead", "in-read", "before".
    pub allocation: *const c_char,
    /// A checksum to compute: "crc32c", "xxh3", "blake3" or "sha256" puts it into the report;
    /// "sha256=HEX" and its like fail the load where it differs (-EBADMSG). "hub" compares each file
    /// with the digest that names it in a Hugging Face cache, and fails where it has none (-EINVAL).
    /// Default: none.
    pub verify: *const c_char,
    /// First byte of the file that is wanted; default 0.
    pub offset: u64,
    /// How many bytes are wanted; default to the end of the file. Past the end is refused.
    pub length: u64,
    /// Bytes allocated before their reads begin, at least a block; default 128 MiB.
    pub gather: u64,
    /// Bytes of one operation: 4 KiB to 64 MiB, a multiple of the file's direct alignment;
    /// default left to the plan.
    pub block: u64,
    /// Operations in flight, 1 to 4096; default left to the plan.
    pub queue_depth: u32,
    /// DMAFILE_NO_MEMORY_CHECK, or 0.
    pub flags: u32,
    /// Called now and then, at most 30 times a second, and once at the end, with how many bytes are
    /// in place and how many there will be (holes do not count); NULL for none. Calls come from
    /// the calling thread or from others, never two at once and never backwards, and none after
    /// the load has returned. It should return soon, and must neither throw an exception nor jump out.
    pub progress: Option<extern "C" fn(done: u64, total: u64, user: *mut c_void)>,
    /// Handed to `progress` as it is.
    pub user: *mut c_void,
    /// Ends the load early (-ECANCELED) once it is set; NULL for none. It has to live until the
    /// load has returned.
    pub cancel: *const Token,
}

/// A struct whose default is all zeros, and which grows.
///
/// # Safety
/// It begins with its `size`, consists of numbers, pointers and callbacks without gaps between them, and
/// is valid when it is all zero.
pub(crate) unsafe trait Growing {
    /// What the header calls it.
    const NAME: &'static str;
    /// The struct as version 0.1 has it: the least that a caller can have, in bytes.
    const SMALLEST: usize;
}

// SAFETY: as the trait asks for.
unsafe impl Growing for Options {
    const NAME: &'static str = "dmafile_options";
    const SMALLEST: usize = offset_of!(Self, cancel) + size_of::<*const Token>();
}

/// Called with how many bytes are in place, how many there will be, and what the caller wants to see.
pub(crate) type ProgressCall = extern "C" fn(done: u64, total: u64, user: *mut c_void);

/// Nothing asks for more: a larger one is a number that was not meant as a size.
const LARGEST: usize = 4096;

/// Copies what the caller has; null is all defaults.
///
/// # Safety
/// `theirs` is null, or valid for reads of as many bytes as its `size` says, and of version 0.1 of the
/// struct where that is 0.
pub(crate) unsafe fn copy<T: Growing>(theirs: *const T) -> Result<T> {
    let mut ours = MaybeUninit::<T>::zeroed();
    if theirs.is_null() {
        // SAFETY: valid when it is all zero.
        return Ok(unsafe { ours.assume_init() });
    }
    // SAFETY: `size` is the first member, and in every version.
    let size = unsafe { theirs.cast::<usize>().read() };
    let refuse = |errno, why: &str| Err(Failure::new(errno, "options.size", why));
    let name = T::NAME;
    if size != 0 && size < T::SMALLEST {
        let why = format!("it is {size}, less than any {name} has");
        return refuse(libc::EINVAL, &why);
    }
    if size > LARGEST {
        let why = format!("it is {size}, more than any {name} has");
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
        let why = format!("it is 0 beside options that are set; set it to sizeof(struct {name})");
        return refuse(libc::EINVAL, &why);
    }
    // What a newer header has, an older library can only leave at its default.
    if is_set(known..size) {
        return refuse(
            libc::E2BIG,
            "an option is set that this version of dmafile does not know",
        );
    }
    // SAFETY: the caller has that many bytes, and so have we; zeros follow them.
    unsafe {
        ours.as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(theirs.cast(), known);
        Ok(ours.assume_init())
    }
}

/// Refuses bits that mean nothing.
pub(crate) fn check_flags(flags: u32, known: u32) -> Result<()> {
    if flags & !known == 0 {
        return Ok(());
    }
    let why = format!("it has bits that mean nothing: {flags:#x}");
    Err(Failure::new(libc::EINVAL, "options.flags", &why))
}

/// A number that is not at its default.
pub(crate) fn some<N: Default + PartialEq>(number: N) -> Option<N> {
    (number != N::default()).then_some(number)
}

/// What an engine calls to say how far it is, which calls the caller's function.
pub(crate) fn teller(call: ProgressCall, user: *mut c_void) -> impl Fn(Progress) + Send + Sync {
    let (user, told) = (User(user), Mutex::new(0));
    move |progress: Progress| {
        // A call that takes long is not joined by another: the next ones are left out, but for the
        // last, which comes when all threads are done.
        if let Ok(mut told) = told.try_lock()
            && *told <= progress.done
        {
            *told = progress.done;
            call(progress.done, progress.total, user.pointer());
        }
    }
}

impl Options {
    /// Adds them to a load of memory that it allocates.
    ///
    /// # Safety
    /// Its strings are null or end in NUL; its token is null or alive until the load has returned;
    /// its callback takes `user` from any thread.
    pub(crate) unsafe fn apply(&self, load: Load) -> Result<Load> {
        // SAFETY: as this function asks for.
        let load = match unsafe { word(self.to, "options.to")? } {
            Some(kind) => load.to(kind),
            None => load,
        };
        // SAFETY: as this function asks for.
        unsafe { self.apply_to_caller(load) }
    }

    /// Adds them to a load into memory of the caller.
    ///
    /// # Safety
    /// As [`Options::apply`].
    pub(crate) unsafe fn apply_elsewhere(&self, load: Load) -> Result<Load> {
        if !self.to.is_null() {
            let why = "the memory is the caller's; leave it NULL";
            return Err(Failure::new(libc::EINVAL, "options.to", why));
        }
        // SAFETY: as this function asks for.
        unsafe { self.apply_to_caller(load) }
    }

    /// All but the kind of memory.
    unsafe fn apply_to_caller(&self, load: Load) -> Result<Load> {
        // SAFETY: as `apply` asks for.
        let mut load = unsafe { self.tuning()? }.tune(load.names(&crate::border::Header));
        // SAFETY: as `apply` asks for.
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
        // SAFETY: as `apply` asks for.
        if let Some(token) = unsafe { self.cancel.as_ref() } {
            load = load.cancel(token.0.clone());
        }
        Ok(load)
    }

    /// How bytes move.
    ///
    /// # Safety
    /// Its strings are null or end in NUL.
    pub(crate) unsafe fn tuning(&self) -> Result<Tuning> {
        check_flags(self.flags, DMAFILE_NO_MEMORY_CHECK)?;
        // SAFETY: as this function asks for.
        unsafe {
            Ok(Tuning {
                method: word(self.method, "options.method")?,
                io: word(self.io, "options.io")?,
                allocation: word(self.allocation, "options.allocation")?,
                gather: some(self.gather),
                block: some(self.block),
                queue_depth: some(self.queue_depth),
                check_memory: self.flags & DMAFILE_NO_MEMORY_CHECK == 0,
            })
        }
    }
}

/// The options of a load that say how its bytes move, without pointers of the caller.
pub(crate) struct Tuning {
    method: Option<Method>,
    io: Option<Io>,
    allocation: Option<Allocation>,
    gather: Option<u64>,
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
        if let Some(gather) = self.gather {
            load = load.gather(gather);
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

/// What the caller wants to see again in its callback.
struct User(*mut c_void);

// SAFETY: it is carried to the callback, never followed; the header says that the callback runs in
// other threads.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// A method, so that a closure takes all of it and not the bare pointer.
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// A word of the command line; None where it is null.
///
/// # Safety
/// As [`border::optional`].
pub(crate) unsafe fn word<T>(pointer: *const c_char, what: &str) -> Result<Option<T>>
where
    T: FromStr<Err = dmafile::Error>,
{
    // SAFETY: as this function asks for.
    let text = unsafe { border::optional(pointer, what)? };
    Ok(text.map(str::parse).transpose()?)
}
