//! Loads files for a hold.

use super::identity::FileIdentity;
use super::protocol::{Digest, HeldInfo, LONGEST_NAMES, MOST_FILES};
use super::set::{Member, Set, now};
use dmafile::internal::{
    Builder, DigestCheck, Follower, ProgressFn, Selection, Source, Verb, unlisted,
};
use dmafile::{
    Buffer, CancelToken, Error, Kind, Load, MemoryKind, Model, ModelObject, Names, Opt, Pages,
    Progress, RemoteObject, Result, Verify, message,
};
use dmafile_sys::{Errno, file, host};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type EachFileFn = Box<dyn Fn(Load) -> Load + Send>;

/// What to load, and how.
pub(super) struct HoldOptions {
    pub paths: Vec<PathBuf>,
    pub kind: Kind,
    pub pages: Pages,
    pub verify: Option<Verify>,
    pub writable: bool,
    pub each: EachFileFn,
    pub cancel: CancelToken,
    pub progress: Option<Arc<ProgressFn>>,
    pub names: &'static dyn Names,
    /// What paths stand for that are not on this machine.
    pub objects: BTreeMap<PathBuf, Vec<ModelObject>>,
}

/// The options that `Hold` and `Shared` have in common.
macro_rules! hold_setters {
    () => {
        /// The kind of memory, any that has a descriptor; default [`Kind::Memfd`].
        pub fn to(mut self, kind: Kind) -> Self {
            self.wanted.kind = kind;
            self
        }

        /// The page size; default [`Pages::Auto`], which does not use hugetlb pages here ([`Load::exact_size`]).
        pub fn pages(mut self, pages: Pages) -> Self {
            self.wanted.pages = pages;
            self
        }

        /// Computes a checksum of each file while loading it, as [`Load::verify`] does. Processes that take the memory
        /// rely on the one that loaded it.
        pub fn verify(mut self, verify: Verify) -> Self {
            self.wanted.verify = Some(verify);
            self
        }

        /// Lets every process that takes a memfd write to it; only its size is sealed. Default false: no process
        /// can change the bytes. dma-bufs cannot be sealed, and are always writable.
        pub fn writable(mut self, writable: bool) -> Self {
            self.wanted.writable = writable;
            self
        }

        /// Calls `with` with each file's load, to set its options. The hold's own options (`verify`, `cancel`,
        /// `progress`) are set afterwards.
        pub fn each(mut self, with: impl Fn(Load) -> Load + Send + 'static) -> Self {
            self.wanted.each = Box::new(with);
            self
        }

        /// Lets `token` cancel the loads, and the wait for another process.
        pub fn cancel(mut self, token: CancelToken) -> Self {
            self.wanted.cancel = token;
            self
        }

        /// As [`Load::progress`], for all files together, if this process loads.
        pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
            self.wanted.progress = Some(Arc::new(Box::new(progress)));
            self
        }

        /// What one of the paths stands for that is not on this machine: objects, each with its tensors that do not
        /// count.
        pub fn objects(
            mut self,
            path: impl Into<PathBuf>,
            objects: Vec<dmafile::ModelObject>,
        ) -> Self {
            self.wanted.objects.insert(path.into(), objects);
            self
        }

        /// Sets how messages name options; default: as this crate does.
        pub fn names(mut self, names: &'static dyn Names) -> Self {
            self.wanted.names = names;
            self
        }
    };
}
pub(super) use hold_setters;

enum OpenFrom {
    File(OwnedFd),
    Object(Arc<dyn RemoteObject>),
}

/// A file or an object that is open to be loaded.
pub(super) struct OpenFile {
    pub path: PathBuf,
    pub identity: FileIdentity,
    from: OpenFrom,
    /// Its tensors that do not count.
    superseded: Vec<String>,
}

impl OpenFrom {
    fn source(self, path: &Path) -> Result<Source> {
        match self {
            Self::File(fd) => Source::of(path, fd),
            Self::Object(object) => Source::of_objects(path, vec![object]),
        }
    }
}

impl HoldOptions {
    pub(super) fn new(paths: Vec<PathBuf>) -> Self {
        Self {
            paths,
            kind: Kind::Memfd,
            pages: Pages::Auto,
            verify: None,
            writable: false,
            each: Box::new(|load| load),
            cancel: CancelToken::new(),
            progress: None,
            names: &Builder,
            objects: BTreeMap::new(),
        }
    }

