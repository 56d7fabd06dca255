//! Evaluates the samples: medians, spreads, ratios; as text and as JSON.

use super::Sample;
use super::subject::{State, Subject};
use super::way::Way;
use crate::text::columns;
use dmafile::facts::Host;
use indicatif::BinaryBytes;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use tabwriter::Alignment;

#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(numbers: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<_> = numbers.collect();
        sorted.sort_by(f64::total_cmp);
        let (last, middle) = (sorted.len() - 1, sorted.len() / 2);
        Self {
            median: f64::midpoint(sorted[last - middle], sorted[middle]),
            min: sorted[0],
            max: sorted[last],
        }
    }
}

/// A line of the table: one candidate in one state.
#[derive(Serialize)]
pub(super) struct Line {
    state: State,
    way: Way,
    what: String,
    seconds: Spread,
    cpu_seconds: Spread,
    /// Bytes of the file in the page cache afterwards, the median.
    cached_after: Option<u64>,
    /// Its time divided by dmafile's in the same round; none for dmafile.
    ratio: Option<Spread>,
    /// Neither was consistently faster.
    undecided: bool,
}

impl Line {
    pub(super) fn all(samples: &[Sample], host: &Host) -> Vec<Self> {
        let pairs = State::ALL
            .into_iter()
            .flat_map(|state| Way::ALL.map(|way| (state, way)));
        pairs
            .filter_map(|(state, way)| Self::of(samples, state, way, host))
            .collect()
    }

    fn of(samples: &[Sample], state: State, way: Way, host: &Host) -> Option<Self> {
        let all = |way| {
            let of_pair = move |sample: &&Sample| (sample.state, sample.way) == (state, way);
            samples.iter().filter(of_pair)
        };
        all(way).next()?;
        let mut cached: Vec<_> = all(way).filter_map(|sample| sample.cached_after).collect();
        cached.sort_unstable();
        let ratios = all(way).filter_map(|sample| {
            let ours = all(Way::Dmafile).find(|ours| ours.round == sample.round)?;
            Some(sample.run.seconds / ours.run.seconds)
        });
        let ratios: Vec<_> = ratios.collect();
        let compared = way != Way::Dmafile && !ratios.is_empty();
        let ratio = compared.then(|| Spread::of(ratios.into_iter()));
        Some(Self {
            state,
            way,
            what: way.describe(host),
            seconds: Spread::of(all(way).map(|sample| sample.run.seconds)),
            cpu_seconds: Spread::of(all(way).map(|sample| sample.run.cpu_seconds)),
            cached_after: cached.get(cached.len() / 2).copied(),
            undecided: ratio
                .as_ref()
                .is_some_and(|ratio| ratio.min <= 1.0 && ratio.max >= 1.0),
            ratio,
        })
    }
}

pub(super) fn text(subject: &Subject, rounds: usize, lines: &[Line], notes: &[String]) -> String {
    let size = BinaryBytes(subject.bytes);
    let mut text = format!(
        "{}: {size} on {}, {rounds} rounds\n\n",
        subject.name, subject.facts.file_system
    );
    let mut table = String::from(
        "CACHE\tWAY\tSECONDS (MIN TO MAX)\tGB/s\tCPU s\tLEFT CACHED\tTIME / DMAFILE'S\n",
    );
    for line in lines {
        let seconds = &line.seconds;
        let left = line
            .cached_after
            .map_or("?".to_string(), |bytes| format!("{} MiB", bytes >> 20));
        let ratio = line.ratio.as_ref().map(|ratio| {
            let unsure = if line.undecided { ", undecided" } else { "" };
            let Spread { median, min, max } = ratio;
            format!("{median:.2} ({min:.2} to {max:.2}){unsure}")
        });
        // Writing to a String does not fail.
        let _ = writeln!(
            table,
            "{}\t{}\t{:.3} ({:.3} to {:.3})\t{:.2}\t{:.3}\t{left}\t{}",
            line.state.word(),
            line.what,
            seconds.median,
            seconds.min,
            seconds.max,
            subject.bytes as f64 / seconds.median / 1e9,
            line.cpu_seconds.median,
            ratio.unwrap_or_default(),
        );
    }
    text += &columns(&table, Alignment::Left);
    if lines.iter().any(|line| line.undecided) {
        text += "\nundecided: neither was faster in every round\n";
    }
    for note in notes {
        let _ = writeln!(text, "\n{note}");
    }
    text
}

/// Properties of the machine that matter for the numbers.
pub(super) fn machine(host: &Host) -> Value {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find(|line| line.starts_with("model name"));
    let cpu = cpu.and_then(|line| Some(line.split_once(':')?.1.trim()));
    json!({
        "kernel": kernel.as_deref().map(str::trim),
        "architecture": std::env::consts::ARCH,
        "cpu": cpu,
        "host": host,
    })
}
