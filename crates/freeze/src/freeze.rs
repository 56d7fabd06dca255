//! Freezing: criu sends its images through pipes, and the memory of shared objects is saved from the processes
//! themselves, while criu keeps them stopped.

use crate::criu;
use crate::folders;
use crate::image::{Image, Message};
use crate::manifest::{
    self, ALGORITHM, Held, ImageFile, MEMORY, Manifest, Memory, OpenMemory, Stored, Tree,
};
use crate::memory::{self, Object};
use crate::place::{RunFolder, Unfinished};
use crate::work::{for_each, joined};
use dmafile::internal::sync::lock;
use dmafile::internal::{Hasher, Verb};
use dmafile::{Algorithm, CancelToken, Error, Origin, Result, Save, Verify};
use dmafile_hold::{HeldFile, HeldInfo, holds};
use dmafile_sys::{Errno, errno, file, process, socket};
use rustix::pipe::{SpliceFlags, splice};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

const WHAT: Verb = Verb::Freeze;
/// Interval at which criu and the token are checked.
const STEP: Duration = Duration::from_millis(5);
/// The longest name of an image.
const LONGEST_NAME: usize = 4096;
/// The name of the socket that criu sends its images to.
const SOCKET: &str = "streamer-capture.sock";

/// A builder for images of processes: which, and where to.
///
/// The processes end when all images are on the disk, or run on as if nothing had happened. Memory that they took from
/// a hold is not in the images, which name it instead; all other memory that processes share (memfds and mappings with
/// MAP_SHARED) is saved directly. It needs root, and criu.
///
/// ```no_run
/// use dmafile_freeze::{Freeze, Thaw};
///
/// Freeze::of([4711]).to("server.frozen").run()?;
/// let thawed = Thaw::of("server.frozen").run()?;
/// thawed.wait();
/// # Ok::<(), dmafile::Error>(())
/// ```
#[must_use = "nothing is frozen before `run`"]
pub struct Freeze {
    pids: Vec<u32>,
    to: PathBuf,
    sockets: Vec<PathBuf>,
    leave_running: bool,
    options: Vec<OsString>,
    cancel: CancelToken,
}

/// What was frozen.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Frozen {
    /// The folder.
    pub to: PathBuf,
    /// The version of criu.
    pub criu: String,
    /// Bytes of the images that criu made, of all processes.
    pub bytes_criu: u64,
    /// Bytes of shared memory that were saved, holes included.
    pub bytes_memory: u64,
    /// Bytes of files that are held, and not in the images.
    pub bytes_held: u64,
    /// The holds that they are in.
    pub holds: Vec<String>,
    /// Number of objects of shared memory that were saved.
    pub objects: usize,
}

/// Memory that is saved, except for what only criu's images say of it.
struct Saved {
    bytes: u64,
    seals: u32,
    digest: String,
}

/// Held memory, and the number that CRIU gives it.
type Numbered = (u32, Held);

/// What all trees share.
struct Common<'a> {
    folder: &'a Path,
    held: BTreeMap<u32, usize>,
    fates: Mutex<Fates>,
    cancel: &'a CancelToken,
}

#[derive(Default)]
struct Fates {
    /// Memory that criu has sent: where it comes from in a thaw, or None if criu restores it.
    by_number: BTreeMap<u32, Option<Memory>>,
    saved: Vec<Saved>,
}

impl Freeze {
    /// Freezes these processes, and their descendants.
    pub fn of(pids: impl IntoIterator<Item = u32>) -> Self {
        Self {
            pids: pids.into_iter().collect(),
            to: PathBuf::new(),
            sockets: Vec::new(),
            leave_running: false,
            options: Vec::new(),
            cancel: CancelToken::new(),
        }
    }

    /// The folder for the images, which must not exist.
    pub fn to(mut self, folder: impl Into<PathBuf>) -> Self {
        self.to = folder.into();
        self
    }

    /// Looks for memory in the hold at this socket, too. Default: in all holds that [`holds`] lists.
    pub fn socket(mut self, socket: impl Into<PathBuf>) -> Self {
        self.sockets.push(socket.into());
        self
    }

