//! Copies slots into the caller's memory.

use super::{Sink, Slot};
use crate::error::{Error, Result};
use crate::sys::Errno;

/// Copies the wanted bytes into memory: byte `at` of the file goes to byte `at - start` of the memory.
#[derive(Debug)]
pub struct CopyTo<'m> {
    memory: &'m mut [u8],
    start: u64,
}

impl<'m> CopyTo<'m> {
    /// `memory` receives the part of the file that begins at byte `start`.
    pub fn new(memory: &'m mut [u8], start: u64) -> Self {
        Self { memory, start }
    }
}

impl Sink for CopyTo<'_> {
    fn take(&mut self, slot: &Slot<'_>) -> Result<()> {
        for piece in slot.pieces() {
            let from = piece.at.checked_sub(self.start).map(|at| at as usize);
            let range = from.map(|from| from..from + piece.memory.len() as usize);
            let Some(into) = range.and_then(|range| self.memory.get_mut(range)) else {
                let why = "these bytes are outside the memory";
                return Err(Error::new("cannot copy", why)
                    .with_errno(Errno::INVAL)
                    .at(format!("byte {}", piece.at)));
            };
            piece.memory.copy_to(into);
        }
        Ok(())
    }

    fn done(&mut self, _: bool) -> Result<bool> {
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}
