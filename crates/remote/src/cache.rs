//! A cache on a local disk, in the layout of Hugging Face's, so that other programs use it, too:
//!
//! ```text
//! DIR/models--OWNER--NAME/refs/REVISION           the commit, or what stands for one
//!                         snapshots/COMMIT/FILE   a link to its blob
//!                         blobs/DIGEST            the bytes of a file
//! ```
//!
//! What is not from the hub is laid out alike: the folder that it is in is the repository, its version stands for a
//! commit, and a blob is named by file and version. A blob gets its name when it has been read back from the disk and
//! has the digest that was computed as its bytes arrived: the program that got the memory may have changed it by then.

use crate::place::UrlPlace;
use crate::{FolderKind, Remote, RemoteFolder, is_collection, is_weights};
use dmafile::internal::{Hasher, Verb, folder, without_secrets};
use dmafile::{
    Algorithm, Discard, Error, Load, Model, ModelFolder, ObjectReader, Origin, Progress, ReadBuf,
    RemoteObject, Result, Ring, Save, Verify,
};
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT, openat, statat, unlinkat,
};
use rustix::io::{Errno, FdFlags};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where what has been fetched is kept.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The folder; it is created if it does not exist.
    pub folder: PathBuf,
    /// The most that it may hold in bytes: what was not used for the longest time is removed.
    pub limit: Option<u64>,
}

/// What a cache has of a URL.
#[derive(Debug)]
pub enum Cached {
    /// The file or the folder.
    Here(PathBuf),
    /// Nothing, or not all of it. No other process fetches it meanwhile.
    Absent(CacheSlot),
    /// Not all of it, and the cache cannot be written to.
    Closed(Error),
}

/// A place in a cache for what a URL stands for, which is fetched now.
#[derive(Debug)]
pub struct CacheSlot {
    /// Locked.
    lock: Arc<OwnedFd>,
    at: SlotPlace,
    is_hub: bool,
    limit: Option<u64>,
    root: PathBuf,
}

/// Where a revision is in a cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SlotPlace {
    repository: PathBuf,
    /// The revision that was asked for, and what it is.
    reference: String,
    commit: String,
    /// The folder of the files in the snapshot: empty, or with a slash at the end.
    prefix: String,
    /// The file of which the names of all files are kept that the URL stands for.
    list: PathBuf,
    /// The files with their versions, where a commit does not say them.
    versions: Option<Vec<(String, String)>>,
}

/// A file that has been fetched into memory.
pub struct FetchedFile<'a> {
    /// Its name in its folder.
    pub name: &'a str,
    /// What it was fetched from.
    pub object: &'a dyn RemoteObject,
    /// The memory, and where the file is in it.
    pub fd: BorrowedFd<'a>,
    /// Its first byte.
    pub at: u64,
    /// Its digest, as computed while it was fetched. Files of the hub need none.
    pub digest: Option<(Algorithm, &'a str)>,
}

/// What is to be written into a cache. It can be handed to a process that inherits the lock of the [`CacheSlot`] and the
/// descriptors of the files.
#[derive(Debug, Serialize, Deserialize)]
pub struct CacheWrite {
    /// Keeps others out while it is open.
    lock: RawFd,
    at: SlotPlace,
    root: PathBuf,
    limit: Option<u64>,
    files: Vec<BlobWrite>,
}

#[derive(Debug, Serialize, Deserialize)]
struct BlobWrite {
    name: String,
    blob: String,
    fd: RawFd,
    at: u64,
    bytes: u64,
    algorithm: String,
    digest: String,
}

impl Remote {
    /// Looks for what a URL stands for in the cache. None without a cache.
    ///
    /// # Errors
    /// As [`Remote::open_model`]; ENOENT if it is not there and the store must not be asked ([`OpenOptions::offline`]).
    ///
    /// [`OpenOptions::offline`]: crate::OpenOptions::offline
    pub fn find_cached(&self, url: &str) -> Result<Option<PathBuf>> {
        let Some(cache) = &self.options.cache else {
            return Ok(None);
        };
        let place = UrlPlace::parse(url)?;
        if self.options.offline {
            return offline(cache, url, &place).map(Some);
        }
        let seen = self.see(cache, url, &place)?;
        Ok(seen.and_then(|seen| seen.find(false)))
    }

