//! One run: an operation in a fresh folder, stopped at one call for one action.

use crate::action::{self, Acted, Action, Actor, Names, Spy, Target, Verb};
use crate::operation::{self, Fault, Kind, Log, Operation, Run, Seen, Stage, Tools, Which};
use crate::trace::{Call, Exit, Next, Session};
use crate::world::{Content, GROUP, OTHER, Trust, World};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a run may take before it hangs. Much longer than it takes anywhere.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long a process is stopped.
const MOMENT: Duration = Duration::from_millis(30);

/// Where an action takes place, as found by a run without one.
#[derive(Clone, Debug)]
pub struct Point {
    pub key: String,
    /// The call names a file in the operation's folder.
    has_path: bool,
    /// The operation has made files by then.
    has_fresh: bool,
}

impl Point {
    /// Whether the action has something to act on here.
    pub fn suits(&self, action: Action, operation: &Operation, trust: Trust) -> bool {
        match action {
            // COMMAND itself waits for a FIFO that its user puts in its path.
            Action::Name(Verb::Fifo, _) if operation.name.ends_with("-path") => false,
            Action::Name(_, Target::Here) => self.has_path,
            Action::Name(_, Target::Fresh) => self.has_fresh,
            Action::Name(_, Target::Final) => !operation.finals.is_empty(),
            Action::Flip => !matches!(trust, Trust::Sticky | Trust::Foreign),
            Action::Release => {
                operation.name.starts_with("hold") || operation.name.starts_with("take")
            }
            Action::Fork => cfg!(target_arch = "x86_64"),
            _ => true,
        }
    }
}

/// What is run.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub operation: &'a Operation,
    pub trust: Trust,
    pub actor: Actor,
    pub action: Action,
    /// The call, by its name; None for actions that need none.
    pub at: Option<&'a str>,
}

/// What came of it.
pub struct Outcome {
    /// None if no call had that name in this run.
    pub acted: Option<Acted>,
    pub exit: Exit,
    pub faults: Vec<Fault>,
    pub took: Duration,
    pub points: Vec<Point>,
}

pub fn run(tools: &Tools, base: &Path, case: Case) -> io::Result<Outcome> {
    let begin = Instant::now();
    let world = World::new(base, case.trust)?;
    let operation = case.operation;
    (operation.prepare)(tools, &world)?;
    let mut peers = (operation.peers)(tools, &world)?;
    world.open()?;
    let evil = operation::evil(tools, &world, case.action, case.actor)?;
    let before = [world.list("outside"), world.list("src")];
    let secrets = operation.finals.iter().any(|name| {
        let found = fs::metadata(world.work().join(name));
        found.is_ok_and(|found| found.mode() & 0o077 == 0 && found.is_file())
    });
    let mut session = Session::new(world.root());
    let mut started = vec![start(tools, &world, operation, Which::First)?];
    session.add(Pid::from_raw(started[0].id() as i32))?;
    if let Action::Weave(_) = case.action {
        started.push(start(tools, &world, operation, Which::Second)?);
        session.add(Pid::from_raw(started[1].id() as i32))?;
    }
    let mut actor = Actions {
        tools,
        world: &world,
        case,
        names: Names::of(&world.work()),
        session,
        acted: None,
        paths: Vec::new(),
        points: Vec::new(),
        others: Vec::new(),
        spy: None,
        resume_at: None,
        is_late: false,
    };
    let out = BufReader::new(started[0].stdout.take().expect("it is a pipe"));
    let mut stage = Stage {
        tools,
        world: &world,
        action: case.action,
        pid: started[0].id() as i32,
        input: started[0].stdin.take(),
        peers: &mut peers,
    };
    // The second's streams are of no interest, but must not fill up.
    let second = started
        .get_mut(1)
        .map(|second| (second.stdin.take(), second.stdout.take()));
    let script = operation.script;
    let log = std::thread::scope(|scope| -> io::Result<Log> {
        let log = scope.spawn(move || script(&mut stage, out));
        let drained = scope.spawn(move || {
            if let Some((input, Some(mut out))) = second {
                // A process that shares ends with its input.
                drop(input);
                let _ = io::copy(&mut out, &mut io::sink());
            }
        });
        let traced = actor.trace();
        let killed = actor.session.kill();
        let _ = drained.join();
        let log = log
            .join()
            .map_err(|_| io::Error::other("the script panicked"))?;
        traced.and(killed).map(|()| log)
    })?;
    let exit = actor.session.exit(0).unwrap_or(Exit::Hangs);
    let exit = if actor.is_late { Exit::Hangs } else { exit };
    let woven = matches!(case.action, Action::Weave(_))
        .then(|| actor.session.exit(1))
        .flatten();
    let mut seconds = actor
        .others
        .iter_mut()
        .filter_map(|(child, ends)| ends.then(|| wait(child)));
    let second = woven.or_else(|| seconds.next());
    let reads = actor.spy.take().map(Spy::reads).transpose()?;
    let errors = fs::read(world.at("errors.first")).unwrap_or_default();
    let (acted, paths, points) = (
        actor.acted,
        actor.paths.clone(),
        std::mem::take(&mut actor.points),
    );
    drop(actor);
    let mut seen = Seen {
        world: &world,
        action: case.action,
        actor: case.actor,
        acted: acted == Some(Acted::Done),
        exit,
        second,
        log: &log,
        errors: &String::from_utf8_lossy(&errors),
        peers: &mut peers,
        fails: operation.fails,
    };
    let mut faults = seen.judge_all();
    faults.extend((operation.judge)(&mut seen));
    let followed = operation.follows && is_followed(case, &paths);
    let after = [world.list("outside"), world.list("src")];
    if !followed {
        let mut changes = before[0].changes(&after[0]);
        if is_led(case, &paths) {
            changes.retain(|change| !change.ends_with(" is new"));
        }
        faults.extend(outside(&changes));
    }
    if !case.action.is_of_source() {
        faults.extend(outside(&before[1].changes(&after[1])));
    }
    for bytes in reads.into_iter().flatten() {
        if secrets && !bytes.is_empty() && Content::New.bytes().starts_with(&bytes) {
            faults.push(Fault {
                kind: Kind::Leak,
                what: format!("another user has read {} bytes of the secret", bytes.len()),
            });
        }
    }
    let killed = exit == Exit::Signal(libc::SIGKILL);
    if let Some(again) = operation.again.filter(|_| killed && faults.is_empty()) {
        faults.extend(again(tools, &world));
    }
    drop(evil);
    Ok(Outcome {
        acted,
        exit,
        faults,
        took: begin.elapsed(),
        points,
    })
}