    /// Sets whether the processes run on afterwards; default false. What they change later is not in the images.
    pub fn leave_running(mut self, leave: bool) -> Self {
        self.leave_running = leave;
        self
    }

    /// Further options of `criu dump` (criu(8)), such as `--tcp-close`.
    pub fn options(mut self, options: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.options.extend(options.into_iter().map(Into::into));
        self
    }

    /// Lets `token` cancel it; the processes run on.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Freezes the processes.
    ///
    /// # Errors
    /// ENOENT without criu, EOPNOTSUPP if it is too old; ESRCH for a process that does not exist; EINVAL if
    /// this process is one of them; EBUSY for one with an
    /// io_uring, which criu cannot dump; EEXIST if the folder exists; what criu says, and the errors of
    /// [`Save::run`]. In all cases the processes run on.
    pub fn run(self) -> Result<Frozen> {
        let version = criu::version(WHAT)?;
        let trees = self.check()?;
        let (held, kept) = self.held(&trees)?;
        let unfinished = Unfinished::beside(WHAT, &self.to)?;
        let folder = unfinished.path();
        make(&folder.join(MEMORY))?;
        let common = Common {
            folder,
            held: held
                .iter()
                .enumerate()
                .map(|(at, (number, _))| (*number, at))
                .collect(),
            fates: Mutex::default(),
            cancel: &self.cancel,
        };
        // Each criu waits until all are ready, because the images become valid together.
        let mut waiting = Vec::new();
        for number in 0..self.pids.len() {
            waiting.push(self.dump(&common, number)?);
        }
        let saved = std::mem::take(&mut lock(&common.fates).saved);
        let mut stored: Vec<Option<Stored>> = saved.iter().map(|_| None).collect();
        let mut done = Vec::new();
        for dumped in &waiting {
            done.push(dumped.tree(&common, &saved, &mut stored)?);
        }
        let manifest = Manifest {
            criu: version,
            trees: done,
            stored: stored
                .into_iter()
                .collect::<Option<_>>()
                .ok_or_else(|| Error::new(WHAT, "criu has sent memory and not described it"))?,
            held: held.into_iter().map(|(_, held)| held).collect(),
        };
        let path = folder.join(manifest::NAME);
        let text = manifest.to_text();
        Save::new(Origin::memory(&text), path).sync(false).run()?;
        unfinished.finish(WHAT)?;
        // From here on the images are valid.
        for dumped in waiting {
            dumped.end()?;
        }
        drop(kept);
        let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.sum();
        let images = manifest.trees.iter().flat_map(|tree| &tree.images);
        Ok(Frozen {
            bytes_criu: sum(&mut images.map(|image| image.bytes)),
            bytes_memory: sum(&mut manifest.stored.iter().map(|one| one.bytes)),
            bytes_held: sum(&mut manifest.held.iter().map(|one| one.bytes)),
            holds: {
                let names = manifest.held.iter().map(|one| one.hold.clone());
                names.collect::<BTreeSet<_>>().into_iter().collect()
            },
            objects: manifest.stored.len(),
            criu: manifest.criu,
            to: self.to,
        })
    }

    /// The processes of each tree.
    fn check(&self) -> Result<Vec<Vec<u32>>> {
        if self.pids.is_empty() {
            return Err(Error::usage("PID", "name a process"));
        }
        let mut all = Vec::new();
        for &pid in &self.pids {
            if !process::exists(pid) {
                return Err(Error::os(WHAT, Errno::SRCH).at(format!("process {pid}")));
            }
            let tree = memory::tree(pid);
            if tree.contains(&std::process::id()) {
                return Err(Error::os(WHAT, Errno::INVAL)
                    .at(format!("process {pid}"))
                    .with_why("this process is one of its descendants")
                    .with_remedy("freeze it from a process that it has not started"));
            }
            for &one in &tree {
                let links = process::links(&process::folder(one)).unwrap_or_default();
                let ring = links
                    .iter()
                    .find(|link| link.1.as_os_str() == "anon_inode:[io_uring]");
                if let Some((fd, _)) = ring {
                    return Err(Error::os(WHAT, Errno::BUSY)
                        .at(format!("process {one}, descriptor {fd}"))
                        .with_why("it has an io_uring, which criu cannot dump")
                        .with_remedy(
                            "close the recorder or stream, or wait for the load, that uses it",
                        ));
                }
            }
            all.push(tree);
        }
        Ok(all)
    }

