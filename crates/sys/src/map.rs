//! Mappings, and regions of memory that the kernel reads and writes.

use super::{Errno, last_errno};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The size of a base page, in bytes.
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// A mapping that is unmapped when dropped.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    share: Share,
}

/// Who else can change the bytes of a mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    /// Nothing else: it is private.
    Private,
    /// Nothing: its file is sealed against writing and shrinking.
    Sealed,
    /// Any process that has the descriptor.
    Shared,
}

// SAFETY: a mapping is plain memory that no thread owns. Its address is private to this crate: `Region` copies
// bytes or passes the address to the kernel, and makes no reference from it; `View` makes slices only of bytes
// that nothing else can change, and no region exists while it does.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private anonymous memory of `len` bytes whose start is a multiple of `align` (a power of
    /// two, at least a page), so that transparent huge pages can begin at its first byte.
    pub fn anon(len: usize, align: usize) -> Result<Self, Errno> {
        Self::anon_with(len, align, MapFlags::empty())
    }

    /// As [`Mapping::anon`], for memory of which most will never be touched: the kernel does not reserve for it
    /// (MAP_NORESERVE).
    pub fn anon_sparse(len: usize, align: usize) -> Result<Self, Errno> {
        Self::anon_with(len, align, MapFlags::NORESERVE)
    }

    fn anon_with(len: usize, align: usize, flags: MapFlags) -> Result<Self, Errno> {
        let hole = Self::reserve(len, align)?;
        let flags = flags | MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: the range is inside the reservation made above, which nothing else uses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                hole.base.as_ptr().cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        debug_assert_eq!(base.cast(), hole.base.as_ptr());
        Ok(hole)
    }

    /// Private memory made of hugetlb pages; `len` is a multiple of their size.
    ///
    /// ENOMEM if the pool cannot reserve all of them: mapping reserves.
    pub fn anon_huge(len: usize) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::HUGETLB,
            )?
        };
        Ok(Self::owned(base, len, Share::Private))
    }

    /// `len` bytes of `fd` from its start, shared. `align` as in [`Mapping::anon`]; 1 leaves the address to the
    /// kernel, as hugetlb descriptors require.
    pub fn shared(
        fd: BorrowedFd<'_>,
        len: usize,
        align: usize,
        writable: bool,
    ) -> Result<Self, Errno> {
        let mut prot = ProtFlags::READ;
        prot.set(ProtFlags::WRITE, writable);
        if align <= 1 {
            return Self::shared_with(fd, len, prot, MapFlags::SHARED);
        }
        let mut hole = Self::reserve(len, align)?;
        hole.share = Share::Shared;
        // SAFETY: the range is inside the reservation made above, which nothing else uses.
        unsafe {
            rustix::mm::mmap(
                hole.base.as_ptr().cast(),
                len,
                prot,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                0,
            )?;
        }
        Ok(hole)
    }

    /// As [`Mapping::shared`], writable, and left out of forked children from the start: as long as a child has
    /// such a mapping, the memory cannot be sealed against writing.
    pub fn unforked(fd: BorrowedFd<'_>, len: usize, align: usize) -> Result<Self, Errno> {
        Self::outside_forks(|| Self::shared(fd, len, align, true))
    }

    fn outside_forks(map: impl FnOnce() -> Result<Self, Errno>) -> Result<Self, Errno> {
        super::fork::hold_off(|| map().inspect(|map| map.region().leave_out_of_forks(true)))
    }

    /// `len` bytes of `fd` from its start, copied page by page when written to (MAP_PRIVATE); `align` as in
    /// [`Mapping::shared`]. The kernel does not reserve memory for the copies (MAP_NORESERVE).
    fn copied(fd: BorrowedFd<'_>, len: usize, align: usize) -> Result<Self, Errno> {
        let hole = Self::reserve(len, align)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is inside the reservation made above, which nothing else uses.
        unsafe { rustix::mm::mmap(hole.base.as_ptr().cast(), len, prot, flags, fd, 0)? };
        Ok(hole)
    }

    /// `len` bytes of a hugetlb memfd from its start, shared and writable, of which few will be touched:
    /// nothing is reserved for its holes (MAP_NORESERVE). Touching a hole raises SIGBUS if the pool is empty.
    /// Left out of forked children, as [`Mapping::unforked`].
    pub fn shared_sparse(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        Self::outside_forks(|| Self::shared_with(fd, len, prot, flags))
    }

    fn shared_with(
        fd: BorrowedFd<'_>,
        len: usize,
        prot: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, fd, 0)? };
        Ok(Self::owned(base, len, Share::Shared))
    }

    /// Whole dma-bufs, back to back in one range of addresses. Their sizes must be multiples of a page.
    ///
    /// EACCES if one is not open for reading and writing; EINVAL or ENODEV if its exporter does not allow
    /// mapping.
    pub fn chain(fds: &[(BorrowedFd<'_>, u64)]) -> Result<Self, Errno> {
        let total = fds
            .iter()
            .try_fold(0_u64, |sum, (_, size)| sum.checked_add(*size));
        let total = total.and_then(|total| usize::try_from(total).ok());
        let total = total.ok_or(Errno::OVERFLOW)?;
        let mut hole = Self::reserve(total, page_size() as usize)?;
        hole.share = Share::Shared;
        let mut at = 0;
        for (fd, size) in fds {
            let start = hole.region().span(at, *size).cast();
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: the range is inside the reservation made above, which nothing else uses.
            unsafe { rustix::mm::mmap(start, *size as usize, prot, flags, fd, 0)? };
            at += size;
        }
        Ok(hole)
    }

    /// Reserves aligned address space; the excess at both ends is released.
    fn reserve(len: usize, align: usize) -> Result<Self, Errno> {
        let page = page_size() as usize;
        let len = len.next_multiple_of(page);
        let spare = align.saturating_sub(page);
        let total = len.checked_add(spare).ok_or(Errno::NOMEM)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                total,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let start = base.addr().next_multiple_of(align.max(page));
        let head = start - base.addr();
        let tail = total - head - len;
        // SAFETY: both ends belong to the reservation made above and are outside what is kept.
        unsafe {
            if head > 0 {
                rustix::mm::munmap(base, head)?;
            }
            if tail > 0 {
                rustix::mm::munmap(base.byte_add(head + len), tail)?;
            }
            Ok(Self::owned(base.byte_add(head), len, Share::Private))
        }
    }

    fn owned(base: *mut c_void, len: usize, share: Share) -> Self {
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address 0");
        Self { base, len, share }
    }

    /// The memory, for as long as the mapping exists.
    pub fn region(&self) -> Region<'_> {
        Region {
            base: self.base,
            len: self.len,
            turn: None,
            owner: PhantomData,
        }
    }

    /// The first `bytes` bytes as a ring that `len` bytes pass through: byte `at` is stored at
    /// `at + phase` modulo `bytes`. A single read or write must not cross the end of the ring.
    pub fn ring(&self, bytes: u64, len: u64, phase: u64) -> Region<'_> {
        Region {
            len: len as usize,
            turn: Some(Turn { bytes, phase }),
            ..self.region().part(0, bytes)
        }
    }

    /// Ends the filling: from here on there are slices, copies and seals, but no regions.
    pub fn into_view(self) -> View {
        View(self)
    }
}

