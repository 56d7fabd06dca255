//! Makes the plan, one step for each of its parts.

use super::allocation::{allocation, fuses};
use super::load::{self, WantedRange};
use super::methods;
use super::range::{placement, range};
use super::room::check_memory;
use super::tuning::LoadTuning;
use super::{Attempt, Plan, Sizes, pages};
use crate::error::{Result, Verb};
use crate::exporter::module;
use crate::facts::target::MemoryTarget;
use crate::facts::{File, HeldBack, Host, Layout};
use crate::options::{Allocation, Io, Kind, Method};
use crate::reasons::{About, Reasons};
use crate::request::Request;

/// Makes the plan. `layout` covers exactly the requested range.
pub(crate) fn decide(
    request: &Request,
    file: &File,
    host: &Host,
    target: &MemoryTarget,
    layout: &Layout,
    log: &Reasons,
) -> Result<Plan> {
    let (start, end) = range(request, file)?;
    let place = placement(target, file, host, (start, end))?;
    let capacity = place.writable_to;
    let footprint = |page| match target.kind {
        // A driver allocates all pages that it pins, including those of holes.
        Kind::Pinned(_) => capacity,
        _ => layout
            .footprint(start.wrapping_sub(place.start), page)
            .min(capacity),
    };
    if let (Kind::Module, Some(found)) = (&target.kind, target.module())
        && capacity > found.max_buffer
    {
        let error = module::cannot_allocate(rustix::io::Errno::FBIG, &found);
        return Err(error.at(format!("{}, {capacity} bytes", target.kind)));
    }
    let pages = match target.ring {
        None => pages::pages(request, host, target, end - start, footprint, log)?,
        Some(ring) => {
            // All of it is used, whatever passes through it.
            let bytes = ring.min(end - start);
            let full = |page| bytes.next_multiple_of(page);
            pages::pages(request, host, target, bytes, full, log)?
        }
    };
    let one_run = layout.is_one_run(start, end);
    let wanted = WantedRange {
        start,
        to_copy: layout.bytes(true),
        to_read: layout.bytes(false),
        whole: one_run
            && (start, end) == (0, file.size)
            && matches!(request.allocation, Allocation::Auto | Allocation::Ahead),
        capacity,
    };
    let (mut methods, not_mapped) = load::choose(request, file, host, target, wanted, log)?;
    let first = methods[0];
    // One call reads with one I/O mode.
    let (to_copy, to_read) = if first.moves_in_one_call() && first.direct {
        (0, wanted.to_copy + wanted.to_read)
    } else {
        (wanted.to_copy, wanted.to_read)
    };
    let tuning = LoadTuning::decide(request, file, host, target, &methods, wanted, log)?;
    let LoadTuning {
        block,
        queue_depth,
        drop_behind,
        ..
    } = tuning;
    let in_flight = block * u64::from(queue_depth);
    let window = load::window(&mut methods, host, target, pages, in_flight, log);
    let first = methods[0];
    describe_io(request, first, file, layout, log);
    if to_read > 0 {
        load::describe_mapping(&methods, not_mapped, file, target, log);
    }
    let why = methods::describe(Verb::Load, (first, request.method), (drop_behind, false));
    log.add(About::Method, first, why);
    let fuses = fuses(target, first, one_run);
    let (allocation, why) = allocation(
        request,
        file,
        target,
        pages,
        (first, drop_behind),
        end - start,
        fuses,
    );
    log.add(About::Allocation, allocation, why);
    if let Some(node) = host.node {
        let why = "the NUMA node of the caller; use numactl for another";
        log.add(About::Node, node, why);
    }
    if request.check_memory {
        let ring = match first.method {
            Method::Bounce => block * u64::from(queue_depth),
            _ => 0,
        };
        check_memory(file, host, target, pages, capacity, footprint, ring)?;
    }
    Ok(Plan {
        file: file.path.clone(),
        offset: start,
        bytes: end - start,
        kind: target.kind.memory(),
        pages,
        methods,
        sizes: Sizes {
            window,
            ..Sizes::default()
        },
        allocation,
        fused: fuses && matches!(allocation, Allocation::Ahead | Allocation::Before),
        place,
        to_read,
        to_copy,
        // Small gaps between selected tensors are read along.
        holes: layout.bytes_wanted().saturating_sub(to_copy + to_read),
        node: host.node,
        reasons: Vec::new(),
        tuning,
    }
    .with_sizes())
}

fn describe_io(request: &Request, first: Attempt, file: &File, layout: &Layout, log: &Reasons) {
    if file.object {
        return;
    }
    if let Some(HeldBack { why, remedy }) = &file.held_back {
        log.add(About::Mount, "slow", format!("{why}; {remedy}"));
    }
    let (cached, read) = (layout.bytes(true), layout.bytes(false));
    match (request.io, &file.direct_refused) {
        (Io::Direct | Io::Buffered, _) => log.add(About::Io, request.io, "requested"),
        (Io::Auto, Some(why)) => log.add(About::Io, Io::Buffered, why),
        (Io::Auto, None) if first.moves_in_one_call() => {
            let choice = if first.direct {
                Io::Direct
            } else {
                Io::Buffered
            };
            let why = format!(
                "{cached} of {} bytes are cached, and a call cannot mix modes ({})",
                cached + read,
                layout.learned
            );
            log.add(About::Io, choice, why);
        }
        (Io::Auto, None) if !first.direct && request.method != Method::Auto => {
            log.add(
                About::Io,
                Io::Buffered,
                format!("{} reads through the page cache", first.method),
            );
        }
        (Io::Auto, None) => {
            let choice = match (cached, read) {
                (0, _) => Io::Direct,
                (_, 0) => Io::Buffered,
                _ => Io::Auto,
            };
            log.add(About::Io, choice, &layout.learned);
        }
    }
}
