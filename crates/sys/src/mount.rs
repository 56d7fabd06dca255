//! Mounts: `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use super::host::text;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The type of the file system that an open file is on (`nfs4`, `fuse.sshfs`), and its options, separated by commas;
/// None if `/proc` does not tell.
pub fn of(fd: BorrowedFd<'_>) -> Option<(String, String)> {
    let fdinfo = text(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let mountinfo = text("/proc/self/mountinfo")?;
    let (kind, options) = listed(&mountinfo, id?.trim())?;
    Some((kind.to_string(), options.to_string()))
}

fn listed<'a>(mountinfo: &'a str, id: &str) -> Option<(&'a str, &'a str)> {
    let mut lines = mountinfo.lines();
    let line = lines.find(|line| line.split(' ').next() == Some(id))?;
    // The fields before the dash vary in number.
    let mut fields = line.split_once(" - ")?.1.split(' ');
    let (kind, _source, options) = (fields.next()?, fields.next()?, fields.next()?);
    Some((kind, options))
}

/// The value of one of these options; None without it.
pub fn option<'a>(options: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = options.split(',').filter_map(|one| one.split_once('='));
    pairs.find_map(|(key, value)| (key == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn options_are_those_of_the_file_system() {
        let list = "\
            2 1 0:30 / / ro,rsize=1 - ext4 /dev/root rw\n\
            22 2 0:34 / /mnt/a\\040b rw,relatime shared:7 master:3 - nfs4 server:/a\\040b \
            rw,vers=4.2,rsize=65536,hard,proto=tcp\n";
        let (kind, options) = listed(list, "22").unwrap();
        assert_eq!(kind, "nfs4");
        assert_eq!(options, "rw,vers=4.2,rsize=65536,hard,proto=tcp");
        assert_eq!(option(options, "rsize"), Some("65536"));
        assert_eq!(option(options, "proto"), Some("tcp"));
        assert_eq!(option(options, "size"), None);
        assert_eq!(option(options, "hard"), None);
        assert_eq!(listed(list, "2"), Some(("ext4", "rw")));
        assert_eq!(listed(list, "3"), None);
    }

    #[test]
    fn an_open_file_has_a_mount() {
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        assert_eq!(of(proc.as_fd()).unwrap().0, "proc");
    }
}