    /// As [`Remote::find_cached`], with the small files next to a model's weights. What is not there must be fetched, and
    /// waits until no other process does.
    ///
    /// # Errors
    /// As [`Remote::find_cached`].
    pub fn reserve(&self, url: &str) -> Result<Option<Cached>> {
        let Some(cache) = &self.options.cache else {
            return Ok(None);
        };
        let place = UrlPlace::parse(url)?;
        if self.options.offline {
            return Ok(Some(Cached::Here(offline(cache, url, &place)?)));
        }
        let Some(mut seen) = self.see(cache, url, &place)? else {
            return Ok(None);
        };
        if let Some(found) = seen.find(true) {
            return Ok(Some(Cached::Here(found)));
        }
        let (lock, waited) = match self.lock(cache, &place) {
            Ok(Some(locked)) => locked,
            Ok(None) => return Ok(None),
            Err(error) if self.options.cancel.is_cancelled() => return Err(error),
            Err(error) => return Ok(Some(Cached::Closed(error))),
        };
        if waited {
            // There may be another version by now.
            match self.see(cache, url, &place)? {
                Some(now) => seen = now,
                None => return Ok(None),
            }
        }
        // It may be there by now.
        Ok(Some(match seen.find(true) {
            Some(found) => Cached::Here(found),
            None => Cached::Absent(CacheSlot {
                lock,
                at: seen.at,
                is_hub: matches!(place, UrlPlace::Hub { .. }),
                limit: cache.limit,
                root: cache.folder.clone(),
            }),
        }))
    }

    /// Brings what a URL stands for into the cache, with the small files next to a model's weights, one file after the
    /// other, and returns where it is. Calls `progress` after each file, with the bytes of all files.
    ///
    /// # Errors
    /// As [`Remote::reserve`], [`Load::run`] and [`Save::run`]; EOPNOTSUPP without a cache, and for what is not kept.
    pub fn fetch(&self, url: &str, progress: impl Fn(Progress) + Sync) -> Result<PathBuf> {
        let refused = |why: &str| {
            let error = Error::new("cannot fetch", why).with_errno(Errno::OPNOTSUPP);
            error.at(without_secrets(url))
        };
        let slot = match self.reserve(url)? {
            Some(Cached::Here(path)) => return Ok(path),
            Some(Cached::Absent(slot)) => slot,
            Some(Cached::Closed(error)) => return Err(error),
            None => {
                return Err(refused(
                    "it cannot be kept in a cache: its store names no version",
                ));
            }
        };
        let objects = self.open_whole(url)?;
        let total = objects.iter().map(|object| object.size()).sum();
        let (mut write, mut done): (Option<CacheWrite>, u64) = (None, 0);
        for object in objects {
            let mut load = Load::of_object(Arc::clone(&object))
                .exact_size(true)
                .cancel(self.options.cancel.clone());
            if let Some(verify) = slot.digest() {
                load = load.verify(verify);
            }
            let loaded = load.run()?;
            let (name, digest) = (object.name(), loaded.report.verify.first());
            let file = FetchedFile {
                name: name.rsplit('/').next().unwrap_or_default(),
                object: &*object,
                fd: loaded.buffer.as_fd().expect("a memfd has a descriptor"),
                at: loaded.report.offset,
                digest: digest.map(|digest| (digest.algorithm, &*digest.digest)),
            };
            let Some(one) = slot.write(&[file])? else {
                return Err(refused("its version has changed meanwhile; try again"));
            };
            let write = match &mut write {
                Some(all) => {
                    all.files.extend(one.files);
                    all
                }
                none => {
                    remove_unfinished(&one.blobs());
                    none.insert(one)
                }
            };
            write.put(write.files.last_chunk::<1>().map_or(&[], |last| last))?;
            done += object.size();
            progress(Progress::new(done, total));
        }
        if let Some(write) = write {
            write.finish()?;
        }
        self.find_cached(url)?
            .ok_or_else(|| refused("it is not in the cache any more"))
    }

