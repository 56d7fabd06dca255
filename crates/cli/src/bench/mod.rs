//! `dmafile bench`: compares dmafile with read() on this machine.
//!
//! Every run is a separate process, so that its CPU time and memory can be measured. The order is
//! shuffled in each round, so that other activity on the machine affects all candidates.

mod subject;
mod table;
pub(crate) mod way;

use crate::args::BenchArgs;
use crate::output::{Text, progress_bar, write_wanted_json};
use crate::signals::interruptible;
use crate::{Failure, INTERRUPTED, Launcher};
use dmafile::internal::folder;
use dmafile::{CancelToken, facts::Host};
use indicatif::ProgressBar;
use memmap2::{Advice, MmapMut};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::json;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use subject::{State, Subject};
use table::Line;
use way::{Run, Way};

/// With fewer rounds there is no meaningful spread.
const FEWEST: usize = 5;
/// More rounds hardly change a median.
const MOST: usize = 15;
/// No round starts that would end later than this, so that the whole benchmark takes less than a
/// minute.
const BUDGET: Duration = Duration::from_secs(50);
/// How long [`FEWEST`] rounds may take.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// How often to try to get the page cache into a state before giving up.
const TRIES: usize = 10;
const PROGRESS: &str = "{spinner} {msg}";

/// One run, and the contents of the page cache before and after it.
#[derive(Serialize)]
struct Sample {
    round: usize,
    state: State,
    way: Way,
    #[serde(flatten)]
    run: Run,
    /// Bytes of the file; null if unknown.
    cached_before: Option<u64>,
    cached_after: Option<u64>,
}

pub(crate) fn run(args: &BenchArgs, again: &Launcher) -> Result<u8, Failure> {
    let out = match (args.quiet, &args.json) {
        (true, _) => Text::Nowhere,
        (false, Some(None)) => Text::Stderr,
        (false, _) => Text::Stdout,
    };
    let begun = Instant::now();
    let token = CancelToken::new();
    interruptible(&token)?;
    // If the signal is ignored, as started by some daemons, no status of a child can be read.
    signal_hook::flag::register(signal_hook::consts::SIGCHLD, Arc::default())
        .map_err(|error| Failure::os("cannot handle", "signals", &error, ""))?;
    let host = Host::probe();
    let subject = match &args.file {
        Some(path) => Subject::open(path)?,
        None => Subject::make(&args.dir, args.size, &host, &token)?,
    };
    subject.fits(&host)?;
    let bench = Bench {
        bar: progress_bar(args.quiet, PROGRESS),
        subject,
        again,
        token,
    };
    bench.compare_bytes()?;
    let (samples, mut notes) = bench.measure(begun)?;
    if let Some(bar) = &bench.bar {
        bar.finish_and_clear();
    }
    let rounds = samples.last().map_or(0, |sample| sample.round);
    if rounds < FEWEST {
        notes.push(format!(
            "only {rounds} rounds: more would have taken over 5 minutes"
        ));
    }
    let lines = Line::all(&samples, &host);
    out.print(&table::text(&bench.subject, rounds, &lines, &notes))?;
    let subject = &bench.subject;
    let json = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "file": args.file.as_ref().map(|path| path.to_string_lossy()),
        "bytes": subject.bytes,
        "file_system": subject.facts.file_system,
        "direct_refused": subject.facts.direct_refused,
        "machine": table::machine(&host),
        "rounds": rounds,
        "seconds": begun.elapsed().as_secs_f64(),
        "notes": notes,
        "table": lines,
        "samples": samples,
    });
    write_wanted_json(&args.json, &json)?;
    Ok(0)
}

struct Bench<'a> {
    subject: Subject,
    again: &'a Launcher<'a>,
    token: CancelToken,
    bar: Option<ProgressBar>,
}

