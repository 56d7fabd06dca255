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
use dmafile::internal::{Hasher, Verb};
use dmafile::{
    Algorithm, Error, Load, Model, ModelFolder, ObjectReader, Origin, ReadBuf, RemoteObject,
    Result, Ring, Save, Sink, Slot, Verify,
};
use rustix::fs::{AtFlags, CWD, FlockOperation, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::{Errno, FdFlags};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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
}

/// A place in a cache for what a URL stands for, which is fetched now.
#[derive(Debug)]
pub struct CacheSlot {
    /// Locked.
    lock: OwnedFd,
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
    /// Looks for what a URL stands for in the cache; with `others`, for the small files next to a model's weights, too.
    /// None without a cache.
    ///
    /// # Errors
    /// As [`Remote::open_model`]; ENOENT if it is not there and the store must not be asked ([`OpenOptions::offline`]).
    ///
    /// [`OpenOptions::offline`]: crate::OpenOptions::offline
    pub fn find_cached(&self, url: &str, others: bool) -> Result<Option<PathBuf>> {
        let Some(cache) = &self.options.cache else {
            return Ok(None);
        };
        let place = UrlPlace::parse(url)?;
        if self.options.offline {
            return offline(cache, url, &place).map(Some);
        }
        Ok(self.look(cache, url, &place, others)?.ok())
    }

    /// As [`Remote::find_cached`]. What is not there must be fetched, and waits until no other process does.
    ///
    /// # Errors
    /// As [`Remote::find_cached`]; those of the folder.
    pub fn reserve(&self, url: &str, others: bool) -> Result<Option<Cached>> {
        let Some(cache) = &self.options.cache else {
            return Ok(None);
        };
        if let Some(found) = self.find_cached(url, others)? {
            return Ok(Some(Cached::Here(found)));
        }
        let place = UrlPlace::parse(url)?;
        let lock = self.lock(cache, &place)?;
        // It may be there by now.
        Ok(Some(match self.look(cache, url, &place, others)? {
            Ok(found) => Cached::Here(found),
            Err(at) => Cached::Absent(CacheSlot {
                lock,
                at,
                is_hub: matches!(place, UrlPlace::Hub { .. }),
                limit: cache.limit,
                root: cache.folder.clone(),
            }),
        }))
    }

    /// Where it is, or would be.
    fn look(
        &self,
        cache: &CacheOptions,
        url: &str,
        place: &UrlPlace,
        others: bool,
    ) -> Result<std::result::Result<PathBuf, SlotPlace>> {
        let (folder, name) = self.folder(place)?;
        let collection = is_collection(url);
        let versions = versions(&folder, &name, collection)?;
        let repository = cache.folder.join(repository(place));
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
        let at = SlotPlace {
            repository,
            reference: reference(place),
            commit,
            prefix,
        };
        if !is_plain(&at.prefix) || !is_plain(&at.commit) || !is_plain(&at.reference) {
            return Ok(Err(at));
        }
        let here = at.snapshot();
        for (name, version) in versions.iter().flatten() {
            let blob = blob_of(name, version);
            // A version that another snapshot has, too.
            if at.repository.join("blobs").join(&blob).is_file() {
                at.link(name, &blob)?;
            }
        }
        let local = LocalFolder {
            path: here.clone(),
            names: match &versions {
                Some(own) => own.iter().map(|own| own.0.clone()).collect(),
                None => folder.names()?,
            },
        };
        let path = if name.is_empty() {
            here
        } else {
            here.join(&name)
        };
        let whole = if collection {
            Model::open_remote(&local, Some(&*name).filter(|name| !name.is_empty())).is_ok()
        } else {
            path.is_file()
        };
        let is_there = |name: &String| is_weights(name) || local.path.join(name).is_file();
        if whole && (!others || local.names.iter().all(is_there)) {
            touch(&path);
            return Ok(Ok(path));
        }
        Ok(Err(at))
    }

