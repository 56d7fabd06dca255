//! Names in a folder, files without names, and making both durable.

use super::stat::{self, Inode};
use super::{Errno, retry, sandbox};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, Uid,
    XattrFlags,
};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What a name in a folder refers to.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    pub kind: FileType,
    /// The file system's device: major and minor number.
    pub device: (u32, u32),
    pub inode: u64,
    pub owner: (u32, u32),
    /// Permissions, without the setuid and setgid bits.
    pub mode: u32,
    /// Number of its names.
    pub links: u32,
    /// True if it cannot be changed or replaced (chattr(1)).
    pub immutable: bool,
}

impl Named {
    /// Returns true if both are the same file.
    pub fn is(&self, other: &Named) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// Returns true if only the owner of a file may remove or rename it there.
    pub fn is_sticky(&self) -> bool {
        self.kind == FileType::Directory && self.mode & 0o1000 != 0
    }
}

/// Opens a folder to look up and change names in.
///
/// The second descriptor can be synced; None without permission to list the folder.
pub fn folder(path: &Path) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    folder_from(rustix::fs::CWD, path)
}

/// As [`folder`], for a path that begins in another one.
pub fn folder_from(from: BorrowedFd<'_>, path: &Path) -> Result<(OwnedFd, Option<OwnedFd>), Errno> {
    open_folder(from, path.as_os_str(), OFlags::empty())
}

/// As [`folder`], for a folder in another one; ENOTDIR for a symbolic link.
pub fn folder_in(
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
pub fn make_folder(folder: BorrowedFd<'_>, name: &OsStr, mode: u32) -> Result<(), Errno> {
    rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(mode))
}

/// Removes an empty folder.
pub fn remove_folder(folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
}

