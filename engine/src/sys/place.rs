//! Names in a folder, files without names, and making both durable.

use super::{Errno, retry};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, StatxAttributes,
    StatxFlags, Uid, XattrFlags,
};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What a name in a folder refers to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub kind: FileType,
    /// The file system's device: major and minor number.
    pub device: (u32, u32),
    pub inode: u64,
    pub owner: (u32, u32),
    /// Permissions, without the setuid and setgid bits.
    pub mode: u32,
    /// Number of its names.
    pub links: u32,
    /// Whether it cannot be changed or replaced (chattr(1)).
    pub immutable: bool,
}

/// Opens a folder to look up and change names in.
///
/// The second descriptor can be synced; None without permission to list the folder.
pub(crate) fn folder(path: &Path) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    folder_from(rustix::fs::CWD, path)
}

/// As [`folder`], for a path that begins in another one.
pub(crate) fn folder_from(
    from: BorrowedFd<'_>,
    path: &Path,
) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    open_folder(from, path.as_os_str(), OFlags::empty())
}

/// As [`folder`], for a folder in another one; ENOTDIR for a symbolic link.
pub(crate) fn folder_in(
    folder: BorrowedFd<'_>,
    name: &OsStr,
) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    open_folder(folder, name, OFlags::NOFOLLOW)
}

fn open_folder(
    from: BorrowedFd<'_>,
    name: &OsStr,
    more: OFlags,
) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let flags_of_path = flags | more | OFlags::PATH;
    let folder = retry(|| rustix::fs::openat(from, name, flags_of_path, Mode::empty()))?;
    // The same folder, not the one that has the name by now.
    let flags = flags | OFlags::RDONLY;
    match retry(|| rustix::fs::openat(&folder, c".", flags, Mode::empty())) {
        Ok(listed) => Ok((folder, Some(listed))),
        Err(Errno::ACCESS) => Ok((folder, None)),
        Err(errno) => Err(errno),
    }
}

/// Creates a folder; EEXIST if anything has the name.
pub(crate) fn make_folder(folder: BorrowedFd<'_>, name: &OsStr, mode: u32) -> Result<(), Errno> {
    rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(mode))
}

/// Removes an empty folder.
pub(crate) fn remove_folder(folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
}