/// A save follows links at its final name, as documented, except where the kernel does not follow them
/// (fs.protected_symlinks).
fn is_followed(case: Case, paths: &[PathBuf]) -> bool {
    let protected = fs::read_to_string("/proc/sys/fs/protected_symlinks");
    let protects = protected.is_ok_and(|value| value.trim() != "0");
    let foreign = case.actor == Actor::Other && case.trust == Trust::Sticky;
    let named = is_final(case, paths);
    let is_link = matches!(
        case.action,
        Action::Name(Verb::Link | Verb::DirLink | Verb::Dangling, _)
    );
    named && is_link && !(foreign && protects)
}

/// Whether new files may appear where a link leads: it is the user's own, or the operation works in a folder whose path
/// others choose, as every program would.
fn is_led(case: Case, paths: &[PathBuf]) -> bool {
    let Action::Name(verb, target) = case.action else {
        return false;
    };
    matches!(verb, Verb::DirLink | Verb::Dangling)
        && (case.actor == Actor::Same
            || target == Target::Folder
            || case.operation.leads && is_final(case, paths))
}

/// Whether an action was about a name that the operation has in the end.
fn is_final(case: Case, paths: &[PathBuf]) -> bool {
    let finals = case.operation.finals;
    let is_final = |path: &PathBuf| finals.iter().any(|name| path.ends_with(name));
    paths.iter().any(is_final)
}

fn outside(changes: &[String]) -> Vec<Fault> {
    let changes = changes.iter();
    changes
        .map(|what| Fault {
            kind: Kind::Outside,
            what: what.clone(),
        })
        .collect()
}

fn wait(child: &mut Child) -> Exit {
    let until = Instant::now() + DEADLINE;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                return status
                    .code()
                    .map_or(Exit::Signal(libc::SIGKILL), Exit::Status);
            }
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            _ => return Exit::Hangs,
        }
    }
}

fn start(tools: &Tools, world: &World, operation: &Operation, which: Which) -> io::Result<Child> {
    let run = (operation.command)(tools, world, which);
    let name = match which {
        Which::First => "errors.first",
        Which::Second => "errors.second",
    };
    let mut command = launched(tools, world, operation, &run, true);
    command.stdin(input(&run)?).stdout(Stdio::piped());
    command.stderr(File::create(world.at(name))?).spawn()
}

