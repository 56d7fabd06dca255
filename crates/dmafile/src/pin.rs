//! Memory that is pinned for a device. What a device is, crates above this one know.

use crate::error::Result;
use std::fmt::Debug;

/// A device that memory can be pinned for, such as a GPU of `dmafile-gpu`.
pub trait PinDevice: Debug + Send + Sync {
    /// Its name, such as `gpu:0`.
    fn name(&self) -> String;

    /// The kind of memory that is pinned for it, as a word that ends with `-host` or `-host:N`.
    fn memory(&self) -> String;

    /// Its model and its driver.
    ///
    /// # Errors
    /// ENODEV if it cannot be used.
    fn describe(&self) -> Result<String>;

    /// Pins `bytes` bytes from `start`, which stay mapped there until the result is dropped. The device may
    /// write to them only if they are `writable`.
    ///
    /// # Errors
    /// ENODEV if the device cannot be used; otherwise its driver's error.
    fn pin(&self, start: *const u8, bytes: u64, writable: bool) -> Result<Box<dyn Pinned>>;
}

/// Memory of this process that is pinned for a device. Dropping it unpins the memory.
pub trait Pinned: Send + Sync {
    /// The name of the device.
    fn device(&self) -> String;

    /// Unpins the memory.
    ///
    /// # Errors
    /// The driver's error. The memory then stays pinned and mapped until the process ends.
    fn end(self: Box<Self>) -> Result<()>;
}
