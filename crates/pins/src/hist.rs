//! Parses a histogram of tracefs (Documentation/trace/histogram.rst) whose keys are a process and a
//! stack.

/// One bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    /// The thread ID.
    pub tid: u32,
    /// Its name at the first event.
    pub name: String,
    /// Functions, innermost first; a module follows after a space, as the kernel prints it.
    pub stack: Vec<String>,
    /// Number of events.
    pub hits: u64,
    /// The sum of `n`; the number of events, if there is no such value.
    pub sum: u64,
}

/// A histogram's entries, and the number of events that did not fit into it.
pub(super) fn parse(text: &str) -> (Vec<Bucket>, u64) {
    let mut entries = Vec::new();
    let mut open: Option<Bucket> = None;
    let mut dropped = 0;
    for line in text.lines() {
        if let Some(key) = line.strip_prefix("{ common_pid: ") {
            open = begun(key);
        } else if let Some(values) = line.strip_prefix("} hitcount:") {
            if let (Some(mut entry), Some((hits, sum))) = (open.take(), values_of(values)) {
                entry.hits = hits;
                entry.sum = sum;
                entries.push(entry);
            }
        } else if let Some(entry) = &mut open {
            let frame = line.trim();
            if !frame.is_empty() {
                entry.stack.push(function(frame));
            }
        } else if let Some(count) = line.trim_start().strip_prefix("Dropped: ") {
            dropped += count.trim().parse::<u64>().unwrap_or(0);
        }
    }
    (entries, dropped)
}

/// `NAME  [  TID], stacktrace:`; newer kernels say `common_stacktrace`.
fn begun(key: &str) -> Option<Bucket> {
    let (process, key) = key.rsplit_once("], ")?;
    if !key.trim_end().ends_with("stacktrace:") {
        return None;
    }
    let (name, tid) = process.rsplit_once('[')?;
    Some(Bucket {
        tid: tid.trim().parse().ok()?,
        name: name.trim_end().to_string(),
        stack: Vec::new(),
        hits: 0,
        sum: 0,
    })
}

/// ` 6  n:       1579`
fn values_of(values: &str) -> Option<(u64, u64)> {
    let (hits, rest) = match values.split_once("n:") {
        Some((hits, sum)) => (hits, Some(sum)),
        None => (values, None),
    };
    let hits = hits.trim().parse().ok()?;
    Some((
        hits,
        rest.map_or(Some(hits), |sum| sum.trim().parse().ok())?,
    ))
}

/// `io_pin_pages+0x82/0xf0`, `ib_umem_get+0x1f4/0x3f0 [ib_uverbs]`
fn function(frame: &str) -> String {
    match frame.split_once('+') {
        Some((name, place)) => match place.split_once(' ') {
            Some((_, module)) => format!("{name} {module}"),
            None => name.to_string(),
        },
        None => frame.to_string(),
    }
}

/// The callers of `probed`, without the frames that the probe itself adds.
pub(super) fn callers<'a>(stack: &'a [String], probed: &str) -> &'a [String] {
    let is_ours = |frame: &&String| {
        *frame == probed
            || frame.ends_with("rethook_trampoline")
            || frame.contains("kretprobe_trampoline")
    };
    // A return probe's trampoline replaces the function.
    let head = &stack[..stack.len().min(8)];
    let last = head.iter().rev().position(|frame| is_ours(&frame));
    &stack[last.map_or(0, |behind| head.len() - behind)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &str = "# event histogram\n#\n# trigger info: hist:keys=common_pid.execname,\
common_stacktrace:vals=hitcount,n:sort=hitcount:size=4096 if (flags & 0x100) && n > 0 [active]\n#\n\n\
{ common_pid: pin [x] y       [       215], common_stacktrace:\n\
         kretprobe_rethook_handler+0x45/0x60\n\
         rethook_trampoline_handler+0x8e/0x140\n\
         arch_rethook_trampoline_callback+0x3b/0x50\n\
         arch_rethook_trampoline+0x2c/0x60\n\
         ib_umem_get+0x1f4/0x3f0 [ib_uverbs]\n\
         rxe_mr_init_user+0xa7/0x2d0 [rdma_rxe]\n\
} hitcount:          1  n:          5\n\
{ common_pid: pinner          [         7], common_stacktrace:\n\
         io_pin_pages+0x82/0xf0\n\
} hitcount:          6  n:       1579\n\nTotals:\n    Hits: 7\n    Entries: 2\n    Dropped: 3\n";

    const OLD: &str = "{ common_pid: kworker/1:1     [        29], stacktrace:\n\
         kprobe_ftrace_handler+0x10b/0x1b0\n\
         0xffffffffc03640c8\n\
         unpin_user_page+0x5/0x60\n\
         io_buffer_unmap+0x39/0x90\n\
} hitcount:         37\n\nTotals:\n    Hits: 37\n    Entries: 1\n    Dropped: 0\n";

    #[test]
    fn histograms_of_new_and_old_kernels_are_read() {
        let (entries, dropped) = parse(NEW);
        assert_eq!((entries.len(), dropped), (2, 3));
        let first = &entries[0];
        assert_eq!((first.tid, first.name.as_str()), (215, "pin [x] y"));
        assert_eq!((first.hits, first.sum), (1, 5));
        let callers_of = callers(&first.stack, "pin_user_pages_fast");
        assert_eq!(
            callers_of,
            ["ib_umem_get [ib_uverbs]", "rxe_mr_init_user [rdma_rxe]"]
        );
        assert_eq!((entries[1].hits, entries[1].sum), (6, 1579));
        assert_eq!(
            callers(&entries[1].stack, "pin_user_pages_fast"),
            ["io_pin_pages"]
        );

        let (entries, dropped) = parse(OLD);
        assert_eq!((entries.len(), dropped), (1, 0));
        assert_eq!(
            (entries[0].tid, entries[0].hits, entries[0].sum),
            (29, 37, 37)
        );
        assert_eq!(
            callers(&entries[0].stack, "unpin_user_page"),
            ["io_buffer_unmap"]
        );
    }

    #[test]
    fn truncated_and_unknown_entries_are_left_out() {
        assert_eq!(parse("").0, []);
        assert_eq!(
            parse("{ common_pid: x [ 1], other: 3 } hitcount: 1\n").0,
            []
        );
        assert_eq!(
            parse("{ common_pid: x [ 1], stacktrace:\n f+0x1/0x2\n").0,
            []
        );
    }
}
