//! What a folder of images contains, in JSON. A reader trusts none of it: a first line has the digest of the rest.

use crate::folders::LinkFolder;
use dmafile::internal::{Hasher, Verb};
use dmafile::{Algorithm, Error, Result};
use dmafile_hold::FileIdentity;
use dmafile_sys::{Errno, errno};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Its file name.
pub(crate) const NAME: &str = "freeze.json";
/// The folder in it with the memory of objects.
pub(crate) const MEMORY: &str = "memory";
/// The version that is written, and the only one that can be read.
const VERSION: u64 = 1;
/// The algorithm of all digests that are made here: it detects damage, not forgery.
pub(crate) const ALGORITHM: Algorithm = Algorithm::Xxh3;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// The version of criu that made the images.
    pub criu: String,
    pub trees: Vec<Tree>,
    /// Memory in the folder [`MEMORY`]: the files are named by their index here.
    pub stored: Vec<Stored>,
    /// Memory that is taken from a hold.
    pub held: Vec<Held>,
}

/// A process and its descendants; its images are in the folder with its number here.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tree {
    pub pid: u32,
    pub images: Vec<ImageFile>,
    pub open: Vec<OpenMemory>,
    pub folders: Vec<LinkFolder>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageFile {
    pub name: String,
    pub bytes: u64,
    pub digest: String,
}

/// An open file, or a mapping, of memory that a thaw supplies.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenMemory {
    /// Its name in the images.
    pub key: String,
    pub memory: Memory,
    /// As fcntl(2) returns them; of a mapping only the access.
    pub flags: u32,
    pub position: u64,
}

/// The index of memory in [`Manifest::stored`] or [`Manifest::held`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Memory {
    Stored(usize),
    Held(usize),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stored {
    pub name: String,
    pub bytes: u64,
    pub digest: String,
    pub seals: u32,
    /// Flags of memfd_create(2): MFD_HUGETLB and the size of its pages.
    pub huge: u32,
    pub mode: u32,
    pub user: u32,
    pub group: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Held {
    pub hold: String,
    pub socket: PathBuf,
    /// The name of the file in the hold, and its path.
    pub name: String,
    pub file: PathBuf,
    /// The size of the file, and of the memory.
    pub bytes: u64,
    pub size: u64,
    pub identity: FileIdentity,
    pub algorithm: String,
    pub digest: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    version: u64,
    xxh3: String,
}

impl Manifest {
    pub fn to_text(&self) -> Vec<u8> {
        let text = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        let head = Head {
            version: VERSION,
            xxh3: digest_of(&text),
        };
        let mut all = serde_json::to_vec(&head).expect("a head is plain data");
        all.push(b'\n');
        all.extend(text);
        all.push(b'\n');
        all
    }

    /// Reads the one of a folder.
    ///
    /// # Errors
    /// ENOENT if there is none, EBADMSG if it is damaged, EOPNOTSUPP for another version.
    pub fn read(what: Verb, folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let text = std::fs::read(&path).map_err(|error| {
            let error = Error::os(what, errno(error)).at(path.display().to_string());
            match error.raw_os_error() {
                Some(2) => error.with_remedy("name a folder that `dmafile freeze` has written"),
                _ => error,
            }
        })?;
        Self::parse(&text).map_err(|(errno, why)| {
            Error::os(what, errno)
                .at(path.display().to_string())
                .with_why(why)
        })
    }

    fn parse(text: &[u8]) -> std::result::Result<Self, (Errno, String)> {
        let bad = |why: String| (Errno::BADMSG, why);
        let mut parts = text.splitn(2, |&byte| byte == b'\n');
        let (head, rest) = (
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default(),
        );
        let head: Head = serde_json::from_slice(head).map_err(|error| bad(error.to_string()))?;
        if head.version != VERSION {
            let why = format!("version {} is not supported", head.version);
            return Err((Errno::OPNOTSUPP, why));
        }
        let rest = rest
            .strip_suffix(b"\n")
            .filter(|rest| digest_of(rest) == head.xxh3);
        let rest = rest.ok_or_else(|| bad("its digest differs: it is damaged".to_string()))?;
        let manifest: Self =
            serde_json::from_slice(rest).map_err(|error| bad(error.to_string()))?;
        manifest.check().map_err(bad)?;
        Ok(manifest)
    }

    /// Checks that nothing leads out of the folder, and every index is there.
    fn check(&self) -> std::result::Result<(), String> {
        for tree in &self.trees {
            for image in &tree.images {
                if image.name.contains('/') || image.name.starts_with('.') {
                    return Err(format!("{:?} is no name of an image", image.name));
                }
            }
            if let Some(folder) = tree.folders.iter().find(|folder| !folder.is_plain()) {
                return Err(format!("{:?} is no folder of links", folder.path));
            }
            for open in &tree.open {
                let there = match open.memory {
                    Memory::Stored(number) => number < self.stored.len(),
                    Memory::Held(number) => number < self.held.len(),
                };
                if !there {
                    return Err(format!("{} has no memory", open.key));
                }
            }
        }
        Ok(())
    }
}

/// The folder with the images of a tree.
pub(crate) fn folder_of(number: usize) -> String {
    format!("tree-{number}")
}

pub(crate) fn digest_of(bytes: &[u8]) -> String {
    let mut hasher = Hasher::new(ALGORITHM, bytes.len() as u64);
    hasher.update(bytes);
    hasher.hex()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let manifest = Manifest {
            criu: "4.1.1".to_string(),
            trees: vec![Tree {
                pid: 7,
                images: Vec::new(),
                open: vec![OpenMemory {
                    key: "dmafile-1".to_string(),
                    memory: Memory::Stored(0),
                    flags: 2,
                    position: 9,
                }],
                folders: vec![folder("/tmp/dmafile-path-1", "model/weights")],
            }],
            stored: vec![Stored {
                name: "own".to_string(),
                bytes: 1,
                digest: "0".repeat(16),
                seals: 0,
                huge: 0,
                mode: 0o600,
                user: 0,
                group: 0,
            }],
            held: Vec::new(),
        };
        let text = manifest.to_text();
        assert!(Manifest::parse(&text).is_ok());
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut other = text.clone();
                other[at] ^= 1 << bit;
                assert!(Manifest::parse(&other).is_err(), "byte {at}, bit {bit}");
            }
        }
        let mut other = manifest.clone();
        other.stored.clear();
        assert!(Manifest::parse(&other.to_text()).is_err());
        for (path, link) in [
            ("/tmp/other", "x"),
            ("tmp/dmafile-path-1", "x"),
            ("/tmp/../dmafile-path-1", "x"),
            ("/tmp/dmafile-path-1", "/x"),
            ("/tmp/dmafile-path-1", "../x"),
            ("/tmp/dmafile-path-1", "x/y/z"),
        ] {
            let mut other = manifest.clone();
            other.trees[0].folders = vec![folder(path, link)];
            assert!(Manifest::parse(&other.to_text()).is_err(), "{path}, {link}");
        }
    }

    fn folder(path: &str, link: &str) -> LinkFolder {
        LinkFolder {
            path: path.into(),
            user: 0,
            group: 0,
            links: vec![(link.into(), "/proc/7/fd/3".into())],
        }
    }
}
