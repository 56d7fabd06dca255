//! System calls that a sandbox refuses: a seccomp filter, which lists what a program may call, often without newer calls.
//! Such a filter returns EPERM, EACCES or ENOSYS, which the calls may return for other reasons, too.

use super::Errno;
use std::ffi::c_long;

/// A system call that fails, without having done anything, if each of its arguments is -1: no such descriptor, address,
/// length or flag exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub name: &'static str,
    number: c_long,
}

macro_rules! calls {
    ($($constant:ident $name:ident = $number:ident;)*) => {
        $(pub(crate) const $constant: Call = Call { name: stringify!($name), number: libc::$number };)*
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
    FDATASYNC fdatasync = SYS_fdatasync;
    FSYNC fsync = SYS_fsync;
    FTRUNCATE ftruncate = SYS_ftruncate;
    LINKAT linkat = SYS_linkat;
    LISTEN listen = SYS_listen;
    MEMFD_CREATE memfd_create = SYS_memfd_create;
    PIPE2 pipe2 = SYS_pipe2;
    PROCESS_VM_READV process_vm_readv = SYS_process_vm_readv;
    RECVMSG recvmsg = SYS_recvmsg;
    RENAMEAT renameat = SYS_renameat;
    RENAMEAT2 renameat2 = SYS_renameat2;
    SENDFILE sendfile = SYS_sendfile;
    SENDMSG sendmsg = SYS_sendmsg;
    SOCKET socket = SYS_socket;
    SPLICE splice = SYS_splice;
    STATX statx = SYS_statx;
    SYNCFS syncfs = SYS_syncfs;
}

/// Whether a sandbox may have returned this errno.
pub(crate) fn may_return(errno: Errno) -> bool {
    matches!(errno, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

impl Call {
    /// Whether the call returned this errno because it is refused, whatever its arguments.
    pub(crate) fn refuses(self, errno: Errno) -> bool {
        may_return(errno) && self.refusal() == Some(errno)
    }

    /// What it returns if it is refused; None if it is not.
    pub(crate) fn refusal(self) -> Option<Errno> {
        Some(self.answer()).filter(|&errno| may_return(errno))
    }

    /// What it returns for arguments that nothing can be done with.
    fn answer(self) -> Errno {
        let none: c_long = -1;
        // SAFETY: with these arguments the calls above neither access memory nor do anything.
        unsafe { libc::syscall(self.number, none, none, none, none, none, none) };
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
        };
        assert_eq!(call.refusal(), Some(Errno::NOSYS));
        assert!(call.refuses(Errno::NOSYS) && !call.refuses(Errno::PERM));
    }
}
