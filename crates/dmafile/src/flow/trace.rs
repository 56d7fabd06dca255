//! The timeline of one transfer in the Chrome trace format, which Perfetto opens
//! (<https://ui.perfetto.dev>).

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// One bar of the timeline.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub name: &'static str,
    /// One of the rows below; reads and copies have one per operation in flight.
    pub row: u64,
    pub start: Duration,
    pub length: Duration,
    pub offset: u64,
    pub bytes: u64,
}

/// Rows of the timeline.
pub(crate) const ROW_MAIN: u64 = 0;
pub(crate) const ROW_ALLOC: u64 = 1;
pub(crate) const ROW_VERIFY: u64 = 2;
pub(crate) const ROW_READS: u64 = 16;
pub(crate) const ROW_COPIES: u64 = 8192;

/// Converts spans to a trace: complete events (`X`) in microseconds, in named rows.
pub(crate) fn render(spans: &[Span]) -> Value {
    let pid = std::process::id();
    let rows: BTreeSet<u64> = spans.iter().map(|span| span.row).collect();
    let names = rows.into_iter().map(|row| {
        let name = match row {
            ROW_MAIN => "transfer".to_string(),
            ROW_ALLOC => "allocation".to_string(),
            ROW_VERIFY => "verify".to_string(),
            ROW_COPIES.. => format!("copy {:02}", row - ROW_COPIES),
            _ => format!("in flight {:02}", row - ROW_READS),
        };
        json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": name}})
    });
    let bars = spans.iter().map(|span| {
        json!({
            "ph": "X",
            "name": span.name,
            "pid": pid,
            "tid": span.row,
            "ts": span.start.as_nanos() as f64 / 1000.0,
            "dur": span.length.as_nanos() as f64 / 1000.0,
            "args": {"offset": span.offset, "bytes": span.bytes},
        })
    });
    json!({
        "displayTimeUnit": "ms",
        "traceEvents": names.chain(bars).collect::<Vec<_>>(),
    })
}
