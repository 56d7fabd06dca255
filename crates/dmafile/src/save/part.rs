//! Writes parts of memory to a growing file: the basis of recorders.

use super::SaveRequest;
use super::origin::{Opened, Origin};
use super::plan::{self, SavePlan};
use super::run::{SaveTransfer, checksum_beside};
use super::to::{To, cannot_open, cannot_sync};
use super::write::EdgeBytes;
use crate::control::CancelToken;
use crate::error::{Error, Result, Verb};
use crate::facts::Host;
use crate::flow::meter::Meter;
use crate::flow::run::Run;
use crate::folder::{Folder, split};
use crate::options::{Io, Method};
use crate::plan::Attempt;
use crate::reasons::Reasons;
use crate::request::How;
use crate::sync::lock;
use crate::sys::map::{Borrowed, Mapping, page_size};
use crate::sys::{Errno, file, memfd, place, retry};
use crate::verify::{Algorithm, Follower};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The checksum of a shorter part is computed after its write, because starting a thread would take
/// longer.
const BESIDE: u64 = 1 << 20;

/// How parts are written.
pub struct PartOptions {
    /// The method.
    pub method: Method,
    /// Direct or cached.
    pub io: Io,
    /// True if each part gets a checksum.
    pub checksum: bool,
    /// What the machine can do.
    pub host: Host,
}

/// Memory whose parts are written, opened once.
pub struct PartMemory {
    name: String,
    opened: Opened<'static>,
    /// The plan for parts that begin at this offset, modulo the grain of the file.
    plan: Mutex<Option<(u64, Arc<SavePlan>)>>,
}

impl PartMemory {
    /// Memory behind a descriptor, or a file.
    pub fn open(origin: &Origin<'static>) -> Result<Self> {
        let opened = Opened::open(origin, None).map_err(|error| error.of(Verb::Record))?;
        if opened.is_stream() {
            return Err(Error::os(Verb::Record, Errno::INVAL)
                .with_why("a pipe has no parts")
                .at(origin.to_string())
                .with_remedy("read it into memory and record that"));
        }
        // A child may record from it with a recorder of its own.
        opened.enter_forks();
        Ok(Self::new(origin.to_string(), opened))
    }

    /// The caller's memory.
    pub fn of_caller(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let opened = Opened::of_caller(Borrowed::owned(owner));
        Self::new(opened.place(0), opened)
    }

    fn new(name: String, opened: Opened<'static>) -> Self {
        Self {
            name,
            opened,
            plan: Mutex::new(None),
        }
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.opened.bytes.unwrap_or(0)
    }

    /// Writes a part of it at a multiple of the file's grain, padded with zeros to the next one; returns
    /// the CRC-32C of the part, if requested. Waits for devices that are still writing to the memory.
    pub fn write(
        &self,
        (at, len): (u64, u64),
        (to, offset): (&AppendFile, u64),
        how: &PartOptions,
    ) -> Result<Option<u32>> {
        let origin = self.opened.part(at, len);
        let cancel = CancelToken::new();
        let access = origin.begin(&cancel)?;
        let write = || self.write_all(&origin, len, (to, offset), how, &cancel);
        let sum = match how.checksum && len > 0 {
            true if len < BESIDE => write()
                .and_then(|()| checksum(&origin, len, || false))
                .map(Some),
            true => {
                let sum =
                    |over: &AtomicBool| checksum(&origin, len, || over.load(Ordering::Relaxed));
                let (wrote, sum) = checksum_beside(sum, write);
                wrote.and(sum).map(Some)
            }
            false => write().map(|()| None),
        };
        drop(access);
        let sum = sum?;
        match origin.cut_short(origin.start) {
            Some(error) => Err(error),
            None => Ok(sum),
        }
    }

    fn write_all(
        &self,
        origin: &Opened,
        len: u64,
        (to, offset): (&AppendFile, u64),
        how: &PartOptions,
        cancel: &CancelToken,
    ) -> Result<()> {
        let whole = len - len % to.grain();
        if whole > 0 {
            self.write_blocks(origin, whole, (to, offset), how, cancel)?;
        }
        if whole < len {
            let mut block = vec![0; to.grain() as usize];
            origin.copy_out(origin.start + whole, &mut block[..(len - whole) as usize])?;
            to.write_block(offset + whole, &block)?;
        }
        Ok(())
    }

