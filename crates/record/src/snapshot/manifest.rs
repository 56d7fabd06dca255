//! The manifest, in JSON: which files of a folder form the snapshot, and what they contain. A reader
//! trusts none of it.

use dmafile::internal::unlisted;
use dmafile::{Algorithm, Error, Result, Verify};
use dmafile_sys::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;

/// Its file name.
pub(super) const NAME: &str = "dmafile-snapshot.json";
/// The version that is written, and the only one that can be read.
const VERSION: u64 = 1;
/// The maximum size of a manifest in bytes. One with the maximum number of sources has a tenth of it.
pub(super) const LARGEST: usize = 1 << 20;
/// The maximum number of sources in a snapshot.
pub const MOST_SOURCES: usize = 256;
/// The maximum length of a source's name in bytes: even with what [`Save`](dmafile::Save) temporarily adds
/// to it, it is never truncated.
const LONGEST_NAME: usize = 64;
/// The maximum length of the kind of memory in bytes.
const LONGEST_KIND: usize = 64;
/// The suffix of a file's name, after the generation.
const ENDING: &str = ".dmafile";
/// Bounds the number of digits of a generation, and fits into a JSON number.
pub(super) const LAST_GENERATION: u64 = 999_999_999_999_999;

/// Remedy for a file that differs from what was saved.
pub(super) const DAMAGED: &str = "it is damaged: use another snapshot";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    version: u64,
    /// The number of this snapshot in the folder.
    pub(super) generation: u64,
    /// The algorithm of the digests.
    algorithm: String,
    pub(super) sources: Vec<SourceEntry>,
}

/// A source and its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceEntry {
    pub(super) name: String,
    /// The file, in the same folder.
    pub(super) file: String,
    pub(super) bytes: u64,
    /// In hexadecimal, over all bytes, holes included.
    pub(super) digest: String,
    /// What was saved: `memfd`, `dma-buf`, `file`, `block device`, `pipe`.
    pub(super) kind: String,
    /// Size of the largest pages of the saved memory, in bytes.
    pub(super) page: Option<u64>,
}

impl SourceEntry {
    /// Checks the size of its file; `place` names that.
    pub(super) fn check_size(&self, found: u64, place: String) -> Result<()> {
        if found == self.bytes {
            return Ok(());
        }
        let why = format!("it has {found} bytes and should have {}", self.bytes);
        Err(Error::new("wrong size", why)
            .with_errno(Errno::BADMSG)
            .at(place)
            .with_remedy(DAMAGED))
    }
}

/// What every version has.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

impl Manifest {
    pub(super) fn new(generation: u64, algorithm: Algorithm, sources: Vec<SourceEntry>) -> Self {
        Self {
            version: VERSION,
            generation,
            algorithm: algorithm.name().to_string(),
            sources,
        }
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        text.push(b'\n');
        text
    }

    /// Parses a manifest that may come from anywhere.
    ///
    /// # Errors
    /// EOPNOTSUPP for another version, EBADMSG if it is not a manifest. `path` is the place for errors.
    pub(super) fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let damaged = |why: String| {
            Error::new("cannot use the snapshot", why)
                .with_errno(Errno::BADMSG)
                .at(path.display().to_string())
                .with_remedy("it is damaged: use another folder")
        };
        if text.len() > LARGEST {
            return Err(damaged(format!(
                "its manifest has more than {LARGEST} bytes"
            )));
        }
        let head: Head = serde_json::from_slice(text)
            .map_err(|error| damaged(format!("invalid manifest: {error}")))?;
        if head.version != VERSION {
            let why = format!("it has version {}, and this is {VERSION}", head.version);
            return Err(damaged(why)
                .with_errno(Errno::OPNOTSUPP)
                .with_remedy("use the version of dmafile that saved it, or a newer one"));
        }
        let manifest: Self = serde_json::from_slice(text)
            .map_err(|error| damaged(format!("invalid manifest: {error}")))?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Checks that its values are valid.
    fn check(&self) -> Result<(), String> {
        if !(1..=LAST_GENERATION).contains(&self.generation) {
            return Err(format!("invalid generation {}", self.generation));
        }
        check_count(self.sources.len())?;
        check_names(self.sources.iter().map(|entry| &entry.name[..]))?;
        let mut sum = 0_u64;
        for entry in &self.sources {
            let name = &entry.name;
            if entry.file != file_of(name, self.generation) {
                return Err(format!("'{}' is not the file of '{name}'", entry.file));
            }
            let total = sum.checked_add(entry.bytes);
            sum = total
                .filter(|sum| i64::try_from(*sum).is_ok())
                .ok_or_else(|| {
                    format!("the sizes up to that of '{name}' add up to too many bytes")
                })?;
            self.expected(entry)
                .map_err(|error| error.why().to_string())?;
            if entry.kind.len() > LONGEST_KIND {
                return Err(format!("'{name}' has an unknown kind"));
            }
        }
        Ok(())
    }

    /// The expected digest of a source.
    pub(super) fn expected(&self, entry: &SourceEntry) -> Result<Verify> {
        // By its own name only: a load accepts others, and an expected digest after one.
        let known = Algorithm::ALL
            .iter()
            .find(|one| one.name() == self.algorithm);
        let algorithm = *known.ok_or_else(|| {
            let all: Vec<_> = Algorithm::ALL.iter().map(|one| one.name()).collect();
            let why = format!(
                "its algorithm '{}' is not one of {}",
                self.algorithm,
                all.join(", ")
            );
            Error::new("cannot use the snapshot", why).with_errno(Errno::BADMSG)
        })?;
        Verify::expect(algorithm, &entry.digest)
    }
}

