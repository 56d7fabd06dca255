//! Properties of block devices, from /sys.

use super::Errno;
use super::host::{number, text};
use super::ioctl::{Argument, Opcode, request};
use rustix::fs::{FileType, fstat, major, minor};
use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// A block device that a file is or is stored on.
#[derive(Clone, Debug)]
pub struct BlockDevice {
    /// Its name, or that of a partition.
    name: String,
    /// The folder of the whole disk, with links resolved.
    disk: PathBuf,
}

impl BlockDevice {
    /// The device with this number; None if /sys has none, as for file systems without a block device.
    pub fn of((major, minor): (u32, u32)) -> Option<Self> {
        Self::at(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
    }

    fn at(link: &Path) -> Option<Self> {
        let folder = fs::canonicalize(link).ok()?;
        let name = folder.file_name()?.to_string_lossy().into_owned();
        let disk = if folder.join("partition").exists() {
            folder.parent()?.to_path_buf()
        } else {
            folder
        };
        Some(Self { name, disk })
    }

    /// As in `/dev`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Why it is not an NVMe namespace behind one controller on PCI; None if it is one.
    pub fn not_one_nvme(&self) -> Option<String> {
        let name = self.disk.file_name()?.to_string_lossy();
        let has = |what: &str| self.disk.join(what).exists();
        let what = match &name {
            _ if has("dm") => "is a device-mapper device",
            _ if has("md") => "is an MD array",
            _ if name.starts_with("loop") => "is a loop device",
            _ if !name.starts_with("nvme") => "is not an NVMe disk",
            // The head of a namespace that can have several paths has no controller, even with one path.
            _ if self
                .disk
                .components()
                .any(|part| part.as_os_str() == "nvme-subsystem") =>
            {
                "is a head of NVMe multipath (nvme_core.multipath=N on the kernel's command line avoids it)"
            }
            _ => match self.transport().as_deref() {
                Some("pcie") | None => return None,
                Some(other) => return Some(format!("{} is reached over {other}", self.name)),
            },
        };
        Some(format!("{} {what}", self.name))
    }

    /// Why a driver could not map buffers once for such a namespace, as far as /sys shows.
    pub fn namespace_refuses(&self) -> Option<String> {
        let attribute = |what: &str| text(self.disk.join(what));
        if number("/sys/module/nvme/parameters/premap") == Some(0) {
            return Some("the parameter nvme.premap is 0".to_string());
        }
        if attribute("queue/zoned").is_some_and(|zoned| zoned != "none") {
            return Some(format!("{} is zoned", self.name));
        }
        let format = attribute("integrity/format");
        let metadata = number(self.disk.join("metadata_bytes")).is_some_and(|bytes| bytes > 0);
        if metadata || format.is_some_and(|format| format != "none") {
            return Some(format!(
                "{} has metadata or protection information",
                self.name
            ));
        }
        None
    }

    /// Returns true if its memory accesses are translated by an IOMMU, with tables that each mapping changes.
    pub fn is_translated(&self) -> bool {
        // The disk's own folder has none, but its controller's has.
        let groups = self
            .disk
            .ancestors()
            .map(|folder| folder.join("iommu_group/type"));
        // "DMA" or "DMA-FQ"; "identity" does not translate.
        groups
            .filter_map(text)
            .next()
            .is_some_and(|kind| kind.starts_with("DMA"))
    }

    /// The transport of the controller of an NVMe namespace.
    fn transport(&self) -> Option<String> {
        text(self.disk.join("device").join("transport"))
            .or_else(|| text(self.disk.parent()?.join("transport")))
    }
}

/// What holds the bytes of a file, or of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// A file, by the number of its file system and its own.
    File((u32, u32), u64),
    /// A whole disk.
    Disk((u32, u32)),
}

/// What holds the bytes of a file or block device, and which byte of that is its first one: a partition is a part of a
/// disk, a loop device one of a file. What lies below the device mapper or a network is not known.
pub fn store(fd: BorrowedFd<'_>) -> Result<(Store, u64), Errno> {
    let pair = |device| (major(device), minor(device));
    let stat = fstat(fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return Ok((Store::File(pair(stat.st_dev), stat.st_ino), 0));
    }
    let (disk, start) = disk_of(pair(stat.st_rdev));
    let mut below = LoopInfo::default();
    if disk.0 != LOOP_MAJOR || request(fd, &mut below).is_err() {
        return Ok((Store::Disk(disk), start));
    }
    let start = start + below.offset;
    if below.rdevice == 0 {
        return Ok((Store::File(pair(below.device), below.inode), start));
    }
    let (disk, more) = disk_of(pair(below.rdevice));
    Ok((Store::Disk(disk), start + more))
}

