//! DLPack: passes memory to array libraries in a capsule
//! (<https://dmlc.github.io/dlpack/latest/>).

use crate::buffer::{Held, View};
use dlpark::allocation::fixed::Initialized;
use dlpark::ffi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned,
    DLPackVersion,
};
use dlpark::metadata::{Dynamic, Fixed};
use dlpark::{DlpackFlags, ManagedTensorBase};
use dmafile_gpu::{Device, DeviceMemory};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use std::sync::Arc;

/// The CPU, as a device type and number.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// The oldest version that supports read-only memory: every consumer with `max_version` accepts
/// it.
const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };

enum Memory {
    Shared { _view: View },
    Copy { _bytes: Vec<u8> },
}

/// A capsule for all of `held`, or for a copy of it.
pub(crate) fn export(
    py: Python<'_>,
    held: Arc<Held>,
    versioned: bool,
    copy: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let (memory, start, len, flags) = if copy {
        let mut bytes = held.copy(py)?;
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        (
            Memory::Copy { _bytes: bytes },
            start,
            len,
            DlpackFlags::IS_COPIED,
        )
    } else {
        let mut flags = DlpackFlags::empty();
        flags.set(DlpackFlags::READ_ONLY, !held.is_writable());
        let (view, start, len) = View::of(py, held)?;
        (Memory::Shared { _view: view }, start, len, flags)
    };
    if versioned {
        let mut tensor = describe::<DLManagedTensorVersioned>(memory, start, len)?;
        let version = tensor.set_version(VERSION);
        version.expect("a version of the layout that is described");
        // SAFETY: `describe` has set what the memory says; the flags do, too.
        let tensor = unsafe {
            tensor.set_flags_unchecked(flags);
            tensor.finish()
        };
        return tensor.into_pyobject(py);
    }
    if flags.contains(DlpackFlags::READ_ONLY) {
        return Err(PyBufferError::new_err(
            "the memory is read-only, which needs DLPack 1.0: request it with max_version=(1, 0)",
        ));
    }
    let tensor = describe::<DLManagedTensor>(memory, start, len)?;
    // SAFETY: `describe` has set what the memory says.
    unsafe { tensor.finish() }.into_pyobject(py)
}

/// A device, as DLPack's type and number.
pub(crate) fn device(device: Device) -> (u32, i32) {
    let kind = if device.is_cuda() {
        DLDeviceType::CUDA
    } else {
        DLDeviceType::ROCM
    };
    (kind.0, i32::try_from(device.number()).unwrap_or(i32::MAX))
}

/// A capsule for a tensor in the memory of a device, `at` bytes from the start of that memory.
pub(crate) fn of_device<'py>(
    py: Python<'py>,
    memory: Arc<DeviceMemory>,
    (kind, number): (u32, i32),
    at: u64,
    (dtype, shape): (&str, Vec<i64>),
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let Some(dtype) = data_type(dtype) else {
        let text = format!("DLPack has no type for {dtype} tensors");
        return Err(PyBufferError::new_err(text));
    };
    let device = DLDevice {
        device_type: DLDeviceType(kind),
        device_id: number,
    };
    let start = memory.address() + at;
    let failed = |error: dlpark::metadata::Error| PyBufferError::new_err(error.to_string());
    macro_rules! describe {
        ($type:ty) => {{
            let tensor = Dynamic::compact(shape).initialize_as::<$type>(Box::new(memory));
            let mut tensor = tensor.map_err(failed)?;
            tensor.set_dtype(dtype).set_device(device);
            tensor.set_data(std::ptr::without_provenance_mut(start as usize));
            tensor
        }};
    }
    if versioned {
        let mut tensor = describe!(DLManagedTensorVersioned);
        let version = tensor.set_version(VERSION);
        version.expect("a version of the layout that is described");
        // SAFETY: shape, type, device and address describe the memory, which the tensor owns.
        return unsafe { tensor.finish() }.into_pyobject(py);
    }
    let tensor = describe!(DLManagedTensor);
    // SAFETY: as above.
    unsafe { tensor.finish() }.into_pyobject(py)
}

/// DLPack's type for a type name in files; None if it has none.
fn data_type(name: &str) -> Option<DLDataType> {
    let (code, bits) = match name {
        "BOOL" => (DLDataTypeCode::BOOL, 8),
        "U8" | "F4" => (DLDataTypeCode::UINT, 8),
        "U16" => (DLDataTypeCode::UINT, 16),
        "U32" => (DLDataTypeCode::UINT, 32),
        "U64" => (DLDataTypeCode::UINT, 64),
        "I8" => (DLDataTypeCode::INT, 8),
        "I16" => (DLDataTypeCode::INT, 16),
        "I32" => (DLDataTypeCode::INT, 32),
        "I64" => (DLDataTypeCode::INT, 64),
        "F16" => (DLDataTypeCode::FLOAT, 16),
        "F32" => (DLDataTypeCode::FLOAT, 32),
        "F64" => (DLDataTypeCode::FLOAT, 64),
        "BF16" => (DLDataTypeCode::BFLOAT, 16),
        "C64" => (DLDataTypeCode::COMPLEX, 64),
        "F8_E4M3" => (DLDataTypeCode::FLOAT8_E4M3FN, 8),
        "F8_E5M2" => (DLDataTypeCode::FLOAT8_E5M2, 8),
        "F8_E4M3FNUZ" => (DLDataTypeCode::FLOAT8_E4M3FNUZ, 8),
        "F8_E5M2FNUZ" => (DLDataTypeCode::FLOAT8_E5M2FNUZ, 8),
        "F8_E8M0" => (DLDataTypeCode::FLOAT8_E8M0FNU, 8),
        _ => return None,
    };
    let lanes = 1;
    Some(DLDataType { code, bits, lanes })
}

/// A tensor that owns the memory, whose `len` bytes stay at `start` for as long as it exists.
fn describe<T: ManagedTensorBase>(
    memory: Memory,
    start: *mut u8,
    len: usize,
) -> PyResult<Initialized<T, 1>> {
    let tensor = Fixed::new([len as i64], [1]).initialize_as::<T>(Box::new(memory));
    let mut tensor = tensor.map_err(|error| PyBufferError::new_err(error.to_string()))?;
    let described = tensor.set_dtype(DLDataType::U8).set_device(DLDevice::CPU);
    described.set_data(start.cast());
    Ok(tensor)
}
