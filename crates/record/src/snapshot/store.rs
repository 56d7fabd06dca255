//! Snapshots in a folder of a store, with the same files and the same manifest as in a folder on a disk.
//!
//! A store has neither locks nor renames, but conditions. A save begins with an object of its generation that nobody
//! else has created: from then on all names of this generation are its own. It ends with the manifest, which replaces
//! only the one that was read at first: so only one of several saves succeeds, and none needs to know of the others.

use super::folder::SnapshotPlace;
use super::manifest::{self, Manifest, SourceEntry};
use super::report::{StoredSnapshot, StoredSource};
use super::save::{Snapshot, after, next};
use super::tally::Tally;
use dmafile::internal::{Clock, OriginReader, ProgressFn, Reasons, Source, Verb};
use dmafile::{About, Algorithm, Error, ModelFolder, Result, Save};
use dmafile_sys::Errno;
use std::path::Path;
use std::time::Instant;

/// How often a request is made that must not be repeated blindly.
const TRIES: u32 = 4;
/// How often a folder is listed to find a generation that nobody has: only one of so many savers would succeed.
const TURNS: u32 = 5;

/// A folder of a store in which snapshots can be saved.
pub trait SnapshotStore: ModelFolder {
    /// Lists the names of the objects in it; asks the store each time.
    ///
    /// # Errors
    /// They end the save; ENOENT if there are none.
    fn list(&self) -> Result<Vec<String>>;

    /// Reads a small object; returns its bytes and its version, or None if there is none.
    ///
    /// # Errors
    /// They end the save.
    fn read(&self, name: &str) -> Result<Option<(Vec<u8>, String)>>;

    /// Saves a small object in place of the one of this version, or where there is none.
    ///
    /// # Errors
    /// EEXIST or ESTALE if there is another one; EACCES and EOPNOTSUPP if trying again is useless.
    fn put(&self, name: &str, bytes: Vec<u8>, instead_of: Option<&str>) -> Result<()>;

    /// Saves what is read as an object, whatever there was; returns the number of bytes and their digest.
    ///
    /// # Errors
    /// They end the save.
    fn upload(&self, name: &str, upload: SourceUpload) -> Result<(u64, String)>;

    /// Removes parts that killed savers have sent to objects with names that `is_own` is true for. Nothing depends on it.
    fn clear(&self, is_own: fn(&str) -> bool);

    /// Removes an object, if there is one. Called even after the save was cancelled.
    ///
    /// # Errors
    /// The object is left to the next save.
    fn remove(&self, name: &str) -> Result<()>;
}

/// A source that is saved to a store.
#[non_exhaustive]
pub struct SourceUpload {
    /// Reads it.
    pub reader: OriginReader,
    /// The algorithm of its digest.
    pub algorithm: Algorithm,
    /// How many parts of it are sent at the same time; default: as the store chooses.
    pub depth: Option<u32>,
    /// To be called when a part has arrived.
    pub progress: Option<ProgressFn>,
}

impl SnapshotPlace for &dyn ModelFolder {
    fn manifest(&self) -> Result<Option<Manifest>> {
        let path = Path::new(&self.name()).join(manifest::NAME);
        let object = match self.open(manifest::NAME) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            object => object?,
        };
        // One byte more shows that it is too large.
        let size = object.size().min(manifest::LARGEST as u64 + 1);
        let mut text = vec![0; size as usize];
        Source::of_objects(&path, vec![object])?.read_at(0, &mut text)?;
        Manifest::parse(&text, &path).map(Some)
    }

    fn open_source(&self, entry: &SourceEntry) -> Result<Option<Source>> {
        let path = Path::new(&self.name()).join(&entry.file);
        let object = match self.open(&entry.file) {
            // It is empty.
            Err(error) if error.raw_os_error() == Some(libc::ENODATA) => None,
            object => Some(object?),
        };
        let size = object.as_ref().map_or(0, |object| object.size());
        entry.check_size(size, path.display().to_string())?;
        let source = object.filter(|_| size > 0);
        source
            .map(|object| Source::of_objects(&path, vec![object]))
            .transpose()
    }
}

