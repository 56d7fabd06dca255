//! Thawing: memory is taken from holds, or filled by the engine (small objects here), and given to criu as descriptors.

use crate::criu;
use crate::freeze::digest_of_memory;
use crate::manifest::{
    self, ALGORITHM, Held, ImageFile, MEMORY, Manifest, Memory, OpenMemory, Stored,
};
use crate::place::RunFolder;
use crate::work::for_each;
use dmafile::internal::folder::Folder;
use dmafile::internal::sync::lock;
use dmafile::internal::{Hasher, Verb};
use dmafile::{Algorithm, CancelToken, Error, Kind, Load, Result, Verify};
use dmafile_hold::{HeldFile, Shared};
use dmafile_sys::{Errno, errno, file, memfd, place};
use rustix::fs::{Mode, OFlags, SealFlags, SeekFrom};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, pidfd_open, pidfd_send_signal, waitpid,
};
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const WHAT: Verb = Verb::Thaw;
/// Interval at which criu and the token are checked.
const STEP: Duration = Duration::from_millis(5);
/// How long a killed process may take to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Memory up to this size is read in pieces and copied: a load takes longer to plan than to copy as much.
const SMALL: u64 = 16 << 20;
/// How much of an image is read at once, and what that is aligned to for direct I/O.
const PIECE: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The name of the file with the ID of a root.
const PID: &str = "pid";
/// A builder for a thaw: the folder of images, and how to run criu.
#[must_use = "nothing is thawed before `run`"]
pub struct Thaw {
    from: PathBuf,
    wait: Duration,
    options: Vec<OsString>,
    cancel: CancelToken,
}

/// Held memory, and whether a holder had it; otherwise it was loaded.
type Source = (dmafile_hold::Held, bool);

/// Processes that run again. They are children of this process, if that still exists.
#[derive(Debug)]
#[must_use = "it says which processes run"]
pub struct Thawed {
    pids: Vec<u32>,
    taken: usize,
    loaded: usize,
    /// Counted by the holder, or passed on by this process, until they end.
    _held: Vec<dmafile_hold::Held>,
}

/// The roots of thawed processes, by descriptors, because their IDs can be used again when they have ended.
#[derive(Debug)]
pub struct Roots(Vec<OwnedFd>);

impl Roots {
    /// Sends a signal, by its number, to those that have not ended.
    pub fn signal(&self, number: i32) {
        if let Some(signal) = Signal::from_named_raw(number) {
            for root in &self.0 {
                // ESRCH if it has ended.
                let _ = pidfd_send_signal(root, signal);
            }
        }
    }
}

impl Thawed {
    /// The process IDs of the roots, in the order in which they were frozen.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// Number of holds that memory was taken from.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Number of held files that had to be loaded again, because nothing held them.
    pub fn loaded(&self) -> usize {
        self.loaded
    }

    /// The roots, for signals.
    pub fn roots(&self) -> Roots {
        let open = |&pid: &u32| {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            pidfd_open(pid, PidfdFlags::empty()).ok()
        };
        Roots(self.pids.iter().filter_map(open).collect())
    }

    /// Waits until all of them have ended; returns the exit status of the last root, as a shell does: 128 and the
    /// signal's number, if a signal ended it.
    pub fn wait(self) -> i32 {
        let mut last = 0;
        for &pid in &self.pids {
            if let Some(status) = exit_of(pid) {
                let signal = || status.terminating_signal().map(|signal| 128 + signal);
                last = status.exit_status().or_else(signal).unwrap_or(0);
            }
        }
        last
    }
}

/// A criu that restores a tree, and waits for an answer before it lets the processes run.
struct Restoring {
    pid: u32,
    run: RunFolder,
    child: Child,
    is_over: bool,
}