/// What a name refers to; None if it does not exist. A symbolic link is not followed.
pub fn look_up(folder: BorrowedFd<'_>, name: &OsStr) -> Result<Option<Named>, Errno> {
    match stat::name(folder, name) {
        Ok(inode) => Ok(Some(named(&inode))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The type of what a name refers to, after following links.
pub fn kind(folder: BorrowedFd<'_>, name: &OsStr) -> Result<FileType, Errno> {
    let stat = retry(|| rustix::fs::statat(folder, name, AtFlags::empty()))?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// What a descriptor refers to.
pub fn look_at(fd: BorrowedFd<'_>) -> Result<Named, Errno> {
    stat::of(fd).map(|inode| named(&inode))
}

fn named(inode: &Inode) -> Named {
    Named {
        kind: inode.kind,
        device: inode.device,
        inode: inode.number,
        owner: inode.owner,
        mode: inode.mode & 0o1777,
        links: inode.links,
        immutable: inode.immutable,
    }
}

/// A descriptor of what has a name, for everything but reading and writing (O_PATH); of a symbolic link itself.
/// None if it does not exist.
pub fn find(folder: BorrowedFd<'_>, name: &OsStr) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match retry(|| rustix::fs::openat(folder, name, flags, Mode::empty())) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Where a symbolic link leads that [`find`] has found.
pub fn target_of(link: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlinkat(link, c"", Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

/// Returns true if a folder is one of `/proc`: its links need not lead where their text says.
pub fn is_in_proc(folder: BorrowedFd<'_>) -> bool {
    let fs = rustix::fs::fstatfs(folder);
    fs.is_ok_and(|fs| fs.f_type as u64 == libc::PROC_SUPER_MAGIC as u64)
}

/// Returns true if this process may write to a file that [`find`] has found under a name, by its real user (access(2)).
pub fn may_write(
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
pub fn tmpfile(folder: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(folder, c".", flags, Mode::from_raw_mode(NEW)))
}

/// Creates a file with this name and these permissions, restricted by umask(2) or the folder's default access
/// control list; EEXIST if it exists, or is a symbolic link.
pub fn create(folder: BorrowedFd<'_>, name: &OsStr, mode: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    retry(|| rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(mode)))
}

/// As [`create`], for a file that only this user may open.
pub fn create_private(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    create(folder, name, PRIVATE)
}

/// The permissions of new files, before their restriction.
pub const NEW: u32 = 0o666;
/// Permissions that only let the owner, and root, open a file.
pub const PRIVATE: u32 = 0o600;

/// Opens a file in a folder for reading and writing; refuses symbolic links.
pub fn open(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()))
}

/// As [`open`], for reading only.
pub fn open_to_read(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
    let flags = flags | OFlags::NONBLOCK;
    let fd = retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()))?;
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
    Ok(fd)
}

/// The names in a folder that was opened for listing, in no order, without `.` and `..`.
pub fn names(folder: BorrowedFd<'_>) -> Result<Vec<OsString>, Errno> {
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
pub fn open_to_write(
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
pub fn reopen_direct(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    retry(|| rustix::fs::open(link_of(fd), flags, Mode::empty()))
}

/// Gives a nameless file a name (linkat(2)); EEXIST if that exists.
pub fn link(fd: BorrowedFd<'_>, folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::linkat(
        rustix::fs::CWD,
        link_of(fd),
        folder,
        name,
        AtFlags::SYMLINK_FOLLOW,
    )
}

/// Returns true if there is a link to what a descriptor refers to: it needs `/proc`.
pub fn has_link(fd: BorrowedFd<'_>) -> bool {
    stat::link(&link_of(fd)).is_ok()
}

/// Checks that [`link`] works: ENOENT without `/proc`, or what a sandbox returns.
pub fn can_link(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    if !has_link(fd) {
        return Err(Errno::NOENT);
    }
    match sandbox::LINKAT.refusal() {
        Some(errno) => Err(errno),
        None => Ok(()),
    }
}

/// A path to what a descriptor refers to, valid while it is open (proc(5)).
pub fn link_of(fd: BorrowedFd<'_>) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// Renames a file within a folder, and atomically replaces the file that has the new name (rename(2)).
pub fn rename(folder: BorrowedFd<'_>, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
    match rustix::fs::renameat(folder, from, folder, to) {
        Err(errno) if sandbox::RENAMEAT.refuses(errno) => {
            rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::empty())
        }
        done => done,
    }
}

/// Renames within a folder; EEXIST if anything has the new name.
pub fn rename_new(folder: BorrowedFd<'_>, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
    match rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE) {
        Err(errno) if is_unknown(errno) => {}
        done => return done,
    }
    match rustix::fs::linkat(folder, from, folder, to, AtFlags::empty()) {
        Ok(()) => return unlink(folder, from),
        Err(Errno::PERM) => {}
        Err(errno) => return Err(errno),
    }
    // A folder has no other links. An empty folder that has got the name since would be replaced.
    match look_up(folder, to)? {
        None => rename(folder, from, to),
        Some(_) => Err(Errno::EXIST),
    }
}

/// Exchanges two names in a folder (renameat2(2)): atomically, unless the kernel, a sandbox or the file system does
/// not support that. Then the second name does not exist for a moment.
pub fn exchange(folder: BorrowedFd<'_>, one: &OsStr, other: &OsStr) -> Result<(), Errno> {
    match rustix::fs::renameat_with(folder, one, folder, other, RenameFlags::EXCHANGE) {
        Err(errno) if is_unknown(errno) => {}
        done => return done,
    }
    let mut aside = one.to_os_string();
    aside.push(".old");
    rename_new(folder, other, &aside)?;
    rename(folder, one, other).inspect_err(|_| {
        let _ = rename(folder, &aside, other);
    })?;
    rename(folder, &aside, one)
}

/// The errors of renameat2(2) for flags that are not supported, or for a call that a sandbox refuses.
fn is_unknown(errno: Errno) -> bool {
    matches!(errno, Errno::NOSYS | Errno::INVAL | Errno::PERM) || sandbox::RENAMEAT2.refuses(errno)
}

/// Sets the group and the permissions of a socket that this process has just made, and returns what it is. A symbolic
/// link is not followed.
pub fn permit_socket(
    folder: BorrowedFd<'_>,
    name: &OsStr,
    group: Option<u32>,
    mode: u32,
) -> Result<Named, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = retry(|| rustix::fs::openat(folder, name, flags, Mode::empty()))?;
    let found = look_at(fd.as_fd())?;
    if found.kind != FileType::Socket || found.owner.0 != rustix::process::geteuid().as_raw() {
        return Err(Errno::PERM);
    }
    if let Some(group) = group.map(Gid::from_raw) {
        rustix::fs::chownat(&fd, c"", None, Some(group), AtFlags::EMPTY_PATH)?;
    }
    let mode = Mode::from_raw_mode(mode);
    if has_link(fd.as_fd()) {
        rustix::fs::chmod(link_of(fd.as_fd()), mode)?
    } else {
        rustix::fs::chmodat(folder, name, mode, AtFlags::empty())?
    }
    Ok(found)
}

/// Creates a symbolic link; EEXIST if anything has the name.
pub fn symlink(folder: BorrowedFd<'_>, name: &OsStr, target: &Path) -> Result<(), Errno> {
    rustix::fs::symlinkat(target, folder, name)
}

/// The target of a symbolic link.
pub fn read_link(folder: BorrowedFd<'_>, name: &OsStr) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlinkat(folder, name, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

pub fn unlink(folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::unlinkat(folder, name, AtFlags::empty())
}

/// Marks a file, or a folder opened for listing, as in use until [`unlock`], or until its last descriptor is
/// closed (flock(2)); EAGAIN if another process has marked it.
pub fn try_lock(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive))
}

/// Locks a file that is open for writing, for this process: until it ends, or closes any descriptor of the file
/// (F_SETLK in fcntl(2)). EAGAIN if another process has locked it.
pub fn lock(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::fcntl_lock(fd, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::ACCESS) => Err(Errno::AGAIN),
        done => done,
    }
}

/// Removes a mark immediately: a child that was forked since has the descriptor, too.
pub fn unlock(fd: BorrowedFd<'_>) {
    // Does not fail for a marked descriptor.
    let _ = retry(|| rustix::fs::flock(fd, FlockOperation::Unlock));
}

