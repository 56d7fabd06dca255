//! What this machine's GPUs support.

use crate::device::Device;
use dmafile::{Check, Health, PinDevice, Result};
use dmafile_sys::host;
use std::path::Path;

/// As [`dmafile::doctor`], with the GPUs of this machine.
///
/// # Errors
/// As [`dmafile::doctor`].
pub fn doctor(path: &Path) -> Result<Vec<Check>> {
    let mut checks = dmafile::doctor(path)?;
    // What makes dma-bufs comes before them, the limits and the file system after them.
    let before = checks.iter().position(|check| check.name == "memory");
    let at = before.unwrap_or(checks.len());
    checks.splice(at..at, gpus());
    Ok(checks)
}

/// GPUs, by the drivers that are there.
fn gpus() -> Vec<Check> {
    let mut checks = Vec::new();
    for (name, first, is_tested) in [
        ("cuda", Device::cuda(0), true),
        ("hip", Device::hip(0), false),
    ] {
        let all = match first.all() {
            Ok(all) => all,
            Err(error) => {
                let found = format!("cannot load into GPU memory: {}", error.why());
                checks.push(Check::new(name, Health::Absent, found));
                continue;
            }
        };
        checks.extend(all.into_iter().map(|device| match device.describe() {
            Ok(described) => {
                let mut found = vec![
                    format!("{device}, {described}"),
                    match device.pins_read_only() {
                        Some(true) => "can pin sealed memory".to_string(),
                        Some(false) => "cannot pin sealed memory".to_string(),
                        None => "may or may not pin sealed memory (cannot be queried)".to_string(),
                    },
                    link(device).unwrap_or_else(|| "unknown PCIe link".to_string()),
                    if Path::new("/sys/module/nvidia_fs").exists() {
                        "nvidia_fs is loaded but not used".to_string()
                    } else {
                        "no nvidia_fs (GPUDirect Storage)".to_string()
                    },
                ];
                if is_tested {
                    return Check::new(name, Health::Good, found.join("; "));
                }
                found.push("dmafile has not been tested on an AMD GPU".to_string());
                Check::new(name, Health::Fair, found.join("; "))
                    .remedy("before relying on it, compare its tensors with another loader's")
            }
            Err(error) => Check::new(name, Health::Absent, error.to_string()),
        }));
    }
    checks
}

/// The PCIe link of a device.
fn link(device: Device) -> Option<String> {
    pcie(&Path::new("/sys/bus/pci/devices").join(device.pci_address()?))
}

/// A link, as the kernel shows it in the folder of its device.
fn pcie(folder: &Path) -> Option<String> {
    let read = |name: String| host::text(folder.join(name));
    let link = |which: &str| {
        let speed = read(format!("{which}_link_speed"))?;
        let width = read(format!("{which}_link_width"))?;
        Some(format!("{} x{width}", speed.trim_end_matches(" PCIe")))
    };
    let current = link("current")?;
    Some(match link("max").filter(|max| *max != current) {
        Some(max) => format!("PCIe {current}, at most {max} (an idle device is slower)"),
        None => format!("PCIe {current}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_its_present_and_its_highest_speed() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        assert_eq!(pcie(folder.path()), None);
        write("current_link_speed", "2.5 GT/s PCIe\n");
        write("current_link_width", "16\n");
        assert_eq!(pcie(folder.path()).unwrap(), "PCIe 2.5 GT/s x16");
        write("max_link_speed", "32.0 GT/s PCIe\n");
        write("max_link_width", "16\n");
        assert_eq!(
            pcie(folder.path()).unwrap(),
            "PCIe 2.5 GT/s x16, at most 32.0 GT/s x16 (an idle device is slower)"
        );
        write("current_link_speed", "32.0 GT/s PCIe\n");
        assert_eq!(pcie(folder.path()).unwrap(), "PCIe 32.0 GT/s x16");
    }
}