    /// Waits until no other process fetches what is in the same folder.
    fn lock(&self, cache: &CacheOptions, place: &UrlPlace) -> Result<OwnedFd> {
        let folder = cache.folder.join(".locks").join(repository(place));
        let path = folder.join("dmafile.lock");
        let failed = |error: io::Error| cannot("cannot lock the cache", &path, &error);
        fs::create_dir_all(&folder).map_err(failed)?;
        // It may be another user's.
        let file = File::open(&path).or_else(|_| File::create(&path));
        let file = file.map_err(failed)?;
        let mut waiting = self.options.waiting;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file.into()),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
            if let Some(say) = waiting.take() {
                say();
            }
            if self.options.cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Load, path.display().to_string()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The names of the files in a folder that is not the hub's, with their versions; None for the hub.
fn versions(
    folder: &RemoteFolder<'_>,
    name: &str,
    collection: bool,
) -> Result<Option<Vec<(String, String)>>> {
    // A folder may have any number of other objects.
    let opened = |name: &str| {
        let object = folder.open(name)?;
        let version = object.version().unwrap_or_default();
        Ok((name.to_string(), version))
    };
    Ok(match &folder.kind {
        FolderKind::Hub(_) => None,
        FolderKind::Bucket(_) if collection => Some(folder.listed()?.clone()),
        FolderKind::Bucket(_) | FolderKind::Web(..) => Some(vec![opened(name)?]),
    })
}

/// What a URL stands for, as the cache has it.
fn offline(cache: &CacheOptions, url: &str, place: &UrlPlace) -> Result<PathBuf> {
    let repository = cache.folder.join(repository(place));
    let reference = reference(place);
    let known = fs::read_to_string(repository.join("refs").join(&reference));
    let (prefix, name) = match (place, place.path().rsplit_once('/')) {
        (UrlPlace::Hub { .. }, Some((before, name))) => (format!("{before}/"), name),
        (_, Some((_, name))) => (String::new(), name),
        (_, None) => (String::new(), place.path()),
    };
    let at = SlotPlace {
        repository,
        // A commit stands for itself.
        commit: known.map_or(reference.clone(), |text| text.trim().to_string()),
        reference,
        prefix,
    };
    let path = at.snapshot().join(name);
    let plain = is_plain(&at.prefix) && is_plain(&at.commit) && is_plain(name);
    if plain && path.exists() {
        touch(&path);
        return Ok(path);
    }
    Err(Error::new("cannot load", "it is not in the cache")
        .with_errno(Errno::NOENT)
        .at(crate::place::without_secrets(url))
        .with_remedy("load it once without --offline"))
}

impl SlotPlace {
    fn snapshot(&self) -> PathBuf {
        let snapshot = self.repository.join("snapshots").join(&self.commit);
        match self.prefix.trim_end_matches('/') {
            "" => snapshot,
            prefix => snapshot.join(prefix),
        }
    }

    /// Makes a file of the snapshot a link to its blob.
    fn link(&self, name: &str, blob: &str) -> Result<()> {
        let folder = self.snapshot();
        let path = folder.join(name);
        let up = "../".repeat(2 + Path::new(&self.prefix).components().count());
        let to = format!("{up}blobs/{blob}");
        if fs::read_link(&path).is_ok_and(|own| own == Path::new(&to)) || !is_plain(name) {
            return Ok(());
        }
        let failed = |error: io::Error| cannot("cannot write to the cache", &path, &error);
        fs::create_dir_all(&folder).map_err(failed)?;
        let new = folder.join(format!(".{}-{}", std::process::id(), short([name])));
        let _ = fs::remove_file(&new);
        symlink(&to, &new).map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)
    }
}

