//! What memory a buffer has, as plans, reports and holders name it.

use super::Kind;
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
    /// A memfd that is pinned for a device, by the word for that memory: one that ends with `-host` or `-host:N`.
    Pinned(String),
    /// The caller's memory.
    Caller,
    /// The ring that a load goes through.
    Ring,
    /// The memory of a device, by its name: a word, and a number after a colon.
    Device(String),
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
            Self::Pinned(device) => MemoryKind::Pinned(device.memory()),
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
            Self::Pinned(word) | Self::Device(word) => word,
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
                } else if text.strip_suffix("-host").is_some_and(is_word)
                    || is_numbered(text, "-host:")
                {
                    Self::Pinned(text.to_string())
                } else if is_numbered(text, ":") {
                    Self::Device(text.to_string())
                } else {
                    return Err(unknown());
                }
            }
        })
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// True if it is a word and, after `between`, a number.
fn is_numbered(text: &str, between: &str) -> bool {
    let parts = text.split_once(between);
    parts.is_some_and(|(word, number)| {
        let digits = number.bytes().all(|byte| byte.is_ascii_digit());
        is_word(word) && digits && number.parse::<u32>().is_ok()
    })
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
            MemoryKind::Pinned("gpu-host".to_string()),
            MemoryKind::Pinned("gpu-host:2".to_string()),
            MemoryKind::Caller,
            MemoryKind::Ring,
            MemoryKind::Device("gpu:1".to_string()),
        ] {
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{kind}\""));
            assert_eq!(serde_json::from_str::<MemoryKind>(&json).unwrap(), kind);
        }
        for word in [
            "",
            "memory",
            "fd:",
            "fd:x",
            "fd:1@",
            "gpu:x",
            "gpu:+1",
            ":1",
            "-host",
            "gpu-host:",
            "gpu-host:x",
        ] {
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
        ] {
            let kind: Kind = word.parse().unwrap();
            assert_eq!(kind.memory().to_string(), word);
            assert_eq!(kind.to_string(), word);
        }
    }
}