impl Snapshot {
    /// Saves the snapshot to a folder of a store. When it returns, the snapshot is valid. Of the options of
    /// [`Snapshot::each`] the length and the queue depth count.
    ///
    /// # Errors
    /// Those of the store; EBUSY if another snapshot was saved there meanwhile. The previous snapshot is complete, and
    /// what has been sent is removed; if that is impossible, or if it is unknown which snapshot is valid, by the next
    /// save, as is the claim, an empty object.
    pub fn run_in(mut self, store: &dyn SnapshotStore) -> Result<StoredSnapshot> {
        let (clock, log) = (Clock::start(), Reasons::named(self.names));
        self.check()?;
        let open = |(name, origin): &(String, _)| {
            let save = (self.each)(name, Save::new(Clone::clone(origin), "").names(self.names));
            Ok((save.reader()?, save.depth()))
        };
        let readers = self.sources.iter().map(open).collect::<Result<Vec<_>>>()?;
        let folder = store.name();
        // This save has other names.
        store.clear(|name| manifest::generation_of(name).is_some());
        let (mut unfinished, generation, old) = begin(store)?;
        let tally = self.progress.take().map(|tell| {
            let totals = readers
                .iter()
                .map(|reader| reader.0.bytes().unwrap_or_default());
            Tally::new(tell, totals)
        });
        let (mut sources, mut entries) = (Vec::new(), Vec::new());
        let all = self.sources.iter().zip(readers).enumerate();
        for (number, ((name, _), (reader, depth))) in all {
            let (begin, file) = (Instant::now(), manifest::file_of(name, generation));
            let (kind, page) = (reader.kind(), reader.page());
            unfinished.names.push(file.clone());
            let upload = SourceUpload {
                reader,
                algorithm: self.algorithm,
                depth,
                progress: tally.clone().map(|tally| {
                    let tell: ProgressFn = Box::new(move |progress| tally.set(number, progress));
                    tell
                }),
            };
            let (bytes, digest) = store.upload(&file, upload)?;
            sources.push(StoredSource {
                name: name.clone(),
                bytes,
                seconds: begin.elapsed().as_secs_f64(),
                to: format!("{folder}/{file}"),
                kind,
                digest: format!("{} {digest}", self.algorithm),
            });
            entries.push(SourceEntry {
                name: name.clone(),
                file,
                bytes,
                digest,
                kind: kind.to_string(),
                page,
            });
        }
        if self.cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Save, folder));
        }
        let manifest = Manifest::new(generation, self.algorithm, entries);
        publish(&mut unfinished, &manifest, old.as_ref().map(|old| &*old.1))?;
        unfinished.names = vec![claim_of(generation)];
        match files(store) {
            Ok(all) => {
                // Savers that have these generations cannot succeed any more.
                let older = all.into_iter().filter(|file| file.1 < generation);
                unfinished.names.extend(older.map(|file| file.0));
            }
            Err(error) => {
                let why = format!("cannot list them now, the next save will: {}", error.why());
                log.add(About::Left, "the old files", why);
            }
        }
        let stay = unfinished.remove();
        if stay > 0 {
            let why = "cannot remove them now; the next save will";
            log.add(About::Left, format!("{stay} old files"), why);
        }
        Ok(StoredSnapshot {
            bytes: sources.iter().map(|source| source.bytes).sum(),
            seconds: clock.begin.elapsed().as_secs_f64(),
            to: folder,
            generation,
            cpu: clock.cpu(),
            sources,
            reasons: log.list(),
        })
    }
}

/// The object that makes a generation a save's own.
fn claim_of(generation: u64) -> String {
    format!(".dmafile-snapshot.{generation}.lock")
}

/// The generation of a file of a snapshot, or of a claim.
fn generation_of(name: &str) -> Option<u64> {
    let claimed = || {
        let number = name.strip_prefix(".dmafile-snapshot.")?;
        let generation = number.strip_suffix(".lock")?.parse().ok()?;
        let known = (1..=manifest::LAST_GENERATION).contains(&generation);
        (known && claim_of(generation) == name).then_some(generation)
    };
    manifest::generation_of(name).or_else(claimed)
}

/// True if the same request would fail again.
fn is_final(error: &Error) -> bool {
    let errno = error.raw_os_error();
    let all = [
        libc::EACCES,
        libc::EOPNOTSUPP,
        libc::ENOENT,
        libc::ECANCELED,
    ];
    errno.is_some_and(|errno| all.contains(&errno))
}