/// Addresses that stay mapped until the process ends, although their owner is dropped.
static KEPT: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());
/// True if there are any. Without any, a drop takes no lock: in a forked child it might be held
/// forever.
static KEEPS: AtomicBool = AtomicBool::new(false);

/// Never unmaps the `len` bytes from `start`, nor maps anything else there.
pub(super) fn keep(start: *const u8, len: usize) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push(start.addr()..start.addr() + len);
    KEEPS.store(true, Ordering::Relaxed);
}

impl Mapping {
    /// True if any of it must stay mapped.
    fn is_kept(&self) -> bool {
        let (start, end) = (self.base.addr().get(), self.base.addr().get() + self.len);
        let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        KEEPS.load(Ordering::Relaxed)
            && kept()
                .iter()
                .any(|kept| kept.start < end && start < kept.end)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_kept() {
            return;
        }
        // SAFETY: the mapping is ours and no region of it outlives it. An error would mean that it was not
        // ours; a drop could not report it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A mapping that has been filled. Its slices rely on the fact that no [`Region`] of it exists any more:
/// filling ends with [`Mapping::into_view`], which consumes the mapping that regions borrow.
pub struct View(Mapping);

impl View {
    /// The first `len` bytes of a memfd that is sealed against writing and shrinking; EPERM if it is not.
    /// `align` as in [`Mapping::shared`].
    pub fn sealed(fd: BorrowedFd<'_>, len: usize, align: usize) -> Result<Self, Errno> {
        if !super::memfd::is_sealed(fd)? {
            return Err(Errno::PERM);
        }
        let mut map = Mapping::shared(fd, len, align, false)?;
        map.share = Share::Sealed;
        Ok(Self(map))
    }

    /// As [`View::sealed`], but writable: writes stay in this process (copy-on-write).
    pub fn copied(fd: BorrowedFd<'_>, len: usize, align: usize) -> Result<Self, Errno> {
        if !super::memfd::is_sealed(fd)? {
            return Err(Errno::PERM);
        }
        Mapping::copied(fd, len, align).map(Self)
    }

    /// Frees the memory and keeps its address range reserved: it reads as zeros from now on, and a write there
    /// raises a signal. EBUSY if a device may still access it.
    pub fn blank(&mut self) -> Result<(), Errno> {
        if self.0.is_kept() {
            return Err(Errno::BUSY);
        }
        // SAFETY: the range is ours, and `&mut self` says that no slice of it is held, and a view has no regions.
        unsafe {
            rustix::mm::mmap_anonymous(
                self.0.base.as_ptr().cast(),
                self.0.len,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )?;
        }
        Ok(())
    }

    /// Maps the first `len` bytes of a memfd at the same address: read-only if `sealed` (EPERM if it is not),
    /// otherwise writable.
    pub fn show(&mut self, fd: BorrowedFd<'_>, len: usize, sealed: bool) -> Result<(), Errno> {
        if sealed && !super::memfd::is_sealed(fd)? {
            return Err(Errno::PERM);
        }
        let mut prot = ProtFlags::READ;
        prot.set(ProtFlags::WRITE, !sealed);
        let (base, flags) = (self.0.base.as_ptr(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the range is ours, and `&mut self` says that no slice of it is held, and a view has no regions.
        unsafe { rustix::mm::mmap(base.cast(), len.min(self.0.len), prot, flags, fd, 0)? };
        self.0.share = if sealed { Share::Sealed } else { Share::Shared };
        Ok(())
    }

    /// Its first byte; the caller must not make a reference from it.
    pub fn start(&self) -> *const u8 {
        self.0.base.as_ptr()
    }

    pub fn len(&self) -> u64 {
        self.0.len as u64
    }

    /// Includes it in children that are forked from now on.
    pub fn enter_forks(&self) {
        self.0.region().leave_out_of_forks(false);
    }

    /// Requests transparent huge pages for later accesses.
    pub fn want_huge(&self) {
        // Only advice: without it, pages are mapped as they are.
        let _ = self.0.region().want_huge();
    }

    /// Returns true if the first `huge` bytes are mapped as one huge page, after they were touched; None if that cannot
    /// be found out.
    pub fn first_is_huge(&self, huge: u64) -> Option<bool> {
        let first = self.0.region().part(0, huge);
        // SAFETY: it makes pages present that are there in the file, and changes no contents.
        let touched = unsafe {
            rustix::mm::madvise(first.base.as_ptr().cast(), 1, Advice::LinuxPopulateRead)
        };
        touched.ok()?;
        super::pagemap::huge_bytes(&first).map(|bytes| bytes == huge)
    }

    /// Copies bytes out; other processes may be writing to them.
    pub fn copy_out(&self, at: u64, into: &mut [u8]) {
        self.0.region().copy_out(at, into);
    }

    /// Copies bytes in; EPERM if it is sealed, because a store there would raise a signal.
    pub fn copy_in(&mut self, at: u64, from: &[u8]) -> Result<(), Errno> {
        if self.is_sealed() {
            return Err(Errno::PERM);
        }
        self.0.region().copy_in(at, from);
        Ok(())
    }

    /// Nothing can write to it, not even this process.
    pub fn is_sealed(&self) -> bool {
        self.0.share == Share::Sealed
    }

    /// The bytes as a slice, if nothing else can change them.
    pub fn bytes(&self) -> Option<&[u8]> {
        if self.0.share == Share::Shared {
            return None;
        }
        // SAFETY: mapped and readable for `len` bytes. Private memory is written only through `&mut self`,
        // because a view gives no region; a sealed file can neither be written nor shrink, which was checked
        // when it was mapped, and seals cannot be removed.
        unsafe { Some(std::slice::from_raw_parts(self.0.base.as_ptr(), self.0.len)) }
    }

    /// The bytes as a mutable slice, if the memory is private.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.0.share != Share::Private {
            return None;
        }
        // SAFETY: mapped, writable, private and borrowed mutably.
        unsafe {
            Some(std::slice::from_raw_parts_mut(
                self.0.base.as_ptr(),
                self.0.len,
            ))
        }
    }
}

/// A caller's bytes, borrowed for reading.
#[derive(Clone)]
pub struct Borrowed<'m> {
    region: Region<'m>,
    /// Keeps them alive and in place, if no borrow does.
    _owner: Option<Arc<dyn AsRef<[u8]> + Send + Sync>>,
}

impl<'m> Borrowed<'m> {
    /// For as long as they are borrowed.
    pub fn shown(memory: &'m [u8]) -> Self {
        Self {
            region: Region::of(NonNull::from(memory)),
            _owner: None,
        }
    }

