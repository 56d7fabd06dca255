//! Names of holds and of their files.

use dmafile::internal::unlisted;
use dmafile::{Error, Result};
use std::ffi::OsStr;
use std::path::Path;

/// The maximum length of a name in bytes.
const LONGEST: usize = 64;

/// Checks that a name is valid as a file name and as the name of a descriptor that systemd keeps:
/// letters, digits, `.`, `_` and `-`, starting with a letter or digit.
pub(super) fn check(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let first = name.bytes().next();
    if name.len() <= LONGEST
        && first.is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name.bytes().all(allowed)
    {
        return Ok(());
    }
    let why = format!(
        "'{name}' is not a valid name: use 1 to {LONGEST} letters, digits, '.', '_' and '-', with a letter or \
         digit first"
    );
    Err(Error::usage("name", why))
}

/// The default name for a path without links: that of the file without its extension, or that of the
/// folder.
pub(super) fn of(path: &Path) -> Option<String> {
    let name = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    let name = name?.to_str()?.to_string();
    check(&name).is_ok().then_some(name)
}

/// Checks that a file's name from a peer is a plain file name, as a holder may send it.
pub(super) fn is_plain(name: &OsStr) -> bool {
    let text = name.to_string_lossy();
    !matches!(&text[..], "" | "." | "..")
        && name.len() <= 255
        && !text.contains('/')
        && unlisted(&text).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_must_be_valid_for_files_and_stored_descriptors() {
        for good in ["llama", "Llama-3.1_8B", "7", &"x".repeat(LONGEST)] {
            check(good).unwrap();
        }
        for bad in [
            "",
            ".x",
            "-x",
            "a/b",
            "a:b",
            "a b",
            "ä",
            &"x".repeat(LONGEST + 1),
        ] {
            check(bad).unwrap_err();
        }
        for bad in ["", ".", "..", "a/b", "a\nb", "a\0", "a,b"] {
            assert!(!is_plain(bad.as_ref()), "{bad:?}");
        }
    }
}
