//! Names of tensors, by name, glob or regular expression.

use crate::error::{Error, Result};
use crate::message::Opt;
use std::fmt;
use std::str::FromStr;

/// Names of tensors: a name; a glob with `*`, `?`, `[…]` or `{…,…}`; or `re:` and a regular
/// expression that the whole name matches (syntax of the crate `regex`, linear time). At most 1024
/// bytes. In a glob `?` and `[…]` stand for one byte.
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
    Glob(regex::bytes::Regex),
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
                Matcher::Glob(glob) => glob.is_match(name.as_bytes()),
                Matcher::Regex(regex) => regex.is_match(name),
            }
    }

    /// The one name it can match, if it is that kind.
    pub(super) fn exact(&self) -> Option<&str> {
        matches!(self.matcher, Matcher::Name).then_some(&self.text)
    }
}

/// No name of a tensor is nearly as long, and what makes a matcher of it is recursive.
const LONGEST: usize = 1024;

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: String| {
            // The libraries explain over several lines, the last of which says it.
            let why = why.lines().last().unwrap_or_default().trim().to_string();
            Error::usage(
                Opt::Patterns,
                format!("'{text}' is not a valid pattern: {why}"),
            )
        };
        if text.len() > LONGEST {
            return Err(bad(format!("it is longer than {LONGEST} bytes")));
        }
        let matcher = if let Some(regex) = text.strip_prefix("re:") {
            // Alone first: what is put around it must not complete it.
            let whole =
                regex::Regex::new(regex).and_then(|_| regex::Regex::new(&format!("^(?:{regex})$")));
            Matcher::Regex(whole.map_err(|error| bad(error.to_string()))?)
        } else if text.contains(['*', '?', '[', '{']) {
            let glob = globset::GlobBuilder::new(text).build();
            let glob = glob.map_err(|error| bad(error.kind().to_string()))?;
            // Its own way to compile panics where the expression becomes too large.
            let glob = regex::bytes::Regex::new(glob.regex());
            Matcher::Glob(glob.map_err(|error| bad(error.to_string()))?)
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
        assert!(!matches("re:a|b", "ab"));
        // What is large is refused or works, and neither panics nor takes the stack.
        let (open, close) = ("{".repeat(500), "}".repeat(500));
        let deep = format!("{open}a{close}");
        for large in [
            &deep,
            &"*?".repeat(512),
            &"[a-z]*".repeat(170),
            &format!("re:{}", "(a{1,100}){1,100}".repeat(50)),
            &format!("re:{}a{}", "(".repeat(500), ")".repeat(500)),
        ] {
            if let Ok(pattern) = large.parse::<Pattern>() {
                pattern.matches("some name");
            }
        }
        let long = "a".repeat(1025);
        for bad in ["re:(", "re:a)|(?:q", "a[", "x{a", &long] {
            let error = bad.parse::<Pattern>().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Usage);
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }
}