    /// The memory of the processes that comes from holds, by CRIU's number; and what keeps it.
    fn held(&self, trees: &[Vec<u32>]) -> Result<(Vec<Numbered>, Vec<dmafile_hold::Held>)> {
        let mut all = Vec::new();
        let mut found = Vec::new();
        let listed = holds(None, &self.cancel)?;
        let mut places: Vec<_> = listed
            .into_iter()
            .map(|hold| (hold.name, hold.socket))
            .collect();
        for socket in &self.sockets {
            let more = holds(Some(socket), &self.cancel)?;
            places.extend(more.into_iter().map(|hold| (hold.name, hold.socket)));
        }
        if places.is_empty() {
            return Ok((all, found));
        }
        let theirs: BTreeMap<_, _> = trees.iter().flat_map(|tree| memory::of(tree)).collect();
        for (name, socket) in places {
            let take = dmafile_hold::Held::take(&name)
                .socket(&socket)
                .cancel(self.cancel.clone());
            // It may have ended, or not be for this user: then its memory is saved.
            let Ok(taken) = take.run() else {
                continue;
            };
            let mut is_used = false;
            for one in taken.files() {
                let Some((number, size)) = same(one, &theirs) else {
                    continue;
                };
                let (algorithm, digest) = digest(one)?;
                let socket = std::path::absolute(&socket).unwrap_or_else(|_| socket.clone());
                let HeldInfo {
                    name: file_name,
                    file,
                    bytes,
                    identity,
                    ..
                } = one.info.clone();
                let held = Held {
                    hold: name.clone(),
                    socket,
                    name: file_name,
                    file,
                    bytes,
                    size,
                    identity,
                    algorithm,
                    digest,
                };
                all.push((number, held));
                is_used = true;
            }
            if is_used {
                found.push(taken);
            }
        }
        Ok((all, found))
    }

    /// Starts criu for a tree, and receives its images.
    fn dump(&self, common: &Common<'_>, number: usize) -> Result<Dumped> {
        let folder = common.folder.join(manifest::folder_of(number));
        make(&folder)?;
        let run = RunFolder::new(WHAT)?;
        let failed = |error: std::io::Error, place: &Path| {
            Error::os(WHAT, errno(error)).at(place.display().to_string())
        };
        let at = run.path().join(SOCKET);
        let listener = UnixListener::bind(&at).map_err(|error| failed(error, &at))?;
        listener
            .set_nonblocking(true)
            .map_err(|error| failed(error, &at))?;
        run.write_hook(WHAT, "post-dump")?;
        let mut command = criu::command("dump", run.path(), run.path());
        command.arg("--stream");
        command.arg("--tree").arg(self.pids[number].to_string());
        command.arg("--action-script").arg(run.hook());
        if self.leave_running {
            command.arg("--leave-running");
        }
        command.args(&self.options);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command
            .spawn()
            .map_err(|error| failed(error, Path::new("criu")))?;
        let mut dumped = Dumped {
            pid: self.pids[number],
            run,
            listener,
            child,
            images: Mutex::default(),
            kept: BTreeMap::new(),
            folder,
            is_over: false,
        };
        dumped.receive(common)?;
        Ok(dumped)
    }
}

/// The number and size of the memory of a held file, if the processes have it.
fn same(one: &HeldFile, theirs: &BTreeMap<u32, Object>) -> Option<(u32, u64)> {
    let fd = one.buffer.as_fd()?;
    let number = memory::number(fd).ok()?;
    let object = theirs.get(&number)?;
    // What can change is saved.
    one.info.sealed.then_some((number, object.size))
}

