//! Names of tensors, by name, glob or regular expression.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Names of tensors: a name; a glob with `*`, `?`, `[…]` or `{…,…}`; or `re:` and a regular
/// expression that the whole name matches (syntax of the crate `regex`, linear time).
///
/// A tensor that has exactly the text as its name is always named by it.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    matcher: Matcher,
}

#[derive(Clone, Debug)]
enum Matcher {
    Name,
    Glob(globset::GlobMatcher),
    Regex(regex::Regex),
}

impl Pattern {
    /// Exactly this name, whatever characters it has.
    pub fn name(name: impl Into<String>) -> Self {
        Self {
            text: name.into(),
            matcher: Matcher::Name,
        }
    }

    /// Whether it names this tensor.
    pub fn matches(&self, name: &str) -> bool {
        name == self.text
            || match &self.matcher {
                Matcher::Name => false,
                Matcher::Glob(glob) => glob.is_match(name),
                Matcher::Regex(regex) => regex.is_match(name),
            }
    }

    /// The one name it can match, if it is that kind.
    pub(super) fn exact(&self) -> Option<&str> {
        matches!(self.matcher, Matcher::Name).then_some(&self.text)
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: String| {
            // The libraries explain over several lines, the last of which says it.
            let why = why.lines().last().unwrap_or_default().trim().to_string();
            Error::usage("--tensor", format!("'{text}' is no pattern: {why}"))
        };
        let matcher = if let Some(regex) = text.strip_prefix("re:") {
            let whole = regex::Regex::new(&format!("^(?:{regex})$"));
            Matcher::Regex(whole.map_err(|error| bad(error.to_string()))?)
        } else if text.contains(['*', '?', '[', '{']) {
            let glob = globset::GlobBuilder::new(text).build();
            let glob = glob.map_err(|error| bad(error.kind().to_string()))?;
            Matcher::Glob(glob.compile_matcher())
        } else {
            Matcher::Name
        };
        Ok(Self {
            text: text.to_string(),
            matcher,
        })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}'", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_globs_and_expressions() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Pattern>().unwrap().matches(name);
        assert!(matches("a.b", "a.b") && !matches("a.b", "a.bc"));
        assert!(matches("*.0.*", "model.layers.0.q") && !matches("*.0.*", "model.layers.10"));
        assert!(matches("h.{1,2}.w", "h.2.w") && !matches("h.?.w", "h.12.w"));
        assert!(matches("re:h\\.\\d+\\.w", "h.12.w") && !matches("re:h", "h.1"));
        // A name may look like a glob.
        assert!(matches("a[0]", "a[0]") && matches("a[0]", "a0"));
        for bad in ["re:(", "a[", "x{a"] {
            let error = bad.parse::<Pattern>().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Usage);
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }
}
