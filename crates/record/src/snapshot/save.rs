//! Saves a snapshot: inspects and plans every source, reserves space, writes, makes the snapshot valid, and
//! removes the old files.

use super::folder::{SnapshotFolder, SnapshotPlace};
use super::manifest::{self, Manifest, SourceEntry};
use super::report::{SavedSource, SnapshotPlan, SnapshotReport, SourcePlan};
use super::tally::Tally;
use dmafile::internal::{Builder, Clock, ProgressFn, Reasons, Staged, Verb};
use dmafile::{
    About, Algorithm, CancelToken, Error, Names, Opt, Origin, Progress, Result, Save, Verify,
};
use dmafile_sys::{Errno, file, memfd};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

pub(super) type EachSaveFn = Box<dyn Fn(&str, Save<'static>) -> Save<'static> + Send>;
type SnapshotPlanFn = Box<dyn FnOnce(&SnapshotPlan) + Send>;

/// A builder for a snapshot: several sources that become valid together, in an existing folder.
///
/// The files of the previous snapshot stay unchanged until all of the new one is on the disk. Then the new
/// manifest replaces the old one atomically, and the old files are removed; so there must be room for both.
/// If the save ends early, the previous snapshot is still complete; what remains of the new one is removed,
/// after a crash by the next save to the folder.
///
/// The memory should not change during the save: concurrent writes make its digest wrong.
///
/// ```no_run
/// use dmafile::{Algorithm, Io, Origin};
/// use dmafile_record::{Snapshot, SnapshotLoad};
///
/// let report = Snapshot::new("task.snapshot")
///     .add("weights", "fd:3".parse::<Origin>()?)
///     .add("cache", "fd:4".parse::<Origin>()?)
///     .verify(Algorithm::Blake3)
///     .each(|_, save| save.io(Io::Direct))
///     .run()?;
/// assert_eq!(report.sources[1].name, "cache");
/// for source in SnapshotLoad::new("task.snapshot").run()?.sources {
///     println!("{}: {} bytes", source.name, source.buffer.len());
/// }
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is saved before `run`"]
pub struct Snapshot {
    path: PathBuf,
    pub(super) sources: Vec<(String, Origin<'static>)>,
    pub(super) each: EachSaveFn,
    pub(super) algorithm: Algorithm,
    sync: bool,
    pub(super) cancel: CancelToken,
    pub(super) progress: Option<ProgressFn>,
    on_plan: Option<SnapshotPlanFn>,
    pub(super) names: &'static dyn Names,
}

/// Sums up the progress of the sources, once there is a plan.
type SharedTally = Arc<OnceLock<Arc<Tally>>>;

impl Snapshot {
    /// A snapshot in the folder `path`, without sources yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            sources: Vec::new(),
            each: Box::new(|_, save| save),
            algorithm: Algorithm::Xxh3,
            sync: true,
            cancel: CancelToken::new(),
            progress: None,
            on_plan: None,
            names: &Builder,
        }
    }

    /// Adds a source. Its name has 1 to 64 bytes, does not start with a dot, and has no slash, comma,
    /// equals sign or control character. At most [`MOST_SOURCES`](crate::MOST_SOURCES).
    pub fn add(mut self, name: impl Into<String>, origin: Origin<'static>) -> Self {
        self.sources.push((name.into(), origin));
        self
    }

    /// Calls `with` with the name and the save of each source, to set its options. The snapshot's own
    /// options (`verify`, `sync`, `cancel`, `progress`) are set afterwards.
    pub fn each(
        mut self,
        with: impl Fn(&str, Save<'static>) -> Save<'static> + Send + 'static,
    ) -> Self {
        self.each = Box::new(with);
        self
    }

    /// The algorithm of the digests in the manifest; default [`Algorithm::Xxh3`], the longest of those that
    /// cost the least CPU time. It detects damage, not forgery: for that, compare a digest of the manifest.
    pub fn verify(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Sets whether to wait until everything is on the disk; default true. If false, a system crash shortly
    /// afterwards may leave no snapshot that can be loaded.
    pub fn sync(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// Lets `token` cancel the save.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// As [`Save::progress`], for all sources together.
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Sets how messages name options; default: as this crate does.
    pub fn names(mut self, names: &'static dyn Names) -> Self {
        self.names = names;
        self
    }

    /// Calls `show` with the plan, before any byte is moved.
    pub fn on_plan(mut self, show: impl FnOnce(&SnapshotPlan) + Send + 'static) -> Self {
        self.on_plan = Some(Box::new(show));
        self
    }

    /// Checks everything that depends neither on files nor on this machine: the names and the number of
    /// sources.
    ///
    /// # Errors
    /// Kind [`Usage`](dmafile::ErrorKind::Usage).
    pub fn check(&self) -> Result<()> {
        let names = self.sources.iter().map(|source| &source.0[..]);
        manifest::check_count(self.sources.len())
            .and_then(|()| manifest::check_names(names))
            .map_err(|why| Error::usage(Opt::From, why))
    }

    /// Returns what would be done, and why. Opens everything and probes the machine; moves nothing, and
    /// leaves nothing behind.
    ///
    /// # Errors
    /// As [`Snapshot::run`], as far as they can be foreseen.
    pub fn plan(self) -> Result<SnapshotPlan> {
        self.check()?;
        let folder = self.open()?;
        let old = folder.manifest()?;
        let left = folder.others(old.as_ref())?;
        let generation = next(old.as_ref(), &left)?;
        let staged = self.stage(&folder, generation, &SharedTally::default())?;
        Ok(self.plan_of(generation, &staged))
    }

    /// Saves the snapshot. When it returns, the snapshot is valid, and on the disk unless
    /// [`Snapshot::sync`] is false.
    ///
    /// # Errors
    /// As [`Save::run`]; EBUSY while another snapshot is being saved to the folder; ENOENT and ENOTDIR if
    /// there is no such folder; EBADMSG and EOPNOTSUPP if its manifest cannot be read by this version. The
    /// previous snapshot is complete, except after an error in the last sync: then a crash may leave either
    /// one. If the folder's path leads elsewhere by then, the snapshot is in the folder that it led to first.
    pub fn run(mut self) -> Result<SnapshotReport> {
        let (clock, log) = (Clock::start(), Reasons::named(self.names));
        self.check()?;
        let folder = self.open()?;
        let lock = folder.lock()?;
        let old = folder.manifest()?;
        let left = self.clear(&folder, old.as_ref(), &log)?;
        let generation = next(old.as_ref(), &left)?;
        let unfinished = Unfinished {
            folder: &folder,
            generation,
        };
        let told = SharedTally::default();
        let mut staged = self.stage(&folder, generation, &told)?;
        let plan = self.plan_of(generation, &staged);
        if let Some(tell) = self.progress.take() {
            let totals = plan.sources.iter();
            let totals = totals.map(|source| source.plan.to_write.unwrap_or(0));
            let _ = told.set(Tally::new(tell, totals));
        }
        if let Some(show) = self.on_plan.take() {
            show(&plan);
        }
        for source in &mut staged {
            // For all sources first, so that a full disk is detected before anything is written.
            source.reserve()?;
        }
        let mut sources = Vec::new();
        let mut entries = Vec::new();
        for ((name, _), source) in self.sources.iter().zip(staged) {
            let (entry, saved) = save_one(&folder, (name, generation), source)?;
            entries.push(entry);
            sources.push(saved);
        }
        let manifest = Manifest::new(generation, self.algorithm, entries);
        self.validate(&folder, &manifest)?;
        confirm(&folder, &manifest)?;
        drop(unfinished);
        let stay = folder.remove(folder.others(Some(&manifest)).unwrap_or_default());
        if !stay.is_empty() {
            let why = "cannot remove them now; the next save will";
            log.add(About::Left, format!("{} old files", stay.len()), why);
        }
        if !folder.is_in_place() {
            let why = "its path leads elsewhere now; the snapshot is in the folder that was opened";
            log.add(About::Folder, "moved", why);
        }
        drop(lock);
        let sum = |of: fn(&SavedSource) -> u64| sources.iter().map(of).sum();
        Ok(SnapshotReport {
            bytes: sum(|source| source.report.bytes),
            seconds: clock.begin.elapsed().as_secs_f64(),
            to: self.path,
            generation,
            sync: self.sync,
            cpu: clock.cpu(),
            bytes_direct: sum(|source| source.report.bytes_direct),
            bytes_buffered: sum(|source| source.report.bytes_buffered),
            bytes_hole: sum(|source| source.report.bytes_hole),
            sources,
            reasons: log.list(),
        })
    }

    fn open(&self) -> Result<SnapshotFolder> {
        SnapshotFolder::open(&self.path).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => error
                .with_why("there is no such folder")
                .with_remedy("create it first: mkdir -p"),
            Some(libc::ENOTDIR) => error.with_remedy("name a folder to save several sources"),
            _ => error,
        })
    }

    /// Removes files of snapshots that were not completed; returns those that could not be removed.
    fn clear(
        &self,
        folder: &SnapshotFolder,
        valid: Option<&Manifest>,
        log: &Reasons,
    ) -> Result<Vec<(String, u64)>> {
        let left = folder.others(valid)?;
        let found = left.len();
        if found == 0 {
            return Ok(left);
        }
        if valid.is_some() {
            // Its saver may have ended before the sync: a crash could then bring back an older snapshot,
            // whose files we are about to remove.
            folder.settle()?;
        }
        let stay = folder.remove(left);
        let why = "left by an interrupted save";
        log.add(About::Removed, format!("{} files", found - stay.len()), why);
        Ok(stay)
    }

    /// Plans all sources.
    fn stage(
        &self,
        folder: &SnapshotFolder,
        generation: u64,
        told: &SharedTally,
    ) -> Result<Vec<Staged<'static>>> {
        let stage = |(number, (name, origin)): (usize, &(String, Origin<'static>))| {
            let file = manifest::file_of(name, generation);
            let save = Save::new(origin.clone(), folder.place(&file)).names(self.names);
            let mut save = folder
                .save((self.each)(name, save), &file)?
                .verify(Verify::compute(self.algorithm))
                .sync(self.sync)
                .cancel(self.cancel.clone());
            if self.progress.is_some() {
                let told = Arc::clone(told);
                save = save.progress(move |progress| {
                    if let Some(tally) = told.get() {
                        tally.set(number, progress);
                    }
                });
            }
            save.stage()
        };
        self.sources.iter().enumerate().map(stage).collect()
    }

    fn plan_of(&self, generation: u64, staged: &[Staged<'static>]) -> SnapshotPlan {
        let sources = self.sources.iter().zip(staged);
        SnapshotPlan {
            to: self.path.clone(),
            generation,
            algorithm: self.algorithm,
            sources: sources
                .map(|((name, _), staged)| SourcePlan {
                    name: name.clone(),
                    plan: staged.plan().clone(),
                })
                .collect(),
        }
    }

    /// Replaces the manifest: from now on the new snapshot is the valid one.
    fn validate(&self, folder: &SnapshotFolder, manifest: &Manifest) -> Result<()> {
        let path = folder.place(manifest::NAME);
        let text = manifest.to_json();
        let memory = memfd::create("dmafile-snapshot", false).and_then(|memory| {
            file::pwrite_all(memory.as_fd(), &text, 0)?;
            Ok(memory)
        });
        let memory =
            memory.map_err(|errno| Error::os(Verb::Write, errno).at(path.display().to_string()))?;
        folder
            .save(Save::new(Origin::fd(memory, 0), path), manifest::NAME)?
            .sync(self.sync)
            .cancel(self.cancel.clone())
            .run()
            .map(drop)
    }
}

/// Checks that the folder has the new manifest: only then may the files of the previous snapshot go.
fn confirm(folder: &SnapshotFolder, manifest: &Manifest) -> Result<()> {
    if folder.manifest()?.as_ref() == Some(manifest) {
        return Ok(());
    }
    Err(Error::os("cannot save a snapshot", Errno::BUSY)
        .with_why("another program has replaced its manifest since")
        .at(folder.place(manifest::NAME).display().to_string())
        .with_remedy("save it again, when nothing else writes to the folder"))
}

/// The generation after all existing ones.
pub(super) fn next(old: Option<&Manifest>, left: &[(String, u64)]) -> Result<u64> {
    let all = left.iter().map(|file| file.1);
    let last = all.chain(old.map(|old| old.generation)).max();
    after(last.unwrap_or(0))
}

/// The generation after this one.
pub(super) fn after(last: u64) -> Result<u64> {
    match last {
        manifest::LAST_GENERATION.. => {
            let why = format!("it has had {last} snapshots, the most that a folder can have");
            let error = Error::new("cannot save a snapshot", why).with_errno(Errno::OVERFLOW);
            Err(error.with_remedy("save to another folder"))
        }
        last => Ok(last + 1),
    }
}

/// Writes the file of a source, which is not valid before the manifest names it.
fn save_one(
    folder: &SnapshotFolder,
    (name, generation): (&str, u64),
    staged: Staged<'static>,
) -> Result<(SourceEntry, SavedSource)> {
    let file = manifest::file_of(name, generation);
    if folder.has(&file)? {
        let error = Error::os("cannot save a snapshot", Errno::EXIST);
        return Err(error
            .at(folder.place(&file).display().to_string())
            .with_why("another source has the same file name")
            .with_remedy("choose names that differ by more than case"));
    }
    let page = staged.page();
    let report = staged.run()?;
    let digest = report.verify.as_ref().map(|verified| &verified.digest);
    let entry = SourceEntry {
        name: name.to_string(),
        file,
        bytes: report.bytes,
        digest: digest.expect("it was asked for").clone(),
        kind: report.kind.to_string(),
        page,
    };
    let saved = SavedSource {
        name: name.to_string(),
        report,
    };
    Ok((entry, saved))
}

/// A snapshot that is not valid yet: its files are removed when this is dropped, unless it has become
/// valid.
struct Unfinished<'a> {
    folder: &'a SnapshotFolder,
    generation: u64,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        // If that cannot be found out, the next save does.
        let Ok(valid) = self.folder.manifest() else {
            return;
        };
        if valid.is_some_and(|valid| valid.generation == self.generation) {
            return;
        }
        let mut files = self.folder.others(None).unwrap_or_default();
        files.retain(|file| file.1 == self.generation);
        self.folder.remove(files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_valid_only_while_its_own_manifest_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let folder = SnapshotFolder::open(dir.path()).unwrap();
        let entry = SourceEntry {
            name: "a".to_string(),
            file: "a.2.dmafile".to_string(),
            bytes: 0,
            digest: "0".repeat(16),
            kind: "memfd".to_string(),
            page: None,
        };
        let own = Manifest::new(2, Algorithm::Xxh3, vec![entry.clone()]);
        let errno = || confirm(&folder, &own).map_err(|error| error.raw_os_error());
        assert_eq!(errno(), Err(Some(libc::EBUSY)));
        let write = |manifest: &Manifest| {
            std::fs::write(dir.path().join(manifest::NAME), manifest.to_json()).unwrap();
        };
        // Of the same generation, by another saver.
        let digest = "1".repeat(16);
        let other = Manifest::new(2, Algorithm::Xxh3, vec![SourceEntry { digest, ..entry }]);
        write(&other);
        assert_eq!(errno(), Err(Some(libc::EBUSY)));
        write(&own);
        assert_eq!(errno(), Ok(()));
    }
}
