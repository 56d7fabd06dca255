//! The pins on the memory of one file: its pages in the page cache, or those of a memfd.

use super::holders::{Maker, PinHolder};
use super::{Process, ended, hidden, pins};
use dmafile::internal::lossy;
use dmafile::{Error, Result};
use dmafile_sys::{Errno, file, map::Mapping, map::page_size, memfd, process};
use rustix::fs::{FileType, SealFlags};
use serde::Serialize;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// What pins a file's memory, as far as the kernel reports it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct FilePins {
    /// The requested file.
    #[serde(serialize_with = "lossy")]
    pub file: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Major and minor number of its file system in hexadecimal, as in `/proc/PID/maps`.
    pub device: String,
    /// Its inode.
    pub inode: u64,
    /// The processes that map some of it.
    pub mapped: Vec<Mapper>,
    /// What certainly pins some of it: registered buffers inside its mappings, with the bytes that
    /// belong to the file.
    pub holders: Vec<PinHolder>,
    /// What might pin some of it: the kernel does not say whose memory it is.
    pub possible: Vec<PinHolder>,
    /// Why there cannot be a udmabuf over it; None if there can.
    pub no_udmabuf: Option<&'static str>,
    /// Number of processes that could not be inspected.
    pub unreadable: u64,
}

/// A process that maps some of a file.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Mapper {
    /// Its process ID.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its real user ID.
    pub uid: u32,
    /// Bytes of its mappings.
    pub bytes: u64,
}

/// The file whose memory is inspected.
pub(super) struct InspectedFile {
    pub device: String,
    pub inode: u64,
    pub bytes: u64,
    no_udmabuf: Option<&'static str>,
}

/// Looks for what pins the memory of a regular file or a memfd (`/proc/PID/fd/N`).
///
/// Registered buffers are found through the mappings that contain them, so not after the file has been
/// unmapped. The kernel does not report which memfd a udmabuf is over; [`pages`](super::pages())
/// inspects the pages themselves.
///
/// # Errors
/// Those of open(2), EINVAL if it is not a regular file, and any error of reading `/proc`.
pub fn of_file(path: &Path) -> Result<FilePins> {
    let target = InspectedFile::open(path)?;
    let all = pins(None)?;
    let mut found = FilePins {
        file: path.to_path_buf(),
        bytes: target.bytes,
        device: target.device,
        inode: target.inode,
        mapped: Vec::new(),
        holders: Vec::new(),
        possible: Vec::new(),
        no_udmabuf: target.no_udmabuf,
        unreadable: 0,
    };
    for pid in super::visible()? {
        let folder = process::folder(pid);
        let looked = process::status(&folder).and_then(|status| {
            let maps = process::maps(&folder)?;
            Ok((status, maps))
        });
        match looked {
            Ok((status, maps)) => {
                let looked_at = all.processes.iter().find(|process| process.pid == pid);
                found.look(&status, &maps, looked_at);
            }
            Err(errno) if ended(errno) => {}
            Err(errno) if hidden(errno) => found.unreadable += 1,
            Err(errno) => return Err(super::failed(pid, errno)),
        }
    }
    found.mapped.sort_unstable_by_key(|mapper| mapper.pid);
    let maps = |pid| found.mapped.iter().any(|mapper| Some(mapper.pid) == pid);
    let possible = all.holders.into_iter().filter(|holder| match holder.by {
        Maker::Udmabuf => found.no_udmabuf.is_none(),
        Maker::Vfio | Maker::Rdma | Maker::AfXdp => maps(holder.pid),
        _ => false,
    });
    found.possible = possible.collect();
    Ok(found)
}

impl FilePins {
    fn look(
        &mut self,
        status: &process::Status,
        maps: &[process::MapsLine],
        process: Option<&Process>,
    ) {
        let is_ours = |map: &&process::MapsLine| {
            map.inode == self.inode && map.inode != 0 && map.device == self.device
        };
        let ours: Vec<_> = maps.iter().filter(is_ours).collect();
        if ours.is_empty() {
            return;
        }
        self.mapped.push(Mapper {
            pid: status.pid,
            name: status.name.clone(),
            uid: status.uid,
            bytes: ours.iter().map(|map| map.end - map.start).sum(),
        });
        let rings = process.and_then(|process| process.rings.as_deref());
        let buffers = rings
            .unwrap_or_default()
            .iter()
            .flat_map(|ring| &ring.buffers);
        let common: Vec<u64> = buffers
            .flatten()
            .map(|buffer| {
                ours.iter()
                    .map(|map| map.common(buffer.address, buffer.bytes))
                    .sum()
            })
            .filter(|bytes| *bytes > 0)
            .collect();
        if !common.is_empty() {
            self.holders.push(PinHolder {
                pid: Some(status.pid),
                name: Some(status.name.clone()),
                uid: Some(status.uid),
                count: common.len() as u64,
                ..PinHolder::of(&[], Maker::IoUring, Some(common.iter().sum()))
            });
        }
    }
}

