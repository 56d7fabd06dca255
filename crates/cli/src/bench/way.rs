//! The candidates that are compared, and one run of one of them.

use crate::Failure;
use crate::output::write_json;
use clap::{Parser, ValueEnum};
use dmafile::{Load, Loaded, facts::Host};
use memmap2::{Advice, MmapMut};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use vm_memory::mmap::MmapRegion;
use vm_memory::{FileOffset, ReadVolatile, VolatileMemory, VolatileMemoryError};
use xxhash_rust::xxh3::Xxh3;

/// The word with which the command starts itself. Not a subcommand, so that help does not
/// show it.
pub(crate) const WORD: &str = "bench-run";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    /// dmafile, into a memfd.
    Dmafile,
    /// read(2) into the mapping of a memfd: what most programs do that share what they read.
    Memfd,
    /// read(2) into private memory on huge pages: the fastest simple method.
    Private,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Dmafile, Self::Memfd, Self::Private];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Dmafile => "dmafile",
            Self::Memfd => "memfd",
            Self::Private => "private",
        }
    }

    /// A description.
    pub(super) fn describe(self, host: &Host) -> String {
        let size = |huge| if huge { "huge" } else { "base" };
        let is = |setting: &Option<String>, words: &[&str]| {
            let setting = setting.as_deref();
            setting.is_some_and(|setting| words.contains(&setting))
        };
        match self {
            Self::Dmafile => "dmafile into a memfd".to_string(),
            Self::Memfd => {
                let huge = is(&host.shmem_thp, &["always", "within_size", "force"]);
                format!("read() into a memfd, {} pages", size(huge))
            }
            Self::Private => {
                let huge = is(&host.thp, &["always", "madvise"]);
                format!("read() into private memory, {} pages", size(huge))
            }
        }
    }
}

/// The result of one run, as its process reports it.
#[derive(Deserialize, Serialize)]
pub(super) struct Run {
    /// From before the file is opened until every byte is in memory.
    pub(super) seconds: f64,
    /// CPU time of all threads of the process during that time.
    pub(super) cpu_seconds: f64,
    /// Maximum resident memory of the process; null if /proc does not report it.
    peak_bytes: Option<u64>,
    /// The method that dmafile chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pages: Option<String>,
    /// XXH3 of the loaded bytes, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<String>,
}

/// `dmafile bench-run`, which only [`super::run`] calls.
#[derive(Debug, Parser)]
#[command(name = "dmafile bench-run")]
struct Args {
    way: Way,
    path: PathBuf,
    bytes: u64,
    #[arg(long)]
    digest: bool,
}

/// Runs one candidate once, and prints the result.
pub(crate) fn run(args: impl Iterator<Item = OsString>) -> Result<u8, Failure> {
    let args = Args::try_parse_from(args).map_err(|error| Failure::usage(&error.to_string()))?;
    let place = args.path.display().to_string();
    let failed = |error: io::Error| Failure::os("cannot measure", &place, &error, "");
    let clock = Clock::start();
    let run = match args.way {
        Way::Dmafile => {
            let Loaded { buffer, report, .. } = Load::new(&args.path).check_memory(false).run()?;
            let mut run = clock.stop();
            run.method = Some(report.method.to_string());
            run.pages = Some(report.pages);
            if args.digest {
                let (offset, memory) = (buffer.offset(), File::from(buffer.into_fd()?));
                run.digest = Some(digest_of(&memory, offset, args.bytes).map_err(failed)?);
            }
            run
        }
        Way::Memfd => {
            let (memory, mapping) = read_into_memfd(&args.path, args.bytes).map_err(failed)?;
            let mut run = clock.stop();
            drop(mapping);
            if args.digest {
                run.digest = Some(digest_of(&memory, 0, args.bytes).map_err(failed)?);
            }
            run
        }
        Way::Private => {
            let memory = read_into_private(&args.path, args.bytes).map_err(failed)?;
            let mut run = clock.stop();
            run.digest = args.digest.then(|| {
                let mut hash = Xxh3::new();
                hash.update(&memory);
                format!("{:016x}", hash.digest())
            });
            run
        }
    };
    write_json(&run)
}

fn read_into_memfd(path: &Path, bytes: u64) -> io::Result<(File, MmapRegion)> {
    let mut file = File::open(path)?;
    let memory = File::from(memfd_create("dmafile-bench", MemfdFlags::CLOEXEC)?);
    ftruncate(&memory, bytes)?;
    let whole = FileOffset::new(memory.try_clone()?, 0);
    let mapping = MmapRegion::<()>::from_file(whole, bytes as usize).map_err(io::Error::other)?;
    file.read_exact_volatile(&mut mapping.as_volatile_slice())
        .map_err(|error| match error {
            VolatileMemoryError::IOError(error) => error,
            other => io::Error::other(other),
        })?;
    Ok((memory, mapping))
}

fn read_into_private(path: &Path, bytes: u64) -> io::Result<MmapMut> {
    let mut file = File::open(path)?;
    let mut memory = MmapMut::map_anon(bytes as usize)?;
    // Only advice: base pages work, too.
    let _ = memory.advise(Advice::HugePage);
    file.read_exact(&mut memory)?;
    Ok(memory)
}

/// XXH3 of the contents of a memfd, read with pread().
fn digest_of(memory: &File, mut offset: u64, mut left: u64) -> io::Result<String> {
    let mut hash = Xxh3::new();
    let mut step = vec![0; 1 << 20];
    while left > 0 {
        let len = left.min(step.len() as u64);
        let step = &mut step[..len as usize];
        memory.read_exact_at(step, offset)?;
        hash.update(step);
        (offset, left) = (offset + len, left - len);
    }
    Ok(format!("{:016x}", hash.digest()))
}

struct Clock {
    begun: Instant,
    cpu: Timespec,
}

impl Clock {
    fn start() -> Self {
        Self {
            cpu: clock_gettime(ClockId::ProcessCPUTime),
            begun: Instant::now(),
        }
    }

    fn stop(&self) -> Run {
        let seconds = self.begun.elapsed().as_secs_f64();
        let cpu = clock_gettime(ClockId::ProcessCPUTime) - self.cpu;
        Run {
            seconds,
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            peak_bytes: peak(),
            method: None,
            pages: None,
            digest: None,
        }
    }
}

/// `VmHWM` of `/proc/self/status`: getrusage(2) would include the process before exec.
fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}