fn input(run: &Run) -> io::Result<Stdio> {
    Ok(match &run.input {
        // Through a pipe it would need a writer; a file is read as a stream as well.
        Some(path) => File::open(path)?.into(),
        None if run.waits => Stdio::piped(),
        None => Stdio::null(),
    })
}

fn launched(
    tools: &Tools,
    world: &World,
    operation: &Operation,
    run: &Run,
    traced: bool,
) -> Command {
    let mut words = Vec::from(["start".to_string()]);
    words.extend(traced.then(|| "traced".to_string()));
    words.extend(operation.no_tmpfile.then(|| "no-tmpfile".to_string()));
    let mut line = vec![tools.own.clone()];
    line.extend(words.into_iter().map(Into::into));
    line.extend(tools.line(run));
    tools.start(world, run, &line)
}

/// The second actor of a run.
struct Actions<'a> {
    tools: &'a Tools,
    world: &'a World,
    case: Case<'a>,
    names: Names,
    session: Session,
    acted: Option<Acted>,
    paths: Vec<PathBuf>,
    points: Vec<Point>,
    /// Other instances, and whether they end by themselves.
    others: Vec<(Child, bool)>,
    spy: Option<Spy>,
    resume_at: Option<Instant>,
    /// It had not ended in time.
    is_late: bool,
}