    /// As [`Borrowed::shown`], for memory that others may write to at the same time.
    pub fn shown_shared(memory: &'m [AtomicU8]) -> Self {
        let memory = NonNull::slice_from_raw_parts(NonNull::from(memory).cast(), memory.len());
        Self {
            region: Region::of(memory),
            _owner: None,
        }
    }

    /// For as long as this, or a clone of it, exists.
    pub fn owned(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        // What this borrows lives as long as the owner is held, even if this value is moved.
        let region = Region::of(NonNull::from((*owner).as_ref()));
        Self {
            region,
            _owner: Some(owner),
        }
    }

    /// The bytes, for reading: nothing may write to them.
    pub fn region(&self) -> Region<'_> {
        self.region
    }
}

/// Memory that the kernel may write or read: addresses and bounds, without exclusive access.
#[derive(Clone, Copy, Debug)]
pub struct Region<'m> {
    base: NonNull<u8>,
    len: usize,
    /// It is a ring, and longer than its memory.
    turn: Option<Turn>,
    owner: PhantomData<&'m [u8]>,
}

/// How offsets wrap around in a ring.
#[derive(Clone, Copy, Debug)]
struct Turn {
    bytes: u64,
    phase: u64,
}

// SAFETY: see `Mapping`; nothing else can access borrowed bytes of a caller.
unsafe impl Send for Region<'_> {}
// SAFETY: as above.
unsafe impl Sync for Region<'_> {}