/// Checks the number of sources; returns why it is invalid.
pub(super) fn check_count(sources: usize) -> Result<(), String> {
    match sources {
        1..=MOST_SOURCES => Ok(()),
        _ => Err(format!(
            "it has {sources} sources; it can have 1 to {MOST_SOURCES}"
        )),
    }
}

/// Checks the names of sources; returns why they are invalid.
pub(super) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for name in names {
        check_name(name)?;
        if !seen.insert(name) {
            return Err(format!("the name '{name}' appears twice"));
        }
    }
    Ok(())
}

/// Names become part of file names, and of comma-separated lists.
fn check_name(name: &str) -> Result<(), String> {
    let why = match name {
        "" => "it is empty",
        NAME => "that is the name of the manifest",
        _ if name.len() > LONGEST_NAME => "it has more than 64 bytes",
        _ if name.starts_with('.') => "it begins with a dot",
        _ if name.contains(['/', '=']) => "it has a slash or an equals sign",
        _ => match unlisted(name) {
            Some(why) => &format!("it {why}"),
            None => return Ok(()),
        },
    };
    Err(format!("'{name}' cannot be the name of a source: {why}"))
}

/// The file of a source.
pub(super) fn file_of(name: &str, generation: u64) -> String {
    format!("{name}.{generation}{ENDING}")
}

/// The generation of a file of a source, complete or not. 0 for a manifest that is being written, None
/// for any other file.
pub(super) fn generation_of(file: &str) -> Option<u64> {
    let Some(hidden) = file.strip_prefix('.') else {
        return generation_of_source(file);
    };
    let (place, number) = hidden.rsplit_once(".dmafile-")?;
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match place {
        NAME => Some(0),
        _ => generation_of_source(place),
    }
}

fn generation_of_source(file: &str) -> Option<u64> {
    let (name, digits) = file.strip_suffix(ENDING)?.rsplit_once('.')?;
    let generation = digits.parse().ok()?;
    let known = (1..=LAST_GENERATION).contains(&generation) && check_name(name).is_ok();
    // Refuses +1 and 01.
    (known && file_of(name, generation) == file).then_some(generation)
}

#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/manifest.rs"]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generation_of_a_file_is_parsed_from_its_name() {
        for (file, generation) in [
            ("weights.1.dmafile", Some(1)),
            ("a.b.12.dmafile", Some(12)),
            (".weights.7.dmafile.dmafile-15", Some(7)),
            (".dmafile-snapshot.json.dmafile-0", Some(0)),
            ("dmafile-snapshot.json", None),
            ("weights.dmafile", None),
            ("weights.+1.dmafile", None),
            ("weights.01.dmafile", None),
            ("weights.0.dmafile", None),
            ("weights.1000000000000000.dmafile", None),
            (".1.dmafile", None),
            (".weights.7.dmafile", None),
            (".weights.7.dmafile.dmafile-", None),
            (".other.dmafile-0", None),
            ("", None),
        ] {
            assert_eq!(generation_of(file), generation, "{file}");
        }
        let longest = "x".repeat(LONGEST_NAME);
        let file = file_of(&longest, LAST_GENERATION);
        assert_eq!(generation_of(&file), Some(LAST_GENERATION));
        assert!(
            file.len() <= 100,
            "a save would cut the name that it adds to"
        );
    }

    #[test]
    fn the_largest_manifest_is_written_and_read_back() {
        let name = "x".repeat(LONGEST_NAME - 3);
        let entry = |number| {
            let name = format!("{name}{number:03}");
            SourceEntry {
                file: file_of(&name, LAST_GENERATION),
                name,
                bytes: 1 << 50,
                digest: "0".repeat(64),
                kind: "memfd".to_string(),
                page: Some(2 << 20),
            }
        };
        let all = (0..MOST_SOURCES).map(entry).collect();
        let manifest = Manifest::new(LAST_GENERATION, Algorithm::Sha256, all);
        let text = manifest.to_json();
        assert!(text.len() < LARGEST / 4, "{}", text.len());
        assert_eq!(Manifest::parse(&text, Path::new("x")).unwrap(), manifest);
    }

    #[test]
    fn a_manifest_names_an_algorithm_and_not_what_else_a_load_accepts() {
        let of = |algorithm: &str, digits: usize| {
            let entry = SourceEntry {
                name: "x".to_string(),
                file: file_of("x", 1),
                bytes: 0,
                digest: "0".repeat(digits),
                kind: "memfd".to_string(),
                page: None,
            };
            let mut manifest = Manifest::new(1, Algorithm::Crc32c, vec![entry]);
            manifest.algorithm = algorithm.to_string();
            Manifest::parse(&manifest.to_json(), Path::new("x"))
        };
        for algorithm in Algorithm::ALL {
            of(algorithm.name(), algorithm.digits()).unwrap();
        }
        let other = format!("sha256={}", "0".repeat(64));
        for (algorithm, digits) in [
            ("hub", 64),
            ("xxh3-64", 16),
            ("git-sha1", 40),
            ("", 8),
            (&other, 64),
        ] {
            let error = of(algorithm, digits).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{algorithm}");
        }
    }
}
