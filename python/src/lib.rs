//! The compiled part of the Python package `dmafile`: loads in separate threads, buffers with the
//! buffer protocol and DLPack, and the command.

mod buffer;
mod call;
mod device;
mod dlpack;
mod error;
mod freeze;
mod hold;
mod job;
mod model;
mod recorder;
mod remote;
mod request;
mod snapshot;
mod stream;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the `dmafile` command with these arguments, starting with the program's name; returns its
/// exit status. `again` is how to start the command: a program and its first arguments.
#[pyfunction]
fn main(py: Python<'_>, args: Vec<OsString>, again: Vec<OsString>) -> u8 {
    py.detach(|| dmafile_cli::run_as(&again, args))
}

/// The compiled part of dmafile; use the package.
#[pymodule(name = "_dmafile")]
mod module {
    #[pymodule_export]
    use super::buffer::Buffer;
    #[pymodule_export]
    use super::device::{DeviceMemory, DeviceStream, check_device, load_to_device};
    #[pymodule_export]
    use super::freeze::{Kept, freeze, thaw};
    #[pymodule_export]
    use super::hold::{Holder, Vacant, find_shared, hold, holds, place, release, shared, take};
    #[pymodule_export]
    use super::job::{Running, check, load, save, start};
    #[pymodule_export]
    use super::main;
    #[pymodule_export]
    use super::model::{Digests, Model, table};
    #[pymodule_export]
    use super::recorder::{Recorder, RecorderBuffer, Recording, Ticket, attach};
    #[pymodule_export]
    use super::remote::fetch;
    #[pymodule_export]
    use super::snapshot::{load_snapshot, save_snapshot};
    #[pymodule_export]
    use super::stream::{Stream, StreamPart};

    /// The version of the package and of the engine.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python spells it so")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
