//! The system calls that name a file, a descriptor or a socket, and which of their arguments do.

/// An argument that names something.
#[derive(Clone, Copy, Debug)]
pub enum Names {
    /// A path, relative to the working folder.
    Path(usize),
    /// A path, relative to the folder of another argument.
    At(usize, usize),
    Fd(usize),
    /// The address of a socket, and its length.
    Address(usize, usize),
    /// A descriptor that the call makes.
    Made,
}

use Names::{Address, At, Fd, Made, Path};

pub struct Known {
    pub number: i64,
    pub name: &'static str,
    pub names: &'static [Names],
}

macro_rules! known {
    ($($(#[$only:meta])* $number:ident $names:expr;)*) => {
        &[$($(#[$only])* Known {
            number: libc::$number,
            // Without `SYS_`.
            name: stringify!($number).split_at(4).1,
            names: &$names,
        }),*]
    };
}

pub const CALLS: &[Known] = known! {
    #[cfg(target_arch = "x86_64")] SYS_open [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_creat [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_stat [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_lstat [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_access [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_readlink [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_unlink [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_rmdir [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_mkdir [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_mknod [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_chmod [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_chown [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_lchown [Path(0)];
    #[cfg(target_arch = "x86_64")] SYS_symlink [Path(1)];
    #[cfg(target_arch = "x86_64")] SYS_link [Path(0), Path(1)];
    #[cfg(target_arch = "x86_64")] SYS_rename [Path(0), Path(1)];
    #[cfg(target_arch = "x86_64")] SYS_dup2 [Fd(0), Fd(1)];
    SYS_openat [At(0, 1)];
    SYS_openat2 [At(0, 1)];
    SYS_newfstatat [At(0, 1)];
    SYS_statx [At(0, 1)];
    SYS_faccessat [At(0, 1)];
    SYS_faccessat2 [At(0, 1)];
    SYS_readlinkat [At(0, 1)];
    SYS_unlinkat [At(0, 1)];
    SYS_mkdirat [At(0, 1)];
    SYS_mknodat [At(0, 1)];
    SYS_fchmodat [At(0, 1)];
    SYS_fchmodat2 [At(0, 1)];
    SYS_fchownat [At(0, 1)];
    SYS_utimensat [At(0, 1)];
    SYS_symlinkat [At(1, 2)];
    SYS_linkat [At(0, 1), At(2, 3)];
    SYS_renameat [At(0, 1), At(2, 3)];
    SYS_renameat2 [At(0, 1), At(2, 3)];
    SYS_chdir [Path(0)];
    SYS_truncate [Path(0)];
    SYS_statfs [Path(0)];
    SYS_listxattr [Path(0)];
    SYS_llistxattr [Path(0)];
    SYS_getxattr [Path(0)];
    SYS_lgetxattr [Path(0)];
    SYS_setxattr [Path(0)];
    SYS_lsetxattr [Path(0)];
    SYS_close [Fd(0)];
    SYS_dup [Fd(0)];
    SYS_dup3 [Fd(0), Fd(1)];
    SYS_fchdir [Fd(0)];
    SYS_fchmod [Fd(0)];
    SYS_fchown [Fd(0)];
    SYS_fstat [Fd(0)];
    SYS_fstatfs [Fd(0)];
    SYS_ftruncate [Fd(0)];
    SYS_fallocate [Fd(0)];
    SYS_fadvise64 [Fd(0)];
    SYS_flock [Fd(0)];
    SYS_fsync [Fd(0)];
    SYS_fdatasync [Fd(0)];
    SYS_syncfs [Fd(0)];
    SYS_fcntl [Fd(0)];
    SYS_ioctl [Fd(0)];
    SYS_lseek [Fd(0)];
    SYS_read [Fd(0)];
    SYS_readv [Fd(0)];
    SYS_pread64 [Fd(0)];
    SYS_preadv [Fd(0)];
    SYS_preadv2 [Fd(0)];
    SYS_write [Fd(0)];
    SYS_writev [Fd(0)];
    SYS_pwrite64 [Fd(0)];
    SYS_pwritev [Fd(0)];
    SYS_pwritev2 [Fd(0)];
    SYS_getdents64 [Fd(0)];
    SYS_fgetxattr [Fd(0)];
    SYS_fsetxattr [Fd(0)];
    SYS_flistxattr [Fd(0)];
    SYS_mmap [Fd(4)];
    SYS_copy_file_range [Fd(0), Fd(2)];
    SYS_sendfile [Fd(0), Fd(1)];
    SYS_splice [Fd(0), Fd(2)];
    SYS_io_uring_setup [Made];
    SYS_io_uring_enter [Fd(0)];
    SYS_io_uring_register [Fd(0)];
    SYS_memfd_create [Made];
    SYS_pidfd_open [Made];
    SYS_pidfd_getfd [Fd(0)];
    SYS_socket [Made];
    SYS_socketpair [Made];
    SYS_bind [Fd(0), Address(1, 2)];
    SYS_connect [Fd(0), Address(1, 2)];
    SYS_listen [Fd(0)];
    SYS_accept [Fd(0)];
    SYS_accept4 [Fd(0)];
    SYS_shutdown [Fd(0)];
    SYS_sendto [Fd(0)];
    SYS_recvfrom [Fd(0)];
    SYS_sendmsg [Fd(0)];
    SYS_recvmsg [Fd(0)];
    SYS_getsockopt [Fd(0)];
    SYS_setsockopt [Fd(0)];
    SYS_getsockname [Fd(0)];
    SYS_getpeername [Fd(0)];
};

pub fn find(number: i64) -> Option<&'static Known> {
    CALLS.iter().find(|known| known.number == number)
}