/// The disk of a partition, and where on it the partition begins; of a disk, the disk itself.
fn disk_of(device: (u32, u32)) -> ((u32, u32), u64) {
    let whole = (device, 0);
    let folder = fs::canonicalize(format!("/sys/dev/block/{}:{}", device.0, device.1));
    let Some(folder) = folder.ok().filter(|at| at.join("partition").exists()) else {
        return whole;
    };
    let disk = text(folder.join("../dev")).and_then(|text| {
        let (major, minor) = text.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    // In sectors of 512 bytes, whatever those of the disk are.
    match (disk, number(folder.join("start"))) {
        (Some(disk), Some(start)) => (disk, start * 512),
        _ => whole,
    }
}

const LOOP_MAJOR: u32 = 7;

/// The first members of struct loop_info64 of linux/loop.h, and room for the others.
#[repr(C)]
#[derive(Default)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    rest: [u64; 25],
}

// SAFETY: LOOP_GET_STATUS64 writes a struct loop_info64, which has 232 bytes.
unsafe impl Argument for LoopInfo {
    // Older than the numbers that tell the size.
    const OPCODE: Opcode = 0x4c05;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_no_more_than_the_structure_of_a_loop_device() {
        assert_eq!(size_of::<LoopInfo>(), 232);
    }

    /// The answers of [`Device`] for a disk whose folder has these files, or for its first partition: name,
    /// why it is not one NVMe namespace, and why buffers cannot be mapped for it.
    fn told(
        path: &str,
        files: &[(&str, &str)],
        partition: bool,
    ) -> (String, Option<String>, Option<String>) {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = dir.path().join(path);
        fs::create_dir_all(&folder).unwrap();
        for (file, text) in files {
            let file = folder.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        if partition {
            folder = folder.join("nvme0n1p1");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("partition"), "1\n").unwrap();
        }
        let link = dir.path().join("259:0");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let found = BlockDevice::at(&link).unwrap();
        (
            found.name().to_string(),
            found.not_one_nvme(),
            found.namespace_refuses(),
        )
    }

    const NVME: &str = "pci/nvme/nvme0/nvme0n1";

    #[test]
    fn the_kind_of_a_disk_is_read_from_its_sysfs_folder() {
        for (path, files, why) in [
            (
                "virtual/block/dm-0",
                &[("dm/name", "root")][..],
                Some("dm-0 is a device-mapper device"),
            ),
            (
                "virtual/block/md0",
                &[("md/level", "raid0")],
                Some("md0 is an MD array"),
            ),
            ("virtual/block/loop3", &[], Some("loop3 is a loop device")),
            (
                "pci/virtio0/block/vda",
                &[],
                Some("vda is not an NVMe disk"),
            ),
            (
                "virtual/nvme-subsystem/nvme-subsys0/nvme0n1",
                &[],
                Some(
                    "nvme0n1 is a head of NVMe multipath (nvme_core.multipath=N on the kernel's \
                     command line avoids it)",
                ),
            ),
            (
                NVME,
                &[("../transport", "tcp")],
                Some("nvme0n1 is reached over tcp"),
            ),
            (NVME, &[("../transport", "pcie")], None),
        ] {
            assert_eq!(told(path, files, false).1.as_deref(), why, "{path}");
        }
    }

    #[test]
    fn a_partition_has_the_properties_of_its_disk() {
        let (name, not_nvme, refuses) = told(NVME, &[("queue/zoned", "host-managed")], true);
        assert_eq!((name.as_str(), not_nvme), ("nvme0n1p1", None));
        assert_eq!(refuses.as_deref(), Some("nvme0n1p1 is zoned"));
    }

    #[test]
    fn a_namespace_with_metadata_is_refused() {
        for (files, refuses) in [
            (
                &[("integrity/format", "none"), ("queue/zoned", "none")][..],
                false,
            ),
            (&[("integrity/format", "T10-DIF-TYPE1-CRC")], true),
            (&[("metadata_bytes", "8")], true),
            (&[("metadata_bytes", "0")], false),
        ] {
            assert_eq!(told(NVME, files, false).2.is_some(), refuses, "{files:?}");
        }
    }

    #[test]
    fn an_unknown_device_number_is_not_a_device() {
        assert!(BlockDevice::of((0, 4096)).is_none());
    }
}