/// What a name refers to; None if it does not exist. A symbolic link is not followed.
pub(crate) fn look_up(folder: BorrowedFd<'_>, name: &OsStr) -> Result<Option<Named>, Errno> {
    match rustix::fs::statx(
        folder,
        name,
        AtFlags::SYMLINK_NOFOLLOW,
        StatxFlags::BASIC_STATS,
    ) {
        Ok(stat) => Ok(Some(named(&stat))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The type of what a name refers to, after following links.
pub(crate) fn kind(folder: BorrowedFd<'_>, name: &OsStr) -> Result<FileType, Errno> {
    let stat = rustix::fs::statx(folder, name, AtFlags::empty(), StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(stat.stx_mode.into()))
}

/// What a descriptor refers to.
pub(crate) fn look_at(fd: BorrowedFd<'_>) -> Result<Named, Errno> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
        .map(|stat| named(&stat))
}

fn named(stat: &rustix::fs::Statx) -> Named {
    let fixed = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
    Named {
        kind: FileType::from_raw_mode(stat.stx_mode.into()),
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        owner: (stat.stx_uid, stat.stx_gid),
        mode: u32::from(stat.stx_mode) & 0o1777,
        links: stat.stx_nlink,
        immutable: stat.stx_attributes.intersects(fixed),
    }
}

/// A descriptor of what has a name, for everything but reading and writing (O_PATH); of a symbolic link itself.
/// None if it does not exist.
pub(crate) fn find(folder: BorrowedFd<'_>, name: &OsStr) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match retry(|| rustix::fs::openat(folder, name, flags, Mode::empty())) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Where a symbolic link leads that [`find`] has found.
pub(crate) fn target_of(link: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlinkat(link, c"", Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

/// Whether a folder is one of `/proc`: its links need not lead where their text says.
pub(crate) fn is_in_proc(folder: BorrowedFd<'_>) -> bool {
    let fs = rustix::fs::fstatfs(folder);
    fs.is_ok_and(|fs| fs.f_type as u64 == libc::PROC_SUPER_MAGIC as u64)
}

/// Whether this process may write to a file that [`find`] has found under a name, by its real user (access(2)).
pub(crate) fn may_write(
    file: BorrowedFd<'_>,
    (folder, name): (BorrowedFd<'_>, &OsStr),
) -> Result<(), Errno> {
    let access = rustix::fs::Access::WRITE_OK;
    // Some sandboxes refuse the newer call, which uses the effective user, and takes a descriptor.
    match rustix::fs::accessat(rustix::fs::CWD, link_of(file), access, AtFlags::empty()) {
        Err(Errno::NOENT) if !has_link(file) => {
            rustix::fs::accessat(folder, name, access, AtFlags::empty())
        }
        done => done,
    }
}

/// A file in a folder without a name, with the permissions of new files (O_TMPFILE in open(2)).
///
/// EOPNOTSUPP if the file system does not support that, EISDIR if the kernel does not.
pub(crate) fn nameless(folder: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(folder, c".", flags, Mode::from_raw_mode(NEW)))
}

/// Creates a file with this name and these permissions, restricted by umask(2) or the folder's default access
/// control list; EEXIST if it exists, or is a symbolic link.
pub(crate) fn create(folder: BorrowedFd<'_>, name: &OsStr, mode: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(mode)))
}

/// The permissions of new files, before their restriction.
pub(crate) const NEW: u32 = 0o666;
/// Permissions that only let the owner, and root, open a file.
pub(crate) const PRIVATE: u32 = 0o600;

/// Opens a file in a folder for reading and writing; refuses symbolic links.
pub(crate) fn open(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()))
}

/// As [`open`], for reading only.
pub(crate) fn open_to_read(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
    let flags = flags | OFlags::NONBLOCK;
    let fd = retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()))?;
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
    Ok(fd)
}

/// The names in a folder that was opened for listing, in no order, without `.` and `..`.
pub(crate) fn names(folder: BorrowedFd<'_>) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name.to_vec()));
        }
    }
    Ok(names)
}

/// Opens an existing file in a folder for writing. EBUSY for a block device that is in use, for example mounted, if
/// `alone` is set; ELOOP for a symbolic link, unless it is to be followed.
pub(crate) fn open_to_write(
    folder: BorrowedFd<'_>,
    name: &OsStr,
    alone: bool,
    follow: bool,
) -> Result<OwnedFd, Errno> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags.set(OFlags::EXCL, alone);
    flags.set(OFlags::NOFOLLOW, !follow);
    let open = |flags| retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()));
    let fd = match open(flags) {
        Err(Errno::ACCESS) => open((flags - OFlags::RDWR) | OFlags::WRONLY)?,
        other => other?,
    };
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
    Ok(fd)
}

/// Opens the file behind a descriptor again, for direct writes (proc(5)).
pub(crate) fn reopen_direct(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    retry(|| rustix::fs::open(link_of(fd), flags, Mode::empty()))
}

/// Gives a nameless file a name (linkat(2)); EEXIST if that exists.
pub(crate) fn link(fd: BorrowedFd<'_>, folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::linkat(
        rustix::fs::CWD,
        link_of(fd),
        folder,
        name,
        AtFlags::SYMLINK_FOLLOW,
    )
}

/// Whether [`link`] and [`reopen_direct`] work: they need `/proc`.
pub(crate) fn has_link(fd: BorrowedFd<'_>) -> bool {
    std::fs::symlink_metadata(link_of(fd)).is_ok()
}

/// A path to what a descriptor refers to, valid while it is open (proc(5)).
pub(crate) fn link_of(fd: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// Renames a file within a folder, and atomically replaces the file that has the new name (rename(2)).
pub(crate) fn rename(folder: BorrowedFd<'_>, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
    rustix::fs::renameat(folder, from, folder, to)
}

pub(crate) fn unlink(folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::unlinkat(folder, name, AtFlags::empty())
}

/// Marks a file, or a folder opened for listing, as in use until [`unmark`], or until its last descriptor is
/// closed (flock(2)); EAGAIN if another process has marked it.
pub(crate) fn mark(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive))
}

