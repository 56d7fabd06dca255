//! `dma-buf`: whichever kind of it this machine makes best.

use super::{look_at_dmafile, look_at_heap, look_at_udmabuf};
use crate::error::{Error, Result};
use crate::options::{Kind, Pages};
use crate::plan::Reason;
use crate::sys::Errno;

/// The first kind of dma-buf that can be made here, found by trying, with the reason for it and those
/// against the kinds before it. `whole`: of one file, all of it, in a way that is left to us.
pub(crate) fn best_dma_buf(pages: Pages, whole: bool) -> Result<(Kind, Vec<Reason>)> {
    type Look = fn() -> Result<()>;
    let mut all: [(Kind, bool, Look, &str); 3] = [
        (
            Kind::Dmafile,
            false,
            || look_at_dmafile(false).map(drop),
            "the disk writes into its pages, and they come into being meanwhile",
        ),
        (
            Kind::Udmabuf,
            true,
            look_at_udmabuf,
            "the disk writes into its pages",
        ),
        (
            Kind::Heap("system".to_string()),
            false,
            || look_at_heap("system").map(drop),
            "what is left; its bytes are copied",
        ),
    ];
    if whole && look_at_heap("system").is_ok_and(|facts| facts.heap_reads) {
        all.swap(1, 2);
        all[1].3 = "it has the disk write into its pages, and they come into being meanwhile";
    }
    let (mut reasons, mut first) = (Vec::new(), None);
    for (kind, chooses_pages, look, why) in all {
        let looked = match pages {
            Pages::Auto => look(),
            _ if chooses_pages => look(),
            _ => Err(
                Error::new(format!("--pages {pages}"), "its exporter chooses them")
                    .with_errno(Errno::OPNOTSUPP),
            ),
        };
        let reason = |about, why| Reason {
            about,
            choice: kind.to_string(),
            why,
        };
        match looked {
            Ok(()) => {
                reasons.push(reason("kind", format!("found by trying: {why}")));
                return Ok((kind, reasons));
            }
            Err(error) => {
                reasons.push(reason("not", error.to_string()));
                first.get_or_insert(error);
            }
        }
    }
    let told = reasons
        .iter()
        .map(|reason| format!("{}: {}", reason.choice, reason.why));
    let errno = first.and_then(|error| error.raw_os_error());
    let errno = errno.map_or(Errno::OPNOTSUPP, Errno::from_raw_os_error);
    Err(Error::new(
        "cannot make a dma-buf",
        told.collect::<Vec<_>>().join("; and "),
    )
    .with_errno(errno)
    .remedy("modprobe dmafile or udmabuf (`dmafile doctor` says more), or --to memfd"))
}