    /// Asks the store which version there is; None if it cannot be kept.
    fn see(
        &self,
        cache: &CacheOptions,
        url: &str,
        place: &UrlPlace,
    ) -> Result<Option<SeenVersion>> {
        let (folder, name) = self.folder(place)?;
        let collection = is_collection(url);
        let versions = versions(&folder, &name, collection)?;
        let is_known = |all: &Vec<(String, String)>| {
            !all.is_empty() && all.iter().all(|file| !file.1.is_empty())
        };
        if !versions.as_ref().is_none_or(is_known) {
            return Ok(None);
        }
        let commit = match (&folder.kind, &versions) {
            (FolderKind::Hub(hub), _) => hub.commit.clone(),
            (_, versions) => {
                let all = versions.iter().flatten();
                short(all.flat_map(|(name, version)| [&**name, &**version]))
            }
        };
        let prefix = match place {
            UrlPlace::Hub { .. } => folder.prefix.clone(),
            _ => String::new(),
        };
        let at = SlotPlace::of(cache, place, commit, prefix);
        let Some(at) = at.filter(|_| is_name(&name)) else {
            return Ok(None);
        };
        let names = match &versions {
            Some(own) => own.iter().map(|own| own.0.clone()).collect(),
            None => folder.names()?,
        };
        Ok(Some(SeenVersion {
            at: SlotPlace { versions, ..at },
            name,
            names,
            collection,
        }))
    }

    /// Waits until no other process fetches what is in the same folder. None if that is not to be waited for.
    /// With it comes whether it was waited for.
    fn lock(&self, cache: &CacheOptions, place: &UrlPlace) -> Result<Option<(Arc<OwnedFd>, bool)>> {
        let folder = cache.folder.join(".locks").join(repository(place));
        let path = folder.join("dmafile.lock");
        let failed = |error: io::Error| cannot("cannot lock the cache", &path, &error);
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|lock| lock.1.strong_count() > 0);
        if let Some(own) = locks.iter().find(|lock| lock.0 == path) {
            return Ok(own.1.upgrade().map(|own| (own, false)));
        }
        // Two processes that wait for each other's would wait for ever.
        let has_another = !locks.is_empty();
        fs::create_dir_all(&folder).map_err(failed)?;
        let open = |write| {
            let mut how = fs::OpenOptions::new();
            let how = how.read(true).write(write).create(write);
            how.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path)
        };
        // It may be another user's.
        let file = open(true).or_else(|_| open(false)).map_err(failed)?;
        let file = Arc::new(OwnedFd::from(file));
        let mut waited = false;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    locks.push((path, Arc::downgrade(&file)));
                    return Ok(Some((file, waited)));
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) if !has_another => {}
                Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(None),
                Err(errno) => return Err(failed(errno.into())),
            }
            if let Some(say) = self.options.waiting.filter(|_| !waited) {
                say();
            }
            waited = true;
            if self.options.cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Load, path.display().to_string()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// What a store has of a URL, and where that is in a cache, or would be.
struct SeenVersion {
    at: SlotPlace,
    /// The file in its folder; empty for the folder.
    name: String,
    /// All files next to it.
    names: Vec<String>,
    /// It stands for several of them.
    collection: bool,
}

impl SeenVersion {
    /// Where it is, if all of it is there; with `others`, the small files next to a model's weights, too.
    fn find(&self, others: bool) -> Option<PathBuf> {
        let folder = self.at.snapshot();
        for (name, version) in self.at.versions.iter().flatten() {
            let blob = blob_of(name, version);
            // A version that another snapshot has, too. What cannot be noted in a cache is looked for again.
            if self.at.repository.join("blobs").join(&blob).is_file() {
                let _ = self.at.link(name, &blob);
            }
        }
        let path = if self.name.is_empty() {
            folder
        } else {
            folder.join(&self.name)
        };
        if self.collection && !self.at.is_complete() {
            let names = self.written_by_others(others)?;
            if others {
                let _ = self.at.note(names);
            }
        }
        self.at.found(path)
    }