/// Sets owner and group of a file.
pub fn own(fd: BorrowedFd<'_>, owner: (u32, u32)) -> Result<(), Errno> {
    if look_at(fd)?.owner == owner {
        return Ok(());
    }
    let (user, group) = (Some(Uid::from_raw(owner.0)), Some(Gid::from_raw(owner.1)));
    match rustix::fs::fchown(fd, user, group) {
        Err(errno) if sandbox::FCHOWN.refuses(errno) => {
            let (folder, link) = (rustix::fs::CWD, link_of(fd));
            rustix::fs::chownat(folder, link, user, group, AtFlags::empty())
        }
        done => done,
    }
}

/// Sets the permissions of a file.
pub fn set_mode(fd: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
    if look_at(fd)?.mode == mode {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(mode);
    match rustix::fs::fchmod(fd, mode) {
        Err(errno) if sandbox::FCHMOD.refuses(errno) => {
            let (folder, link) = (rustix::fs::CWD, link_of(fd));
            rustix::fs::chmodat(folder, link, mode, AtFlags::empty())
        }
        done => done,
    }
}

/// The extended attributes of a file that [`find`] has found under a name, each with its value. Empty if the file system
/// does not support them.
pub fn attributes(
    file: BorrowedFd<'_>,
    (folder, name): (BorrowedFd<'_>, &OsStr),
) -> Result<Vec<(OsString, Vec<u8>)>, Errno> {
    let link = link_of(file);
    let by_link = attributes_by(
        |list| rustix::fs::listxattr(&link, list),
        |name, value| rustix::fs::getxattr(&link, name, value),
    );
    match by_link {
        // Without /proc, or in a sandbox: this requires permission to read the file.
        Err(errno) if errno == Errno::NOENT || sandbox::may_return(errno) => {
            let fd = open_to_read(folder, name)?;
            let (own, there) = (stat::of(file)?, stat::of(&fd)?);
            if (own.device, own.number) != (there.device, there.number) {
                return Err(Errno::STALE);
            }
            attributes_by(
                |list| rustix::fs::flistxattr(&fd, list),
                |name, value| rustix::fs::fgetxattr(&fd, name, value),
            )
        }
        done => done,
    }
}

fn attributes_by(
    list: impl Fn(&mut [u8]) -> Result<usize, Errno>,
    get: impl Fn(&[u8], &mut [u8]) -> Result<usize, Errno>,
) -> Result<Vec<(OsString, Vec<u8>)>, Errno> {
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
        match get(name, &mut value) {
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
pub fn set_attribute(fd: BorrowedFd<'_>, name: &OsStr, value: &[u8]) -> Result<(), Errno> {
    let mut now = vec![0_u8; value.len() + 1];
    if rustix::fs::fgetxattr(fd, name.as_bytes(), &mut now[..]) == Ok(value.len())
        && now[..value.len()] == *value
    {
        return Ok(());
    }
    rustix::fs::fsetxattr(fd, name.as_bytes(), value, XattrFlags::empty())
}

/// Removes an extended attribute of a file, if it has it.
pub fn remove_attribute(fd: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
    let mut size = [0_u8; 0];
    match rustix::fs::fgetxattr(fd, name, &mut size[..]) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        _ => rustix::fs::fremovexattr(fd, name),
    }
}

/// Reserves space for a range of a file, without changing its size (fallocate(2)). EOPNOTSUPP if the file
/// system does not support that.
pub fn reserve(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    retry(|| rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, at, len))
}

/// Punches a hole into a range of a file, or of a device (fallocate(2)). EOPNOTSUPP or EINVAL if that is not
/// supported.
pub fn punch(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    retry(|| rustix::fs::fallocate(fd, flags, at, len))
}

/// Waits until a file's bytes, and all metadata that is needed to find them, are on the disk (fdatasync(2)).
///
/// On F2FS this takes a checkpoint (syncfs(2)), as a sync of the file's folder does. The first node that is
/// synced after a checkpoint has the number 0, which `f2fs_wait_on_node_pages_writeback()` takes for none:
/// so fdatasync would send the flush while the node is still being written (Linux 6.12, and others).
pub fn sync_data(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    match retry(|| rustix::fs::fdatasync(fd)) {
        Err(errno) if sandbox::FDATASYNC.refuses(errno) => retry(|| rustix::fs::fsync(fd))?,
        done => done?,
    }
    match rustix::fs::fstatfs(fd) {
        Ok(fs) if fs.f_type as u64 != libc::F2FS_SUPER_MAGIC as u64 => Ok(()),
        Err(errno) if !sandbox::may_return(errno) => Err(errno),
        _ => sync_all(fd),
    }
}

/// As [`sync_data`], including owner, permissions and attributes; for a folder, its names (fsync(2)).
pub fn sync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    match retry(|| rustix::fs::fsync(fd)) {
        Err(errno) if sandbox::FSYNC.refuses(errno) => {
            // Before Linux 5.8, syncfs does not report failed writes.
            retry(|| rustix::fs::fdatasync(fd))?;
            sync_all(fd)
        }
        done => done,
    }
}

/// As [`sync`], for everything in the file system of a file (syncfs(2)).
pub fn sync_all(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| rustix::fs::syncfs(fd))
}