/// The files of all snapshots in a folder, and claims, each with its generation.
fn files(store: &dyn SnapshotStore) -> Result<Vec<(String, u64)>> {
    let names = match store.list() {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
        names => names?,
    };
    let files = names.into_iter();
    let files = files.filter_map(|name| generation_of(&name).map(|generation| (name, generation)));
    Ok(files.collect())
}

/// A manifest, and its version.
type VersionedManifest = (Manifest, String);

/// Begins a save: with a generation of its own, and the manifest that it will replace. From now on its claim stays until
/// a snapshot is valid: a request that was given up may arrive later, and must not find a save with the same names.
fn begin(
    store: &dyn SnapshotStore,
) -> Result<(UnfinishedUpload<'_>, u64, Option<VersionedManifest>)> {
    let mut old: Option<VersionedManifest> = None;
    for _ in 0..TURNS {
        let first = next(old.as_ref().map(|old| &old.0), &files(store)?)?;
        let Some(generation) = claim(store, first)? else {
            continue;
        };
        let mut unfinished = UnfinishedUpload {
            store,
            names: vec![claim_of(generation)],
        };
        // Read after the claim: a save that had the same one may have ended, and removed it, in between.
        old = read(store)?;
        if old.as_ref().is_none_or(|old| old.0.generation < generation) {
            unfinished.names.clear();
            return Ok((unfinished, generation, old));
        }
    }
    Err(Error::os("cannot save a snapshot", Errno::BUSY)
        .with_why("other savers keep beginning there, or the store says so of each name")
        .at(store.name())
        .with_remedy("save it again later"))
}

/// Takes a generation that nobody else has, this one or one of the next; None if there is another one each time.
fn claim(store: &dyn SnapshotStore, mut generation: u64) -> Result<Option<u64>> {
    let mut tries = 0;
    loop {
        let Err(error) = store.put(&claim_of(generation), Vec::new(), None) else {
            return Ok(Some(generation));
        };
        tries += 1;
        if error.raw_os_error() == Some(libc::EEXIST) && tries == TRIES {
            return Ok(None);
        }
        if is_final(&error) || tries == TRIES {
            return Err(error);
        }
        // If only the answer was lost, this generation is taken, too.
        generation = after(generation)?;
    }
}

fn read(store: &dyn SnapshotStore) -> Result<Option<VersionedManifest>> {
    let Some((text, version)) = store.read(manifest::NAME)? else {
        return Ok(None);
    };
    let path = Path::new(&store.name()).join(manifest::NAME);
    Ok(Some((Manifest::parse(&text, &path)?, version)))
}

/// Replaces the manifest: from now on the new snapshot is the valid one.
fn publish(
    unfinished: &mut UnfinishedUpload<'_>,
    manifest: &Manifest,
    instead_of: Option<&str>,
) -> Result<()> {
    let store = unfinished.store;
    // Until it is known that they are not valid, they stay.
    let names = std::mem::take(&mut unfinished.names);
    let mut tries = 0;
    loop {
        let put = store.put(manifest::NAME, manifest.to_json(), instead_of);
        let Err(error) = put else { return Ok(()) };
        // Only the answer may have been lost.
        let now = read(store)?;
        if now.as_ref().is_some_and(|now| now.0 == *manifest) {
            return Ok(());
        }
        tries += 1;
        if now.as_ref().map(|now| &*now.1) != instead_of {
            unfinished.names = names;
            return Err(Error::os("cannot save a snapshot", Errno::BUSY)
                .with_why("another snapshot was saved there meanwhile")
                .at(store.name())
                .with_remedy("save it again, if it is to replace that one"));
        }
        if is_final(&error) {
            unfinished.names = names;
            return Err(error);
        }
        if tries == TRIES {
            let remedy = "the store may have the new snapshot nevertheless: look, or save it again";
            return Err(error.with_remedy(remedy));
        }
    }
}

/// Objects that are removed when this is dropped.
struct UnfinishedUpload<'s> {
    store: &'s dyn SnapshotStore,
    names: Vec<String>,
}

impl UnfinishedUpload<'_> {
    /// Returns how many stay, because one could not be removed.
    fn remove(&mut self) -> usize {
        let mut names = std::mem::take(&mut self.names);
        // A claim, which is the first one, is the last to go.
        while let Some(name) = names.pop() {
            if self.store.remove(&name).is_err() {
                return names.len() + 1;
            }
        }
        0
    }
}

impl Drop for UnfinishedUpload<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}
