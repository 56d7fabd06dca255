//! Requests to drivers (ioctl(2)): each a structure of a header of the kernel, and its number.

use super::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput};
pub(super) use rustix::ioctl::{Opcode, opcode};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr;

/// A structure that one request hands to the kernel.
///
/// # Safety
/// The structure is laid out as the kernel's for that number. The kernel touches nothing but its
/// bytes, and memory whose addresses are in it: the caller keeps that memory alive, and free of
/// references that say otherwise, for as long as a call may run.
pub(super) unsafe trait Argument {
    /// Its number.
    const OPCODE: Opcode;
}

/// Makes a request. What the kernel answers in the structure is there, also after an error; what it
/// returns besides is a count or a descriptor.
pub(super) fn request<R: Argument>(fd: impl AsFd, data: &mut R) -> Result<IoctlOutput, Errno> {
    // SAFETY: `Argument` says that the kernel takes this structure for this number.
    unsafe { rustix::ioctl::ioctl(fd, Call(data)) }
}

/// As [`rustix::ioctl::Updater`], which keeps back what the call returns.
struct Call<'a, R>(&'a mut R);

// SAFETY: number and structure belong together, as `Argument` says; the pointer is that of a
// structure borrowed for longer than the call.
unsafe impl<R: Argument> Ioctl for Call<'_, R> {
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