impl Restoring {
    /// Waits until the processes could run.
    fn ready(&mut self, cancel: &CancelToken) -> Result<()> {
        while !self.run.is_asked() {
            if cancel.is_cancelled() {
                return Err(Error::cancelled(WHAT, format!("process {}", self.pid)));
            }
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(STEP),
                Ok(Some(status)) => return Err(self.failed(&status)),
                Err(error) => return Err(Error::os(WHAT, errno(error)).at("criu")),
            }
        }
        Ok(())
    }

    /// Lets them run; returns the ID of the root.
    fn run(mut self) -> Result<u32> {
        let failed = |error: std::io::Error| Error::os(WHAT, errno(error)).at("criu");
        self.run.allow().map_err(failed)?;
        self.is_over = true;
        let status = self.child.wait().map_err(failed)?;
        if !status.success() {
            return Err(self.failed(&status));
        }
        Ok(self.root())
    }

    /// The ID of the root here, which is another one in a PID namespace.
    fn root(&self) -> u32 {
        let text = std::fs::read_to_string(self.run.path().join(PID)).unwrap_or_default();
        text.trim().parse().unwrap_or(self.pid)
    }

    fn failed(&self, status: &ExitStatus) -> Error {
        criu::failed(WHAT, self.run.path(), status).at(format!("process {}", self.pid))
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // It kills what it has restored.
        self.run.give_up();
        let _ = self.child.wait();
        // The root is a child of this process, so that nobody else could wait for its end.
        let root = i32::try_from(self.root()).ok().and_then(Pid::from_raw);
        let end = Instant::now() + PATIENCE;
        while matches!(waitpid(root, WaitOptions::NOHANG), Ok(None)) && Instant::now() < end {
            std::thread::sleep(STEP);
        }
    }
}

/// Waits for the end of a child.
fn exit_of(pid: u32) -> Option<WaitStatus> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    loop {
        match waitpid(pid, WaitOptions::empty()) {
            Err(Errno::INTR) => {}
            done => return Some(done.ok()??.1),
        }
    }
}

impl Thaw {
    /// Thaws the images in a folder that [`Freeze`](crate::Freeze) has written.
    pub fn of(folder: impl Into<PathBuf>) -> Self {
        Self {
            from: folder.into(),
            wait: Duration::from_secs(600),
            options: Vec::new(),
            cancel: CancelToken::new(),
        }
    }

    /// How long to wait for another process that is loading a file that nothing holds; default: ten minutes.
    pub fn wait(mut self, most: Duration) -> Self {
        self.wait = most;
        self
    }

    /// Further options of `criu restore` (criu(8)).
    pub fn options(mut self, options: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.options.extend(options.into_iter().map(Into::into));
        self
    }

    /// Lets `token` cancel it, until the processes run.
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// Checks all images, gets all memory, and lets the processes run again.
    ///
    /// # Errors
    /// ENOENT without criu or images; EOPNOTSUPP if criu is too old; EPERM if other users can change
    /// the images; EBADMSG if an image is damaged; ESTALE if what a hold has, or the file that would be loaded in its
    /// place, is not what the processes had; what criu says, and the errors of [`Load::run`]. Nothing runs then, or has
    /// run.
    pub fn run(self) -> Result<Thawed> {
        criu::version(WHAT)?;
        let folder = Folder::open(&self.from)
            .map_err(|errno| Error::os(WHAT, errno).at(self.from.display().to_string()))?;
        // The processes get the rights that their images say.
        folder.trust()?;
        folder.trust_path()?;
        let manifest = Manifest::read(WHAT, &self.from)?;
        self.check_images(&manifest)?;
        let (held, memory) = self.held(&manifest)?;
        let stored = self.stored(&manifest)?;
        let mut restoring = Vec::new();
        for (number, tree) in manifest.trees.iter().enumerate() {
            let open = |file: &OpenMemory| {
                let fd = match file.memory {
                    Memory::Stored(at) => stored[at].as_fd(),
                    Memory::Held(at) => memory[at].as_fd(),
                };
                Ok((format!("/memfd:{}", file.key), opened(fd, file)?))
            };
            let mut files = tree.open.iter().map(open).collect::<Result<Vec<_>>>()?;
            for folder in &tree.folders {
                files.push((folder.key(), folder.put(WHAT)?));
            }
            let mut one = self.restore(number, tree.pid, &files)?;
            one.ready(&self.cancel)?;
            restoring.push(one);
        }
        // Nothing runs before all of them can.
        let pids = restoring.into_iter().map(Restoring::run);
        let pids = pids.collect::<Result<_>>()?;
        let taken = held.iter().filter(|one| one.1).count();
        Ok(Thawed {
            pids,
            taken,
            loaded: held.len() - taken,
            _held: held.into_iter().map(|(held, _)| held).collect(),
        })
    }

