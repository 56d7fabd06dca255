//! Stops dmafile at each of its system calls that names a file, a descriptor or a socket, lets a second actor do one
//! thing there, and checks what is left: old or new and whole, nothing outside touched, a status that is true.

#![forbid(unsafe_code)]

mod action;
mod calls;
mod operation;
mod report;
mod run;
mod stage;
mod trace;
mod world;

use action::{Action, Actor};
use clap::Parser;
use operation::{Kind, Operation, Tools};
use report::Report;
use run::{Case, Point};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use world::Trust;

/// The name of this test.
const NAME: &str = "interference";

/// Stops dmafile at each of its system calls, lets a second actor do one thing there, and checks what is left.
#[derive(Parser)]
#[command(name = NAME)]
struct Args {
    /// The command to test [default: the one that this program was built with]
    #[arg(long)]
    dmafile: Option<PathBuf>,
    /// Only these operations (repeat for more)
    #[arg(long)]
    operation: Vec<String>,
    /// Only these actions (repeat for more)
    #[arg(long)]
    action: Vec<Action>,
    /// Only where others may do this in the operation's folder
    #[arg(long)]
    trust: Vec<Trust>,
    /// Only this actor
    #[arg(long)]
    actor: Option<Actor>,
    /// Only this call, by its name
    #[arg(long)]
    at: Option<String>,
    /// Draw this many points
    #[arg(long)]
    sample: Option<usize>,
    /// Run all points
    #[arg(long)]
    all: bool,
    /// Begin no run after this many seconds; a third of them is for finding the calls of operations [default: 45,
    /// or 20 with QUICK=1, unless something else is chosen]
    #[arg(long)]
    seconds: Option<u64>,
    /// Seed of the sample's order, and of the steps of two instances
    #[arg(long)]
    seed: Option<u64>,
    /// How often two instances take turns, for each operation that has such runs
    #[arg(long, default_value_t = 300)]
    weaves: u64,
    /// Runs at the same time [default: the number of CPUs]
    #[arg(long)]
    jobs: Option<usize>,
    /// The folder in which runs have theirs
    #[arg(long)]
    base: Option<PathBuf>,
    /// Succeed if these faults are found, as OPERATION=KIND with the begin of an operation's name: to see that the
    /// harness finds what is known to be wrong
    #[arg(long, value_name = "OPERATION=KIND")]
    expect: Vec<String>,
    /// Print the calls of each operation, and run nothing else
    #[arg(long)]
    list: bool,
    /// Print the result of each run
    #[arg(long, short)]
    verbose: bool,
    /// The names of tests that `cargo test NAME` runs
    #[arg(hide = true)]
    names: Vec<String>,
    /// Those that `cargo test -- --skip NAME` leaves out: of other test programs
    #[arg(long, hide = true)]
    skip: Vec<String>,
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let word = words
        .get(1)
        .and_then(|word| word.to_str())
        .unwrap_or_default();
    let done = match word {
        "dmafile" => {
            let launcher = ["/proc/self/exe".into(), "dmafile".into()];
            return dmafile_cli::run_as(&launcher, words.into_iter().skip(1)).into();
        }
        "act" => {
            let targets: Vec<_> = words[4..].iter().map(PathBuf::from).collect();
            return action::run(&words[2].to_string_lossy(), words[3].as_ref(), &targets).into();
        }
        "start" => {
            let is_flag = |word: &&OsString| *word == "traced" || *word == "no-tmpfile";
            let flags = words[2..].iter().take_while(is_flag).count();
            let (flags, line) = words[2..].split_at(flags);
            let has = |flag: &str| flags.iter().any(|word| word == flag);
            Err(stage::become_command(has("traced"), has("no-tmpfile"), line).to_string())
        }
        "spy" => action::spy(&words[2]).map_err(|error| error.to_string()),
        "record" => stage::record(words[2].clone().into()).map_err(|error| error.to_string()),
        "shared" => stage::shared(words[2].clone().into(), words[3].clone().into())
            .map_err(|error| error.to_string()),
        _ => {
            let args = Args::parse();
            let is_named =
                args.names.is_empty() || args.names.iter().any(|name| NAME.contains(name));
            return if is_named {
                tested(&args)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interference: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The seed, where no argument can be given.
const SEED: &str = "INTERFERENCE_SEED";

/// Seconds that `cargo test` and `make test` take of their time.
const SHORT: u64 = 45;
const QUICK: u64 = 20;

fn tested(args: &Args) -> ExitCode {
    if let Err(why) = stage::works() {
        println!("SKIPPED: interference: {why}");
        // Where nothing may be skipped, this is an error.
        return u8::from(std::env::var_os("CI").is_some_and(|ci| ci == "true")).into();
    }
    match test(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("interference: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One point of the plan: an operation, a folder, an actor, a call, an action.
struct Planned<'a> {
    operation: &'a Operation,
    trust: Trust,
    actor: Actor,
    action: Action,
    at: Option<String>,
}

impl Planned<'_> {
    fn case(&self) -> Case<'_> {
        Case {
            operation: self.operation,
            trust: self.trust,
            actor: self.actor,
            action: self.action,
            at: self.at.as_deref(),
        }
    }
}

fn test(args: &Args) -> io::Result<bool> {
    let given = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let seed = args
        .seed
        .or(given)
        .unwrap_or_else(|| fastrand::u64(..1_000_000));
    let is_chosen = args.all
        || args.list
        || args.sample.is_some()
        || args.at.is_some()
        || !args.action.is_empty();
    let short = match std::env::var_os("QUICK") {
        Some(_) => QUICK,
        None => SHORT,
    };
    let seconds = args.seconds.or((!is_chosen).then_some(short));
    let base = args.base.clone().unwrap_or_else(std::env::temp_dir);
    let (tools, _folder) = tools(args, &base)?;
    let jobs = args
        .jobs
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into));
    let all = operation::all();
    let chosen: Vec<&Operation> = all
        .iter()
        .filter(|operation| {
            args.operation.is_empty() || args.operation.iter().any(|name| name == operation.name)
        })
        .collect();
    if chosen.is_empty() {
        let names: Vec<_> = all.iter().map(|operation| operation.name).collect();
        return Err(io::Error::other(format!(
            "the operations are {}",
            names.join(", ")
        )));
    }
    println!(
        "interference: seed {seed}, {jobs} at a time, in {}, as root and as {}",
        base.display(),
        run::other()
    );
    let report = Report::new(args, seed);
    // First each operation alone, which finds its calls.
    let mut alone = Vec::new();
    for operation in chosen {
        for &trust in operation.trusts {
            if args.trust.is_empty() || args.trust.contains(&trust) {
                alone.push(Planned {
                    operation,
                    trust,
                    actor: Actor::Same,
                    action: Action::None,
                    at: None,
                });
            }
        }
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let begin = Instant::now();
    // A short sample has room for only some of them.
    let after = |part: u64| seconds.map(|seconds| begin + Duration::from_secs(seconds / part));
    if seconds.is_some() {
        random.shuffle(&mut alone);
    }
    let calls: Mutex<Vec<Option<Vec<Point>>>> =
        Mutex::new((0..alone.len()).map(|_| None).collect());
    each(jobs, &alone, after(3), |number, planned| {
        let outcome = run::run(&tools, &base, planned.case());
        let points = report.add(&planned.case(), outcome);
        calls.lock().expect("no holder panics")[number] = Some(points);
    });
    let calls = calls.into_inner().expect("no holder panics");
    let mut plan = Vec::new();
    for (planned, points) in alone.iter().zip(calls) {
        let points = points.unwrap_or_default();
        if args.list {
            println!(
                "{} ({}): {} calls",
                planned.operation.name,
                planned.trust,
                points.len()
            );
            points
                .iter()
                .for_each(|point| println!("    {}", point.key));
        }
        plan.extend(plan_of(args, planned, &points, &mut random));
    }
    if args.list {
        return Ok(true);
    }
    let total = plan.len();
    // In a given time all actions have their share, too.
    let most = seconds.map_or(usize::MAX, |seconds| seconds as usize * 1000);
    let plan = drawn(plan, args.sample.unwrap_or(most), &mut random);
    println!("interference: {} of {total} points", plan.len());
    report.expect(plan.len());
    each(jobs, &plan, after(1), |_, planned| {
        report.add(&planned.case(), run::run(&tools, &base, planned.case()));
    });
    Ok(report.end())
}

/// The points of an operation in a folder.
fn plan_of<'a>(
    args: &Args,
    planned: &Planned<'a>,
    points: &[Point],
    random: &mut fastrand::Rng,
) -> Vec<Planned<'a>> {
    let Planned {
        operation, trust, ..
    } = *planned;
    let mut plan = Vec::new();
    for actor in [Actor::Same, Actor::Other] {
        // What the same user can do does not depend on others' permissions.
        if actor == Actor::Same && trust != operation.trusts[0]
            || args.actor.is_some_and(|only| only != actor)
        {
            continue;
        }
        for action in Action::all(trust, actor) {
            if !args.action.is_empty() && !args.action.contains(&action) {
                continue;
            }
            for point in points
                .iter()
                .filter(|point| point.suits(action, operation, trust))
            {
                if args.at.as_ref().is_none_or(|at| *at == point.key) {
                    plan.push(Planned {
                        operation,
                        trust,
                        actor,
                        action,
                        at: Some(point.key.clone()),
                    });
                }
            }
        }
    }
    let weave = |action: &Action| matches!(action, Action::Weave(_));
    let weaves = args.action.is_empty() || args.action.iter().any(weave);
    if operation.weaves && weaves && args.at.is_none() && trust == operation.trusts[0] {
        let given = args.action.iter().copied().filter(weave);
        let mut actions: Vec<Action> = given
            .filter(|action| *action != Action::Weave(Action::DRAWN))
            .collect();
        if actions.is_empty() {
            actions = (0..args.weaves)
                .map(|_| Action::Weave(random.u64(1..1_000_000_000)))
                .collect();
        }
        plan.extend(actions.into_iter().map(|action| Planned {
            operation,
            trust,
            actor: Actor::Same,
            action,
            at: None,
        }));
    }
    plan
}

/// A part of a plan, in which rare actions have the same share as frequent ones, and two instances that take turns a
/// tenth.
fn drawn<'a>(
    mut plan: Vec<Planned<'a>>,
    most: usize,
    random: &mut fastrand::Rng,
) -> Vec<Planned<'a>> {
    random.shuffle(&mut plan);
    let most = most.min(plan.len());
    let is_weave = |planned: &Planned| matches!(planned.action, Action::Weave(_));
    let (mut weaves, others): (Vec<_>, Vec<_>) = plan.into_iter().partition(is_weave);
    weaves.truncate(if others.is_empty() { most } else { most / 10 });
    let mut seen: BTreeMap<(&str, Trust, Actor, Action), usize> = BTreeMap::new();
    let mut ranked: Vec<(usize, Planned)> = Vec::new();
    for planned in others {
        let rank = seen
            .entry((
                planned.operation.name,
                planned.trust,
                planned.actor,
                planned.action,
            ))
            .or_default();
        *rank += 1;
        ranked.push((*rank, planned));
    }
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.truncate(most - weaves.len());
    // In this order, because time may be short.
    let step = 10;
    let mut weaves = weaves.into_iter();
    let mut plan = Vec::new();
    for (number, (_, planned)) in ranked.into_iter().enumerate() {
        plan.push(planned);
        if number % step == step - 1 {
            plan.extend(weaves.next());
        }
    }
    plan.extend(weaves);
    plan
}