    /// The names of the files of a model that another program may have written; None if some are missing.
    fn written_by_others(&self, others: bool) -> Option<Vec<String>> {
        let local = LocalFolder {
            path: self.at.snapshot(),
            names: self.names.clone(),
        };
        let wanted = Some(&*self.name).filter(|name| !name.is_empty());
        let objects = Model::open_remote(&local, wanted).ok()?.objects();
        let weights = objects
            .iter()
            .map(|object| last(&object.0.name()).to_string());
        let small = self.names.iter().filter(|name| !is_weights(name));
        let is_there = |name: &&String| local.path.join(name).is_file();
        if others && !small.clone().all(|name| is_there(&name)) {
            return None;
        }
        Some(small.cloned().chain(weights).collect())
    }
}

/// The names of the files in a folder that is not the hub's, with their versions; None for the hub.
fn versions(
    folder: &RemoteFolder,
    name: &str,
    collection: bool,
) -> Result<Option<Vec<(String, String)>>> {
    // A folder may have any number of other objects. A date is no version: two may have the same.
    let opened = |name: &str| {
        let object = folder.open(name)?;
        Ok((name.to_string(), tag_of(&*object).unwrap_or_default()))
    };
    Ok(match &folder.kind {
        FolderKind::Hub(_) => None,
        FolderKind::Bucket(_) if collection => {
            let listed = folder.listed()?.iter().map(|(name, tag)| {
                let tag = if tag.starts_with("W/") { "" } else { tag };
                (name.clone(), tag.trim_matches('"').to_string())
            });
            Some(listed.collect())
        }
        // Nobody says what else there is.
        FolderKind::Web(..) if collection => Some(Vec::new()),
        FolderKind::Bucket(_) | FolderKind::Web(..) => Some(vec![opened(name)?]),
    })
}

/// The version of an object for which its store has a strong ETag.
fn tag_of(object: &dyn RemoteObject) -> Option<String> {
    let version = object.version()?;
    let tag = version.strip_prefix('"')?;
    Some(tag.trim_end_matches('"').to_string())
}

/// What a URL stands for, as the cache has it.
fn offline(cache: &CacheOptions, url: &str, place: &UrlPlace) -> Result<PathBuf> {
    let (before, name) = place.path().rsplit_once('/').unwrap_or(("", place.path()));
    let prefix = match place {
        UrlPlace::Hub { .. } if !before.is_empty() => format!("{before}/"),
        _ => String::new(),
    };
    let missing = |why: &str| {
        Error::new("cannot load", why.to_string())
            .with_errno(Errno::NOENT)
            .at(without_secrets(url))
            .with_remedy("load it once without --offline")
    };
    let none = || missing("it is not in the cache");
    let at = SlotPlace::of(cache, place, reference(place), prefix).ok_or_else(none)?;
    let known = fs::read_to_string(at.repository.join("refs").join(&at.reference));
    let at = match known {
        // A commit stands for itself.
        Err(_) => Some(at),
        Ok(commit) => SlotPlace::of(cache, place, commit.trim().to_string(), at.prefix),
    };
    let at = at.filter(|_| is_name(name)).ok_or_else(none)?;
    let path = at.snapshot().join(name);
    if is_collection(url) && path.exists() && !at.is_complete() {
        return Err(missing("it is not known whether all of it is in the cache"));
    }
    at.found(path).ok_or_else(none)
}

impl SlotPlace {
    /// None if a name in it would lead elsewhere.
    fn of(cache: &CacheOptions, place: &UrlPlace, commit: String, prefix: String) -> Option<Self> {
        let (repository, reference) = (repository(place), reference(place));
        let is_one = is_name(&commit) && !commit.is_empty() && is_name(&repository);
        let plain = is_one && is_plain(&prefix) && is_plain(&reference);
        let list = short([&*commit, place.path()]);
        plain.then(|| Self {
            list: cache.folder.join(".locks").join(&repository).join(list),
            repository: cache.folder.join(repository),
            reference,
            commit,
            prefix,
            versions: None,
        })
    }