    fn write_blocks(
        &self,
        origin: &Opened,
        whole: u64,
        (to, offset): (&AppendFile, u64),
        how: &PartOptions,
        cancel: &CancelToken,
    ) -> Result<()> {
        let plan = self.plan(origin, to, how)?;
        let first = plan.first();
        // Setting up a ring for one operation costs more than the write itself.
        if whole <= plan.block_of(first) && first.method == Method::Uring && first.direct {
            match to.write_from(origin, whole, offset) {
                // The fallbacks below find out why, and try other methods.
                Err(Errno::FAULT | Errno::INVAL | Errno::OPNOTSUPP | Errno::AGAIN) => {}
                done => return done.map_err(|errno| to.to.failed(offset, errno)),
            }
        }
        let run = Run {
            verb: Verb::Record,
            meter: Meter::new(Instant::now(), false, false, None),
            cancel,
            log: &Reasons::default(),
        };
        let runs = [(offset, offset + whole)];
        let transfer = SaveTransfer {
            verify: None,
            origin,
            to: &to.to,
            at: offset,
            plan: &plan,
            runs: &runs,
            run: &run,
        };
        let attempt = transfer.walk(runs.to_vec(), to.grain(), None, &EdgeBytes::default())?;
        if attempt != first {
            self.start_at(attempt);
        }
        Ok(())
    }

    fn plan(&self, origin: &Opened, to: &AppendFile, how: &PartOptions) -> Result<Arc<SavePlan>> {
        let phase = origin.start % to.grain();
        let mut known = lock(&self.plan);
        if let Some((known, plan)) = &*known
            && *known == phase
        {
            return Ok(Arc::clone(plan));
        }
        let wanted = SaveRequest {
            from: self.name.clone(),
            length: None,
            how: How {
                method: how.method,
                io: how.io,
                ..How::default()
            },
            sync: true,
        };
        let runs = [(0, origin.bytes.unwrap_or(0))];
        let log = Reasons::default();
        let decided = plan::decide(&wanted, origin, &to.to, &how.host, &runs, &log);
        let mut plan = decided.map_err(|error| error.of(Verb::Record))?;
        // What is written only once does not benefit from being registered.
        let once = |attempt: &Attempt| attempt.method != Method::Uring || !attempt.registered;
        if plan.methods.iter().any(once) {
            plan.methods.retain(once);
        }
        let plan = Arc::new(plan);
        *known = Some((phase, Arc::clone(&plan)));
        Ok(plan)
    }

    /// A method that was refused once is not tried for later parts.
    fn start_at(&self, attempt: Attempt) {
        if let Some((_, plan)) = &mut *lock(&self.plan) {
            let mut shorter = SavePlan::clone(plan);
            if let Some(first) = shorter.methods.iter().position(|other| *other == attempt) {
                shorter.methods.drain(..first);
            }
            *plan = Arc::new(shorter);
        }
    }
}

/// The CRC-32C of the first bytes of an origin, unless `over` says that it is not needed any more.
fn checksum(origin: &Opened, len: u64, over: impl Fn() -> bool) -> Result<u32> {
    let end = origin.start + len;
    let runs = [(origin.start, end)];
    let mut follower = Follower::new(Algorithm::Crc32c, len, origin.start, &runs);
    follower.advance(end, |at, into| origin.copy_out(at, into), over)?;
    let sum = u32::from_str_radix(&follower.hex(), 16);
    Ok(sum.expect("a CRC has eight hexadecimal digits"))
}

/// Opens the folder of a file.
pub fn folder_of(path: &Path) -> Result<Folder> {
    Folder::open(split(path).0).map_err(|errno| {
        cannot_open(errno)
            .of(Verb::Record)
            .at(path.display().to_string())
    })
}

/// A file that grows.
pub struct AppendFile {
    to: To,
}

impl AppendFile {
    /// A new file in this folder, with the last name of a path, marked as in use while it is open. EEXIST if it exists,
    /// EBUSY if that is in use.
    pub fn create(folder: &Folder, path: &Path) -> Result<Self> {
        let name = match path.file_name() {
            Some(name) if !path.as_os_str().as_encoded_bytes().ends_with(b"/") => name,
            _ => {
                return Err(Error::os(Verb::Record, Errno::ISDIR)
                    .at(path.display().to_string())
                    .with_remedy("name a file in it"));
            }
        };
        let to = To::new_file(path, folder, name).map_err(|error| error.of(Verb::Record))?;
        Ok(Self { to })
    }

    /// Every write begins and ends at a multiple of this.
    pub fn grain(&self) -> u64 {
        self.to.grain
    }

    /// Reserves space up to `end` and more, and sets the size: writes below that only change its bytes.
    pub fn reserve_ahead(&self, end: u64) -> Result<()> {
        self.to.reserve_ahead(end)
    }