/// Runs a plan on several threads.
fn each<T: Sync>(jobs: usize, plan: &[T], until: Option<Instant>, run: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while until.is_none_or(|until| Instant::now() < until) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(planned) = plan.get(number) else {
                        return;
                    };
                    run(number, planned);
                }
            });
        }
    });
}

/// The command that is tested, in a folder from which the other user can start it, too.
fn tools(args: &Args, base: &Path) -> io::Result<(Tools, tempfile::TempDir)> {
    let folder = tempfile::Builder::new()
        .prefix("interference.")
        .permissions(Permissions::from_mode(0o755))
        .tempdir_in(base)?;
    let own = std::env::current_exe()?;
    let program = folder.path().join("program");
    std::fs::copy(args.dmafile.as_ref().unwrap_or(&own), &program)?;
    let mut dmafile: Vec<OsString> = vec![program.into()];
    dmafile.extend(args.dmafile.is_none().then(|| "dmafile".into()));
    let tools = Tools {
        dmafile,
        own: own.into(),
    };
    Ok((tools, folder))
}

/// A fault that is expected: the begin of an operation's name, and its kind.
fn expected(text: &str) -> Option<(&str, Kind)> {
    let (operation, kind) = text.split_once('=')?;
    let kind = <Kind as clap::ValueEnum>::from_str(kind, true).ok()?;
    Some((operation, kind))
}