    fn snapshot(&self) -> PathBuf {
        let snapshot = self.repository.join("snapshots").join(&self.commit);
        match self.prefix.trim_end_matches('/') {
            "" => snapshot,
            prefix => snapshot.join(prefix),
        }
    }

    /// A path in it, if there is one.
    fn found(&self, path: PathBuf) -> Option<PathBuf> {
        path.exists().then(|| {
            touch(&path);
            path
        })
    }

    /// Notes the names of all files that the URL stands for.
    fn note(&self, names: Vec<String>) -> Result<()> {
        let text = serde_json::to_vec(&names).unwrap_or_default();
        write_small(&self.list, &text)
    }

    /// True if all files are there that the URL stands for.
    fn is_complete(&self) -> bool {
        let text = fs::read(&self.list).unwrap_or_default();
        let names: Vec<String> = serde_json::from_slice(&text).unwrap_or_default();
        let folder = self.snapshot();
        let is_there = |name: &String| is_name(name) && folder.join(name).is_file();
        !names.is_empty() && names.iter().all(is_there)
    }

    /// True if the version that was looked at is this one: it may have been replaced since.
    fn has(&self, name: &str, tag: &str) -> bool {
        let mut known = self.versions.iter().flatten();
        known.any(|(own, version)| (own.as_str(), version.as_str()) == (name, tag))
    }

    /// Makes a file of the snapshot a link to its blob.
    fn link(&self, name: &str, blob: &str) -> Result<()> {
        let folder = self.snapshot();
        let path = folder.join(name);
        let up = "../".repeat(2 + Path::new(&self.prefix).components().count());
        let to = format!("{up}blobs/{blob}");
        if fs::read_link(&path).is_ok_and(|own| own == Path::new(&to)) || !is_name(name) {
            return Ok(());
        }
        let failed = |error: io::Error| cannot("cannot write to the cache", &path, &error);
        fs::create_dir_all(&folder).map_err(failed)?;
        let new = folder.join(unused());
        symlink(&to, &new).map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)
    }
}

impl CacheSlot {
    /// The digest to compute of what is fetched; None if files are kept without one.
    pub fn digest(&self) -> Option<Verify> {
        (!self.is_hub).then(|| Verify::compute(Algorithm::Xxh3))
    }

    /// Lets processes that are started from now on inherit the lock.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn inherit(&self) -> io::Result<()> {
        Ok(rustix::io::fcntl_setfd(&self.lock, FdFlags::empty())?)
    }

    /// What is written of these files; None if one of them cannot be kept.
    ///
    /// # Errors
    /// Those of an object that is asked for its digest.
    pub fn write(&self, files: &[FetchedFile<'_>]) -> Result<Option<CacheWrite>> {
        let mut writes = Vec::new();
        for file in files {
            let failed = |error: io::Error| cannot("cannot fetch", file.name.as_ref(), &error);
            let of_hub = if self.is_hub {
                file.object.digest().map_err(failed)?
            } else {
                None
            };
            let tag = tag_of(file.object);
            let (blob, algorithm, digest) = match (of_hub, file.digest, tag) {
                (Some((algorithm, digest)), ..) => (digest.clone(), algorithm, digest),
                (None, Some(own), Some(tag)) if self.at.has(file.name, &tag) => {
                    (blob_of(file.name, &tag), own.0, own.1.to_string())
                }
                _ => return Ok(None),
            };
            if !is_name(file.name) {
                return Ok(None);
            }
            writes.push(BlobWrite {
                name: file.name.to_string(),
                blob,
                fd: file.fd.as_raw_fd(),
                at: file.at,
                bytes: file.object.size(),
                algorithm: algorithm.name().to_string(),
                digest,
            });
        }
        Ok(Some(CacheWrite {
            lock: self.lock.as_raw_fd(),
            at: self.at.clone(),
            root: self.root.clone(),
            limit: self.limit,
            files: writes,
        }))
    }
}

