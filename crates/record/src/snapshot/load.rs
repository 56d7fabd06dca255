//! Loads a snapshot: opens all of its files, then loads each.

use super::folder::{SnapshotFolder, SnapshotPlace};
use super::manifest::{self, DAMAGED, Manifest, SourceEntry};
use super::report::{
    LoadedSnapshot, LoadedSource, SnapshotLoadPlan, SnapshotLoadReport, SourceLoadPlan,
    SourceLoadReport,
};
use super::tally::Tally;
use dmafile::internal::{Builder, Clock, ProgressFn, Selection, Source, Verb, sync::lock};
use dmafile::{
    Buffer, CancelToken, Error, Kind, Load, Loaded, ModelFolder, Names, Opt, Plan, Progress,
    Result, message,
};
use dmafile_sys::Errno;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

type EachLoadFn = Box<dyn Fn(&str, Load) -> Load + Send>;
type SourcePlanFn = Box<dyn FnMut(&str, &Plan) + Send>;

/// A builder for loading a snapshot: a folder, and how to load its sources.
///
/// Each source gets a separate buffer, which is checked against the size and the digest in the manifest
/// before it is returned. If another snapshot replaces this one during the load, either the old or the new
/// one is loaded, completely.
#[must_use = "nothing is loaded before `run`"]
pub struct SnapshotLoad {
    path: PathBuf,
    each: EachLoadFn,
    cancel: CancelToken,
    progress: Option<ProgressFn>,
    on_plan: Option<SourcePlanFn>,
    names: &'static dyn Names,
}

/// The sources of a snapshot whose files are open: on a disk they can be loaded even if the folder changes.
type OpenSources = Vec<Option<Source>>;