impl Drop for Actions<'_> {
    fn drop(&mut self) {
        let _ = self.session.kill();
        for (child, _) in &mut self.others {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Actions<'_> {
    fn trace(&mut self) -> io::Result<()> {
        let until = Instant::now() + DEADLINE;
        let mut turns = match self.case.action {
            Action::Weave(seed) => Some(Turns::new(seed)),
            _ => None,
        };
        if turns.is_some() {
            self.acted = Some(Acted::Done);
        }
        loop {
            let patience = match turns {
                // Long, so that a busy machine does not change whose turn it is.
                Some(_) => Duration::from_millis(500),
                None => Duration::from_millis(30),
            };
            match self.session.next(patience)? {
                Next::Over => return Ok(()),
                Next::Call(task, call) => {
                    if let Some(turns) = &mut turns {
                        turns.call(&self.session, task, &call);
                        continue;
                    }
                    self.stopped(task, &call)?;
                    self.session.go(task);
                }
                Next::Quiet => {
                    if let Some(turns) = &mut turns {
                        turns.quiet(&self.session);
                    }
                    if self.session.exit(0).is_some() {
                        // Others may wait for it.
                        self.session.end_copies();
                    }
                    if Instant::now() >= until {
                        self.is_late = true;
                        return Ok(());
                    }
                }
            }
            if self.resume_at.is_some_and(|at| Instant::now() >= at) {
                self.resume_at = None;
                self.session.resume(0);
            }
        }
    }

    /// The operation has stopped at a call.
    fn stopped(&mut self, task: Pid, call: &Call) -> io::Result<()> {
        if self.case.action == Action::None {
            let target = |target| {
                action::targets(
                    self.world,
                    call,
                    target,
                    self.case.operation.finals,
                    &self.names,
                )
            };
            self.points.push(Point {
                key: call.key.clone(),
                has_path: !target(Target::Here).is_empty(),
                has_fresh: !target(Target::Fresh).is_empty(),
            });
            return Ok(());
        }
        if self.acted.is_none() && self.case.at == Some(&*call.key) {
            self.acted = Some(self.act(task, call)?);
        }
        Ok(())
    }

    fn act(&mut self, task: Pid, call: &Call) -> io::Result<Acted> {
        let world = self.world;
        match self.case.action {
            Action::None | Action::Weave(_) => return Ok(Acted::Nothing),
            Action::Name(verb, target) => {
                let finals = self.case.operation.finals;
                self.paths = action::targets(world, call, target, finals, &self.names);
                return action::act(world, self.case.actor, verb, &self.paths);
            }
            // A holder removes its folder at the end.
            Action::Rotate | Action::Spy if !world.work().exists() => return Ok(Acted::Nothing),
            Action::Rotate => rotate(world)?,
            Action::Flip => {
                let link = world.at("top/.flip");
                symlink("spare", &link)?;
                fs::rename(link, world.at("top/current"))?;
            }
            Action::SourceReplaced => {
                fs::rename(world.at("src/changed.bin"), world.at("src/model.bin"))?;
            }
            Action::SourceModified => {
                let file = File::options()
                    .write(true)
                    .open(world.at("src/model.bin"))?;
                file.write_all_at(Content::Changed.bytes(), 0)?;
            }
            Action::SourceTruncated => {
                let file = File::options()
                    .write(true)
                    .open(world.at("src/model.bin"))?;
                file.set_len(Content::New.bytes().len() as u64 / 2)?;
            }
            Action::SourceUnlinked => fs::remove_file(world.at("src/model.bin"))?,
            Action::Kill => self.session.send(0, Signal::SIGKILL),
            Action::Terminate => self.session.send(0, Signal::SIGTERM),
            Action::Interrupt => self.session.send(0, Signal::SIGINT),
            Action::Stop => {
                self.session.stop(0);
                self.resume_at = Some(Instant::now() + MOMENT);
            }
            Action::Fork => self.session.fork(task)?,
            Action::Second => self.second()?,
            Action::Release => self.release()?,
            Action::Spy => self.spy = Some(Spy::new(&world.work())?),
        }
        Ok(Acted::Done)
    }

    fn second(&mut self) -> io::Result<()> {
        let operation = self.case.operation;
        let run = (operation.command)(self.tools, self.world, Which::Second);
        let mut command = launched(self.tools, self.world, operation, &run, false);
        command.stdin(input(&run)?).stdout(Stdio::null());
        let errors = File::create(self.world.at("errors.second"))?;
        self.beside(command.stderr(errors).spawn()?, operation.second_ends);
        Ok(())
    }

    fn release(&mut self) -> io::Result<()> {
        let run = operation::release(self.tools, self.world);
        let line = self.tools.line(&run);
        let mut command = self.tools.start(self.world, &run, &line);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.beside(command.spawn()?, false);
        Ok(())
    }

    /// Gives another process a while, in which it usually ends if the one that has stopped does not keep it.
    fn beside(&mut self, mut child: Child, ends: bool) {
        let until = Instant::now() + Duration::from_millis(if ends { 2000 } else { 150 });
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.others.push((child, ends));
    }
}

fn rotate(world: &World) -> io::Result<()> {
    let work = world.work();
    let found = fs::metadata(&work)?;
    fs::rename(&work, world.at("top/rotated"))?;
    fs::create_dir(&work)?;
    std::os::unix::fs::chown(&work, Some(found.uid()), Some(found.gid()))?;
    fs::set_permissions(&work, found.permissions())
}

/// Two instances, of which one is stopped while the other runs.
struct Turns {
    random: fastrand::Rng,
    current: usize,
    held: [Vec<Pid>; 2],
    /// How often it is the other's turn.
    rate: f64,
    /// Only before calls that change names or locks.
    only_changes: bool,
    /// Its calls since it is its turn.
    patience: u32,
}

impl Turns {
    /// After so many calls in one turn it probably waits for the other one by trying again and again.
    const PATIENCE: u32 = 300;

    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let current = random.usize(..2);
        // Most faults are between calls that change names or locks, of which there are few.
        let only_changes = random.usize(..4) > 0;
        let rates = if only_changes {
            [0.5, 0.5]
        } else {
            [0.1, 0.25]
        };
        Self {
            current,
            rate: rates[random.usize(..2)],
            only_changes,
            patience: 0,
            random,
            held: [Vec::new(), Vec::new()],
        }
    }

    fn call(&mut self, session: &Session, task: Pid, call: &Call) {
        if call.root != self.current {
            return self.held[call.root].push(task);
        }
        // Between two calls that name no file, the other one changes nothing.
        let counts = if self.only_changes {
            call.changes
        } else {
            !call.paths.is_empty()
        };
        self.patience += 1;
        let is_alone = session.exit(1 - self.current).is_some();
        let waits = self.patience > Self::PATIENCE;
        if !is_alone && (waits || counts && self.random.f64() < self.rate) {
            self.held[call.root].push(task);
            self.switch(session);
        } else {
            session.go(task);
        }
    }

    fn switch(&mut self, session: &Session) {
        self.patience = 0;
        self.current = 1 - self.current;
        for task in self.held[self.current].drain(..) {
            session.go(task);
        }
    }

    /// The current one waits for the other, or one has ended.
    fn quiet(&mut self, session: &Session) {
        if session.exit(1 - self.current).is_none() {
            self.switch(session);
        }
    }
}

/// As whom files of the other user are made; for messages.
pub fn other() -> String {
    format!("user {OTHER}, group {GROUP}")
}
