//! An instance of the kernel's tracing with its own probes (Documentation/trace/ftrace.rst,
//! kprobetrace.rst), removed when it is dropped.
//!
//! An instance cannot be removed while a process has one of its files open (EBUSY), and the kernel
//! closes the files of a process that is killed: so instances that can be removed are leftovers.

use dmafile_sys::{Errno, errno, retry};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prefix of the names of all instances and of the groups of their probes.
const PREFIX: &str = "dmafile_watch_";

/// The mount of tracefs: a separate one, or in debugfs.
pub fn root() -> Result<PathBuf, Errno> {
    let places = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    let mut why = Errno::NOENT;
    for place in places.map(PathBuf::from) {
        match fs::metadata(place.join("kprobe_events")) {
            Ok(_) => return Ok(place),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => why = errno(error),
        }
    }
    Err(why)
}

/// An instance, its probes, and the open file that prevents its removal.
pub struct Instance {
    root: PathBuf,
    name: String,
    hold: Option<File>,
    probes: Vec<String>,
}

impl Instance {
    /// Creates an instance, after removing what killed processes have left.
    pub fn new() -> Result<Self, Errno> {
        let root = root()?;
        let all = File::open(root.join("instances")).map_err(errno)?;
        // An instance that has been created but not opened yet is not a leftover.
        retry(|| flock(&all, FlockOperation::LockExclusive))?;
        clear(&root)?;
        for number in 0.. {
            let name = format!("{PREFIX}{}_{number}", std::process::id());
            match fs::create_dir(root.join("instances").join(&name)) {
                Ok(()) => {
                    let mut made = Self {
                        root,
                        name,
                        hold: None,
                        probes: Vec::new(),
                    };
                    let pipe = made.folder().join("trace_pipe");
                    let mut options = OpenOptions::new();
                    options.read(true).custom_flags(libc::O_NONBLOCK);
                    made.hold = Some(options.open(pipe).map_err(errno)?);
                    return Ok(made);
                }
                // A process in another container has the same number.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 100 => {}
                Err(error) => return Err(errno(error)),
            }
        }
        unreachable!("the loop ends by itself")
    }

    fn folder(&self) -> PathBuf {
        self.root.join("instances").join(&self.name)
    }

    fn event(&self, probe: &str) -> PathBuf {
        self.folder()
            .join("events")
            .join(&self.name)
            .join(own(probe))
    }

    /// Creates a probe `name`: `kind` is `p` or `r`, `what` is the function and what to fetch. ENOENT
    /// if there is no such function, EINVAL if the kernel cannot fetch that.
    pub fn probe(&mut self, kind: char, name: &str, what: &str) -> Result<(), Errno> {
        let line = format!("{kind}:{}/{} {what}", self.name, own(name));
        append(&self.root.join("kprobe_events"), &line)?;
        self.probes.push(name.to_string());
        Ok(())
    }

    /// Sets a trigger on a probe.
    pub fn trigger(&self, probe: &str, trigger: &str) -> Result<(), Errno> {
        append(&self.event(probe).join("trigger"), trigger)
    }

    /// Enables or disables all probes.
    pub fn switch(&self, on: bool) -> Result<(), Errno> {
        for probe in &self.probes {
            append(
                &self.event(probe).join("enable"),
                if on { "1" } else { "0" },
            )?;
        }
        Ok(())
    }

    /// The histogram of a probe.
    pub fn histogram(&self, probe: &str) -> Result<String, Errno> {
        let bytes = fs::read(self.event(probe).join("hist")).map_err(errno)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Number of hits of its probes that the kernel missed.
    pub fn missed(&self) -> Result<u64, Errno> {
        let text = fs::read_to_string(self.root.join("kprobe_profile")).map_err(errno)?;
        let probes: Vec<_> = self.probes.iter().map(|probe| own(probe)).collect();
        Ok(misses(&text, &probes))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // A drop cannot report errors: the next instance removes what stays.
        let _ = self.switch(false);
        self.hold = None;
        let _ = fs::remove_dir(self.folder());
        for probe in &self.probes {
            let _ = remove_probe(&self.root, &format!("{}/{}", self.name, own(probe)));
        }
    }
}

/// The name of a probe: the table of misses has no groups.
fn own(probe: &str) -> String {
    format!("{probe}_{}", std::process::id())
}

/// The third column is the number of misses of the probe in the first one.
fn misses(profile: &str, probes: &[String]) -> u64 {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let ours = words
            .next()
            .is_some_and(|name| probes.iter().any(|probe| probe == name));
        ours.then(|| words.nth(1)?.parse::<u64>().ok()).flatten()
    };
    profile.lines().filter_map(of_line).sum()
}

/// Removes instances that are not in use, and probes without an instance.
fn clear(root: &Path) -> Result<(), Errno> {
    for entry in fs::read_dir(root.join("instances")).map_err(errno)? {
        let entry = entry.map_err(errno)?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            // EBUSY: it is in use.
            let _ = fs::remove_dir(entry.path());
        }
    }
    let probes = fs::read_to_string(root.join("kprobe_events")).map_err(errno)?;
    for (group, probe) in probes.lines().filter_map(owned) {
        if !root.join("instances").join(group).exists() {
            let _ = remove_probe(root, &format!("{group}/{probe}"));
        }
    }
    Ok(())
}

/// Group and name of a probe that such an instance has created: `r10:GROUP/NAME FUNCTION…`.
fn owned(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (group, rest) = rest.split_once('/')?;
    group.starts_with(PREFIX).then_some(())?;
    Some((group, rest.split(' ').next()?))
}

fn remove_probe(root: &Path, name: &str) -> Result<(), Errno> {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(10);
    let mut done = Ok(());
    for _ in 0..TRIES {
        done = append(&root.join("kprobe_events"), &format!("-:{name}"));
        // It was disabled only a moment ago.
        if done != Err(Errno::BUSY) {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    done
}

fn append(path: &Path, line: &str) -> Result<(), Errno> {
    let mut file = OpenOptions::new().append(true).open(path).map_err(errno)?;
    file.write_all(format!("{line}\n").as_bytes())
        .map_err(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_probes_of_dmafile_instances_are_owned() {
        let line = "r10:dmafile_watch_7_0/fast pin_user_pages_fast n=$retval:s32";
        assert_eq!(owned(line), Some(("dmafile_watch_7_0", "fast")));
        assert_eq!(owned("p:kprobes/mine do_sys_open"), None);
        assert_eq!(owned(""), None);
    }

    #[test]
    fn misses_of_other_probes_do_not_count() {
        let profile = "  fast                       4               2\n  \
                       slow                       1               9\n  x\n";
        assert_eq!(misses(profile, &["fast".to_string()]), 2);
    }
}