    /// Compares the images with their digests.
    fn check_images(&self, manifest: &Manifest) -> Result<()> {
        let mut all = Vec::new();
        for (number, tree) in manifest.trees.iter().enumerate() {
            let folder = self.from.join(manifest::folder_of(number));
            all.extend(
                tree.images
                    .iter()
                    .map(|image| (folder.join(&image.name), image)),
            );
        }
        for_each(WHAT, &all, &self.cancel, |(path, image)| check(path, image))
    }

    /// The held memory; whether each was taken, and descriptors of all files.
    fn held(&self, manifest: &Manifest) -> Result<(Vec<Source>, Vec<OwnedFd>)> {
        let mut sources: Vec<Source> = Vec::new();
        let mut memory = Vec::new();
        for one in &manifest.held {
            let failed = |errno: Errno| Error::os(WHAT, errno).at(one.name.clone());
            let known = sources
                .iter()
                .position(|(held, taken)| *taken && held.socket() == one.socket);
            let at = match known {
                Some(at) => at,
                None => {
                    sources.push(self.source(one)?);
                    sources.len() - 1
                }
            };
            let files = sources[at].0.files();
            let found = files.iter().find(|file| file.name == one.name);
            let found = found.ok_or_else(|| changed(one, "it has no file of this name"))?;
            compare(one, found)?;
            let fd = found.buffer.as_fd().ok_or_else(|| failed(Errno::NXIO))?;
            memory.push(file::dup(fd).map_err(failed)?);
        }
        Ok((sources, memory))
    }

    /// The hold of a file, or the file itself.
    fn source(&self, one: &Held) -> Result<Source> {
        let take = dmafile_hold::Held::take(&one.hold).socket(&one.socket);
        match take.cancel(self.cancel.clone()).run() {
            Ok(held) => Ok((held, true)),
            Err(error) if self.cancel.is_cancelled() => Err(error.of(WHAT)),
            // Nothing holds it, or not for this user.
            Err(_) => {
                let algorithm = algorithm(one)?;
                let shared = Shared::of([&one.file])
                    .wait(self.wait)
                    .cancel(self.cancel.clone());
                let held = shared
                    .verify(Verify::expect(algorithm, &one.digest)?)
                    .run()?;
                Ok((held, false))
            }
        }
    }

    /// Fills the stored memory, several objects at once.
    fn stored(&self, manifest: &Manifest) -> Result<Vec<OwnedFd>> {
        let filled: Vec<_> = manifest.stored.iter().map(|_| Mutex::new(None)).collect();
        let all: Vec<_> = manifest.stored.iter().zip(&filled).enumerate().collect();
        for_each(WHAT, &all, &self.cancel, |(number, (one, slot))| {
            let path = self.from.join(MEMORY).join(number.to_string());
            *lock(slot) = Some(fill(&path, one, &self.cancel)?);
            Ok(())
        })?;
        let filled = filled.into_iter();
        Ok(filled
            .filter_map(|slot| slot.into_inner().ok().flatten())
            .collect())
    }

    /// Lets criu restore a tree.
    fn restore(&self, number: usize, pid: u32, files: &[(String, OwnedFd)]) -> Result<Restoring> {
        let run = RunFolder::new(WHAT)?;
        let failed = |error: std::io::Error| Error::os(WHAT, errno(error)).at("criu");
        run.write_hook(WHAT, "post-restore")?;
        let images = self.from.join(manifest::folder_of(number));
        let mut command = criu::command("restore", &images, run.path());
        command.arg("--action-script").arg(run.hook());
        command.arg("--pidfile").arg(run.path().join(PID));
        command.args(["--restore-detached", "--restore-sibling"]);
        for (key, fd) in files {
            file::inherit(fd.as_fd()).map_err(|errno| Error::os(WHAT, errno))?;
            command
                .arg("--inherit-fd")
                .arg(format!("fd[{}]:{key}", fd.as_raw_fd()));
        }
        command.args(&self.options);
        Ok(Restoring {
            pid,
            child: command.spawn().map_err(failed)?,
            run,
            is_over: false,
        })
    }
}

/// Compares an image with its digest. criu reads it again afterwards, from the page cache.
fn check(path: &Path, image: &ImageFile) -> Result<()> {
    read(path, image.bytes, &image.digest, None)
}

