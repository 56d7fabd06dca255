//! System calls that a sandbox refuses: a seccomp filter, which lists what a program may call, often without newer calls.
//! Such a filter returns EPERM, EACCES or ENOSYS, which the calls may return for other reasons, too.

use super::Errno;
use std::ffi::c_long;

/// A system call that fails, without having done anything, if each of its arguments is -1, or an empty path: no such
/// descriptor, address, length or flag exists.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    name: &'static str,
    number: c_long,
    /// Arguments that are an empty path instead: checkers of memory accesses report -1 for a path.
    paths: &'static [usize],
}

macro_rules! calls {
    ($($constant:ident $name:ident = $number:ident $($path:literal)*;)*) => {
        $(#[doc = stringify!($name)]
        pub const $constant: Call = Call {
            name: stringify!($name),
            number: libc::$number,
            paths: &[$($path),*],
        };)*
        #[cfg(test)]
        const ALL: &[Call] = &[$($constant),*];
    };
}

calls! {
    BIND bind = SYS_bind;
    CLONE3 clone3 = SYS_clone3;
    CONNECT connect = SYS_connect;
    FALLOCATE fallocate = SYS_fallocate;
    FCHMOD fchmod = SYS_fchmod;
    FCHOWN fchown = SYS_fchown;
    FLOCK flock = SYS_flock;
    FDATASYNC fdatasync = SYS_fdatasync;
    FSYNC fsync = SYS_fsync;
    FTRUNCATE ftruncate = SYS_ftruncate;
    GETRANDOM getrandom = SYS_getrandom;
    LINKAT linkat = SYS_linkat 1 3;
    LISTEN listen = SYS_listen;
    MEMFD_CREATE memfd_create = SYS_memfd_create;
    PIPE2 pipe2 = SYS_pipe2;
    PROCESS_VM_READV process_vm_readv = SYS_process_vm_readv;
    PROCESS_VM_WRITEV process_vm_writev = SYS_process_vm_writev;
    READLINKAT readlinkat = SYS_readlinkat;
    RECVMSG recvmsg = SYS_recvmsg;
    RENAMEAT renameat = SYS_renameat;
    RENAMEAT2 renameat2 = SYS_renameat2;
    SENDMSG sendmsg = SYS_sendmsg;
    SOCKET socket = SYS_socket;
    SYNCFS syncfs = SYS_syncfs;
}

/// readlink, which realpath(3) of the C library uses where it exists.
#[cfg(target_arch = "x86_64")]
pub const READLINK: Call = Call {
    name: "readlink",
    number: libc::SYS_readlink,
    paths: &[],
};
/// As readlinkat, where there is no other call.
#[cfg(not(target_arch = "x86_64"))]
pub const READLINK: Call = READLINKAT;

/// The first of these calls that returned this errno because it is refused.
pub fn refused(errno: Errno, calls: &[Call]) -> Option<Call> {
    calls.iter().find(|call| call.refuses(errno)).copied()
}

/// Why a hash table with std's seed would panic, as those of libraries have it: std has a substitute where getrandom is
/// refused with EPERM or ENOSYS, not for other errnos. It is asked each time, so with arguments that nothing objects to,
/// valgrind included.
pub fn hash_refused() -> Option<Errno> {
    let none = rustix::rand::getrandom(&mut [0_u8; 0][..], rustix::rand::GetRandomFlags::NONBLOCK);
    none.err().filter(|&errno| errno == Errno::ACCESS)
}

/// Returns true if a sandbox may have returned this errno.
pub fn may_return(errno: Errno) -> bool {
    matches!(errno, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

impl Call {
    /// Returns true if the call returned this errno because it is refused, whatever its arguments.
    pub fn refuses(self, errno: Errno) -> bool {
        may_return(errno) && self.refusal() == Some(errno)
    }

    /// The cause of a failure because of it.
    pub fn why(self) -> String {
        format!("a sandbox refuses the system call {}", self.name)
    }

    /// What helps then.
    pub fn remedy(self) -> String {
        format!("allow {} in the seccomp profile of this process", self.name)
    }

    /// What it returns if it is refused; None if it is not.
    pub fn refusal(self) -> Option<Errno> {
        Some(self.answer()).filter(|&errno| may_return(errno))
    }

    /// What it returns for arguments that nothing can be done with.
    fn answer(self) -> Errno {
        let path = c"".as_ptr().expose_provenance() as c_long;
        let argument = |at| if self.paths.contains(&at) { path } else { -1 };
        let [a, b, c, d, e, f] = std::array::from_fn(argument);
        // SAFETY: with these arguments the calls above do nothing, and access no memory but the empty path.
        unsafe { libc::syscall(self.number, a, b, c, d, e, f) };
        super::last_errno()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_work_are_not_taken_for_refused_ones() {
        for call in ALL {
            assert_eq!(call.refusal(), None, "{call:?}");
            assert!(!call.refuses(call.answer()), "{call:?}");
        }
    }

    #[test]
    fn a_call_that_does_not_exist_is_refused() {
        let number = 9999;
        let call = Call {
            name: "none",
            number,
            paths: &[],
        };
        assert_eq!(call.refusal(), Some(Errno::NOSYS));
        assert!(call.refuses(Errno::NOSYS) && !call.refuses(Errno::PERM));
    }
}
