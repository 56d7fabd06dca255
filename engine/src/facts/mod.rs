//! What is true of this machine, of a file and of the memory its bytes are to come into: what the
//! plan decides by and `doctor` shows.

mod file;
mod host;
mod layout;
pub(crate) mod premap;
pub(crate) mod target;

pub use file::File;
pub use host::Host;
pub(crate) use layout::Layout;
#[cfg(test)]
pub(crate) use layout::Run;