/// Reads an image and compares it with its digest; copies it to memory, if there is some, which stays empty at holes. For
/// memory, it is read directly, even if it is in the page cache.
fn read(path: &Path, bytes: u64, digest: &str, to: Option<BorrowedFd<'_>>) -> Result<()> {
    let failed = |errno: Errno| Error::os(WHAT, errno).at(path.display().to_string());
    let damaged = || failed(Errno::BADMSG).with_why("the image is damaged");
    let (mut file, mut is_direct) = match to.map(|_| file::open(path, true)) {
        Some(Ok(file)) => (file, true),
        // This file system has no direct I/O, or it is left to the page cache.
        _ => (file::open(path, false).map_err(failed)?, false),
    };
    if file::stat(file.as_fd()).map_err(failed)?.size != bytes {
        return Err(damaged());
    }
    let mut hasher = Hasher::new(ALGORITHM, bytes);
    let piece = bytes.next_multiple_of(BLOCK).min(PIECE);
    // Btrfs reads through the page cache into memory whose pages are not present.
    let mut memory = vec![1; (piece + BLOCK) as usize];
    let skip = memory.as_ptr().align_offset(BLOCK as usize);
    let memory = &mut memory[skip..][..piece as usize];
    let mut at = 0;
    // Blocks of holes shorter than two are read, so that rounded ranges do not overlap.
    for (data, hole) in file::data(file.as_fd(), 0, bytes, 2 * BLOCK) {
        let data = data / BLOCK * BLOCK;
        let end = hole.next_multiple_of(BLOCK).min(bytes);
        hasher.zeros(data - at);
        at = data;
        while at < end {
            let most = (end - at).next_multiple_of(BLOCK).min(piece) as usize;
            let got = match file::read_at(file.as_fd(), &mut memory[..most], at) {
                // Larger blocks, or another file system below this one.
                Err(Errno::INVAL) if is_direct => {
                    file = file::open(path, false).map_err(failed)?;
                    is_direct = false;
                    continue;
                }
                got => got.map_err(failed)?.min((end - at) as usize),
            };
            if got == 0 {
                return Err(damaged());
            }
            hasher.update(&memory[..got]);
            if let Some(to) = to {
                let failed = |errno| failed(errno).with_why("its memory cannot be filled");
                file::pwrite_all(to, &memory[..got], at).map_err(failed)?;
            }
            at += got as u64;
        }
    }
    hasher.zeros(bytes - at);
    if hasher.hex() != digest {
        return Err(damaged());
    }
    Ok(())
}

fn changed(one: &Held, why: &str) -> Error {
    Error::os(WHAT, Errno::STALE)
        .at(format!("{}, hold {}", one.name, one.hold))
        .with_why(format!("it is not what the processes had: {why}"))
        .with_remedy("hold the file as it was when they were frozen")
}

fn algorithm(one: &Held) -> Result<Algorithm> {
    one.algorithm.parse().map_err(|_| {
        Error::os(WHAT, Errno::BADMSG)
            .at(one.name.clone())
            .with_why("its digest is of no known kind")
    })
}

/// Refuses memory that is not what the processes had.
fn compare(one: &Held, found: &HeldFile) -> Result<()> {
    let info = &found.info;
    if info.bytes != one.bytes {
        return Err(changed(one, "its size differs"));
    }
    let fd = found.buffer.as_fd();
    let seals = fd
        .and_then(|fd| memfd::seals(fd).ok())
        .unwrap_or(SealFlags::empty());
    if !info.sealed || !seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW) {
        return Err(changed(one, "it can be changed"));
    }
    let size = fd.and_then(|fd| file::stat(fd).ok()).map(|stat| stat.size);
    if size != Some(one.size) {
        return Err(changed(one, "the size of its memory differs"));
    }
    // The holder has computed it while it loaded, and nobody could change the memory since.
    let known = info
        .digest
        .as_ref()
        .filter(|digest| digest.algorithm == one.algorithm);
    let digest = match known {
        Some(digest) => digest.digest.clone(),
        None => digest_of_memory(found, algorithm(one)?)?,
    };
    if digest != one.digest {
        return Err(changed(one, "its digest differs"));
    }
    Ok(())
}

fn seals_of(one: &Stored) -> SealFlags {
    SealFlags::from_bits_retain(one.seals)
}

