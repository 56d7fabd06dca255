//! systemd's protocols: descriptors that it starts a service with (sd_listen_fds(3)), and notifications from
//! a service (sd_notify(3)).

use dmafile::{Error, Result};
use dmafile_sys::{Errno, file, socket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first descriptor (SD_LISTEN_FDS_START).
const FIRST: i32 = 3;

/// The descriptors that this process was started with, and their names. Only the first call returns them.
pub(super) fn inherited() -> Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").and_then(|count| i32::try_from(count).ok());
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut all = Vec::new();
    for number in FIRST..FIRST.saturating_add(count.unwrap_or(0)) {
        let fd = file::inherited(number).map_err(|errno| {
            Error::os("cannot use an inherited descriptor", errno)
                .at(format!("LISTEN_FDS, descriptor {number}"))
        })?;
        all.push((names.next().unwrap_or_default().to_string(), fd));
    }
    Ok(all)
}

/// A connection to the service manager.
#[derive(Clone)]
pub(super) struct Manager(PathBuf);

impl Manager {
    /// The manager that NOTIFY_SOCKET names.
    ///
    /// # Errors
    /// ENOENT if it is not set.
    pub(super) fn of_environment() -> Result<Self> {
        let name = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        name.map(|name| Self(name.into())).ok_or_else(|| {
            Error::new("cannot notify", "NOTIFY_SOCKET is not set")
                .with_errno(Errno::NOENT)
                .with_remedy("start it as a service with Type=notify")
        })
    }

    /// Sends lines, with descriptors attached.
    pub(super) fn tell(&self, lines: &str, fds: &[BorrowedFd<'_>]) -> Result<()> {
        socket::send_datagram(&self.0, lines.as_bytes(), fds)
            .map_err(|errno| Error::os("cannot notify", errno).at(self.0.display().to_string()))
    }

    /// Makes it keep a descriptor under a name, until [`Manager::forget`].
    pub(super) fn store(&self, name: &str, fd: impl AsFd) -> Result<()> {
        // FDPOLL=0, because a memfd never signals an event.
        let lines = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n");
        self.tell(&lines, &[fd.as_fd()])
    }

    /// Waits until it has done what it has been told (sd_notify_barrier(3)); not for ever.
    pub(super) fn wait(&self) -> Result<()> {
        const MOST: Duration = Duration::from_secs(30);
        let failed = |errno| Error::os("cannot notify", errno);
        let flags = rustix::pipe::PipeFlags::CLOEXEC;
        let (done, doing) = rustix::pipe::pipe_with(flags).map_err(failed)?;
        self.tell("BARRIER=1\n", &[doing.as_fd()])?;
        drop(doing);
        // It closes the descriptor, whether or not it knows the word.
        file::wait_readable(done.as_fd(), MOST)
            .map_err(failed)
            .map(drop)
    }

    /// Makes it close what it keeps under each of these names.
    pub(super) fn forget_all(&self, names: &[String]) -> Result<()> {
        names.iter().try_for_each(|name| self.forget(name))
    }

    /// Makes it close what it keeps under a name.
    pub(super) fn forget(&self, name: &str) -> Result<()> {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), &[])
    }
}