impl CacheWrite {
    /// Writes the files, and removes others if there are too many bytes.
    ///
    /// # Errors
    /// Those of [`Save::run`]; EBADMSG if the memory does not have the bytes any more that were fetched.
    pub fn run(&self) -> Result<()> {
        remove_unfinished(&self.blobs());
        self.put(&self.files)?;
        self.finish()
    }

    fn blobs(&self) -> PathBuf {
        self.at.repository.join("blobs")
    }

    /// Writes some of the files.
    fn put(&self, files: &[BlobWrite]) -> Result<()> {
        let blobs = self.blobs();
        let failed = |error: io::Error| cannot("cannot write to the cache", &blobs, &error);
        fs::create_dir_all(&blobs).map_err(failed)?;
        let new = files.iter().map(|file| file.bytes).sum();
        self.make_room(new).map_err(failed)?;
        for file in files {
            let path = blobs.join(&file.blob);
            if !path.exists() {
                file.write(&blobs, &path)?;
            }
            self.at.link(&file.name, &file.blob)?;
        }
        Ok(())
    }

    /// Notes that all of the files are there.
    fn finish(&self) -> Result<()> {
        let failed = |error: io::Error| cannot("cannot write to the cache", &self.blobs(), &error);
        self.at
            .note(self.files.iter().map(|file| file.name.clone()).collect())?;
        // As others do, none is written for a commit.
        if self.at.reference != self.at.commit {
            let refs = self.at.repository.join("refs").join(&self.at.reference);
            write_small(&refs, self.at.commit.as_bytes())?;
        }
        self.make_room(0).map_err(failed)
    }

    /// Removes blobs of others until there is room for so many bytes.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let Some(limit) = self.limit else {
            return Ok(());
        };
        let blobs = self.blobs();
        let own = self.files.iter().map(|file| blobs.join(&file.blob));
        evict(&self.root, limit.saturating_sub(bytes), &own.collect())
    }
}

impl BlobWrite {
    fn write(&self, blobs: &Path, path: &Path) -> Result<()> {
        let new = blobs.join(unused());
        let algorithm = self.algorithm.parse::<Algorithm>();
        let algorithm = algorithm.map_err(|_| Error::usage("cache", "no such digest"))?;
        let origin = Origin::parse(format!("fd:{}@{}", self.fd, self.at).as_ref())?;
        Save::new(origin, &new).length(self.bytes).run()?;
        let verify = Verify::expect(algorithm, &self.digest)?;
        let read = Load::new(&new).verify(verify);
        let read = read.run_through(Ring::default(), &mut Discard);
        if let Err(error) = read {
            let _ = fs::remove_file(&new);
            let changed = error.raw_os_error() == Some(Errno::BADMSG.raw_os_error());
            return Err(if changed {
                error.with_remedy("its memory was changed before it could be kept")
            } else {
                error
            });
        }
        let named = fs::rename(&new, path);
        named.map_err(|error| cannot("cannot write to the cache", path, &error))
    }
}

/// Removes blobs until at most `limit` bytes are left: first those that were not used for the longest time, none of
/// `own`, and none that was used just now, because it may be about to be opened.
fn evict(root: &Path, limit: u64, own: &BTreeSet<PathBuf>) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let recent = now.unwrap_or_default().saturating_sub(RECENT).as_secs() as i64;
    let (mut all, mut folders) = (Vec::new(), Vec::new());
    for repository in fs::read_dir(root)?.flatten() {
        // Not those that a link leads to.
        let how = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |at: BorrowedFd<'_>, name: &Path| openat(at, name, how, Mode::empty());
        let folder = open(CWD, &repository.path());
        let Ok(folder) = folder.and_then(|folder| open(folder.as_fd(), Path::new("blobs"))) else {
            continue;
        };
        let path = repository.path().join("blobs");
        for name in fs::read_dir(&path).into_iter().flatten().flatten() {
            let name = name.file_name().to_string_lossy().into_owned();
            let Ok(stat) = statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            if !is_blob(&name) || !is_file {
                continue;
            }
            let used = (stat.st_atime, stat.st_atime_nsec).max((stat.st_mtime, stat.st_mtime_nsec));
            all.push((used, stat.st_size as u64, name, folders.len()));
        }
        folders.push((folder, repository.path()));
    }
    let mut total: u64 = all.iter().map(|blob| blob.1).sum();
    all.sort();
    let mut touched = BTreeSet::new();
    for ((used, _), bytes, name, number) in all {
        let (folder, repository) = &folders[number];
        if total <= limit || used >= recent {
            break;
        }
        let is_own = own.contains(&repository.join("blobs").join(&name));
        if !is_own && unlinkat(folder, &name, AtFlags::empty()).is_ok() {
            total -= bytes;
            touched.insert(repository);
        }
    }
    for repository in touched {
        remove_dangling(&repository.join("snapshots"));
    }
    Ok(())
}