impl InspectedFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let place = path.to_string_lossy();
        let failed = |errno| Error::os("cannot list the pins of", errno).at(&*place);
        let fd = file::open(path, false).map_err(failed)?;
        let stat = file::stat(fd.as_fd()).map_err(failed)?;
        if stat.kind != FileType::RegularFile {
            return Err(failed(Errno::INVAL)
                .with_why("is not a regular file or memfd")
                .with_remedy("name a file, a process, or /proc/PID/fd/N of a memfd"));
        }
        let (major, minor, inode) = stat.identity;
        // On some file systems (Btrfs, overlayfs) stat(2) reports other numbers than mappings have.
        let (device, inode) = as_mapped(fd.as_fd(), stat.size)
            .unwrap_or_else(|| (format!("{major:02x}:{minor:02x}"), inode));
        Ok(Self {
            device,
            inode,
            bytes: stat.size,
            no_udmabuf: no_udmabuf(fd.as_fd()),
        })
    }
}

/// Device and inode of a file, from the line in `maps` for a mapping of it.
fn as_mapped(fd: BorrowedFd<'_>, size: u64) -> Option<(String, u64)> {
    // A mapping of hugetlb pages must be a multiple of their size; but for those stat is right anyway.
    let len = size.min(page_size()) as usize;
    let mapping = Mapping::shared(fd, len, 1, false)
        .ok()
        .filter(|_| size > 0)?;
    let start = mapping.region().address();
    let maps = process::maps(Path::new("/proc/self")).ok()?;
    let line = maps.into_iter().find(|map| map.start == start)?;
    Some((line.device, line.inode))
}

/// Why the kernel cannot create a udmabuf over this file, if so.
fn no_udmabuf(fd: BorrowedFd<'_>) -> Option<&'static str> {
    match memfd::seals(fd) {
        Err(_) => Some("it is not a memfd"),
        Ok(seals) if !seals.contains(SealFlags::SHRINK) => {
            Some("it is not sealed against shrinking (F_SEAL_SHRINK)")
        }
        Ok(seals) if seals.contains(SealFlags::WRITE) => {
            Some("it is sealed against writing (F_SEAL_WRITE)")
        }
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_memfd_and_its_mapping_have_the_same_device_and_inode() {
        let fd = memfd::create("target", false).unwrap();
        memfd::resize(fd.as_fd(), 3 * page_size()).unwrap();
        let path = PathBuf::from(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&fd)
        ));
        let mapping = Mapping::shared(fd.as_fd(), 3 * page_size() as usize, 1, true).unwrap();
        let target = InspectedFile::open(&path).unwrap();
        let maps = process::maps(Path::new("/proc/self")).unwrap();
        let line = maps
            .iter()
            .find(|map| map.start == mapping.region().address())
            .unwrap();
        assert_eq!((&target.device, target.inode), (&line.device, line.inode));
        assert_eq!(
            target.no_udmabuf,
            Some("it is not sealed against shrinking (F_SEAL_SHRINK)")
        );
        memfd::seal(fd.as_fd(), SealFlags::SHRINK).unwrap();
        assert_eq!(InspectedFile::open(&path).unwrap().no_udmabuf, None);
        let found = of_file(&path).unwrap();
        let own = found
            .mapped
            .iter()
            .find(|mapper| mapper.pid == std::process::id());
        assert_eq!(own.map(|mapper| mapper.bytes), Some(3 * page_size()));
    }

    #[test]
    fn folders_are_refused_and_other_files_have_no_udmabufs() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            InspectedFile::open(dir.path())
                .err()
                .unwrap()
                .raw_os_error(),
            Some(22)
        );
        let file = dir.path().join("empty");
        fs::write(&file, "").unwrap();
        assert_eq!(
            InspectedFile::open(&file).unwrap().no_udmabuf,
            Some("it is not a memfd")
        );
    }
}