impl<'m> Region<'m> {
    /// Memory that is borrowed from a caller: nothing else can access it meanwhile.
    pub fn of_slice(memory: &'m mut [u8]) -> Self {
        Self::of(NonNull::from(memory))
    }

    fn of(memory: NonNull<[u8]>) -> Self {
        Self {
            base: memory.cast(),
            len: memory.len(),
            turn: None,
            owner: PhantomData,
        }
    }

    /// `len` bytes of it, from `at` on; in a ring, at their present place.
    pub fn part(&self, at: u64, len: u64) -> Self {
        let base = NonNull::new(self.span(at, len)).expect("memory does not begin at address 0");
        Self {
            base,
            len: len as usize,
            turn: None,
            owner: PhantomData,
        }
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Its first byte; the caller must not make a reference from it.
    pub fn start(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// The address of its first byte, for alignment checks.
    pub fn address(&self) -> u64 {
        self.base.addr().get() as u64
    }

    /// The address of `len` bytes at `at`, after checking that they are inside.
    pub(super) fn span(&self, at: u64, len: u64) -> *mut u8 {
        let end = at.checked_add(len).expect("extent overflows");
        assert!(
            end <= self.len as u64,
            "extent {at}+{len} is outside a buffer of {} bytes",
            self.len
        );
        let at = match self.turn {
            None => at,
            Some(Turn { bytes, phase }) => {
                let at = (at + phase) % bytes;
                assert!(
                    len <= bytes - at,
                    "extent {at}+{len} lies across the end of a ring of {bytes} bytes"
                );
                at
            }
        };
        // SAFETY: `at` is inside the allocation, as just checked.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    /// Zeroes `len` bytes at `at`.
    pub fn zero(&self, at: u64, len: u64) {
        let start = self.span(at, len);
        // SAFETY: inside the region, and writable while a transfer runs.
        unsafe { std::ptr::write_bytes(start, 0, len as usize) }
    }

    /// Copies bytes out of the region, even if others are writing to it.
    pub fn copy_out(&self, at: u64, into: &mut [u8]) {
        let start = self.span(at, into.len() as u64);
        // SAFETY: inside the region; `into` is a distinct allocation. Another process may write at the same
        // time: the copy then has old or new bytes, as with read(2).
        unsafe { std::ptr::copy_nonoverlapping(start, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into the region; it must be writable.
    pub fn copy_in(&self, at: u64, from: &[u8]) {
        let start = self.span(at, from.len() as u64);
        // SAFETY: as in `copy_out`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start, from.len()) }
    }

    /// Calls `write` with `len` bytes at `at`, which it may write to. Only one thread of this process may use these bytes
    /// meanwhile, as one that has taken an extent does.
    pub fn lend<T>(&self, at: u64, len: u64, write: impl FnOnce(&mut [u8]) -> T) -> T {
        let start = self.span(at, len);
        // SAFETY: inside the region, initialised (by the kernel, at the latest when it is touched) and writable while a
        // transfer runs; no other thread uses these bytes. Another process that has the memory may see or change them:
        // what `write` reads back is of no consequence.
        write(unsafe { std::slice::from_raw_parts_mut(start, len as usize) })
    }

    /// As [`Region::copy_in`], for memory where an access might raise SIGBUS: the kernel accesses the pages
    /// (process_vm_writev(2) on this process). EFAULT if a page is gone and cannot be replaced; bytes before it
    /// have then been written.
    pub fn try_copy_in(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        let start = self.span(at, from.len() as u64);
        let mut done = 0;
        while done < from.len() {
            let left = from.len() - done;
            let local = iovec(from[done..].as_ptr().cast_mut(), left);
            let remote = iovec(start.wrapping_add(done), left);
            // SAFETY: reads `from`, and writes as many bytes inside the region, as in `copy_in`.
            let got = unsafe {
                libc::process_vm_writev(
                    libc::getpid(),
                    &raw const local,
                    1,
                    &raw const remote,
                    1,
                    0,
                )
            };
            match got {
                // Neither an error nor a byte: avoid an endless loop.
                0 => return Err(Errno::FAULT),
                1.. => done += got as usize,
                _ => return Err(last_errno()),
            }
        }
        Ok(())
    }

    /// Copies `len` bytes from another region into this one, which must be writable.
    pub fn copy_from(&self, at: u64, from: &Region<'_>, from_at: u64, len: u64) {
        let (to, from) = (self.span(at, len), from.span(from_at, len));
        // SAFETY: both are inside their regions, which are distinct mappings.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) }
    }

    /// Returns true if direct reads can go into the page at `at`: the kernel can pin it. For a device's pages, as in
    /// most mappings of dma-bufs, the result is EFAULT (process_vm_readv(2) pins what it reads). Any other
    /// error, for example in a sandbox, leaves the question open.
    pub fn can_be_pinned(&self, at: u64) -> Result<(), Errno> {
        let mut byte = 0_u8;
        let local = iovec(&raw mut byte, 1);
        let remote = iovec(self.span(at, 1), 1);
        // SAFETY: one byte of the region into one of ours; the kernel checks the page itself.
        let got = unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        match got {
            1 => Ok(()),
            _ => Err(last_errno()),
        }
    }

    /// Requests transparent huge pages for later accesses to the region (madvise(2)).
    pub fn want_huge(&self) -> Result<(), Errno> {
        // SAFETY: advice on memory that we own changes no contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) }
    }

    /// Refuses transparent huge pages (madvise(2)).
    pub fn want_small(&self) -> Result<(), Errno> {
        // SAFETY: as in `want_huge`.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxNoHugepage) }
    }

    /// Excludes the region from forked children, or includes it again (madvise(2)).
    pub fn leave_out_of_forks(&self, leave: bool) {
        let advice = if leave {
            Advice::LinuxDontFork
        } else {
            Advice::LinuxDoFork
        };
        // SAFETY: advice on memory that we own changes no contents. It does not fail for our memory, and
        // children must not access memory that is being filled.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) };
    }

    /// Makes every page of the range present and writable, also where only a part of it is in the range; contents
    /// stay (MADV_POPULATE_WRITE, Linux 5.14). Returns an error where an access would raise SIGBUS.
    pub fn populate(&self, at: u64, len: u64) -> Result<(), Errno> {
        if len == 0 {
            return Ok(());
        }
        let first = self.span(at, len);
        let before = first.addr() as u64 % page_size();
        let start: *mut c_void = first.wrapping_sub(before as usize).cast();
        let len = (before + len).next_multiple_of(page_size()) as usize;
        loop {
            // SAFETY: whole pages, of which the range is ours to write; what else they contain stays as it is.
            match unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite) } {
                Err(Errno::INTR | Errno::AGAIN) => continue,
                done => return done,
            }
        }
    }

    /// Turns the range into transparent huge pages, independently of `shmem_enabled` (MADV_COLLAPSE, Linux
    /// 6.1). `at` and `len` are multiples of `huge`; one base page of each is made present first, because the
    /// kernel collapses only ranges with a page table.
    pub fn collapse(&self, at: u64, len: u64, huge: u64) -> Result<(), Errno> {
        for page in (at..at + len).step_by(huge as usize) {
            self.populate(page, 1)?;
        }
        let start = self.span(at, len);
        // SAFETY: collapsing memory that we own changes no contents.
        match unsafe { libc::madvise(start.cast(), len as usize, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    }
}

/// Memory in the form of the kernel's calls.
pub(super) fn iovec(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_aligned_and_zero() {
        let align = 2 << 20;
        let map = Mapping::anon(3 << 20, align).unwrap();
        assert_eq!(map.region().address() % align as u64, 0);
        map.region().populate(5000, 2 << 20).unwrap();
        let mut bytes = vec![1; 3 << 20];
        map.region().copy_out(0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    /// No pool has 1 TiB.
    #[test]
    fn a_sparse_hugetlb_mapping_reserves_no_pool_pages() {
        use crate::memfd;
        use std::os::fd::AsFd;
        let huge = match memfd::create("holes", true) {
            Ok(huge) => huge,
            Err(errno) => return eprintln!("SKIP: no hugetlb memfd ({errno})"),
        };
        memfd::resize(huge.as_fd(), 1 << 40).unwrap();
        let whole = Mapping::shared(huge.as_fd(), 1 << 40, 1, true);
        assert_eq!(whole.err(), Some(Errno::NOMEM));
        let map = Mapping::shared_sparse(huge.as_fd(), 1 << 40).unwrap();
        // If the pool has no page, it is an error, not a signal.
        let copied = map.region().try_copy_in(1 << 30, &[9; 100]);
        assert!(matches!(copied, Ok(()) | Err(Errno::FAULT)), "{copied:?}");
    }

    #[test]
    fn populate_reaches_each_page_that_the_range_touches() {
        let page = page_size();
        let map = Mapping::anon(4 * page as usize, page as usize).unwrap();
        let present = |at: u64| {
            let mut present = 0;
            let address = map.region().address() + at;
            // SAFETY: asks about one page of the mapping, for which `present` has room.
            let asked = unsafe { libc::mincore(address as *mut c_void, 1, &raw mut present) };
            assert_eq!(asked, 0);
            present == 1
        };
        // Refused by kernels that have no huge pages.
        let _ = map.region().want_small();
        // The end of a part, whose page another part continues.
        let part = map.region().part(0, 2 * page + 100);
        assert!(!present(2 * page));
        part.populate(2 * page, 100).unwrap();
        assert!(present(2 * page) && !present(0) && !present(page));
        part.populate(page - 1, 2).unwrap();
        assert!(present(0) && present(page) && !present(3 * page));
        map.region().part(3 * page + 7, 9).populate(2, 7).unwrap();
        assert!(present(3 * page));
    }

    #[test]
    fn populate_changes_nothing_beside_the_range() {
        let page = page_size() as usize;
        let mut memory = vec![7_u8; 3 * page + 100];
        let region = Region::of_slice(&mut memory[13..3 * page]);
        region.populate(0, region.len()).unwrap();
        assert!(memory.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_ring_wraps_around() {
        let page = page_size();
        let map = Mapping::anon(4 * page as usize, page as usize).unwrap();
        let ring = map.ring(4 * page, 100 * page, page);
        ring.copy_in(6 * page, b"seven");
        ring.copy_in(3 * page, b"four");
        let mut got = [0; 5];
        map.region().copy_out(3 * page, &mut got);
        assert_eq!(&got, b"seven");
        map.region().copy_out(0, &mut got);
        assert_eq!(&got, b"four\0");
    }

    #[test]
    #[should_panic(expected = "lies across the end")]
    fn an_extent_across_the_end_of_a_ring_panics() {
        let map = Mapping::anon(8192, 4096).unwrap();
        map.ring(8192, 1 << 30, 0).zero(8000, 200);
    }

    #[test]
    #[should_panic(expected = "is outside")]
    fn an_extent_past_the_end_panics() {
        let page = page_size();
        let map = Mapping::anon(page as usize, page as usize).unwrap();
        map.region().zero(page - 96, 97);
    }
}