/// Removes a mark immediately: a child that was forked since has the descriptor, too.
pub(crate) fn unmark(fd: BorrowedFd<'_>) {
    // Does not fail for a marked descriptor.
    let _ = retry(|| rustix::fs::flock(fd, FlockOperation::Unlock));
}

/// Sets owner and group of a file.
pub(crate) fn own(fd: BorrowedFd<'_>, owner: (u32, u32)) -> Result<(), Errno> {
    if look_at(fd)?.owner == owner {
        return Ok(());
    }
    let (user, group) = (Uid::from_raw(owner.0), Gid::from_raw(owner.1));
    rustix::fs::fchown(fd, Some(user), Some(group))
}

/// Sets the permissions of a file.
pub(crate) fn set_mode(fd: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
    rustix::fs::fchmod(fd, Mode::from_raw_mode(mode))
}

/// The extended attributes of a file, each with its value. Empty if the file system does not support them. EBADF for a
/// descriptor of [`find`], unless it [has a link](has_link).
pub(crate) fn attributes(file: BorrowedFd<'_>) -> Result<Vec<(OsString, Vec<u8>)>, Errno> {
    let link = has_link(file).then(|| link_of(file));
    let list = |into: &mut [u8]| match &link {
        Some(link) => rustix::fs::listxattr(link, into),
        None => rustix::fs::flistxattr(file, into),
    };
    let value_of = |name: &[u8], into: &mut [u8]| match &link {
        Some(link) => rustix::fs::getxattr(link, name, into),
        None => rustix::fs::fgetxattr(file, name, into),
    };
    // xattr(7): no list and no value is larger.
    let mut names = vec![0_u8; 64 << 10];
    let len = match list(&mut names) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(errno) => return Err(errno),
    };
    let names = names[..len].split(|&byte| byte == 0);
    let mut all = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        let mut value = vec![0_u8; 64 << 10];
        match value_of(name, &mut value) {
            Ok(len) => value.truncate(len),
            // Removed since.
            Err(Errno::NODATA) => continue,
            Err(errno) => return Err(errno),
        }
        all.push((OsString::from_vec(name.to_vec()), value));
    }
    Ok(all)
}

/// Sets an extended attribute of a file, unless it already has this value.
pub(crate) fn set_attribute(fd: BorrowedFd<'_>, name: &OsStr, value: &[u8]) -> Result<(), Errno> {
    let mut now = vec![0_u8; value.len() + 1];
    if rustix::fs::fgetxattr(fd, name.as_bytes(), &mut now[..]) == Ok(value.len())
        && now[..value.len()] == *value
    {
        return Ok(());
    }
    rustix::fs::fsetxattr(fd, name.as_bytes(), value, XattrFlags::empty())
}

/// Removes an extended attribute of a file, if it has it.
pub(crate) fn remove_attribute(fd: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    match rustix::fs::fremovexattr(fd, name) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        done => done,
    }
}

/// Reserves space for a range of a file, without changing its size (fallocate(2)). EOPNOTSUPP if the file
/// system does not support that.
pub(crate) fn reserve(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    retry(|| rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, at, len))
}

/// Punches a hole into a range of a file, or of a device (fallocate(2)). EOPNOTSUPP or EINVAL if that is not
/// supported.
pub(crate) fn punch(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    retry(|| rustix::fs::fallocate(fd, flags, at, len))
}

/// Waits until a file's bytes, and all metadata that is needed to find them, are on the disk (fdatasync(2)).
///
/// On F2FS this takes a checkpoint (syncfs(2)), as a sync of the file's folder does. The first node that is
/// synced after a checkpoint has the number 0, which `f2fs_wait_on_node_pages_writeback()` takes for none:
/// so fdatasync would send the flush while the node is still being written (Linux 6.12, and others).
pub(crate) fn sync_data(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::fdatasync(fd))?;
    let fs = rustix::fs::fstatfs(fd)?;
    match fs.f_type as u64 == libc::F2FS_SUPER_MAGIC as u64 {
        true => sync_all(fd),
        false => Ok(()),
    }
}

/// As [`sync_data`], including owner, permissions and attributes; for a folder, its names (fsync(2)).
pub(crate) fn sync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::fsync(fd))
}

/// As [`sync`], for everything in the file system of a file (syncfs(2)).
pub(crate) fn sync_all(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::syncfs(fd))
}