    /// Checks everything that does not depend on files.
    pub(super) fn check(&self) -> Result<()> {
        if self.paths.is_empty() {
            return Err(Error::usage("paths", "name a file or a model to hold"));
        }
        match &self.kind {
            Kind::Anon => Err(Error::usage(
                Opt::To,
                message![
                    "private memory has no descriptor: use ",
                    Opt::To.set(Kind::Memfd)
                ],
            )),
            Kind::Pinned(_) => Err(Error::usage(
                Opt::To,
                message![
                    "a process that takes memory pins it itself: hold ",
                    Opt::To.set(Kind::Memfd),
                    ", writable"
                ],
            )),
            Kind::Fd { .. } => Err(Error::usage(
                Opt::To,
                "fd:N cannot be used: a hold allocates memory for each file",
            )),
            _ => Ok(()),
        }
    }

    /// Opens the files, in the order in which they will be held.
    pub(super) fn open(&self) -> Result<Vec<OpenFile>> {
        let mut all: Vec<OpenFile> = Vec::new();
        let mut names = BTreeMap::new();
        let mut paths = Vec::new();
        for path in &self.paths {
            match self.objects.get(path) {
                Some(objects) => paths.extend(objects.iter().map(|(object, superseded)| {
                    let path = PathBuf::from(object.name());
                    (path, superseded.clone(), Some(Arc::clone(object)))
                })),
                None => {
                    let files = files(path)?.into_iter();
                    paths.extend(files.map(|(path, superseded)| (path, superseded, None)));
                }
            }
        }
        // All are open at first; each is read by two descriptors and leaves one of memory.
        let _ = host::room_for_files(2 * paths.len() as u64);
        for (path, superseded, object) in paths {
            let place = || path.display().to_string();
            let failed = |errno| Error::os("cannot open", errno).at(place());
            let (path, identity, from) = match object {
                Some(object) => {
                    let identity = FileIdentity::of_object(&*object);
                    (path.clone(), identity, OpenFrom::Object(object))
                }
                None => {
                    // Resolved now: later, a link may point elsewhere and a folder may be replaced.
                    let path = std::path::absolute(&path)
                        .map_err(|error| failed(dmafile_sys::errno(error)))?;
                    let fd = file::open(&path, false).map_err(failed)?;
                    let identity = match FileIdentity::settled(fd.as_fd(), &self.cancel) {
                        Err(Errno::CANCELED) => return Err(Error::cancelled(Verb::Load, place())),
                        settled => settled.map_err(failed)?,
                    };
                    (path, identity, OpenFrom::File(fd))
                }
            };
            let name = path.file_name().unwrap_or_default().to_owned();
            if let Some(why) = unlisted(&name.to_string_lossy()) {
                return Err(Error::new("cannot hold", format!("its name {why}"))
                    .with_errno(Errno::INVAL)
                    .at(place())
                    .with_remedy("hold it under another name, by a link"));
            }
            if let Some(other) = names.insert(name, path.clone()) {
                let why = format!("it has the same name as {}", other.display());
                return Err(Error::new("cannot hold", why)
                    .with_errno(Errno::EXIST)
                    .at(place())
                    .with_remedy("hold them under two names"));
            }
            if superseded.iter().map(String::len).sum::<usize>() > LONGEST_NAMES {
                let why = format!(
                    "another file replaces {} of its tensors, which are too many to list",
                    superseded.len()
                );
                return Err(Error::new("cannot hold", why)
                    .with_errno(Errno::TOOBIG)
                    .at(place())
                    .with_remedy("save the model again, without the old copies"));
            }
            all.push(OpenFile {
                path,
                identity,
                from,
                superseded,
            });
        }
        if all.len() > MOST_FILES {
            let why = format!("{} files are more than {MOST_FILES}", all.len());
            return Err(Error::new("cannot hold", why).with_errno(Errno::TOOBIG));
        }
        if self
            .verify
            .as_ref()
            .is_some_and(|verify| verify.expected.is_some())
            && all.len() > 1
        {
            let why = "a digest can be compared for one file only, but there are several";
            return Err(Error::usage(Opt::Verify, why));
        }
        Ok(all)
    }