impl CacheSlot {
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
            let computed = file.digest;
            let (blob, algorithm, digest) = match (of_hub, computed, file.object.version()) {
                (Some((algorithm, digest)), ..) => (digest.clone(), algorithm, digest),
                (None, Some(own), Some(version)) if !self.is_hub => {
                    (blob_of(file.name, &version), own.0, own.1.to_string())
                }
                _ => return Ok(None),
            };
            if !is_plain(file.name) || !is_plain(&self.at.prefix) || !is_plain(&self.at.commit) {
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
        let blobs = self.at.repository.join("blobs");
        let failed = |error: io::Error| cannot("cannot write to the cache", &blobs, &error);
        fs::create_dir_all(&blobs).map_err(failed)?;
        for file in &self.files {
            let path = blobs.join(&file.blob);
            if !path.exists() {
                file.write(&blobs, &path)?;
            }
            self.at.link(&file.name, &file.blob)?;
        }
        let refs = self.at.repository.join("refs").join(&self.at.reference);
        // As others do, none is written for a commit.
        if self.at.reference != self.at.commit {
            let folder = refs.parent().unwrap_or(&refs);
            fs::create_dir_all(folder).map_err(failed)?;
            Save::new(Origin::memory(self.at.commit.as_bytes()), &refs).run()?;
        }
        if let Some(limit) = self.limit {
            let own: HashSet<_> = self
                .files
                .iter()
                .map(|file| blobs.join(&file.blob))
                .collect();
            evict(&self.root, limit, &own).map_err(failed)?;
        }
        Ok(())
    }
}

impl BlobWrite {
    fn write(&self, blobs: &Path, path: &Path) -> Result<()> {
        let new = blobs.join(format!(".dmafile-{}", self.blob));
        let algorithm = self.algorithm.parse::<Algorithm>();
        let algorithm = algorithm.map_err(|_| Error::usage("cache", "no such digest"))?;
        let origin = Origin::parse(format!("fd:{}@{}", self.fd, self.at).as_ref())?;
        Save::new(origin, &new).length(self.bytes).run()?;
        let verify = Verify::expect(algorithm, &self.digest)?;
        let read = Load::new(&new).verify(verify);
        let read = read.run_through(Ring::default(), &mut Nowhere);
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

/// A sink whose bytes only pass by.
struct Nowhere;

impl Sink for Nowhere {
    fn take(&mut self, _: &Slot<'_>) -> Result<()> {
        Ok(())
    }

    fn done(&mut self, _: bool) -> Result<bool> {
        Ok(true)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Removes blobs until at most `limit` bytes are left: first those that were not used for the longest time, and none of
/// `own`.
fn evict(root: &Path, limit: u64, own: &HashSet<PathBuf>) -> io::Result<()> {
    let mut all = Vec::new();
    for repository in fs::read_dir(root)?.flatten() {
        let Ok(blobs) = fs::read_dir(repository.path().join("blobs")) else {
            continue;
        };
        for blob in blobs.flatten() {
            let Ok(meta) = blob.metadata() else { continue };
            let used = (meta.atime(), meta.atime_nsec());
            let changed = (meta.mtime(), meta.mtime_nsec());
            all.push((
                used.max(changed),
                meta.len(),
                blob.path(),
                repository.path(),
            ));
        }
    }
    let mut total: u64 = all.iter().map(|blob| blob.1).sum();
    all.sort();
    let mut touched = HashSet::new();
    for (_, bytes, path, repository) in all {
        if total <= limit {
            break;
        }
        if !own.contains(&path) && fs::remove_file(&path).is_ok() {
            total -= bytes;
            touched.insert(repository);
        }
    }
    for repository in touched {
        remove_dangling(&repository.join("snapshots"));
    }
    Ok(())
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
            let port = url.port().map(|port| port.to_string()).unwrap_or_default();
            (url.scheme(), host.to_string(), format!("{host}:{port}"))
        }
    };
    let folder = place.path().rsplit_once('/').map_or("", |path| path.0);
    let plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '.' | '_');
    let name: String = name.chars().filter(|char| plain(*char)).take(60).collect();
    format!("{kind}--{name}--{}", short([&*whole, folder]))
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