impl Bench<'_> {
    /// Checks that every candidate loads the bytes of the file; not timed.
    fn compare_bytes(&self) -> Result<(), Failure> {
        self.tell("comparing the bytes");
        let wanted = self.subject.digest(&self.token)?;
        for way in Way::ALL {
            let got = self.child(way, true)?.digest;
            if got.as_deref() != Some(&wanted) {
                let got = got.unwrap_or_default();
                return Err(Failure {
                    line: format!(
                        "cannot measure: {}: {} loaded different bytes: digest {got}, expected {wanted} \
                         (EBADMSG); check whether something writes to it",
                        self.subject.name,
                        way.word(),
                    ),
                    status: 1,
                });
            }
        }
        Ok(())
    }

    /// Runs every candidate in every possible state; also returns remarks.
    fn measure(&self, begun: Instant) -> Result<(Vec<Sample>, Vec<String>), Failure> {
        let (mut samples, mut notes) = (Vec::new(), Vec::new());
        let mut states = State::ALL.to_vec();
        if let Some(why) = &self.subject.facts.direct_refused {
            // There the engine does not query what is cached.
            states.retain(|state| *state == State::Warm);
            notes.push(format!(
                "warm only: {} has no direct I/O ({why}), and it is unknown what the page cache holds",
                self.subject.facts.file_system
            ));
        }
        for round in 1..=MOST {
            let (round_begun, so_far) = (Instant::now(), begun.elapsed());
            for state in states.clone() {
                if !self.round(round, state, &mut samples)? {
                    states.retain(|kept| *kept != state);
                    notes.push(format!("{} left out: {}", state.word(), state.excuse()));
                }
            }
            if states.is_empty() {
                let line = format!(
                    "cannot measure: {}: {} (EBUSY); use another file, or free memory",
                    self.subject.name,
                    notes.join("; ")
                );
                return Err(Failure { line, status: 1 });
            }
            let next = so_far + 2 * round_begun.elapsed();
            if next > TIME_LIMIT || (round >= FEWEST && next > BUDGET) {
                break;
            }
        }
        Ok((samples, notes))
    }

    /// One run of each candidate, in shuffled order; false if the page cache cannot be brought into
    /// that state.
    fn round(
        &self,
        round: usize,
        state: State,
        samples: &mut Vec<Sample>,
    ) -> Result<bool, Failure> {
        let mut ways = Way::ALL;
        ways.sort_by_cached_key(|_| folder::random());
        for way in ways {
            self.tell(&format!("round {round}, {}: {}", state.word(), way.word()));
            let Some(cached_before) = self.prepare(state)? else {
                return Ok(false);
            };
            samples.push(Sample {
                round,
                state,
                way,
                run: self.child(way, false)?,
                cached_before,
                cached_after: self.subject.cached()?,
            });
        }
        Ok(true)
    }

    /// Brings the page cache into a state and checks it; returns the bytes of the file that it
    /// contains.
    fn prepare(&self, state: State) -> Result<Option<Option<u64>>, Failure> {
        let wanted = self.subject.cached_in(state);
        let is_there = |cached: Option<u64>| cached.is_none_or(|cached| cached == wanted);
        for _ in 0..TRIES {
            self.subject.bring(state, &self.token)?;
            if !is_there(self.subject.cached()?) {
                // The kernel may be using some of its pages at the moment.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            // A host may reclaim memory that its guest has freed; the first run to touch it would
            // then be slower. In the cold state read() also allocates memory for the page cache.
            let times = if state == State::Cold { 2 } else { 1 };
            touch(self.subject.bytes * times)?;
            let cached = self.subject.cached()?;
            if is_there(cached) {
                return Ok(Some(cached));
            }
        }
        Ok(None)
    }

    /// Runs one candidate once, in a separate process.
    fn child(&self, way: Way, digest: bool) -> Result<Run, Failure> {
        let failed = |error: std::io::Error| {
            Failure::os("cannot measure", &self.again.to_string(), &error, "")
        };
        let (path, stdin) = self.subject.for_child().map_err(failed)?;
        let mut command = self.again.command();
        command
            .args([way::WORD, way.word()])
            .arg(path)
            .arg(self.subject.bytes.to_string())
            .args(digest.then_some("--digest"))
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        self.wait_for_output(&mut child).map_err(failed)?;
        if self.token.is_cancelled() {
            // It may have ended by itself, or by the same signal.
            let _ = child.kill();
            let _ = child.wait();
            return Err(cancelled(&self.subject.name));
        }
        let ended = child.wait_with_output().map_err(failed)?;
        // A terminal sends it to both processes, in any order.
        if ended.status.signal() == Some(signal_hook::consts::SIGINT) {
            return Err(cancelled(&self.subject.name));
        }
        let unclear = || Failure {
            line: format!(
                "cannot measure: {}: its process ended early ({}); see the kernel log, or use a \
                 smaller file",
                way.word(),
                ended.status
            ),
            status: 1,
        };
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr);
            let line = said
                .lines()
                .last()
                .and_then(|line| line.strip_prefix("dmafile: "));
            return Err(line.map_or_else(unclear, |line| Failure {
                line: line.to_string(),
                status: 1,
            }));
        }
        serde_json::from_slice(&ended.stdout).map_err(|_| unclear())
    }

    /// Returns when the child has written something or has ended, or on a signal.
    fn wait_for_output(&self, child: &mut Child) -> std::io::Result<()> {
        let Some(stdout) = &child.stdout else {
            return Ok(());
        };
        // A signal that arrives just before poll(2) does not interrupt it.
        let now_and_then = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        while !self.token.is_cancelled() {
            let mut fds = [PollFd::new(stdout, PollFlags::IN)];
            match poll(&mut fds, Some(&now_and_then)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn tell(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_string());
            bar.tick();
        }
    }
}

/// Touches memory, and frees it.
fn touch(bytes: u64) -> Result<(), Failure> {
    let failed = |error| Failure::os("cannot measure", "memory", &error, "use a smaller file");
    let mut memory = MmapMut::map_anon(bytes as usize).map_err(failed)?;
    // Only advice: without huge pages it takes longer.
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    Ok(())
}

/// Reads a file to its end in steps, so that a signal is noticed.
fn each_step(
    mut file: impl Read,
    name: &str,
    token: &CancelToken,
    mut look: impl FnMut(&[u8]),
) -> Result<(), Failure> {
    let mut step = vec![0; 1 << 20];
    loop {
        if token.is_cancelled() {
            return Err(cancelled(name));
        }
        match file.read(&mut step) {
            Ok(0) => return Ok(()),
            Ok(bytes) => look(&step[..bytes]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::os("cannot read", name, &error, "")),
        }
    }
}

fn cancelled(name: &str) -> Failure {
    Failure {
        line: format!("bench: {name}: cancelled before it was done (ECANCELED)"),
        status: INTERRUPTED,
    }
}
