//! Patterns for names of tensors: a name, a glob or a regular expression.

use crate::error::{Error, Result, Verb, can_hash};
use crate::message::Opt;
use std::fmt;
use std::str::FromStr;

/// A pattern for names of tensors: a name; a glob with `*`, `?`, `[…]` or `{…,…}`; or `re:` and a
/// regular expression for the whole name (syntax of the crate `regex`, linear time). At most 1024
/// bytes. In a glob `?` and `[…]` match one byte.
///
/// A tensor whose name equals the text always matches.
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
    /// Matches exactly this name, whatever characters it contains.
    pub fn name(name: impl Into<String>) -> Self {
        Self {
            text: name.into(),
            matcher: Matcher::Name,
        }
    }

    /// Returns `true` if it matches this name.
    pub fn matches(&self, name: &str) -> bool {
        name == self.text
            || match &self.matcher {
                Matcher::Name => false,
                Matcher::Glob(glob) => glob.is_match(name.as_bytes()),
                Matcher::Regex(regex) => regex.is_match(name),
            }
    }

    /// The only name it can match, if there is one.
    pub(super) fn exact(&self) -> Option<&str> {
        matches!(self.matcher, Matcher::Name).then_some(&self.text)
    }
}

/// The maximum length of a pattern that is compiled, which is recursive. A name may be longer.
const LONGEST: usize = 1024;

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: String| {
            // The libraries' messages have several lines; the last one has the cause.
            let why = why.lines().last().unwrap_or_default().trim().to_string();
            Error::usage(
                Opt::Tensors,
                format!("'{text}' is not a valid pattern: {why}"),
            )
        };
        let regex = text.strip_prefix("re:");
        let is_name = regex.is_none() && !text.contains(['*', '?', '[', '{']);
        if !is_name {
            can_hash(Verb::Load)?;
        }
        let matcher = if is_name {
            Matcher::Name
        } else if text.len() > LONGEST {
            return Err(bad(format!("it is longer than {LONGEST} bytes")));
        } else if let Some(regex) = regex {
            // First compiled by itself: otherwise the parentheses could complete an invalid
            // expression.
            let whole =
                regex::Regex::new(regex).and_then(|_| regex::Regex::new(&format!("^(?:{regex})$")));
            Matcher::Regex(whole.map_err(|error| bad(error.to_string()))?)
        } else {
            let glob = globset::GlobBuilder::new(text).build();
            let glob = glob.map_err(|error| bad(error.kind().to_string()))?;
            // The crate's own compile function panics if the expression becomes too large.
            let glob = regex::bytes::Regex::new(glob.regex());
            Matcher::Glob(glob.map_err(|error| bad(error.to_string()))?)
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
    fn patterns_are_names_globs_or_regular_expressions() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Pattern>().unwrap().matches(name);
        assert!(matches("a.b", "a.b") && !matches("a.b", "a.bc"));
        assert!(matches("*.0.*", "model.layers.0.q") && !matches("*.0.*", "model.layers.10"));
        assert!(matches("h.{1,2}.w", "h.2.w") && !matches("h.?.w", "h.12.w"));
        assert!(matches("re:h\\.\\d+\\.w", "h.12.w") && !matches("re:h", "h.1"));
        // A name may look like a glob.
        assert!(matches("a[0]", "a[0]") && matches("a[0]", "a0"));
        assert!(!matches("re:a|b", "ab"));
        // A large pattern is refused or works; it neither panics nor overflows the stack.
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
        assert!(matches(&long, &long) && !matches(&long, "a"));
        let long = format!("{long}*");
        for bad in ["re:(", "re:a)|(?:q", "a[", "x{a", &long] {
            let error = bad.parse::<Pattern>().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Usage);
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }
}