/// Makes an object of memory as it was.
fn fill(path: &Path, one: &Stored, cancel: &CancelToken) -> Result<OwnedFd> {
    let place = path.display().to_string();
    let failed = |errno: Errno| Error::os(WHAT, errno).at(place.clone());
    let mut flags = rustix::fs::MemfdFlags::CLOEXEC;
    flags |= rustix::fs::MemfdFlags::from_bits_retain(one.huge);
    // With this seal alone, it could not be sealed at all.
    flags.set(
        rustix::fs::MemfdFlags::ALLOW_SEALING,
        one.seals != SealFlags::SEAL.bits(),
    );
    let fd = rustix::fs::memfd_create(one.name.as_str(), flags).map_err(failed)?;
    memfd::resize(fd.as_fd(), one.bytes).map_err(failed)?;
    if one.bytes == 0 {
        // Nothing to fill it with.
    } else if one.bytes <= SMALL && one.huge == 0 {
        read(path, one.bytes, &one.digest, Some(fd.as_fd()))?;
    } else {
        let kind = format!("fd:{}", fd.as_raw_fd()).parse::<Kind>()?;
        let verify = Verify::expect(ALGORITHM, &one.digest)?;
        Load::new(path)
            .to(kind)
            .verify(verify)
            .cancel(cancel.clone())
            .run()?;
    }
    place::set_mode(fd.as_fd(), one.mode).map_err(failed)?;
    place::own(fd.as_fd(), (one.user, one.group)).map_err(failed)?;
    if seals_of(one) != SealFlags::SEAL {
        memfd::seal(fd.as_fd(), seals_of(one)).map_err(failed)?;
    }
    Ok(fd)
}

/// An open file of the memory, with its own position and flags.
fn opened(memory: BorrowedFd<'_>, open: &OpenMemory) -> Result<OwnedFd> {
    let failed = |errno: Errno| Error::os(WHAT, errno).at(open.key.clone());
    let flags = OFlags::from_bits_retain(open.flags) | OFlags::CLOEXEC;
    let fd = rustix::fs::open(place::link_of(memory), flags, Mode::empty()).map_err(failed)?;
    rustix::fs::seek(&fd, SeekFrom::Start(open.position)).map_err(failed)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// The bytes of an image, in which every third block of 64 KiB is a hole.
    fn bytes_of(size: usize) -> Vec<u8> {
        let byte = |at: usize| match at >> 16 {
            block if block % 3 == 1 => 0,
            _ => (at % 251) as u8 + 1,
        };
        (0..size).map(byte).collect()
    }

    #[test]
    fn small_memory_has_the_bytes_and_the_holes_of_its_image() {
        // A file system in memory may have no direct I/O.
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let folder = tempfile::tempdir_in(folder).unwrap();
            let path = folder.path().join("0");
            for size in [
                1, 4095, 4096, 4097, 65_537, 200_001, 1_048_575, 1_048_577, 3_400_003,
            ] {
                let bytes = bytes_of(size);
                let image = std::fs::File::create(&path).unwrap();
                image.set_len(size as u64).unwrap();
                for (number, block) in bytes.chunks(1 << 16).enumerate() {
                    if number % 3 != 1 {
                        image
                            .write_all_at(block, number as u64 * (1 << 16))
                            .unwrap();
                    }
                }
                image.sync_all().unwrap();
                let digest = digest_of(&bytes);
                let memory =
                    rustix::fs::memfd_create("0", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                memfd::resize(memory.as_fd(), size as u64).unwrap();
                read(&path, size as u64, &digest, Some(memory.as_fd())).unwrap();
                read(&path, size as u64, &digest, None).unwrap();
                let memory = std::fs::File::from(memory);
                let mut got = vec![9; size];
                // Reading a hole of a memfd by pread(2) allocates nothing.
                memory.read_exact_at(&mut got, 0).unwrap();
                assert_eq!(got, bytes, "{size}");
                let data = (0..size.div_ceil(4096))
                    .filter(|page| (page >> 4) % 3 != 1)
                    .count();
                let blocks = memory.metadata().unwrap().blocks() * 512;
                assert!(blocks <= data as u64 * 4096, "{size}: {blocks}, {data}");
                let other = digest_of(&bytes[1..]);
                for (length, digest) in [(size + 1, &digest), (size - 1, &digest), (size, &other)] {
                    let error = read(&path, length as u64, digest, None).unwrap_err();
                    assert!(error.to_string().contains("damaged (EBADMSG)"), "{error}");
                }
            }
        }
    }

    fn digest_of(bytes: &[u8]) -> String {
        let mut hasher = Hasher::new(ALGORITHM, bytes.len() as u64);
        hasher.update(bytes);
        hasher.hex()
    }
}
