//! The file that is loaded, and what the page cache has of it.

use super::{cancelled, each_step};
use crate::Failure;
use dmafile::facts::{self, Host};
use dmafile::{CancelToken, Load, Method, Plan};
use indicatif::BinaryBytes;
use rustix::fs::{Advice, fadvise, fdatasync};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use xxhash_rust::xxh3::Xxh3;

/// What the page cache has of the file when a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Cold,
    Warm,
}

impl State {
    pub(super) const ALL: [Self; 2] = [Self::Cold, Self::Warm];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }

    /// Why a state cannot be reached.
    pub(super) fn excuse(self) -> &'static str {
        match self {
            Self::Cold => "the page cache keeps the file, which may be mapped or locked elsewhere",
            Self::Warm => "the page cache does not keep the file, memory may be short",
        }
    }
}

pub(super) struct Subject {
    /// Its name for messages.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Bytes that are not in holes.
    data: u64,
    pub(super) facts: facts::File,
    file: File,
    path: PathBuf,
    /// A temporary file without a name.
    own: bool,
}

impl Subject {
    /// An existing file.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let name = dmafile::internal::one_line(&path.to_string_lossy());
        // Before it is opened, because opening a FIFO would block.
        facts::File::probe(path)?;
        let file =
            File::open(path).map_err(|error| Failure::os("cannot open", &name, &error, ""))?;
        Self::of(name, file, path.to_path_buf(), false)
    }

    fn of(name: String, file: File, path: PathBuf, own: bool) -> Result<Self, Failure> {
        let facts = facts::File::probe(&path)?;
        let mut subject = Self {
            name,
            bytes: facts.size,
            data: facts.size,
            facts,
            file,
            path,
            own,
        };
        if let Some(plan) = subject.plan()? {
            subject.data = plan.to_read + plan.to_copy;
        }
        Ok(subject)
    }

    /// A temporary file of incompressible bytes. Its name is removed before the first byte is
    /// written, so it disappears when this process ends in any way.
    pub(super) fn make(
        dir: &Path,
        bytes: u64,
        host: &Host,
        token: &CancelToken,
    ) -> Result<Self, Failure> {
        let name = format!(
            "a file of {} in {}",
            BinaryBytes(bytes),
            dmafile::internal::one_line(&dir.to_string_lossy())
        );
        if bytes == 0 {
            return Err(Failure::usage("--size: 0 is out of range: at least 1"));
        }
        enough_memory(&name, bytes, host)?;
        let failed = |error| {
            let remedy = "choose another folder (--dir), or a smaller file (--size)";
            Failure::os("cannot write", &name, &error, remedy)
        };
        let hidden = dir.join(format!(".dmafile-bench-{}", std::process::id()));
        let mut options = File::options();
        let mut file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&hidden)
            .map_err(failed)?;
        fs::remove_file(&hidden).map_err(failed)?;
        fill(&mut file, bytes, token, &name, failed)?;
        fdatasync(&file).map_err(|errno| failed(errno.into()))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Self::of(name, file, path, true)
    }

    /// Checks that its bytes fit into the page cache and a buffer at the same time.
    pub(super) fn fits(&self, host: &Host) -> Result<(), Failure> {
        enough_memory(&self.name, self.bytes, host)
    }

    /// Its path in a child, and the stdin that this may need.
    pub(super) fn for_child(&self) -> io::Result<(PathBuf, Stdio)> {
        Ok(if self.own {
            (
                PathBuf::from("/proc/self/fd/0"),
                self.file.try_clone()?.into(),
            )
        } else {
            (self.path.clone(), Stdio::null())
        })
    }

    /// The digest of its bytes, read with read().
    pub(super) fn digest(&self, token: &CancelToken) -> Result<String, Failure> {
        let mut hash = Xxh3::new();
        each_step(self.reopened()?, &self.name, token, |step| {
            hash.update(step)
        })?;
        Ok(format!("{:016x}", hash.digest()))
    }

    /// Tries to bring the page cache into a state.
    pub(super) fn bring(&self, state: State, token: &CancelToken) -> Result<(), Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::os("cannot empty the page cache", &self.name, &errno.into(), "")
        };
        if self.cached()? == Some(self.cached_in(state)) {
            return Ok(());
        }
        match state {
            // Only clean pages can be dropped.
            State::Cold => fdatasync(&self.file)
                .and_then(|()| fadvise(&self.file, 0, None, Advice::DontNeed))
                .map_err(failed),
            State::Warm => each_step(self.reopened()?, &self.name, token, |_| {}),
        }
    }

    /// Bytes of it in the page cache, accurate to 1 MiB; None if the engine does not query it.
    pub(super) fn cached(&self) -> Result<Option<u64>, Failure> {
        Ok(self.plan()?.map(|plan| plan.to_copy))
    }

    /// Where its bytes are, according to the engine; None if it does not query that.
    fn plan(&self) -> Result<Option<Plan>, Failure> {
        if self.facts.direct_refused.is_some() {
            return Ok(None);
        }
        // A method with which the engine always queries it.
        let load = Load::new(&self.path).method(Method::Threads);
        Ok(Some(load.check_memory(false).plan()?))
    }

    /// How much of it the page cache has in a state; holes are never cached.
    pub(super) fn cached_in(&self, state: State) -> u64 {
        match state {
            State::Cold => 0,
            State::Warm => self.data,
        }
    }

    fn reopened(&self) -> Result<File, Failure> {
        File::open(&self.path).map_err(|error| Failure::os("cannot open", &self.name, &error, ""))
    }
}

fn enough_memory(name: &str, bytes: u64, host: &Host) -> Result<(), Failure> {
    let cgroup = host.cgroup.as_ref().map(|(room, _)| *room);
    let room = host.available.into_iter().chain(cgroup).min();
    let need = bytes.saturating_mul(2);
    match room.filter(|room| *room < need) {
        None => Ok(()),
        Some(room) => Err(Failure {
            line: format!(
                "not enough memory: {name}: {need} bytes are needed, for the page cache and for a \
                 buffer, and {room} are available (ENOMEM); measure a smaller file"
            ),
            status: 1,
        }),
    }
}

fn fill(
    file: &mut File,
    bytes: u64,
    token: &CancelToken,
    name: &str,
    failed: impl Fn(io::Error) -> Failure,
) -> Result<(), Failure> {
    // xorshift64
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut step = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        if token.is_cancelled() {
            return Err(cancelled(name));
        }
        for word in step.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let len = left.min(step.len() as u64);
        file.write_all(&step[..len as usize]).map_err(&failed)?;
        left -= len;
    }
    Ok(())
}
