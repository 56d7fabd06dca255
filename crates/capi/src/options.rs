//! `struct dmafile_options`: how a load should be done.

use crate::Token;
use crate::border::{self, Failure, Header, Result};
use dmafile::{Kind, Load, Opt, OptionValue, Progress, Save};
use libc::{c_char, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Mutex;

/// For dmafile_options.flags: load even what exceeds available memory or a cgroup's limit, at the risk of an
/// out-of-memory kill.
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
    /// Kind of memory: "memfd", "anon", "dma-buf", "fd:N", and others; default: "memfd". "memfd" (sealable);
    /// "anon" (private, without a descriptor); "udmabuf" (a dma-buf over a memfd, or several); "heap:NAME" (a
    /// dma-buf from /dev/dma_heap/NAME); "module" (a dma-buf of dmafile.ko); "dma-buf" (the best of the last
    /// three that works here); "fd:N" (fills an existing memfd or dma-buf from its start, and keeps a
    /// duplicate of N); "fd:N@OFFSET" (fills a range of it, from byte OFFSET on, and changes nothing else);
    /// "cuda-host", "cuda-host:N", "hip-host", "hip-host:N" (a memfd that is pinned for a GPU while it is
    /// filled).
    pub to: *const c_char,
    /// Page size: "auto" (default), "base", "thp", "huge".
    pub pages: *const c_char,
    /// Method that moves the bytes: "auto" (default), "uring", "threads", "bounce", "module",
    /// "copy-file-range", "heap-read", "premap", "fetch".
    pub method: *const c_char,
    /// Bypass or use the page cache: "auto" (default), "direct", "buffered".
    pub io: *const c_char,
    /// When memory is allocated: "auto" (default), "ahead", "in-read", "before". "ahead" (one chunk ahead of
    /// the reads), "in-read" (by the reads themselves), "before" (all of it before the first read).
    pub allocation: *const c_char,
    /// Compute a checksum, and compare it with HEX if given; default: none. "crc32c", "crc64nvme", "xxh3",
    /// "blake3" or "sha256", which the report then contains; with "=HEX" the load fails (EBADMSG) if the
    /// digest differs. "store" compares each file with the digest that is stored with it (its name in a
    /// Hugging Face cache; what the store of an object says), and refuses files without one.
    pub verify: *const c_char,
    /// First byte of the file to load; default: 0.
    pub offset: u64,
    /// How many bytes to load; default: to the end of the file. A range that ends after the file is refused.
    pub length: u64,
    /// Largest chunk of memory that is allocated before it is read into, at least a block; default: 128 MiB.
    pub chunk: u64,
    /// Size of one operation, 4 KiB to 64 MiB, a multiple of the file's alignment for direct I/O; default: 4
    /// MiB for direct I/O, 1 MiB through the page cache, 512 KiB for "bounce", 8 MiB for objects.
    pub block: u64,
    /// Operations in flight, 1 to 4096; default: 8 for direct I/O, 1 to 8 by the number of CPUs through the
    /// page cache, 16 for objects. At most 64 threads, where each does one operation after another.
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
    /// The most to read or receive in a second, at least 64 KiB; default: none. It is held on average, block
    /// by block. Methods in which the kernel moves all bytes in one call are left out.
    pub limit: u64,
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

/// The value of a member that is an option. Zero selects the default.
pub(crate) enum Member {
    Text(*const c_char),
    Number(u64),
    /// A flag that switches the option off.
    Off(bool),
}

/// Options that a struct of the caller sets, without its pointers.
#[derive(Clone)]
pub(crate) struct Values(Vec<(Opt, OptionValue)>);

impl Values {
    /// Takes those of these members that are set.
    ///
    /// # Safety
    /// The strings are null or NUL-terminated.
    pub(crate) unsafe fn of(members: &[(Opt, Member)]) -> Result<Self> {
        let mut values = Vec::new();
        for &(option, ref member) in members {
            let value = match *member {
                Member::Text(text) => {
                    let what = format!("options.{}", option.name());
                    // SAFETY: as this function requires.
                    unsafe { border::optional(text, &what)? }.map(Into::into)
                }
                Member::Number(number) => some(number).map(Into::into),
                Member::Off(off) => off.then(|| false.into()),
            };
            values.extend(value.map(|value| (option, value)));
        }
        Ok(Self(values))
    }

    /// Without the options of which a caller says that they are set elsewhere.
    pub(crate) fn without(mut self, others: &[Opt]) -> Self {
        self.0.retain(|(option, _)| !others.contains(option));
        self
    }

    pub(crate) fn load(&self, load: Load) -> Load {
        load.names(&Header)
            .kinds(dmafile_gpu::parse_kind)
            .set_all(&self.0)
    }

    pub(crate) fn save<'m>(&self, save: Save<'m>) -> Save<'m> {
        save.names(&Header).set_all(&self.0)
    }
}

/// Passes the callback and the token of options to a builder.
///
/// # Safety
/// The token is null or valid until the builder has done its work; the callback accepts `user` in any thread.
macro_rules! watched {
    ($builder:expr, $options:expr) => {{
        let mut builder = $builder;
        if let Some(call) = $options.progress {
            builder = builder.progress(crate::options::teller(call, $options.user));
        }
        if let Some(token) = $options.cancel.as_ref() {
            builder = builder.cancel(token.0.clone());
        }
        builder
    }};
}
pub(crate) use watched;

impl Options {
    /// Applies the options to a load that allocates its memory.
    ///
    /// # Safety
    /// The strings are null or NUL-terminated; the token is null or valid until the load has returned;
    /// the callback accepts `user` in any thread.
    pub(crate) unsafe fn apply(&self, load: Load) -> Result<Load> {
        // SAFETY: as this function requires.
        unsafe { Ok(watched!(self.values()?.load(load), self)) }
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
        unsafe { self.apply(load) }
    }

    /// The options of the load.
    ///
    /// # Safety
    /// The strings are null or NUL-terminated.
    pub(crate) unsafe fn values(&self) -> Result<Values> {
        use Member::{Number, Off, Text};
        check_flags(self.flags, DMAFILE_NO_CHECK_MEMORY)?;
        let off = self.flags & DMAFILE_NO_CHECK_MEMORY != 0;
        let members = [
            (Opt::To, Text(self.to)),
            (Opt::Pages, Text(self.pages)),
            (Opt::Method, Text(self.method)),
            (Opt::Io, Text(self.io)),
            (Opt::Allocation, Text(self.allocation)),
            (Opt::Verify, Text(self.verify)),
            (Opt::Offset, Number(self.offset)),
            (Opt::Length, Number(self.length)),
            (Opt::Chunk, Number(self.chunk)),
            (Opt::Block, Number(self.block)),
            (Opt::QueueDepth, Number(self.queue_depth.into())),
            (Opt::Limit, Number(self.limit)),
            (Opt::CheckMemory, Off(off)),
        ];
        // SAFETY: as this function requires.
        unsafe { Values::of(&members) }
    }
}

/// The caller's `user`, passed back to its callback.
pub(crate) struct User(*mut c_void);

// SAFETY: the pointer is only passed to the callback, never dereferenced; the header says that the
// callback runs in other threads.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    pub(crate) fn of(user: *mut c_void) -> Self {
        Self(user)
    }

    /// A method, so that a closure captures the whole struct and not the bare pointer.
    pub(crate) fn pointer(&self) -> *mut c_void {
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
