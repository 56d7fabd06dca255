//! Properties of this machine, of a file, and of the target memory: what the plan is based on and
//! `doctor` shows.

mod file;
mod host;
mod layout;
mod mount;
pub(crate) mod premap;
pub(crate) mod target;

pub use file::File;
pub use host::Host;
#[cfg(test)]
pub(crate) use layout::DataRun;
pub(crate) use layout::Layout;
pub use mount::HeldBack;
