//! Progress, faults with the command that shows each again, and the counts at the end.

use crate::action::{Acted, Action, Actor};
use crate::operation::{Fault, Kind};
use crate::run::{Case, Outcome, Point};
use crate::{Args, SEED, expected};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How often progress is printed.
const OFTEN: Duration = Duration::from_secs(10);
/// How many faults of the same operation, action and kind are printed.
const SHOWN: usize = 2;

pub struct Report<'a> {
    args: &'a Args,
    seed: u64,
    begin: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    expected: usize,
    done: usize,
    counts: BTreeMap<(&'static str, String), Counts>,
    found: BTreeMap<(&'static str, Actor, String, Kind), usize>,
    failures: usize,
    told: Option<Instant>,
}

#[derive(Default, Clone, Copy)]
struct Counts {
    good: usize,
    refused: usize,
    nothing: usize,
    missed: usize,
    faulty: usize,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.good += other.good;
        self.refused += other.refused;
        self.nothing += other.nothing;
        self.missed += other.missed;
        self.faulty += other.faulty;
    }

    fn all(self) -> usize {
        self.good + self.refused + self.nothing + self.missed + self.faulty
    }
}

impl<'a> Report<'a> {
    pub fn new(args: &'a Args, seed: u64) -> Self {
        Self {
            args,
            seed,
            begin: Instant::now(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// How many runs follow.
    pub fn expect(&self, runs: usize) {
        let mut state = self.state();
        state.expected = state.done + runs;
    }

    /// Adds the result of a run; returns its calls.
    pub fn add(&self, case: &Case, outcome: io::Result<Outcome>) -> Vec<Point> {
        let mut state = self.state();
        let state = &mut *state;
        state.done += 1;
        let action = match case.action {
            Action::Weave(_) => "weave".to_string(),
            action => action.to_string(),
        };
        let counts = state
            .counts
            .entry((case.operation.name, action.clone()))
            .or_default();
        let points = match outcome {
            Err(error) => {
                // The harness itself: not a result.
                state.failures += 1;
                counts.faulty += 1;
                println!("FAILED {}: {error}\n  {}", name(case), self.again(case));
                Vec::new()
            }
            Ok(outcome) => {
                match (&outcome.faults[..], outcome.acted, case.action) {
                    ([], _, Action::None) => counts.good += 1,
                    ([], None, _) => counts.missed += 1,
                    ([], Some(Acted::Done), _) => counts.good += 1,
                    ([], Some(Acted::Refused), _) => counts.refused += 1,
                    ([], Some(Acted::Nothing), _) => counts.nothing += 1,
                    _ => counts.faulty += 1,
                }
                if self.args.verbose {
                    let Outcome {
                        acted, exit, took, ..
                    } = &outcome;
                    println!(
                        "{}: {acted:?}, {exit}, {:.1} s",
                        name(case),
                        took.as_secs_f64()
                    );
                }
                for Fault { kind, what } in &outcome.faults {
                    let key = (case.operation.name, case.actor, action.clone(), *kind);
                    let count = state.found.entry(key).or_default();
                    *count += 1;
                    if *count <= SHOWN {
                        println!(
                            "FAULT {kind}: {}: {what}\n  {}",
                            name(case),
                            self.again(case)
                        );
                    }
                }
                outcome.points
            }
        };
        let told = state.told.unwrap_or(self.begin);
        if told.elapsed() >= OFTEN {
            state.told = Some(Instant::now());
            let faults: usize = state.found.values().sum();
            println!(
                "interference: {} of {} points after {} s, {faults} faults",
                state.done,
                state.expected.max(state.done),
                self.begin.elapsed().as_secs()
            );
        }
        points
    }

    /// The command that runs a point again.
    fn again(&self, case: &Case) -> String {
        let mut line = "cargo test -p dmafile-interference --".to_string();
        if let Some(dmafile) = &self.args.dmafile {
            line += &format!(" --dmafile {}", dmafile.display());
        }
        line += &format!(
            " --operation {} --trust {} --action {}",
            case.operation.name, case.trust, case.action
        );
        if !matches!(case.action, Action::None) {
            line += &format!(" --actor {}", format!("{:?}", case.actor).to_lowercase());
        }
        if let Some(at) = case.at {
            line += &format!(" --at '{at}'");
        }
        line
    }

    /// Prints the counts; whether all is as it should be.
    pub fn end(&self) -> bool {
        let state = self.state();
        let mut total = Counts::default();
        println!(
            "{:22} {:18} {:>6} {:>8} {:>8} {:>7} {:>7}",
            "operation", "action", "good", "refused", "nothing", "missed", "faulty"
        );
        for ((operation, action), counts) in &state.counts {
            println!(
                "{operation:22} {action:18} {:6} {:8} {:8} {:7} {:7}",
                counts.good, counts.refused, counts.nothing, counts.missed, counts.faulty
            );
            total.add(*counts);
        }
        if !state.found.is_empty() {
            println!("faults:");
        }
        for ((operation, actor, action, kind), count) in &state.found {
            let actor = format!("{actor:?}").to_lowercase();
            println!("{operation:22} {actor:6} {action:18} {kind:10} {count:6}");
        }
        println!(
            "interference: {} points in {} s: {} good, {} refused by the kernel, {} without an object, {} missed, {} faulty; seed {} ({SEED})",
            total.all(),
            self.begin.elapsed().as_secs(),
            total.good,
            total.refused,
            total.nothing,
            total.missed,
            total.faulty,
            self.seed
        );
        if self.args.expect.is_empty() {
            return total.faulty == 0;
        }
        let mut all = state.failures == 0;
        for text in &self.args.expect {
            let found = expected(text).is_some_and(|(operation, kind)| {
                let mut found = state.found.keys();
                found.any(|key| key.0.starts_with(operation) && key.3 == kind)
            });
            println!(
                "interference: {text}: {}",
                if found { "found" } else { "NOT FOUND" }
            );
            all &= found;
        }
        all
    }
}

fn name(case: &Case) -> String {
    let actor = match case.actor {
        Actor::Same => "",
        Actor::Other => " by another user",
    };
    let at = case.at.map(|at| format!(" at {at}")).unwrap_or_default();
    format!(
        "{} in a folder of kind {}, {}{actor}{at}",
        case.operation.name, case.trust, case.action
    )
}
