//! DLPack: memory handed to array libraries in a capsule
//! (<https://dmlc.github.io/dlpack/latest/>).

use crate::buffer::{Held, View};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// The CPU, as type and number of a device.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// The version of the layout below.
const VERSION: [u32; 2] = [1, 0];
const READ_ONLY: u64 = 1 << 0;
const IS_COPIED: u64 = 1 << 1;
/// Code and bits of uint8, lanes.
const UINT8: (u8, u8, u16) = (1, 8, 1);

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A managed tensor, and behind it what it points to: so it is a C struct, the tensor first.
#[repr(C)]
struct Export<T> {
    managed: T,
    shape: [i64; 1],
    strides: [i64; 1],
    _memory: Memory,
}

enum Memory {
    Shared { _view: View },
    Copy { _bytes: Vec<u8> },
}

/// A capsule over the whole of `held`, or over a copy of it.
pub(crate) fn export(
    py: Python<'_>,
    held: Arc<Held>,
    versioned: bool,
    copy: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let (memory, start, len, flags) = if copy {
        let mut bytes = held.copy(py)?;
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        (Memory::Copy { _bytes: bytes }, start, len, IS_COPIED)
    } else {
        let flags = if held.is_writable() { 0 } else { READ_ONLY };
        let (view, start, len) = View::of(py, held)?;
        (Memory::Shared { _view: view }, start, len, flags)
    };
    if !versioned && flags & READ_ONLY != 0 {
        return Err(PyBufferError::new_err(
            "the memory is read-only, which only DLPack 1.0 can say: ask with max_version=(1, 0)",
        ));
    }
    let tensor = Tensor {
        data: start.cast(),
        device: [CPU.0, CPU.1],
        ndim: 1,
        dtype_code: UINT8.0,
        dtype_bits: UINT8.1,
        dtype_lanes: UINT8.2,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let len = len as i64;
    if versioned {
        let managed = ManagedVersioned {
            version: VERSION,
            manager: std::ptr::null_mut(),
            deleter: Some(delete::<ManagedVersioned>),
            flags,
            tensor,
        };
        capsule(py, managed, len, memory)
    } else {
        let managed = Managed {
            tensor,
            manager: std::ptr::null_mut(),
            deleter: Some(delete::<Managed>),
        };
        capsule(py, managed, len, memory)
    }
}

/// The two layouts of a managed tensor.
trait Layout: Sized + 'static {
    /// The name of a capsule that nobody has consumed yet.
    const NAME: &'static CStr;

    fn tensor(&mut self) -> &mut Tensor;
}

impl Layout for Managed {
    const NAME: &'static CStr = c"dltensor";

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Layout for ManagedVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

fn capsule<T: Layout>(
    py: Python<'_>,
    managed: T,
    len: i64,
    memory: Memory,
) -> PyResult<Bound<'_, PyAny>> {
    let export = Box::into_raw(Box::new(Export {
        managed,
        shape: [len],
        strides: [1],
        _memory: memory,
    }));
    // SAFETY: `export` was just allocated and is nobody else's yet. The capsule owns it until a
    // consumer takes it over, which the protocol has it say by renaming the capsule.
    unsafe {
        let (shape, strides) = (&raw mut (*export).shape, &raw mut (*export).strides);
        let tensor = (*export).managed.tensor();
        tensor.shape = shape.cast();
        tensor.strides = strides.cast();
        let capsule = ffi::PyCapsule_New(export.cast(), T::NAME.as_ptr(), Some(unclaimed::<T>));
        if capsule.is_null() {
            delete(export.cast::<T>());
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees a managed tensor: the consumer calls it, from any thread, with or without the interpreter.
unsafe extern "C" fn delete<T: Layout>(managed: *mut T) {
    // SAFETY: it is the first field of an `Export` made by `capsule`, and the protocol has the
    // deleter called once.
    drop(unsafe { Box::from_raw(managed.cast::<Export<T>>()) });
}

/// Ends a capsule: what no consumer has taken over is freed.
unsafe extern "C" fn unclaimed<T: Layout>(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with a capsule made by `capsule`; under its first name it
    // still owns its `Export`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr());
            delete(managed.cast::<T>());
        }
    }
}