/// The digest that the holder has computed, or one of the memory.
fn digest(one: &HeldFile) -> Result<(String, String)> {
    match &one.info.digest {
        Some(digest) => Ok((digest.algorithm.clone(), digest.digest.clone())),
        None => Ok((
            ALGORITHM.name().to_string(),
            digest_of_memory(one, ALGORITHM)?,
        )),
    }
}

/// The digest of a file in memory.
pub(crate) fn digest_of_memory(one: &HeldFile, algorithm: Algorithm) -> Result<String> {
    let bytes = one
        .buffer
        .as_slice()
        .ok_or_else(|| Error::os("cannot compute the digest", Errno::NXIO).at(one.name.clone()))?;
    let mut hasher = Hasher::new(algorithm, one.info.bytes);
    hasher.update(bytes);
    Ok(hasher.hex())
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir(folder)
        .map_err(|error| Error::os(WHAT, errno(error)).at(folder.display().to_string()))
}

/// A tree whose images are complete, and whose criu waits for an answer.
struct Dumped {
    pid: u32,
    run: RunFolder,
    listener: UnixListener,
    child: Child,
    images: Mutex<Vec<ImageFile>>,
    /// Images that are changed before they are saved.
    kept: BTreeMap<String, Vec<u8>>,
    /// Where the others are.
    folder: PathBuf,
    is_over: bool,
}

/// An object whose memory is to be saved.
struct Job {
    index: usize,
    object: Object,
}

/// What a thread does.
type Doing<'scope, T> = ScopedJoinHandle<'scope, Result<T>>;

impl Dumped {
    /// Receives the images, and saves the memory that criu sends and that is not left to it.
    fn receive(&mut self, common: &Common<'_>) -> Result<()> {
        let Some(stream) = self.connection(common.cancel)? else {
            return Err(self.failed());
        };
        let (images, folder) = (&self.images, &self.folder);
        let (run, child, pid) = (&self.run, &mut self.child, self.pid);
        let mut kept = BTreeMap::new();
        let received = std::thread::scope(|scope| {
            let mut receiver = Receiver {
                scope,
                common,
                folder,
                images,
                pid,
                scanned: None,
                discards: false,
                running: Vec::new(),
                kept: Vec::new(),
                jobs: Vec::new(),
            };
            // Dropped at the end: the threads end when criu closes its pipes.
            let stream = stream;
            let is_complete = receiver.serve(stream.as_fd(), run, child)?;
            if is_complete {
                receiver.save_memory()?;
            }
            for (name, thread) in receiver.kept.drain(..) {
                kept.insert(name, joined(thread)?);
            }
            for thread in receiver.running.drain(..) {
                joined(thread)?;
            }
            Ok(is_complete)
        });
        self.kept = kept;
        match received {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.failed()),
            Err(error) => Err(error),
        }
    }

    /// Waits for criu's connection; None if it ends before.
    fn connection(&mut self, cancel: &CancelToken) -> Result<Option<OwnedFd>> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream.into())),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(Error::os(WHAT, errno(error))),
            }
            if cancel.is_cancelled() {
                return Err(Error::cancelled(WHAT, format!("process {}", self.pid)));
            }
            if !matches!(self.child.try_wait(), Ok(None)) {
                return Ok(None);
            }
            let _ = file::wait_readable(self.listener.as_fd(), STEP);
        }
    }

    /// Why criu has ended.
    fn failed(&mut self) -> Error {
        let status = self
            .child
            .wait()
            .map_or_else(|error| error.to_string(), |one| one.to_string());
        let error = criu::failed(WHAT, self.run.path(), status);
        error.at(format!("process {}", self.pid))
    }

    /// Lets the processes end, or run on if that was asked for.
    fn end(mut self) -> Result<()> {
        let failed = |error| Error::os(WHAT, errno(error));
        self.run.allow().map_err(failed)?;
        self.is_over = true;
        let status = self.child.wait().map_err(failed)?;
        if status.success() {
            return Ok(());
        }
        let error = self.failed();
        Err(error.with_remedy("the images are complete, but the processes may still run"))
    }

    /// Describes the memory that is ours in the images, and completes them.
    fn tree(
        &self,
        common: &Common<'_>,
        saved: &[Saved],
        stored: &mut [Option<Stored>],
    ) -> Result<Tree> {
        let bad = |name: &str| {
            let error = Error::new(WHAT, "criu has sent an image that is not valid");
            error.at(name.to_string())
        };
        let mut images = BTreeMap::new();
        for (name, bytes) in &self.kept {
            let image = Image::parse(bytes).ok_or_else(|| bad(name))?;
            images.insert(name.as_str(), image);
        }
        let (folders, locked) = folders::of(&memory::tree(self.pid));
        if let Some(locks) = images.get_mut(LOCKS) {
            // A thaw gives their descriptors to criu, with the locks.
            locks.messages.retain(|lock| {
                let of = |name| lock.number(name).map(|number| number as u32);
                let at = of(field::LOCK_PROCESS).zip(of(field::LOCK_DESCRIPTOR));
                at.is_none_or(|at| !locked.contains(&at))
            });
        }
        let mut open = Vec::new();
        let mut files = images.remove(FILES).ok_or_else(|| bad(FILES))?;
        if let Some(mut inodes) = images.remove(INODES) {
            let fates = lock(&common.fates);
            let ours = |number| fates.by_number.get(&number).copied().flatten();
            let mappings = images.iter_mut();
            let mappings = mappings
                .filter(|(name, _)| name.starts_with(MAPPINGS))
                .map(|(_, image)| image);
            let rewritten = rewrite(&mut files, &mut inodes, mappings, ours);
            for (file, inode) in rewritten.map_err(|why| Error::new(WHAT, why))? {
                if let Memory::Stored(index) = file.memory
                    && stored[index].is_none()
                {
                    let one = &saved[index];
                    stored[index] = Some(describe(&inode, one).ok_or_else(|| bad(INODES))?);
                }
                open.push(file);
            }
            images.insert(INODES, inodes);
        }
        images.insert(FILES, files);
        let mut all = std::mem::take(&mut *lock(&self.images));
        for (name, image) in images {
            let bytes = image.to_bytes();
            all.push(save_image(
                Origin::memory(&bytes),
                &self.folder.join(name),
                name,
            )?);
        }
        all.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Tree {
            pid: self.pid,
            images: all,
            open,
            folders,
        })
    }
}