    /// Space below this is reserved.
    pub fn reserved(&self) -> u64 {
        self.to.reserved()
    }

    /// Writes blocks from mapped memory.
    fn write_from(&self, origin: &Opened, len: u64, offset: u64) -> Result<(), Errno> {
        let region = origin.region().map_err(|_| Errno::INVAL)?;
        let fd = self.to.direct().map_err(|_| Errno::INVAL)?;
        let mut done = 0;
        while done < len {
            let (at, to) = (origin.start + done, offset + done);
            let wrote = retry(|| file::pwrite(fd, &region, at, len - done, to))?;
            let wrote = if done + wrote < len {
                wrote - wrote % self.grain()
            } else {
                wrote
            };
            if wrote == 0 {
                return Err(Errno::INVAL);
            }
            done += wrote;
        }
        Ok(())
    }

    /// Writes whole blocks from a temporary buffer.
    pub fn write_block(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let failed = |errno| self.to.failed(offset, errno);
        if let Ok(fd) = self.to.direct() {
            let align = self.grain().max(page_size()) as usize;
            let memory = Mapping::anon(bytes.len(), align).map_err(failed)?;
            let region = memory.region();
            region.copy_in(0, bytes);
            let len = bytes.len() as u64;
            match retry(|| file::pwrite(fd, &region, 0, len, offset)) {
                Ok(wrote) if wrote == len => return Ok(()),
                // The rest, or the error, comes from a write through the page cache.
                Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        file::pwrite_all(self.to.buffered(), bytes, offset).map_err(failed)
    }

    /// Waits until everything written is on the disk.
    pub fn sync(&self) -> Result<()> {
        self.to.sync()
    }

    /// As [`AppendFile::sync`], including the file's name.
    pub fn sync_with_name(&self, folder: &Folder) -> Result<()> {
        let synced = place::sync(self.to.buffered()).and_then(|()| match folder.listed() {
            Some(folder) => place::sync(folder),
            None => place::sync_all(self.to.buffered()),
        });
        synced.map_err(|errno| cannot_sync(errno).at(folder.path().display().to_string()))
    }

    /// Truncates it to `end`, which releases reserved space, and waits until that is on the disk.
    pub fn end_at(&self, end: u64) -> Result<()> {
        memfd::resize(self.to.buffered(), end).map_err(|errno| self.to.failed(end, errno))?;
        self.sync()?;
        self.to.leave_no_cache(&[(0, end)]);
        Ok(())
    }

    /// Removes the file of a recording that has not begun.
    pub fn remove(&self, folder: &Folder) {
        if let Some(name) = self.to.path().file_name() {
            let _ = place::unlink(folder.fd(), name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::meter::Phase;
    use crate::save::parts::OriginPart;
    use std::os::fd::AsFd;

    #[test]
    fn aligned_parts_are_written_from_where_they_are_at_any_offset() {
        const PART: u64 = 256 << 10;
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("to");
        let to = AppendFile::create(&folder_of(&path).unwrap(), &path).unwrap();
        if let Err(why) = to.to.direct() {
            eprintln!("SKIP: {why}");
            return;
        }
        let part = |byte| {
            let fd = memfd::create("part", false).unwrap();
            file::pwrite_all(fd.as_fd(), &[byte; PART as usize], 0).unwrap();
            OriginPart::fd(fd, 0, PART)
        };
        let memory = PartMemory::open(&Origin::Parts(vec![part(1), part(2)])).unwrap();
        let how = PartOptions {
            method: Method::Uring,
            io: Io::Direct,
            checksum: false,
            host: Host::probe(),
        };
        let plan = memory.plan(&memory.opened, &to, &how).unwrap();
        for at in [0, 1 << 20] {
            let runs = [(at, at + 2 * PART)];
            let run = Run {
                verb: Verb::Record,
                meter: Meter::new(Instant::now(), false, false, None),
                cancel: &CancelToken::new(),
                log: &Reasons::default(),
            };
            let transfer = SaveTransfer {
                verify: None,
                origin: &memory.opened,
                to: &to.to,
                at,
                plan: &plan,
                runs: &runs,
                run: &run,
            };
            let kept = EdgeBytes::default();
            transfer
                .walk(runs.to_vec(), to.grain(), None, &kept)
                .unwrap();
            assert_eq!(run.meter.phase(Phase::Copy).as_nanos(), 0, "at {at}");
            let all = std::fs::read(&path).unwrap();
            let (one, two) = all[at as usize..].split_at(PART as usize);
            assert!(one == [1; PART as usize] && two == [2; PART as usize]);
        }
    }
}
