//! What a holder has: descriptors of memory, and the description of each.

use super::identity::FileIdentity;
use super::protocol::{Digest, HeldInfo, MOST_DESCRIPTORS};
use dmafile::{Buffer, Error, MemoryKind, Result};
use dmafile_sys::{Errno, file, memfd, socket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// The files of a hold.
pub(super) struct Set {
    pub name: String,
    pub members: Vec<Member>,
    /// When they were loaded, in seconds since 1970.
    pub since: u64,
}

/// One of them.
pub(super) struct Member {
    pub info: HeldInfo,
    /// The descriptors to send.
    pub fds: Vec<OwnedFd>,
}

/// The current time, in seconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Set {
    /// The files from index `from` on that fit into one answer: at least one, if there is one.
    pub(super) fn batch(&self, from: usize) -> &[Member] {
        let rest = self.members.get(from..).unwrap_or_default();
        let mut sum = 0;
        let fits = rest.iter().take_while(|member| {
            sum += member.fds.len();
            sum <= MOST_DESCRIPTORS
        });
        let count = fits.count().max(1).min(rest.len());
        &rest[..count]
    }
}

impl Member {
    /// A file in a filled buffer. Its size is sealed, and unless it is `writable` its bytes, too, as far
    /// as memory of its kind can be sealed.
    pub(super) fn new(
        path: PathBuf,
        identity: FileIdentity,
        buffer: &mut Buffer,
        pages: &str,
        digest: Option<Digest>,
        writable: bool,
    ) -> Result<Self> {
        let is_memfd = *buffer.kind() == MemoryKind::Memfd;
        let sealed = is_memfd && !writable;
        if sealed {
            buffer.seal()?
        } else {
            buffer.enter_forks()
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let info = HeldInfo {
            name: name.into_owned(),
            file_bytes: HeldInfo::bytes_of(&path),
            kind: buffer.kind().clone(),
            pages: pages.to_string(),
            bytes: buffer.len(),
            offset: buffer.offset(),
            sealed,
            identity,
            digest,
            changed: Some(false),
            descriptors: 0,
            superseded: Vec::new(),
            file: path,
        };
        Self::of(info, buffer)
    }

    /// The same for a buffer that `info` describes.
    pub(super) fn of(mut info: HeldInfo, buffer: &Buffer) -> Result<Self> {
        let failed = |errno| Error::os("cannot hold", errno).at(info.file.display().to_string());
        let mut all: Vec<BorrowedFd<'_>> = buffer.dma_bufs().iter().map(|one| one.fd).collect();
        if all.is_empty() {
            all.extend(buffer.as_fd());
        }
        if all.len() > socket::MOST {
            let why = format!(
                "it consists of {} dma-bufs, and a message carries 253",
                all.len()
            );
            return Err(failed(Errno::TOOBIG)
                .with_why(why)
                .with_remedy("raise size_limit_mb of udmabuf"));
        }
        let own = |fd: BorrowedFd<'_>| {
            if info.kind == MemoryKind::Memfd {
                seal_seals(fd, info.sealed)
            } else {
                file::dup(fd)
            }
        };
        let fds: Result<Vec<_>, Errno> = all.into_iter().map(own).collect();
        let fds = fds.map_err(failed)?;
        info.descriptors = fds.len();
        Ok(Self { info, fds })
    }

    /// Its description now.
    pub(super) fn now(&self, changed: Option<bool>) -> HeldInfo {
        HeldInfo {
            changed,
            ..self.info.clone()
        }
    }

    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd)
    }
}

/// A descriptor of a memfd to send, which accepts no further seals. A sealed memfd is sent open for
/// reading only: kernels before 6.7 refuse a shared mapping of it that could become writable.
fn seal_seals(fd: BorrowedFd<'_>, sealed: bool) -> Result<OwnedFd, Errno> {
    match memfd::seal(fd, rustix::fs::SealFlags::SEAL) {
        // It already has all seals, or was received open for reading.
        Ok(()) | Err(Errno::PERM) => {}
        Err(errno) => return Err(errno),
    }
    if sealed {
        // Without /proc there is no read-only descriptor.
        memfd::read_only(fd).or_else(|_| file::dup(fd))
    } else {
        file::dup(fd)
    }
}