impl Drop for Dumped {
    fn drop(&mut self) {
        if !self.is_over {
            // The processes run on once criu has ended.
            self.run.give_up();
            let _ = self.child.wait();
        }
    }
}

/// The images with the open files, and with the memory behind some of them.
const FILES: &str = "files.img";
const INODES: &str = "memfd.img";
/// The beginning of the names of images with the mappings of a process.
const MAPPINGS: &str = "mm-";
/// The image with locks.
const LOCKS: &str = "filelocks.img";
/// The beginning of the names of images with the pages of memory that processes share.
const SHARED: &str = "pagemap-shmem-";
const PAGES: &str = "pages-";

/// Receives the images of a tree.
struct Receiver<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    common: &'env Common<'env>,
    folder: &'env Path,
    images: &'env Mutex<Vec<ImageFile>>,
    pid: u32,
    /// The memory of the tree, once criu has stopped it.
    scanned: Option<BTreeMap<u32, Object>>,
    /// The next pages are not needed.
    discards: bool,
    running: Vec<Doing<'scope, ()>>,
    kept: Vec<(String, Doing<'scope, Vec<u8>>)>,
    jobs: Vec<Job>,
}

impl Receiver<'_, '_> {
    /// Serves criu until all images have been sent. Returns false if it ends before.
    fn serve(
        &mut self,
        stream: BorrowedFd<'_>,
        run: &RunFolder,
        child: &mut Child,
    ) -> Result<bool> {
        loop {
            if self.common.cancel.is_cancelled() {
                return Err(Error::cancelled(WHAT, format!("process {}", self.pid)));
            }
            let is_ready = file::wait_readable(stream, STEP);
            if is_ready.map_err(|errno| Error::os(WHAT, errno))? {
                match request(stream).map_err(|errno| Error::os(WHAT, errno).at("criu"))? {
                    Some((name, pipe)) => self.take(name, pipe)?,
                    None => return Ok(false),
                }
            } else if run.is_asked() {
                return Ok(true);
            } else if !matches!(child.try_wait(), Ok(None)) {
                return Ok(false);
            }
        }
    }