impl SnapshotLoad {
    /// Loads the snapshot in the folder `path`, each source into a memfd; the plan chooses everything else.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            each: Box::new(|_, load| load),
            cancel: CancelToken::new(),
            progress: None,
            on_plan: None,
            names: &Builder,
        }
    }

    /// Returns `true` if a folder contains a snapshot, intact or damaged: a manifest.
    pub fn is_snapshot(path: &Path) -> bool {
        path.join(manifest::NAME).symlink_metadata().is_ok()
    }

    /// The same for a folder of a store.
    ///
    /// # Errors
    /// Those of listing the folder.
    pub fn is_in(folder: &dyn ModelFolder) -> Result<bool> {
        Ok(folder.names()?.iter().any(|name| name == manifest::NAME))
    }

    /// Calls `with` with the name and the load of each source, to set its options. The snapshot's own
    /// options (`verify`, `cancel`, `progress`) are set afterwards.
    pub fn each(mut self, with: impl Fn(&str, Load) -> Load + Send + 'static) -> Self {
        self.each = Box::new(with);
        self
    }

    /// Lets `token` cancel the load.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// As [`Load::progress`], for all sources together.
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Sets how messages name options; default: as this crate does.
    pub fn names(mut self, names: &'static dyn Names) -> Self {
        self.names = names;
        self
    }

    /// Calls `show` with the name of each source and its plan, when that is made.
    pub fn on_plan(mut self, show: impl FnMut(&str, &Plan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }

    /// Returns what would be done, and why. Opens the files and probes the machine; reads nothing, except
    /// one block of each file if that is the only way to find out whether direct I/O works.
    ///
    /// # Errors
    /// As [`SnapshotLoad::run`], as far as they can be foreseen.
    pub fn plan(self) -> Result<SnapshotLoadPlan> {
        let folder = SnapshotFolder::open(&self.path)?;
        self.plan_in(&folder)
    }

    /// As [`SnapshotLoad::plan`], for a snapshot in a folder of a store.
    ///
    /// # Errors
    /// As [`SnapshotLoad::run_from`], as far as they can be foreseen.
    pub fn plan_from(mut self, folder: &dyn ModelFolder) -> Result<SnapshotLoadPlan> {
        self.path = folder.name().into();
        self.plan_in(&folder)
    }

    fn plan_in(self, place: &impl SnapshotPlace) -> Result<SnapshotLoadPlan> {
        let (manifest, files) = self.settled(place, |manifest| open(place, manifest))?;
        let loads = self.loads(&manifest, files, None)?;
        let plan = |(entry, load): (&SourceEntry, Option<Load>)| {
            Ok(SourceLoadPlan {
                name: entry.name.clone(),
                bytes: entry.bytes,
                plan: load.map(Load::plan).transpose()?,
            })
        };
        let sources = manifest.sources.iter().zip(loads).map(plan);
        Ok(SnapshotLoadPlan {
            sources: sources.collect::<Result<_>>()?,
            from: self.path,
            generation: manifest.generation,
        })
    }

    /// Loads all sources, one after another.
    ///
    /// # Errors
    /// As [`Load::run`], for each of them; ENOENT if the folder has no snapshot, EBADMSG for a damaged
    /// manifest or file, EOPNOTSUPP for a manifest of another version. Nothing is left behind, except in an
    /// `fd:N` that was being filled.
    pub fn run(self) -> Result<LoadedSnapshot> {
        let clock = Clock::start();
        let folder = SnapshotFolder::open(&self.path)?;
        self.run_in(&folder, &clock)
    }

    /// As [`SnapshotLoad::run`], from a folder of a store.
    ///
    /// # Errors
    /// As [`SnapshotLoad::run`]; those of the folder and of readers.
    pub fn run_from(mut self, folder: &dyn ModelFolder) -> Result<LoadedSnapshot> {
        self.path = folder.name().into();
        self.run_in(&folder, &Clock::start())
    }

    fn run_in(mut self, place: &impl SnapshotPlace, clock: &Clock) -> Result<LoadedSnapshot> {
        let tell = self.progress.take().map(Arc::new);
        let show = self.on_plan.take().map(|show| Arc::new(Mutex::new(show)));
        let (manifest, loaded) = self.settled(place, |manifest| {
            let files = open(place, manifest)?;
            let tally = tell.clone().map(|tell| {
                let totals = manifest.sources.iter().map(|entry| entry.bytes);
                Tally::new(Box::new(move |progress| tell(progress)), totals)
            });
            let loads = self.loads(manifest, files, tally.as_ref())?;
            let all = manifest.sources.iter().zip(loads);
            all.map(|(entry, load)| self.load_one(entry, load, show.as_ref()))
                .collect::<Result<Vec<_>>>()
        })?;
        let (sources, reports) = loaded.into_iter().unzip();
        Ok(LoadedSnapshot {
            sources,
            report: SnapshotLoadReport {
                bytes: manifest.sources.iter().map(|entry| entry.bytes).sum(),
                seconds: clock.begin.elapsed().as_secs_f64(),
                from: self.path,
                generation: manifest.generation,
                cpu: clock.cpu(),
                sources: reports,
            },
        })
    }

    fn load_one(
        &self,
        entry: &SourceEntry,
        load: Option<Load>,
        show: Option<&Arc<Mutex<SourcePlanFn>>>,
    ) -> Result<(LoadedSource, SourceLoadReport)> {
        if self.cancel.is_cancelled() {
            let place = self.path.display().to_string();
            return Err(Error::cancelled(Verb::Load, place));
        }
        let (buffer, report) = match load {
            None => (Buffer::empty()?, None),
            Some(load) => {
                let Loaded { buffer, report, .. } = run_one(load, entry, show)?;
                (buffer, Some(report))
            }
        };
        let source = LoadedSource {
            name: entry.name.clone(),
            buffer,
        };
        let report = SourceLoadReport {
            name: entry.name.clone(),
            bytes: entry.bytes,
            saved_from: entry.kind.clone(),
            saved_page: entry.page,
            report,
        };
        Ok((source, report))
    }

    /// The snapshot, and what `with` makes of it. If another one replaces it meanwhile and removes its files, `with`
    /// gets that.
    fn settled<T>(
        &self,
        place: &impl SnapshotPlace,
        mut with: impl FnMut(&Manifest) -> Result<T>,
    ) -> Result<(Manifest, T)> {
        /// Only an attacker replaces it more often in a row.
        const MOST_TRIES: u32 = 100;
        let name = || self.path.display().to_string();
        let none = || {
            Error::os("cannot load a snapshot", Errno::NOENT)
                .at(name())
                .with_why(format!("the folder has no {}", manifest::NAME))
                .with_remedy("name a folder with a snapshot")
        };
        let is_gone =
            |error: &Error| matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE));
        let mut failed: Option<(Manifest, Error)> = None;
        for _ in 0..MOST_TRIES {
            let manifest = match place.manifest() {
                // It was replaced after it was opened.
                Err(error) if is_gone(&error) => continue,
                manifest => manifest?.ok_or_else(none)?,
            };
            if let Some((_, error)) = failed.filter(|failed| failed.0 == manifest) {
                return Err(error);
            }
            match with(&manifest) {
                Ok(done) => return Ok((manifest, done)),
                Err(error) if is_gone(&error) => failed = Some((manifest, error)),
                Err(error) => return Err(error),
            }
        }
        let error = Error::os("cannot load a snapshot", Errno::AGAIN);
        Err(error
            .at(name())
            .with_why("it keeps being replaced while it is loaded"))
    }

    /// The load of each source; None for an empty one.
    fn loads(
        &self,
        manifest: &Manifest,
        files: OpenSources,
        tally: Option<&Arc<Tally>>,
    ) -> Result<Vec<Option<Load>>> {
        let mut filled = Vec::new();
        let mut load_of = |number, entry: &SourceEntry, file: Option<Source>| {
            let Some(file) = file else {
                return Ok(None);
            };
            let load = Load::of(Arc::new(file), Selection::Requested).names(self.names);
            let mut load = (self.each)(&entry.name, load)
                .verify(manifest.expected(entry)?)
                .cancel(self.cancel.clone());
            load.check()?;
            if !load.is_whole() {
                let why = "sources of a snapshot are loaded whole";
                return Err(Error::usage(message![Opt::Offset, ", ", Opt::Length], why));
            }
            if let Kind::Fd { number, .. } = load.kind() {
                if filled.contains(number) {
                    let why = format!("fd:{number} holds only one source");
                    return Err(Error::usage(Opt::To, why));
                }
                filled.push(*number);
            }
            if let Some(tally) = tally {
                let tally = Arc::clone(tally);
                load = load.progress(move |progress| tally.set(number, progress));
            }
            Ok(Some(load))
        };
        let sources = manifest.sources.iter().zip(files).enumerate();
        sources
            .map(|(number, (entry, file))| load_of(number, entry, file))
            .collect()
    }
}

fn run_one(
    load: Load,
    entry: &SourceEntry,
    show: Option<&Arc<Mutex<SourcePlanFn>>>,
) -> Result<Loaded> {
    let load = match show {
        Some(show) => {
            let (show, name) = (Arc::clone(show), entry.name.clone());
            load.on_plan(move |plan| lock(&show)(&name, plan))
        }
        None => load,
    };
    load.run().map_err(|error| match error.raw_os_error() {
        Some(libc::EBADMSG) => error.with_remedy(DAMAGED),
        _ => error,
    })
}

/// Opens the files of a snapshot.
fn open(place: &impl SnapshotPlace, manifest: &Manifest) -> Result<OpenSources> {
    let files = manifest.sources.iter();
    files.map(|entry| place.open_source(entry)).collect()
}
