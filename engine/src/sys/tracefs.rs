//! An instance of the kernel's tracing with probes of its own (Documentation/trace/ftrace.rst,
//! kprobetrace.rst), which is gone when it is dropped.
//!
//! An instance that a process has a file of open in cannot be removed (EBUSY), and the kernel closes
//! the files of one that is killed: so those that can be removed are left over.

use super::{Errno, errno, retry};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the names of all instances and of the groups of their probes begin with.
const PREFIX: &str = "dmafile_watch_";

/// Where tracefs is: by itself, or in debugfs.
pub(crate) fn root() -> Result<PathBuf, Errno> {
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

/// An instance, its probes, and the file that keeps others from removing it.
pub(crate) struct Instance {
    root: PathBuf,
    name: String,
    hold: Option<File>,
    probes: Vec<String>,
}

impl Instance {
    /// A new one; what killed processes left is removed first.
    pub(crate) fn new() -> Result<Self, Errno> {
        let root = root()?;
        let all = File::open(root.join("instances")).map_err(errno)?;
        // One that is made but not held yet is not left over.
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
                // A process of another container has the same number.
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

    /// Makes a probe `name`: `kind` is `p` or `r`, `what` the function and what to fetch. ENOENT where
    /// there is no such function, EINVAL where the kernel knows no such fetch.
    pub(crate) fn probe(&mut self, kind: char, name: &str, what: &str) -> Result<(), Errno> {
        let line = format!("{kind}:{}/{} {what}", self.name, own(name));
        append(&self.root.join("kprobe_events"), &line)?;
        self.probes.push(name.to_string());
        Ok(())
    }

    /// Sets a trigger of a probe.
    pub(crate) fn trigger(&self, probe: &str, trigger: &str) -> Result<(), Errno> {
        append(&self.event(probe).join("trigger"), trigger)
    }

    /// Switches all probes on, or off.
    pub(crate) fn switch(&self, on: bool) -> Result<(), Errno> {
        for probe in &self.probes {
            append(
                &self.event(probe).join("enable"),
                if on { "1" } else { "0" },
            )?;
        }
        Ok(())
    }

    /// The histogram of a probe.
    pub(crate) fn histogram(&self, probe: &str) -> Result<String, Errno> {
        let bytes = fs::read(self.event(probe).join("hist")).map_err(errno)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// How many hits of its probes the kernel had to leave out.
    pub(crate) fn missed(&self) -> Result<u64, Errno> {
        let text = fs::read_to_string(self.root.join("kprobe_profile")).map_err(errno)?;
        let probes: Vec<_> = self.probes.iter().map(|probe| own(probe)).collect();
        Ok(misses(&text, &probes))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // There is nobody to tell in a drop: what stays is removed by the next one.
        let _ = self.switch(false);
        self.hold = None;
        let _ = fs::remove_dir(self.folder());
        for probe in &self.probes {
            let _ = remove_probe(&self.root, &format!("{}/{}", self.name, own(probe)));
        }
    }
}

/// What a probe is called: the table of misses has no groups.
fn own(probe: &str) -> String {
    format!("{probe}_{}", std::process::id())
}

/// The third column is misses, of the probes in the first one.
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

/// Removes instances that nobody holds, and the probes of none.
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

/// Group and name of a probe that such an instance has made: `r10:GROUP/NAME FUNCTION…`.
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
        // Switched off a moment ago.
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
    fn only_what_such_instances_made_is_theirs() {
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