/// What was used within this time is not removed.
const RECENT: Duration = Duration::from_secs(60);

/// True for the name of a blob: what else there is is not ours.
fn is_blob(name: &str) -> bool {
    matches!(name.len(), 32 | 40 | 64) && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Removes what a process has left behind that was ended while it wrote; others wait for the lock.
fn remove_unfinished(blobs: &Path) {
    for entry in fs::read_dir(blobs).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// How the names of unfinished files begin.
const UNFINISHED: &str = ".dmafile-";

/// A name that no file has, and that nobody can guess.
fn unused() -> String {
    format!(
        "{UNFINISHED}{:016x}{:016x}",
        folder::random(),
        folder::random()
    )
}

/// Replaces a small file. A link with its name is replaced, and not followed.
fn write_small(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    let failed = |error: io::Error| cannot("cannot write to the cache", path, &error);
    fs::create_dir_all(folder).map_err(failed)?;
    let new = folder.join(unused());
    let written = File::create_new(&new).and_then(|mut file| file.write_all(bytes));
    written.map_err(failed)?;
    fs::rename(&new, path).map_err(failed)
}

/// Removes links to nothing, and folders that are empty then.
fn remove_dangling(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                remove_dangling(&path);
                let _ = fs::remove_dir(&path);
            }
            Ok(kind) if kind.is_symlink() && !path.exists() => {
                let _ = fs::remove_file(&path);
            }
            _ => {}
        }
    }
}

/// Notes that a file, or those of a folder, are used now.
fn touch(path: &Path) {
    let omit = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_OMIT,
    };
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: omit,
    };
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    for path in entries
        .map(|entry| entry.path())
        .chain([path.to_path_buf()])
    {
        // Only its owner may; then it seems to be older than it is.
        let _ = rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty());
    }
}

/// The name of the folder of a repository, or of what stands for one.
fn repository(place: &UrlPlace) -> String {
    let (kind, name, whole) = match place {
        UrlPlace::Hub { repository, .. } => {
            return format!("models--{}", repository.replace('/', "--"));
        }
        UrlPlace::Bucket {
            dialect, bucket, ..
        } => {
            // The same name is another bucket elsewhere.
            let elsewhere = dialect
                .places()
                .map(|variable| std::env::var(variable).ok());
            let elsewhere = elsewhere
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(" ");
            (
                dialect.scheme(),
                bucket.clone(),
                format!("{bucket} {elsewhere}"),
            )
        }
        UrlPlace::Web(url) => {
            let host = url.host_str().unwrap_or_default();
            // A signature is another one each time; other queries name other files, and users see other ones.
            let mut whole = url.clone();
            if url.query_pairs().any(|pair| is_signature(&pair.0)) {
                whole.set_query(None);
            }
            whole.set_path("");
            (url.scheme(), host.to_string(), whole.to_string())
        }
    };
    let folder = place.path().rsplit_once('/').map_or("", |path| path.0);
    let plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '.' | '_');
    let name: String = name.chars().filter(|char| plain(*char)).take(60).collect();
    format!("{kind}--{name}--{}", short([&*whole, folder]))
}

