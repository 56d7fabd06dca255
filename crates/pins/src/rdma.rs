//! Memory regions of RDMA devices, by netlink (as `rdma resource show mr` reads them): size and
//! owner. The kernel does not report their addresses.

use super::holders::{Maker, Person, PinHolder, refusal};
use crate::netlink::{self, Family, attribute, attributes};
use std::collections::BTreeMap;
use std::path::Path;

/// RDMA_NL_NLDEV, in the bits of the request number that select the family.
const NLDEV: u16 = 5 << 10;
/// RDMA_NLDEV_CMD_GET, RDMA_NLDEV_CMD_RES_MR_GET
const DEVICES: u16 = NLDEV | 1;
const REGIONS: u16 = NLDEV | 13;
// RDMA_NLDEV_ATTR_*
const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const RES_PID: u16 = 28;
const RES_KERN_NAME: u16 = 29;
const RES_MR: u16 = 40;
const RES_MRLEN: u16 = 45;

/// A region and its process; None if that has ended or is not visible from here.
type RdmaRegion = (Option<u32>, u64);

/// What is registered by which process with which device; or why that is unknown.
pub(super) fn holders(people: &[Person]) -> (Vec<PinHolder>, Option<String>) {
    // The request would load the kernel's module for it, which is only useful if there is a device.
    let folder = "/sys/class/infiniband";
    if Path::new(folder)
        .read_dir()
        .is_ok_and(|mut entries| entries.next().is_some())
    {
        match regions() {
            Ok(regions) => (sums(&regions, people), None),
            Err(errno) => (Vec::new(), Some(refusal(errno))),
        }
    } else {
        (Vec::new(), Some(format!("no device in {folder}")))
    }
}

fn regions() -> Result<Vec<(String, RdmaRegion)>, dmafile_sys::Errno> {
    let mut all = Vec::new();
    for device in netlink::dump(Family::Rdma, DEVICES, &[])? {
        let Some((index, name)) = device_of(&device) else {
            continue;
        };
        for message in netlink::dump(Family::Rdma, REGIONS, &attribute(DEV_INDEX, index))? {
            all.extend(regions_of(&message).map(|region| (name.clone(), region)));
        }
    }
    Ok(all)
}

fn sums(regions: &[(String, RdmaRegion)], people: &[Person]) -> Vec<PinHolder> {
    let mut sums = BTreeMap::<_, (u64, u64)>::new();
    for (device, (pid, bytes)) in regions {
        let sum = sums.entry((pid, device)).or_default();
        sum.0 += 1;
        sum.1 += bytes;
    }
    let person = |pid: &Option<u32>| people.iter().find(|person| Some(person.pid) == *pid);
    sums.into_iter()
        .map(|((pid, device), (count, bytes))| {
            let by: Vec<_> = person(pid).into_iter().collect();
            PinHolder {
                pid: *pid,
                count,
                device: Some(device.clone()),
                ..PinHolder::of(&by, Maker::Rdma, Some(bytes))
            }
        })
        .collect()
}

fn number<const N: usize>(value: &[u8]) -> Option<[u8; N]> {
    value.first_chunk::<N>().copied()
}

/// Index and name of a device.
fn device_of(message: &[u8]) -> Option<(u32, String)> {
    let (mut index, mut name) = (None, None);
    for (kind, value) in attributes(message) {
        match kind {
            DEV_INDEX => index = number(value).map(u32::from_ne_bytes),
            DEV_NAME => {
                let text = value.strip_suffix(&[0]).unwrap_or(value);
                name = Some(String::from_utf8_lossy(text).into_owned());
            }
            _ => {}
        }
    }
    Some((index?, name?))
}

/// The regions of processes in a message; those of the kernel itself pin no process memory.
fn regions_of(message: &[u8]) -> impl Iterator<Item = RdmaRegion> {
    let lists = attributes(message).filter(|(kind, _)| *kind == RES_MR);
    let entries = lists.flat_map(|(_, list)| attributes(list));
    entries.filter_map(|(_, entry)| {
        let (mut pid, mut bytes) = (None, None);
        for (kind, value) in attributes(entry) {
            match kind {
                RES_KERN_NAME => return None,
                RES_PID => pid = number(value).map(u32::from_ne_bytes),
                RES_MRLEN => bytes = number(value).map(u64::from_ne_bytes),
                _ => {}
            }
        }
        Some((pid, bytes?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(kind: u16, inside: &[u8]) -> Vec<u8> {
        let length = (4 + inside.len()) as u16;
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(inside);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn only_memory_regions_of_processes_are_listed() {
        let length = |bytes: u64| nested(RES_MRLEN, &bytes.to_ne_bytes());
        let region = |inside: &[u8]| nested(41, inside);
        let list = [
            region(&[length(20480), attribute(RES_PID, 213).to_vec()].concat()),
            region(&[nested(RES_KERN_NAME, b"ib_srp\0"), length(4096)].concat()),
            region(&length(8192)),
        ];
        let message = [
            attribute(DEV_INDEX, 0).to_vec(),
            nested(RES_MR, &list.concat()),
        ]
        .concat();
        let found: Vec<_> = regions_of(&message).collect();
        assert_eq!(found, [(Some(213), 20480), (None, 8192)]);
        let device = [
            attribute(DEV_INDEX, 3).to_vec(),
            nested(DEV_NAME, b"rxe0\0"),
        ]
        .concat();
        assert_eq!(device_of(&device), Some((3, "rxe0".to_string())));
    }
}
