//! The ways of moving the bytes that can work here, in the order in which they are tried.

use super::{DIRECT_BLOCK, DIRECT_DEPTH, Reasons, Request, Rung};
use crate::error::{Error, Result};
use crate::facts::{self, Host};
use crate::method;
use crate::options::{Io, Method, Pages};

/// Registered windows in turn: one being read, one being filled, one being emptied.
pub(crate) const WINDOWS: u64 = 3;
/// Windows that are pinned at once: the kernel pins a new one before it lets the old one go.
const PINNED: u64 = WINDOWS + 1;
/// The size of a window, unless more is in flight: worth a registration of its own.
const WINDOW: u64 = 64 << 20;
/// The largest buffer that io_uring registers (io_uring_register(2)).
const LARGEST_WINDOW: u64 = 1 << 30;

/// Bytes that must be allowed to be pinned for registered buffers on pages of `page` bytes, unless
/// other blocks or depths are asked for.
pub(crate) fn registered_need(page: u64) -> u64 {
    (DIRECT_BLOCK * u64::from(DIRECT_DEPTH) + 2 * page) * PINNED
}

/// Whether direct reads can land where the bytes belong.
pub(super) fn congruence(request: &Request, file: &facts::File) -> Result<(), String> {
    if let Some(why) = &file.direct_refused {
        return Err(why.clone());
    }
    match request.place {
        Some(place) if place.address % file.align != request.offset % file.align => Err(format!(
            "the memory's address and --offset are not congruent modulo {}",
            file.align
        )),
        _ => Ok(()),
    }
}

/// The ways to try, in order, with the reasons for those left out.
pub(super) fn ladder(
    request: &Request,
    file: &facts::File,
    host: &Host,
    pages: Pages,
    direct: &Result<(), String>,
    to_read: u64,
    reasons: &mut Reasons,
) -> Result<Vec<Rung>> {
    let rung = |method, direct, registered| Rung {
        method,
        direct,
        registered,
    };
    let uring = [
        rung(Method::Uring, true, true),
        rung(Method::Uring, true, false),
    ];
    let asked = request.method;
    let all: Vec<Rung> = match asked {
        Method::Auto => vec![
            uring[0],
            uring[1],
            rung(Method::Threads, true, false),
            rung(Method::Threads, false, false),
        ],
        Method::Uring => vec![uring[0], uring[1], rung(Method::Uring, false, false)],
        Method::Threads => vec![rung(asked, true, false), rung(asked, false, false)],
        // The baselines do what their names say: through the page cache, unless told otherwise.
        _ if request.io == Io::Direct => vec![rung(asked, true, false)],
        _ => vec![rung(asked, false, false)],
    };
    if request.io == Io::Auto && asked == Method::Auto && to_read == 0 {
        // Nothing for the disk to do.
        return Ok(vec![rung(Method::Threads, false, false)]);
    }
    let mut left_out = None;
    let mut kept = Vec::new();
    for rung in all {
        let why = match (request.io, rung.direct) {
            (Io::Direct, false) | (Io::Buffered, true) => continue,
            (_, true) => direct.clone(),
            _ => Ok(()),
        }
        .and_then(|()| match no_uring(host, file) {
            Some(why) if rung.method == Method::Uring => Err(why),
            _ => method::serves(rung, &request.kind, pages),
        });
        match why {
            Ok(()) => kept.push(rung),
            Err(why) => {
                reasons.add("not", rung, why.clone());
                left_out.get_or_insert((rung, why));
            }
        }
    }
    if kept.is_empty() {
        let (rung, why) = left_out.unwrap_or((
            rung(asked, false, false),
            "no way is left by --io".to_string(),
        ));
        return Err(Error::new("cannot load this way", why)
            .at(format!("{rung} to {}", request.kind))
            .with_errno(rustix::io::Errno::OPNOTSUPP)
            .remedy("leave --method and --io to auto, or see `dmafile explain`"));
    }
    Ok(kept)
}

/// Why io_uring cannot read this file here; None where it can.
fn no_uring(host: &Host, file: &facts::File) -> Option<String> {
    if let Some(errno) = &host.uring_refused {
        return Some(format!("io_uring is refused ({errno})"));
    }
    // Where a FUSE file is opened with FOPEN_DIRECT_IO, io_uring goes on with a short read by
    // itself, and at the wrong place: fuse_direct_IO leaves ki_pos where it was (seen with Linux
    // 6.18). Wrong bytes would come without an error, through a stacked file system too; that one
    // is trusted only where the real file beneath it has told its alignment, as FUSE never does.
    let name = file.file_system.as_str();
    let stacked = name == "overlayfs" || name.starts_with("0x");
    let what = match name {
        "fuse" => "a FUSE file",
        _ if stacked && !file.align_told => "a file that may lie on FUSE",
        _ => return None,
    };
    Some(format!(
        "io_uring may repeat bytes of {what} after a short read"
    ))
}

/// The size of a window of registered buffers; drops the registered rung where the limit on pinned
/// memory is too low for windows that hold the reads in flight.
pub(super) fn window(
    ladder: &mut Vec<Rung>,
    host: &Host,
    pages: Pages,
    block: u64,
    depth: u32,
    reasons: &mut Reasons,
) -> u64 {
    if !ladder.iter().any(|rung| rung.registered) {
        return 0;
    }
    let page = match pages {
        Pages::Small => host.page,
        // Memory that exists may have them too.
        Pages::Thp | Pages::Auto => host.thp_size.max(host.page),
        Pages::Huge => host.pool_page.max(host.page),
    };
    // One window must hold what is in flight, or reads would wait for registrations.
    let in_flight = block * u64::from(depth);
    let limit = host.pin_limit();
    // A page of which a window holds a part is counted whole, at either end.
    let most = (limit / PINNED).saturating_sub(2 * page);
    if in_flight > most {
        ladder.retain(|rung| !rung.registered);
        reasons.add(
            "not",
            "uring direct registered",
            format!(
                "{PINNED} windows of {} KiB exceed the limit on pinned memory, {} KiB \
                 (RLIMIT_MEMLOCK)",
                (in_flight + 2 * page) >> 10,
                limit >> 10
            ),
        );
        return 0;
    }
    most.min(in_flight.clamp(WINDOW, LARGEST_WINDOW))
}