    /// An image, which comes through a pipe.
    fn take(&mut self, name: String, pipe: OwnedFd) -> Result<()> {
        let shared = name
            .strip_prefix(SHARED)
            .and_then(|rest| rest.strip_suffix(".img"));
        if let Some(number) = shared.and_then(|number| number.parse().ok()) {
            self.discards = self.decide(number);
            if self.discards {
                self.running.push(self.scope.spawn(move || discard(&pipe)));
                return Ok(());
            }
        } else if self.discards && name.starts_with(PAGES) {
            self.discards = false;
            self.running.push(self.scope.spawn(move || discard(&pipe)));
            return Ok(());
        }
        if [FILES, INODES, LOCKS].contains(&name.as_str()) || name.starts_with(MAPPINGS) {
            self.kept
                .push((name, self.scope.spawn(move || all_of(pipe))));
            return Ok(());
        }
        let (path, images) = (self.folder.join(&name), self.images);
        self.running.push(self.scope.spawn(move || {
            let image = save_image(Origin::fd(pipe, 0), &path, &name)?;
            lock(images).push(image);
            Ok(())
        }));
        Ok(())
    }

    /// Whether memory is ours. criu has stopped the processes by now.
    fn decide(&mut self, number: u32) -> bool {
        let scanned = self
            .scanned
            .get_or_insert_with(|| memory::of(&memory::tree(self.pid)));
        let mut fates = lock(&self.common.fates);
        if let Some(fate) = fates.by_number.get(&number) {
            return fate.is_some();
        }
        let fate = if let Some(&held) = self.common.held.get(&number) {
            Some(Memory::Held(held))
        } else if let Some(object) = scanned.remove(&number) {
            let index = fates.saved.len();
            fates.saved.push(Saved {
                bytes: object.size,
                seals: object.seals.bits(),
                digest: String::new(),
            });
            self.jobs.push(Job { index, object });
            Some(Memory::Stored(index))
        } else {
            None
        };
        fates.by_number.insert(number, fate);
        fate.is_some()
    }

    /// Saves the memory that is ours, several objects at once.
    fn save_memory(&mut self) -> Result<()> {
        let common = self.common;
        for_each(WHAT, &self.jobs, common.cancel, |job| {
            let name = job.index.to_string();
            let path = common.folder.join(MEMORY).join(&name);
            let fd = job.object.fd.try_clone();
            let fd = fd.map_err(|error| Error::os(WHAT, errno(error)).at(name.clone()))?;
            let image = save_image(Origin::fd(fd, 0), &path, &name)?;
            lock(&common.fates).saved[job.index].digest = image.digest;
            Ok(())
        })
    }
}

/// Saves an image.
fn save_image(origin: Origin<'_>, path: &Path, name: &str) -> Result<ImageFile> {
    let save = Save::new(origin, path).verify(Verify::compute(ALGORITHM));
    let report = save.sync(false).run()?;
    Ok(ImageFile {
        name: name.to_string(),
        bytes: report.bytes,
        digest: report
            .verify
            .map(|verified| verified.digest)
            .unwrap_or_default(),
    })
}

/// The name of the image that criu sends next, and a pipe with its bytes; None if it sends no more.
fn request(stream: BorrowedFd<'_>) -> std::result::Result<Option<(String, OwnedFd)>, Errno> {
    let mut length = [0; 4];
    if !received(stream, &mut length)? {
        return Ok(None);
    }
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > LONGEST_NAME {
        return Err(Errno::MSGSIZE);
    }
    let mut message = vec![0; length];
    if !received(stream, &mut message)? {
        return Ok(None);
    }
    let name = Message::parse(&message).and_then(|message| {
        let name = String::from_utf8(message.bytes(1)?.to_vec()).ok()?;
        (!name.is_empty() && !name.starts_with('.') && !name.contains('/')).then_some(name)
    });
    let name = name.ok_or(Errno::PROTO)?;
    let (_, fds) = socket::receive_up_to(stream, &mut [0], true)?;
    let pipe = fds.into_iter().next().ok_or(Errno::PROTO)?;
    Ok(Some((name, pipe)))
}