/// True for a parameter that is a signature: of S3, Google, Azure, CloudFront, and the like.
fn is_signature(name: &str) -> bool {
    ["x-amz-signature", "x-goog-signature", "signature", "sig"]
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
}

/// The revision that a URL names; elsewhere than on the hub, the file or the folder.
fn reference(place: &UrlPlace) -> String {
    match place {
        UrlPlace::Hub { revision, .. } => revision.clone(),
        _ => {
            let name = place
                .path()
                .rsplit_once('/')
                .map_or(place.path(), |path| path.1);
            short([name])
        }
    }
}

/// The name of a blob of what is not from the hub.
fn blob_of(name: &str, version: &str) -> String {
    short([name, version.trim_matches('"')])
}

/// A name that stands for these texts.
fn short<'t>(texts: impl IntoIterator<Item = &'t str>) -> String {
    let mut hasher = Hasher::new(Algorithm::Blake3, 0);
    for text in texts {
        hasher.update(text.as_bytes());
        // Text has no such byte.
        hasher.update(&[0xff]);
    }
    hasher.hex()[..32].to_string()
}

/// True for a path that leads nowhere else than below its folder.
fn is_plain(path: &str) -> bool {
    let parts = Path::new(path).components();
    let mut plain = parts.map(|part| matches!(part, Component::Normal(_)));
    plain.all(|plain| plain) && !path.contains('\0')
}

/// True for the name of a file, or an empty one.
fn is_name(name: &str) -> bool {
    is_plain(name) && !name.contains('/')
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn cannot(what: &'static str, path: &Path, error: &io::Error) -> Error {
    let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
    Error::os(what, errno).at(path.display().to_string())
}

/// A folder in a cache, with the names that it has in the store.
struct LocalFolder {
    path: PathBuf,
    names: Vec<String>,
}

impl ModelFolder for LocalFolder {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> Result<Vec<String>> {
        Ok(self.names.clone())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn RemoteObject>> {
        let path = self.path.join(name);
        let failed = |error: io::Error| cannot("cannot open", &path, &error);
        let file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        Ok(Arc::new(LocalObject { path, file, size }))
    }
}

/// A file of a cache, for reading its header.
struct LocalObject {
    path: PathBuf,
    file: File,
    size: u64,
}

impl RemoteObject for LocalObject {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn reader(&self) -> io::Result<Box<dyn ObjectReader + '_>> {
        Ok(Box::new(LocalReader(&self.file)))
    }
}

struct LocalReader<'a>(&'a File);

impl ObjectReader for LocalReader<'_> {
    fn read(&mut self, offset: u64, into: &mut ReadBuf<'_>) -> io::Result<()> {
        while into.remaining() > 0 {
            let at = offset + into.filled();
            if into.fill(1 << 20, |memory| self.0.read_at(memory, at))? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_names_is_told_apart_and_a_signature_is_not() {
        let of = |url: &str| repository(&UrlPlace::parse(url).unwrap());
        let one = of("https://host/a/x");
        for other in [
            "https://host/a/x?file=b",
            "https://host:8443/a/x",
            "https://user@host/a/x",
            "https://host/b/x",
            "http://host/a/x",
            "https://other/a/x",
        ] {
            assert_ne!(of(other), one, "{other}");
        }
        assert_ne!(of("https://host/a/x?file=b"), of("https://host/a/x?file=c"));
        assert_ne!(of("https://me:a@host/a/x"), of("https://me:b@host/a/x"));
        for signed in [
            "X-Amz-Signature=1&X-Amz-Date=2",
            "sv=1&sig=2",
            "Expires=1&Signature=2",
        ] {
            assert_eq!(of(&format!("https://host/a/x?{signed}")), one, "{signed}");
        }
        assert!(!of("https://me:hunter2@host/a/x").contains("hunter2"));
        assert!(is_name(&of("s3://../../../x")));
    }

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["x", "a b", ".hidden", "ü"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["..", ".", "a/b", "/x", "../x", "a\0b"] {
            assert!(!is_name(name), "{name}");
        }
        assert!(is_plain("refs/pr/1") && !is_plain("../refs") && !is_plain("/refs"));
    }
}
