//! A snapshot's manifest is refused in one line, or everything in it obeys the rules. Part of the engine in a build for
//! fuzzing.

use super::{Manifest, file_of, generation_of};
use dmafile::Algorithm;
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Component, Path};

const NAME: &str = "dmafile-snapshot.json";
const GENERATIONS: std::ops::RangeInclusive<u64> = 1..=999_999_999_999_999;

/// Parses the bytes as a manifest, and as a name in the folder of a snapshot.
pub fn manifest(text: &[u8]) {
    check(text);
    // Most changes of a name or of the generation make the file's name wrong.
    if let Some(consistent) = consistent(text) {
        check(&consistent);
    }
    if let Ok(name) = std::str::from_utf8(text) {
        check_file(name);
    }
}

/// The same manifest, with the file names that belong to its sources.
fn consistent(text: &[u8]) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(text).ok()?;
    let generation = value.get("generation")?.as_u64()?;
    for source in value.get_mut("sources")?.as_array_mut()? {
        let file = file_of(source.get("name")?.as_str()?, generation);
        source.as_object_mut()?.insert("file".into(), file.into());
    }
    serde_json::to_vec(&value).ok()
}

fn check(text: &[u8]) {
    let manifest = match Manifest::parse(text, Path::new("folder/dmafile-snapshot.json")) {
        Ok(manifest) => manifest,
        Err(error) => {
            let known = [libc::EBADMSG, libc::EOPNOTSUPP].map(Some);
            assert!(known.contains(&error.raw_os_error()), "{error}");
            let text = error.to_string();
            assert!(!text.contains(char::is_control), "{text:?}");
            return;
        }
    };
    assert_eq!(manifest.version, 1);
    assert!(GENERATIONS.contains(&manifest.generation));
    assert!((1..=256).contains(&manifest.sources.len()));
    let algorithm = Algorithm::ALL
        .iter()
        .find(|algorithm| algorithm.name() == manifest.algorithm)
        .expect("an algorithm that can be requested");
    let digits = match algorithm {
        Algorithm::Crc32c => 8,
        Algorithm::Xxh3 => 16,
        _ => 64,
    };
    let mut names = HashSet::new();
    for entry in &manifest.sources {
        let name = &entry.name;
        assert!((1..=64).contains(&name.len()) && name != NAME);
        assert!(!name.starts_with('.') && !name.contains(['/', ',', '=']));
        assert!(!name.contains(char::is_control) && names.insert(name));
        // The file is in the folder itself, and recognised there.
        let parts: Vec<_> = Path::new(&entry.file).components().collect();
        assert!(matches!(parts[..], [Component::Normal(part)] if part == &*entry.file));
        assert_eq!(
            entry.file,
            format!("{name}.{}.dmafile", manifest.generation)
        );
        assert_eq!(generation_of(&entry.file), Some(manifest.generation));
        assert!(
            entry.digest.len() == digits && entry.digest.bytes().all(|c| c.is_ascii_hexdigit())
        );
        let expected = manifest.expected(entry).expect("a digest");
        assert_eq!(expected.expected, Some(entry.digest.to_lowercase()));
        assert!(entry.kind.len() <= 64);
    }
    let bytes = manifest.sources.iter().map(|entry| u128::from(entry.bytes));
    assert!(bytes.sum::<u128>() <= i64::MAX as u128);
    let again = Manifest::parse(&manifest.to_json(), Path::new("again"));
    assert_eq!(again.expect("what was written is read"), manifest);
}

fn check_file(name: &str) {
    let Some(generation) = generation_of(name) else {
        return;
    };
    let complete = match name.strip_prefix('.') {
        None => name,
        Some(hidden) => {
            let (complete, digits) = hidden.rsplit_once(".dmafile-").expect("a suffix");
            assert!(!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()));
            complete
        }
    };
    if generation == 0 {
        return assert_eq!((complete, name.starts_with('.')), (NAME, true));
    }
    assert!(GENERATIONS.contains(&generation));
    let ending = format!(".{generation}.dmafile");
    let source = complete.strip_suffix(&ending).expect("a source's file");
    assert!((1..=64).contains(&source.len()) && !source.starts_with('.'));
    assert!(!complete.contains('/') && !complete.contains(char::is_control));
}