/// Receives all bytes; false at the end of the connection.
fn received(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> std::result::Result<bool, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match socket::receive_up_to(stream, &mut bytes[done..], true)? {
            (0, _) => return Ok(false),
            (got, _) => done += got,
        }
    }
    Ok(true)
}

/// Lets the bytes of a pipe go, without a copy.
fn discard(pipe: &OwnedFd) -> Result<()> {
    let failed = |errno| Error::os(WHAT, errno).at("/dev/null");
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null");
    let null = null.map_err(|error| failed(errno(error)))?;
    while splice(pipe, None, &null, None, 1 << 30, SpliceFlags::empty()).map_err(failed)? > 0 {}
    Ok(())
}

fn all_of(pipe: OwnedFd) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::fs::File::from(pipe), &mut bytes)
        .map_err(|error| Error::os(WHAT, errno(error)).at("criu"))?;
    Ok(bytes)
}

/// Numbers of fields in criu's messages (in its images/: fdinfo.proto, file-lock.proto, memfd.proto, fown.proto, mm.proto,
/// vma.proto).
mod field {
    /// Of a file.
    pub const FILE_ID: u64 = 2;
    /// Of a file: what it is as memory.
    pub const FILE_MEMORY: u64 = 20;
    /// Of an open file of memory.
    pub const OPEN_ID: u64 = 1;
    pub const OPEN_FLAGS: u64 = 2;
    pub const OPEN_POSITION: u64 = 3;
    pub const OPEN_OWNER: u64 = 4;
    pub const OPEN_INODE: u64 = 5;
    /// Of the process that gets signals about an open file.
    pub const OWNER_PID: u64 = 5;
    /// Of memory.
    pub const INODE_NAME: u64 = 1;
    pub const INODE_USER: u64 = 2;
    pub const INODE_GROUP: u64 = 3;
    pub const INODE_NUMBER: u64 = 5;
    pub const INODE_ID: u64 = 7;
    pub const INODE_HUGE: u64 = 8;
    pub const INODE_MODE: u64 = 9;
    /// Of the memory of a process.
    pub const MAPPINGS: u64 = 14;
    /// Of a mapping: its file, what it is, and how its file was open.
    pub const MAPPING_FILE: u64 = 4;
    pub const MAPPING_STATUS: u64 = 7;
    pub const MAPPING_FLAGS: u64 = 10;
    /// Of a lock.
    pub const LOCK_PROCESS: u64 = 3;
    pub const LOCK_DESCRIPTOR: u64 = 4;
}

/// In the status of a mapping: its file is memory.
const MAPS_MEMORY: u64 = 1 << 14;
/// O_ACCMODE.
const ACCESS: u64 = 3;

