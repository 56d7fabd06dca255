//! Processes that drive devices by VFIO. The kernel counts the memory that it pins for them in
//! `VmLck`, together with mlock(2), and does not list it.

use super::holders::Person;

/// The processes that have a VFIO device or container open, and which.
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
