//! A FUSE file system with one file, whose faults the test chooses.
#![allow(dead_code, reason = "each test program uses a part of it")]

use crate::common::{self, content};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry,
    ReplyLseek, ReplyOpen, Request,
};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// The faults of the file.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// `O_DIRECT` is refused at open.
    pub no_direct_open: bool,
    /// Direct reads are refused from this one on, counted from 1.
    pub no_direct_read_from: Option<u64>,
    /// A read that reaches this byte fails.
    pub broken_at: Option<u64>,
    /// The most bytes that one read returns.
    pub at_most: Option<u64>,
    /// The first read that reaches this byte (0) changes the size (1).
    pub resized: Option<(u64, u64)>,
    /// SEEK_DATA and SEEK_HOLE always return the offset where the search begins.
    pub nonsense_holes: bool,
    /// How long a read takes.
    pub pause: Duration,
}

/// Nothing goes wrong.
pub const GOOD: Faults = Faults {
    no_direct_open: false,
    no_direct_read_from: None,
    broken_at: None,
    at_most: None,
    resized: None,
    nonsense_holes: false,
    pause: Duration::ZERO,
};

/// The file system, mounted; unmounted when dropped, busy or not.
pub struct Mounted {
    place: PathBuf,
    session: Option<BackgroundSession>,
    reads: Arc<AtomicU64>,
    hangs: Arc<AtomicBool>,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = if common::is_root() {
            let place = CString::new(self.place.as_os_str().as_bytes()).unwrap();
            // SAFETY: unmounts a mount of this test.
            unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) == 0 }
        } else {
            let mut command = Command::new("fusermount3");
            let status = command.args(["-u", "-z"]).arg(&self.place).status();
            status.is_ok_and(|status| status.success())
        };
        assert!(
            unmounted || std::thread::panicking(),
            "{} is still mounted",
            self.place.display()
        );
        drop(self.session.take());
    }
}

impl Mounted {
    /// Reads that have begun so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }

    /// Until the result is dropped, lookups and requests for attributes get no answer.
    pub fn hang(&self) -> Hung<'_> {
        self.hangs.store(true, Ordering::SeqCst);
        Hung(&self.hangs)
    }
}

pub struct Hung<'a>(&'a AtomicBool);

impl Drop for Hung<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Mounts `m/file` with `bytes` bytes of [`content`] in a folder. None, with a message, if nothing can be
/// mounted.
pub fn mount(dir: &common::Dir, bytes: u64, faults: Faults) -> Option<Mounted> {
    let reads = Arc::new(AtomicU64::new(0));
    let hangs = Arc::new(AtomicBool::new(false));
    let file_system = Faulty {
        size: AtomicU64::new(bytes),
        faults,
        reads: Arc::clone(&reads),
        hangs: Arc::clone(&hangs),
        direct_reads: AtomicU64::new(0),
    };
    std::fs::create_dir(dir.path("m")).unwrap();
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("faulty".to_string())];
    config.n_threads = Some(4);
    let own = if common::is_root() {
        common::own_mounts()
    } else {
        Ok(())
    };
    let place = dir.path("m");
    match own.and_then(|()| fuser::spawn_mount(file_system, &place, &config)) {
        Ok(session) => Some(Mounted {
            place,
            session: Some(session),
            reads,
            hangs,
        }),
        Err(error) => {
            common::skip(&format!("FUSE cannot be mounted: {error}"));
            None
        }
    }
}

struct Faulty {
    size: AtomicU64,
    faults: Faults,
    reads: Arc<AtomicU64>,
    hangs: Arc<AtomicBool>,
    direct_reads: AtomicU64,
}

const FILE: INodeNo = INodeNo(2);
/// Attributes are not cached: the kernel requests them each time.
const NOT_CACHED: Duration = Duration::ZERO;

impl Faulty {
    /// Waits until the test no longer lets it hang.
    fn hang(&self) {
        while self.hangs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let (kind, perm, size) = match ino {
            FILE => (
                FileType::RegularFile,
                0o644,
                self.size.load(Ordering::SeqCst),
            ),
            _ => (FileType::Directory, 0o755, 0),
        };
        FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The bytes of a read, or its error.
    fn answer(&self, offset: u64, len: u64, direct: bool) -> Result<Vec<u8>, Errno> {
        let faults = &self.faults;
        let end = offset + len;
        self.reads.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(faults.pause);
        if direct {
            let number = self.direct_reads.fetch_add(1, Ordering::SeqCst) + 1;
            if faults
                .no_direct_read_from
                .is_some_and(|first| number >= first)
            {
                return Err(Errno::EINVAL);
            }
        }
        if let Some((at, size)) = faults.resized
            && end > at
        {
            self.size.store(size, Ordering::SeqCst);
        }
        if faults
            .broken_at
            .is_some_and(|at| (offset..end).contains(&at))
        {
            return Err(Errno::EIO);
        }
        let size = self.size.load(Ordering::SeqCst);
        let len = size.saturating_sub(offset).min(len);
        let len = len.min(faults.at_most.unwrap_or(len));
        Ok(content(offset, len as usize))
    }
}

impl Filesystem for Faulty {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.hang();
        if name == "file" {
            reply.entry(&NOT_CACHED, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.hang();
        reply.attr(&NOT_CACHED, &self.attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.0 & libc::O_DIRECT != 0 && self.faults.no_direct_open {
            return reply.error(Errno::EINVAL);
        }
        // The page cache would take a short read for the end of the file; without it, read(2) returns
        // the short read.
        let flags = match self.faults.at_most {
            Some(_) => FopenFlags::FOPEN_DIRECT_IO,
            None => FopenFlags::empty(),
        };
        reply.opened(FileHandle(0), flags);
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        _: i32,
        reply: ReplyLseek,
    ) {
        if self.faults.nonsense_holes {
            reply.offset(offset)
        } else {
            reply.error(Errno::ENOSYS)
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.answer(offset, size.into(), flags.0 & libc::O_DIRECT != 0) {
            Ok(bytes) => reply.data(&bytes),
            Err(errno) => reply.error(errno),
        }
    }
}