/// Gives each open file of memory that is `ours` memory of its own, with a name of its own, because criu takes a
/// descriptor for each name, and the position and flags belong to the open file. Mappings get files of their own as
/// well: criu lets them share one with a descriptor, which may be open for less than they need. Returns these files,
/// with the original memory.
fn rewrite<'i>(
    files: &mut Image,
    inodes: &mut Image,
    mappings: impl Iterator<Item = &'i mut Image>,
    ours: impl Fn(u32) -> Option<Memory>,
) -> std::result::Result<Vec<(OpenMemory, Message)>, String> {
    let number = |inode: &Message| {
        let number = inode.number(field::INODE_NUMBER);
        number.map(|number| number as u32)
    };
    let last = |image: &Image, name| {
        image
            .messages
            .iter()
            .filter_map(|one| one.number(name))
            .max()
    };
    let mut next_inode = last(inodes, field::INODE_ID).unwrap_or(0);
    let mut next_file = last(files, field::FILE_ID).unwrap_or(0);
    let old = std::mem::take(&mut inodes.messages);
    let mut all = Vec::new();
    // A file of memory, and memory of its own for it.
    let mut renamed = |file: &Message, of: &Message, inode: &Message, memory| {
        let (mut file, mut of, mut own) = (file.clone(), of.clone(), inode.clone());
        next_inode += 1;
        let key = format!("dmafile-{next_inode}");
        of.set_number(field::OPEN_INODE, next_inode);
        file.set_bytes(field::FILE_MEMORY, &of.to_bytes());
        own.set_bytes(field::INODE_NAME, key.as_bytes());
        own.set_number(field::INODE_ID, next_inode);
        inodes.messages.push(own);
        let opened = OpenMemory {
            key,
            memory,
            flags: of.number(field::OPEN_FLAGS).unwrap_or_default() as u32,
            position: of.number(field::OPEN_POSITION).unwrap_or_default(),
        };
        all.push((opened, inode.clone()));
        file
    };
    // The files by their number: the original ones of mappings, and what they are.
    let mut mapped = BTreeMap::new();
    for file in &mut files.messages {
        let Some(open) = file.message(field::FILE_MEMORY) else {
            continue;
        };
        let of = open.number(field::OPEN_INODE);
        let inode = old.iter().find(|inode| inode.number(field::INODE_ID) == of);
        let inode = inode.ok_or("criu has sent an open file without its memory")?;
        let Some(memory) = number(inode).and_then(&ours) else {
            continue;
        };
        let owner = open.message(field::OPEN_OWNER);
        if owner
            .and_then(|owner| owner.number(field::OWNER_PID))
            .unwrap_or(0)
            != 0
        {
            let why = "a memfd has an owner for signals (F_SETOWN), which would be lost";
            return Err(why.to_string());
        }
        let id = open.number(field::OPEN_ID).unwrap_or_default();
        mapped.insert(id, (file.clone(), open.clone(), inode, memory));
        *file = renamed(file, &open, inode, memory);
    }
    let mut added = BTreeMap::new();
    for image in mappings {
        for process in &mut image.messages {
            let done = process.each_message(field::MAPPINGS, |mapping| {
                let is_memory =
                    mapping.number(field::MAPPING_STATUS).unwrap_or(0) & MAPS_MEMORY != 0;
                let id = mapping.number(field::MAPPING_FILE).unwrap_or_default();
                let Some((file, open, inode, memory)) = mapped.get(&id).filter(|_| is_memory)
                else {
                    return;
                };
                let access = mapping.number(field::MAPPING_FLAGS).unwrap_or(0) & ACCESS;
                let own = added.entry((id, access)).or_insert_with(|| {
                    next_file += 1;
                    let (mut file, mut open) = (file.clone(), open.clone());
                    file.set_number(field::FILE_ID, next_file);
                    open.set_number(field::OPEN_ID, next_file);
                    open.set_number(field::OPEN_FLAGS, access);
                    open.set_number(field::OPEN_POSITION, 0);
                    (next_file, renamed(&file, &open, inode, *memory))
                });
                mapping.set_number(field::MAPPING_FILE, own.0);
            });
            done.ok_or("criu has sent a mapping that is not valid")?;
        }
    }
    files
        .messages
        .extend(added.into_values().map(|(_, file)| file));
    let left = old
        .iter()
        .filter(|inode| number(inode).and_then(&ours).is_none());
    inodes.messages.extend(left.cloned());
    Ok(all)
}

/// Saved memory, as criu describes it.
fn describe(inode: &Message, saved: &Saved) -> Option<Stored> {
    let number = |name| inode.number(name).map(|number| number as u32);
    Some(Stored {
        name: String::from_utf8(inode.bytes(field::INODE_NAME)?.to_vec()).ok()?,
        bytes: saved.bytes,
        digest: saved.digest.clone(),
        seals: saved.seals,
        huge: number(field::INODE_HUGE).unwrap_or(0),
        mode: number(field::INODE_MODE).unwrap_or(0o600) & 0o7777,
        user: number(field::INODE_USER)?,
        group: number(field::INODE_GROUP)?,
    })
}
