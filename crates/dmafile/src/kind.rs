//! What memory a buffer has, as plans, reports and holders name it.

use crate::device::Device;
use crate::options::Kind;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::fd::RawFd;
use std::str::FromStr;

/// What the memory of a buffer is. In JSON it is the word that the command line has for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum MemoryKind {
    /// Private memory of this process.
    Anon,
    /// A memfd.
    Memfd,
    /// A dma-buf over a memfd.
    Udmabuf,
    /// A dma-buf from this heap.
    Heap(String),
    /// A dma-buf of dmafile.ko.
    Module,
    /// A dma-buf of an unknown exporter, or one that has not been chosen yet.
    DmaBuf,
    /// What a descriptor with this number refers to, from this byte on, if one was given.
    Fd(RawFd, Option<u64>),
    /// A memfd that is pinned for a device.
    Pinned(Device),
    /// The caller's memory.
    Caller,
    /// The ring that a load goes through.
    Ring,
    /// The memory of a device.
    Device(Device),
}

impl Kind {
    /// What it is called.
    pub fn memory(&self) -> MemoryKind {
        match self {
            Self::Anon => MemoryKind::Anon,
            Self::Memfd => MemoryKind::Memfd,
            Self::Udmabuf => MemoryKind::Udmabuf,
            Self::Heap(name) => MemoryKind::Heap(name.clone()),
            Self::Module => MemoryKind::Module,
            Self::DmaBuf => MemoryKind::DmaBuf,
            Self::Fd { number, at, .. } => MemoryKind::Fd(*number, *at),
            Self::Pinned(device) => MemoryKind::Pinned(*device),
            Self::Caller => MemoryKind::Caller,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory().fmt(f)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self {
            Self::Anon => "anon",
            Self::Memfd => "memfd",
            Self::Udmabuf => "udmabuf",
            Self::Module => "module",
            Self::DmaBuf => "dma-buf",
            Self::Caller => "caller",
            Self::Ring => "ring",
            Self::Heap(name) => return write!(f, "heap:{name}"),
            Self::Fd(number, None) => return write!(f, "fd:{number}"),
            Self::Fd(number, Some(at)) => return write!(f, "fd:{number}@{at}"),
            Self::Pinned(device) => return f.pad(&device.host_word()),
            Self::Device(device) => return device.fmt(f),
        };
        f.pad(word)
    }
}

impl From<MemoryKind> for String {
    fn from(kind: MemoryKind) -> Self {
        kind.to_string()
    }
}

impl FromStr for MemoryKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("'{text}' is no kind of memory");
        Ok(match text {
            "anon" => Self::Anon,
            "memfd" => Self::Memfd,
            "udmabuf" => Self::Udmabuf,
            "module" => Self::Module,
            "dma-buf" => Self::DmaBuf,
            "caller" => Self::Caller,
            "ring" => Self::Ring,
            _ => {
                if let Some(name) = text.strip_prefix("heap:") {
                    Self::Heap(name.to_string())
                } else if let Some(place) = text.strip_prefix("fd:") {
                    let (number, at) = match place.split_once('@') {
                        None => (place, None),
                        Some((number, at)) => (number, Some(at.parse().map_err(|_| unknown())?)),
                    };
                    Self::Fd(number.parse().map_err(|_| unknown())?, at)
                } else if let Some(device) = Device::of_host_word(text) {
                    Self::Pinned(device)
                } else {
                    Self::Device(text.parse().map_err(|_| unknown())?)
                }
            }
        })
    }
}

impl TryFrom<String> for MemoryKind {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_parsed_from_its_own_word() {
        for kind in [
            MemoryKind::Anon,
            MemoryKind::Memfd,
            MemoryKind::Udmabuf,
            MemoryKind::Heap("system".to_string()),
            MemoryKind::Module,
            MemoryKind::DmaBuf,
            MemoryKind::Fd(3, None),
            MemoryKind::Fd(3, Some(4096)),
            MemoryKind::Pinned(Device::cuda(0)),
            MemoryKind::Pinned(Device::hip(2)),
            MemoryKind::Caller,
            MemoryKind::Ring,
            MemoryKind::Device(Device::cuda(1)),
        ] {
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{kind}\""));
            assert_eq!(serde_json::from_str::<MemoryKind>(&json).unwrap(), kind);
        }
        for word in ["", "memory", "fd:", "fd:x", "fd:1@", "cuda:x"] {
            assert!(word.parse::<MemoryKind>().is_err(), "{word}");
        }
    }

    #[test]
    fn a_requested_kind_and_the_memory_have_the_same_word() {
        for word in [
            "anon",
            "memfd",
            "udmabuf",
            "heap:system",
            "module",
            "dma-buf",
            "cuda-host",
            "hip-host:1",
        ] {
            let kind: Kind = word.parse().unwrap();
            assert_eq!(kind.memory().to_string(), word);
            assert_eq!(kind.to_string(), word);
        }
    }
}
