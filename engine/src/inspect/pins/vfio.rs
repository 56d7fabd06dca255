//! Processes that drive devices by VFIO. The kernel counts the memory that it pins for them in
//! `VmLck`, beside what mlock(2) counts there, and lists it nowhere.

use super::holders::Person;

/// Who has a VFIO device or container open, and which.
pub(super) fn holders(people: &[Person]) -> Vec<(&Person, Vec<String>)> {
    let devices = |person: &Person| {
        let mut devices: Vec<_> = person
            .links
            .iter()
            .map(|(_, link)| link.to_string_lossy())
            .filter(|link| link.starts_with("/dev/vfio/"))
            .map(|link| link.into_owned())
            .collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    };
    people
        .iter()
        .map(|person| (person, devices(person)))
        .filter(|(_, devices)| !devices.is_empty())
        .collect()
}
