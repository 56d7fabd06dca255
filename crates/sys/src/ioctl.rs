//! Requests to drivers (ioctl(2)): each is a structure of a kernel header, with its number.

use super::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput};
pub(super) use rustix::ioctl::{Opcode, opcode};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr;

/// A structure that one request passes to the kernel.
///
/// # Safety
/// The structure has the kernel's layout for that number. The kernel accesses only its bytes,
/// and memory whose addresses are in it: the caller keeps that memory alive, and free of
/// references that forbid such access, for as long as a call may run.
pub(super) unsafe trait Argument {
    /// Its number.
    const OPCODE: Opcode;
}

/// Makes a request. The kernel's answer in the structure is available after an error, too; the
/// return value is a count or a descriptor.
pub(super) fn request<R: Argument>(fd: impl AsFd, data: &mut R) -> Result<IoctlOutput, Errno> {
    // SAFETY: `Argument` says that the kernel takes this structure for this number.
    unsafe { rustix::ioctl::ioctl(fd, IoctlCall(data)) }
}

/// As [`rustix::ioctl::Updater`], which does not return the result of the call.
struct IoctlCall<'a, R>(&'a mut R);

// SAFETY: number and structure match, as `Argument` requires; the pointer is that of a structure
// borrowed for longer than the call.
unsafe impl<R: Argument> Ioctl for IoctlCall<'_, R> {
    type Output = IoctlOutput;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        R::OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(
        returned: IoctlOutput,
        _: *mut c_void,
    ) -> rustix::io::Result<IoctlOutput> {
        Ok(returned)
    }
}
