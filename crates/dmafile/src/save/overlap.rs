//! A save within one file: a range of it must not be read after it has been overwritten.

use super::origin::Opened;
use super::to::To;
use crate::error::{Error, Result, Verb};
use crate::sys::block::{Store, store};
use crate::sys::{Errno, file};
use std::os::fd::BorrowedFd;

/// Bytes of an origin, and where they are stored.
pub(super) struct Stored {
    pub(super) store: Store,
    /// The offset there.
    pub(super) from: u64,
    /// None for a stream that ends where its file does at that time.
    pub(super) bytes: Option<u64>,
    /// The offset of the first of them within the origin.
    pub(super) at: u64,
}

impl Stored {
    /// Bytes of a file, or of a device, from an offset on. None if it has neither offsets nor a store.
    pub(super) fn of(fd: BorrowedFd<'_>, from: u64, bytes: Option<u64>) -> Option<Self> {
        let (store, start) = store(fd).ok()?;
        Some(Self {
            store,
            from: start + from,
            bytes,
            at: 0,
        })
    }

    /// What a stream of a file will read: from its position on.
    pub(super) fn of_stream(fd: BorrowedFd<'_>, bytes: Option<u64>) -> Option<Self> {
        let (from, size) = file::position(fd)?;
        // What a save appends to the file would be read, too.
        let bytes =
            bytes.filter(|bytes| size.is_none_or(|size| from.saturating_add(*bytes) <= size));
        Self::of(fd, from, bytes)
    }
}

/// Refuses a save that would overwrite bytes before they are read.
pub(super) fn refuse(origin: &Opened<'_>, to: &To) -> Result<()> {
    if !to.is_in_place() {
        return Ok(());
    }
    let all = origin.stored(to.buffered());
    if all.is_empty() {
        return Ok(());
    }
    let cannot = |errno| Error::os("cannot stat", errno).at(to.place(0));
    let (place, start) = store(to.buffered()).map_err(cannot)?;
    let (at, bytes) = (start + to.at, origin.bytes.unwrap_or(u64::MAX));
    let end = at.saturating_add(bytes);
    let collides = |one: &&Stored| {
        let wanted = bytes.saturating_sub(one.at);
        let last = match one.bytes {
            Some(bytes) => one.from.saturating_add(bytes.min(wanted)),
            None => u64::MAX,
        };
        // A block that is written onto itself stays what it is.
        let stays = one.bytes.is_some() && one.from == at.saturating_add(one.at);
        one.store == place && wanted > 0 && one.from < end && at < last && !stays
    };
    let Some(found) = all.iter().find(collides) else {
        return Ok(());
    };
    let range = |from: u64, bytes: Option<u64>| match bytes {
        Some(bytes) => format!("bytes {from} to {}", from.saturating_add(bytes)),
        None => format!("the bytes from byte {from} on"),
    };
    let why = format!(
        "{} would be written to {} of the same file",
        range(found.from.saturating_sub(start), found.bytes),
        range(to.at, origin.bytes)
    );
    Err(Error::new(Verb::Save, why)
        .with_errno(Errno::INVAL)
        .at(to.place(0))
        .with_remedy("save them to another file first, and from there to this one"))
}
