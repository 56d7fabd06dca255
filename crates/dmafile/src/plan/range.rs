//! The requested range of a file, and where it is in memory.

use super::Placement;
use crate::error::{Error, Result, Verb};
use crate::facts::target::MemoryTarget;
use crate::facts::{File, Host};
use crate::message::{Opt, message};
use crate::request::{Request, Selection};

/// The requested range `[start, end)` of a file.
pub(crate) fn range(request: &Request, file: &File) -> Result<(u64, u64)> {
    let past = |option: Opt, value: String| {
        Error::new(
            Verb::Load,
            message![
                option,
                format!(" {value} is past the end at byte {}", file.size),
            ],
        )
        .at(file.path.display().to_string())
        .with_errno(rustix::io::Errno::INVAL)
        .with_remedy("choose a range inside the file")
    };
    let (start, length) = match request.selection {
        Selection::Part(start, length) => (start, Some(length)),
        Selection::Requested | Selection::Only(_) => (request.offset, request.length),
    };
    if start >= file.size {
        return Err(past(Opt::Offset, start.to_string()));
    }
    match length {
        None => Ok((start, file.size)),
        Some(length) => match start.checked_add(length) {
            Some(end) if end <= file.size => Ok((start, end)),
            _ => Err(past(Opt::Length, format!("{length} from byte {start} on"))),
        },
    }
}

/// File and memory have the same alignment, so that every block can be read into place; existing
/// memory has fixed bounds.
pub(super) fn placement(
    target: &MemoryTarget,
    file: &File,
    host: &Host,
    (start, end): (u64, u64),
) -> Result<Placement> {
    let need = end - start;
    let Some(existing) = target.existing else {
        let grain = file.align.max(host.page);
        let skip = start % grain;
        return Ok(Placement {
            start: skip,
            writable_from: 0,
            writable_to: (skip + need).next_multiple_of(grain),
        });
    };
    let at = existing.at.unwrap_or(0);
    if existing.bytes.saturating_sub(at) < need {
        let room = match existing.at {
            None => existing.bytes.to_string(),
            Some(at) => format!("the rest of {} from byte {at} on", existing.bytes),
        };
        return Err(
            Error::new(Verb::Load, format!("{need} bytes do not fit into {room}"))
                .with_errno(rustix::io::Errno::INVAL)
                .at(target.kind.to_string())
                .with_remedy("enlarge the memory (ftruncate(2) for a memfd), or load a range"),
        );
    }
    Ok(Placement {
        start: at,
        writable_from: at,
        writable_to: existing.at.map_or(existing.bytes, |at| at + need),
    })
}
