//! One file that a load reads: two descriptors for it, one of them for direct I/O.

use crate::error::{Error, Result, Verb};
use crate::sync;
use crate::sys::block::BlockDevice;
use crate::sys::file::{self, Stat};
use crate::sys::map::Mapping;
use crate::sys::{Errno, cache, retry, usage};
use rustix::fs::FileType;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// An open file.
pub(crate) struct FileInput {
    path: PathBuf,
    buffered: OwnedFd,
    direct: Result<OwnedFd, String>,
    stat: Stat,
    align: u64,
    /// Offsets of pages that [`FileInput::peek`] did not find, and so brought into the page cache.
    missed: Mutex<Vec<u64>>,
}

/// File systems whose files are generated when they are read.
const PSEUDO: &[(u32, &str)] = &[
    (libc::PROC_SUPER_MAGIC as u32, "proc"),
    (libc::SYSFS_MAGIC as u32, "sysfs"),
    (libc::DEBUGFS_MAGIC as u32, "debugfs"),
    (libc::TRACEFS_MAGIC as u32, "tracefs"),
    (libc::CGROUP_SUPER_MAGIC as u32, "cgroup"),
    (libc::CGROUP2_SUPER_MAGIC as u32, "cgroup2"),
    (libc::SECURITYFS_MAGIC as u32, "securityfs"),
    (0x6265_6570, "configfs"),
    (libc::BPF_FS_MAGIC as u32, "bpf"),
];
/// File systems whose files are in memory. Numbers here and below are constants that libc lacks.
const MEMORY: &[(u32, &str)] = &[
    (libc::TMPFS_MAGIC as u32, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (libc::HUGETLBFS_MAGIC as u32, "hugetlbfs"),
];
const DISK: &[(u32, &str)] = &[
    (libc::EXT4_SUPER_MAGIC as u32, "ext4"),
    (libc::XFS_SUPER_MAGIC as u32, "xfs"),
    (libc::BTRFS_SUPER_MAGIC as u32, "btrfs"),
    (libc::F2FS_SUPER_MAGIC as u32, "f2fs"),
    (libc::OVERLAYFS_SUPER_MAGIC as u32, "overlayfs"),
    (0x7371_7368, "squashfs"),
    (0xe0f5_e1e2, "erofs"),
    (libc::FUSE_SUPER_MAGIC as u32, "fuse"),
    (libc::NFS_SUPER_MAGIC as u32, "nfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb2"),
    (0x0102_1997, "9p"),
    (0x2fc1_2fc1, "zfs"),
    (libc::BCACHEFS_SUPER_MAGIC as u32, "bcachefs"),
    (libc::MSDOS_SUPER_MAGIC as u32, "vfat"),
    (0x2011_bab0, "exfat"),
];

fn named(list: &[(u32, &'static str)], magic: u64) -> Option<&'static str> {
    // Some architectures sign-extend the 32-bit magic.
    list.iter()
        .find(|(known, _)| *known == magic as u32)
        .map(|(_, name)| *name)
}

/// The file system, if it keeps the file in memory.
pub(crate) fn in_memory(stat: &Stat) -> Option<&'static str> {
    let on_disk = stat.kind == FileType::BlockDevice;
    named(MEMORY, stat.fs_magic).filter(|_| !on_disk)
}

/// The name of a file's file system, "block device" for one; a hexadecimal number if it is unknown.
pub(crate) fn file_system(stat: &Stat) -> String {
    if stat.kind == FileType::BlockDevice {
        // The file system of its node does not matter.
        return super::Source::BLOCK_DEVICE.to_string();
    }
    [DISK, MEMORY]
        .iter()
        .find_map(|list| named(list, stat.fs_magic))
        .map_or_else(|| format!("{:#x}", stat.fs_magic), str::to_string)
}

fn refusal(why: &str, errno: Errno, remedy: &str) -> Error {
    Error::new(Verb::Load, why)
        .with_errno(errno)
        .with_remedy(remedy)
}

impl FileInput {
    /// Opens a regular file or a block device, with and without `O_DIRECT`; `both` says why not with it.
    ///
    /// Refuses anything without contents of a known size: directories, FIFOs, sockets, character
    /// devices, files of `/proc` and similar, and empty files.
    pub(crate) fn open(path: &Path, both: &Result<(), String>) -> Result<Self> {
        let place = path.display().to_string();
        let buffered = file::open(path, false).map_err(|errno| match errno {
            // What open(2) returns for a socket.
            Errno::NXIO => refusal("is a socket, or a device with no driver", errno, REGULAR),
            _ => Error::os("cannot open", errno),
        });
        Self::of(
            path,
            buffered.map_err(|error| error.at(&place))?,
            path,
            both,
        )
    }

    /// The same for a file that is open for reading; `again` is a path to reopen it, `path` its name in
    /// messages.
    pub(crate) fn of(
        path: &Path,
        buffered: OwnedFd,
        again: &Path,
        both: &Result<(), String>,
    ) -> Result<Self> {
        let place = path.display().to_string();
        let refuse = |why: &str, errno, remedy| refusal(why, errno, remedy).at(&place);
        let stat = file::stat(buffered.as_fd())
            .map_err(|errno| Error::os("cannot stat", errno).at(&place))?;
        match stat.kind {
            FileType::RegularFile | FileType::BlockDevice => {}
            FileType::Directory => {
                return Err(refuse("is a directory", Errno::ISDIR, "name a file in it"));
            }
            FileType::Fifo => return Err(refuse("is a FIFO", Errno::SPIPE, REGULAR)),
            _ => return Err(refuse("is not a regular file", Errno::INVAL, REGULAR)),
        }
        if let Some(fs) = named(PSEUDO, stat.fs_magic) {
            let why = format!("{fs} generates this file as it is read, and reports no size");
            return Err(refuse(
                &why,
                Errno::INVAL,
                "copy it to a regular file first",
            ));
        }
        if stat.size == 0 {
            return Err(refuse(
                "is empty",
                Errno::NODATA,
                "a buffer needs at least one byte",
            ));
        }
        let mut source = Self {
            path: path.to_path_buf(),
            buffered,
            direct: Err(String::new()),
            stat,
            align: stat.block(),
            missed: Mutex::default(),
        };
        source.direct = match both {
            Ok(()) => source.open_direct(again),
            Err(why) => Err(why.clone()),
        };
        Ok(source)
    }

    /// The file system, if it keeps the file in memory.
    pub(crate) fn in_memory(&self) -> Option<&'static str> {
        in_memory(&self.stat)
    }

    /// The second descriptor and the alignment for its reads, or why there is none.
    fn open_direct(&mut self, path: &Path) -> Result<OwnedFd, String> {
        if let Some(fs) = self.in_memory() {
            return Err(format!(
                "{fs} files are in memory, so there is no direct I/O"
            ));
        }
        if self.stat.direct.is_some_and(|(_, offset)| offset == 0) {
            return Err("statx says that this file allows no direct I/O".to_string());
        }
        let named_open = |errno: Errno| {
            format!(
                "O_DIRECT is refused at open ({})",
                crate::error::errno_name(errno.raw_os_error())
            )
        };
        let direct = file::open(path, true).map_err(named_open)?;
        let again = file::stat(direct.as_fd()).map_err(named_open)?;
        if again.identity != self.stat.identity {
            return Err("the path named a different file when it was reopened".to_string());
        }
        self.align = match self.stat.direct {
            Some((memory, offset)) => u64::from(memory.max(offset)),
            None => self.probe_align(direct.as_fd())?,
        };
        Ok(direct)
    }

    /// The alignment of direct reads if `statx` does not report it: the smallest that a read accepts,
    /// starting with the file system's block size. A value that is too large does no harm; one that is
    /// too small makes Btrfs and F2FS silently fall back to the page cache.
    fn probe_align(&self, direct: BorrowedFd<'_>) -> Result<u64, String> {
        const LARGEST: u64 = 1 << 20;
        let mut align = self.stat.block();
        let memory = Mapping::anon(2 * LARGEST as usize, LARGEST as usize)
            .map_err(|errno| format!("no memory for a test read ({errno:?})"))?;
        while align <= LARGEST {
            // Into memory that is present, because of Btrfs (see plan::allocation). If that fails, only
            // a few pages stay in the page cache.
            let _ = memory.region().populate(0, align);
            match retry(|| file::pread(direct, &memory.region(), 0, align, 0)) {
                Ok(_) => return Ok(align),
                Err(Errno::INVAL) => align *= 2,
                Err(errno) => {
                    return Err(format!(
                        "the first direct read fails ({})",
                        crate::error::errno_name(errno.raw_os_error())
                    ));
                }
            }
        }
        Err("direct reads are refused (EINVAL) at every alignment".to_string())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The size when it was opened, which counts for the load.
    pub(crate) fn size(&self) -> u64 {
        self.stat.size
    }

    /// The current size.
    pub(crate) fn size_now(&self) -> Result<u64> {
        let stat = file::stat(self.buffered.as_fd())
            .map_err(|errno| Error::os("cannot stat", errno).at(self.path.display().to_string()))?;
        Ok(stat.size)
    }

    /// The name of its file system, "block device" for one; a hexadecimal number if it is unknown.
    pub(crate) fn file_system(&self) -> String {
        file_system(&self.stat)
    }

    /// The block device that it is or is stored on.
    pub(crate) fn device(&self) -> Option<BlockDevice> {
        BlockDevice::of(self.stat.device)
    }

    /// Alignment of offsets, lengths and memory of direct reads, in bytes.
    pub(crate) fn align(&self) -> u64 {
        self.align
    }

    /// True if `statx` reported the alignment.
    pub(crate) fn align_is_told(&self) -> bool {
        self.stat.direct.is_some()
    }

    /// True if it is on a file system that is neither in memory nor on a block device.
    pub(crate) fn is_without_device(&self) -> bool {
        self.stat.device.0 == 0 && self.in_memory().is_none()
    }

    /// The size of the requests of its file system, if that is larger than any block; otherwise 0.
    pub(crate) fn request(&self) -> u64 {
        self.stat.request()
    }

    pub(crate) fn buffered(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    pub(crate) fn direct(&self) -> Result<BorrowedFd<'_>, &str> {
        match &self.direct {
            Ok(fd) => Ok(fd.as_fd()),
            Err(why) => Err(why),
        }
    }

    /// Probes whether reads can drop the pages that they bring into the page cache.
    pub(crate) fn drops_behind(&self) -> bool {
        file::drops_behind(self.buffered(), self.size())
    }

    /// The ranges of `[start, end)` that have data; the others are holes and need not be read.
    ///
    /// Holes shorter than `small` count as data: reading zeros is cheaper than splitting a read.
    pub(crate) fn data(&self, start: u64, end: u64, small: u64) -> Vec<(u64, u64)> {
        file::data(self.buffered(), start, end, small)
    }

    /// Bytes of `[start, end)` in the page cache, in whole pages; EPERM if the kernel does not allow
    /// the query, ENOSYS if it does not support it.
    pub(crate) fn resident(&self, start: u64, end: u64) -> Result<u64, Errno> {
        let page = crate::sys::map::page_size();
        let first = start - start % page;
        let pages = cache::resident(self.buffered(), first, end - first)?;
        Ok((pages * page).min(end - start))
    }

    /// True if the page cache has the bytes at both offsets, found by reading them without blocking:
    /// for users whom `cachestat` refuses. A miss brings the page in, and if the disk is fast or this
    /// thread waits for its CPU, it may arrive before the kernel looks again: so a hit counts only if
    /// nothing was read from a disk. Two offsets, because not every kernel and file system counts these
    /// reads. Pages that a miss brought in are dropped by [`FileInput::forget_misses`].
    pub(crate) fn peek(&self, offsets: [u64; 2]) -> bool {
        let mut byte = [0_u8];
        let region = crate::sys::map::Region::of_slice(&mut byte);
        let mut hit = |offset| file::pread_cached(self.buffered(), &region, 0, 1, offset) == Ok(1);
        let before = usage::blocks_read();
        let hit = offsets.into_iter().all(&mut hit) && usage::blocks_read() == before;
        if !hit {
            self.missed().extend(offsets);
        }
        hit
    }

    /// Drops the pages that peeking has brought in: the next load would assume that their neighbours
    /// are cached, too. Those that have not arrived yet stay.
    pub(crate) fn forget_misses(&self) {
        for offset in self.missed().drain(..) {
            cache::drop_page(self.buffered(), offset);
        }
    }

    /// True if there are such pages.
    pub(crate) fn has_misses(&self) -> bool {
        !self.missed().is_empty()
    }

    fn missed(&self) -> MutexGuard<'_, Vec<u64>> {
        sync::lock(&self.missed)
    }

    /// Prevents misses of [`FileInput::peek`] from reading ahead.
    pub(crate) fn no_readahead(&self) {
        cache::no_readahead(self.buffered());
    }
}

const REGULAR: &str = "name a regular file or a block device";

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    #[test]
    fn holes_are_found_and_small_holes_are_bridged() {
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("sparse");
        let mut file = std::fs::File::create(&path).unwrap();
        for at in [0, 64 << 10, 4 << 20] {
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(&[1; 4096]).unwrap();
        }
        file.set_len(8 << 20).unwrap();
        file.sync_all().unwrap();
        let source = FileInput::open(&path, &Ok(())).unwrap();
        let small = 4096;
        let whole = source.data(0, 8 << 20, small);
        assert_eq!(
            whole,
            [(0, 4096), (64 << 10, 68 << 10), (4 << 20, (4 << 20) + 4096)]
        );
        let bridged = source.data(0, 8 << 20, 128 << 10);
        assert_eq!(bridged, [(0, 68 << 10), (4 << 20, (4 << 20) + 4096)]);
        assert_eq!(source.data(5 << 20, 8 << 20, small), []);
        assert_eq!(source.data(100, 200, small), [(100, 200)]);
    }

    #[test]
    fn descriptors_are_blocking() {
        let source = FileInput::open(&std::env::current_exe().unwrap(), &Ok(())).unwrap();
        let fds = [Ok(source.buffered()), source.direct()];
        for fd in fds.into_iter().flatten() {
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
        }
    }

    #[test]
    fn files_without_fixed_contents_are_refused() {
        let refused = |path: &str| {
            FileInput::open(Path::new(path), &Ok(()))
                .err()
                .unwrap()
                .to_string()
        };
        assert!(refused("/proc/self/maps").contains("proc generates this file"));
        assert!(refused("/dev/null").contains("is not a regular file"));
        assert!(refused("/tmp").contains("is a directory (EISDIR)"));
        assert!(refused("/no/such/file").contains("(ENOENT); check the path"));
    }
}