    /// Loads the files, each into separate memory, and calls `keep` with each one after sealing
    /// it.
    pub(super) fn load(
        &mut self,
        files: Vec<OpenFile>,
        mut keep: impl FnMut(Buffer, HeldInfo),
    ) -> Result<Vec<Member>> {
        let total: u64 = files.iter().map(|file| file.identity.size).sum();
        let tell = self.progress.clone();
        let before = Arc::new(AtomicU64::new(0));
        let mut members = Vec::new();
        for file in files {
            let OpenFile {
                path,
                identity,
                from,
                superseded,
            } = file;
            if self.cancel.is_cancelled() {
                return Err(Error::cancelled(Verb::Load, path.display().to_string()));
            }
            let source = Arc::new(from.source(&path)?);
            let load = Load::of(Arc::clone(&source), Selection::Requested)
                .names(self.names)
                .to(self.kind.clone())
                .pages(self.pages)
                // Programs that read it as a file would not expect bytes after its end.
                .exact_size(true);
            let mut load = (self.each)(load).cancel(self.cancel.clone());
            if let Some(verify) = &self.verify {
                load = load.verify(verify.clone());
            }
            if let Some(tell) = &tell {
                let (tell, before) = (Arc::clone(tell), Arc::clone(&before));
                load = load.progress(move |progress| {
                    let done = before.load(Ordering::Relaxed) + progress.done;
                    tell(Progress::new(done, total));
                });
            }
            let mut loaded = load.run_to_seal()?;
            // An object is of the version that was opened.
            if let Ok((fd, _)) = source.buffered(0)
                && FileIdentity::of(fd) != Ok(identity)
            {
                return Err(changed("cannot hold", &path));
            }
            before.fetch_add(identity.size, Ordering::Relaxed);
            let digest = loaded.report.verify.first().map(Digest::of);
            let (buffer, pages) = (&mut loaded.buffer, &loaded.report.pages);
            let mut member = Member::new(path, identity, buffer, pages, digest, self.writable)?;
            member.info.superseded = superseded;
            keep(loaded.buffer, member.info.clone());
            members.push(member);
        }
        Ok(members)
    }

    /// Takes over memory that contains the bytes of the files, and calls `keep` with each one
    /// after sealing it.
    pub(super) fn adopt(
        &self,
        files: Vec<OpenFile>,
        memory: Vec<OwnedFd>,
        mut keep: impl FnMut(Buffer, HeldInfo),
    ) -> Result<Vec<Member>> {
        let mut members = Vec::new();
        let mut memory = memory.into_iter();
        for file in files {
            let OpenFile {
                path,
                identity,
                from,
                superseded,
            } = file;
            let failed = |errno| Error::os("cannot share", errno).at(path.display().to_string());
            let own: Vec<_> = memory.next().into_iter().collect();
            let mut buffer = Buffer::of_peer_to_seal(own, &MemoryKind::Memfd, (0, identity.size))
                .map_err(|why| failed(Errno::PROTO).with_why(why))?;
            if !identity.is_of_object() && FileIdentity::at(&path) != Ok(identity) {
                return Err(changed("cannot share", &path));
            }
            let source = from.source(&path)?;
            let digest = self.digest(&source, &buffer)?;
            let pages = "existing";
            let mut member =
                Member::new(path, identity, &mut buffer, pages, digest, self.writable)?;
            member.info.superseded = superseded;
            keep(buffer, member.info.clone());
            members.push(member);
        }
        Ok(members)
    }

    /// The digest of a buffer with all bytes of a source, if one is requested.
    fn digest(&self, source: &Source, buffer: &Buffer) -> Result<Option<Digest>> {
        let Some(verify) = &self.verify else {
            return Ok(None);
        };
        let checks = DigestCheck::all(verify, source, 0, source.size())?;
        let check = checks.first().expect("it has bytes");
        let (size, access) = (source.size(), buffer.access()?);
        let data = [(0, size)];
        let mut follower = Follower::new(check.algorithm, size, 0, &data);
        let copy = |at, into: &mut [u8]| access.read_at(at, into);
        if !follower.advance(size, copy, || self.cancel.is_cancelled())? {
            let place = check.file.display().to_string();
            return Err(Error::cancelled(Verb::Load, place));
        }
        Ok(Some(Digest::of(&check.compare(follower.hex())?)))
    }

    /// Loads the files as a set.
    pub(super) fn set(&mut self, name: &str) -> Result<Set> {
        let files = self.open()?;
        // Only descriptors are served: nothing stays mapped here.
        let members = self.load(files, |_, _| {})?;
        Ok(Set {
            name: name.to_string(),
            members,
            since: now(),
        })
    }
}

/// The error for a file of which no state is in memory.
fn changed(what: &str, path: &Path) -> Error {
    Error::os(what, Errno::STALE)
        .at(path.display().to_string())
        .with_why("the file changed during the load")
        .with_remedy("try again")
}

/// The files that a path stands for, and the tensors in each that do not count.
fn files(path: &Path) -> Result<Vec<(PathBuf, Vec<String>)>> {
    if !Model::is_collection(path) {
        return Ok(vec![(path.to_path_buf(), Vec::new())]);
    }
    let model = Model::open(path)?;
    let shards = model.shards().into_iter().enumerate();
    let described = shards.map(|(number, shard)| {
        let superseded = model.superseded(number).map(str::to_string).collect();
        (shard.file, superseded)
    });
    Ok(described.collect())
}
