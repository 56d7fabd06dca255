//! What went wrong, where, why, and what to do about it.

use rustix::io::Errno;
use std::fmt;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a caller should take an [`Error`]; the command turns it into its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request itself cannot be meant: a value out of range, a pair that excludes itself.
    Usage,
    /// The request was fine and could not be carried out.
    Failed,
    /// A [`CancelToken`](crate::CancelToken) was set.
    Cancelled,
}

/// One failure: `what: where: why (ERRNO); remedy`.
///
/// The parts can be asked for one by one; [`Display`](fmt::Display) joins them in that order and
/// leaves out those that are not known.
#[derive(Clone)]
pub struct Error(Box<Parts>);

#[derive(Clone, Debug)]
struct Parts {
    kind: ErrorKind,
    what: String,
    place: String,
    why: String,
    errno: Option<Errno>,
    remedy: String,
}

impl Error {
    /// A failure that the kernel reported with an errno.
    pub(crate) fn os(what: impl Into<String>, errno: Errno) -> Self {
        let why = nix::errno::Errno::from_raw(errno.raw_os_error()).desc();
        Self(Box::new(Parts {
            kind: ErrorKind::Failed,
            what: what.into(),
            place: String::new(),
            why: why.to_string(),
            errno: Some(errno),
            remedy: usual_remedy(errno).to_string(),
        }))
    }

    /// A failure found without asking the kernel.
    pub(crate) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            kind: ErrorKind::Failed,
            what: what.into(),
            place: String::new(),
            why: why.into(),
            errno: None,
            remedy: String::new(),
        }))
    }

    /// A request that cannot be meant: for the command and the bindings, which have requests of
    /// their own.
    #[doc(hidden)]
    pub fn usage(what: impl Into<String>, why: impl Into<String>) -> Self {
        let mut error = Self::new(what, why);
        error.0.kind = ErrorKind::Usage;
        error
    }

    /// The transfer was cancelled by its token.
    pub(crate) fn cancelled(place: impl Into<String>) -> Self {
        let mut error = Self::new("load", "cancelled before it was whole").at(place);
        error.0.kind = ErrorKind::Cancelled;
        error.0.errno = Some(Errno::CANCELED);
        error
    }

    pub(crate) fn at(mut self, place: impl Into<String>) -> Self {
        self.0.place = place.into();
        self
    }

    pub(crate) fn why(mut self, why: impl Into<String>) -> Self {
        self.0.why = why.into();
        self
    }

    pub(crate) fn with_errno(mut self, errno: Errno) -> Self {
        self.0.errno = Some(errno);
        self
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.0.remedy = remedy.into();
        self
    }

    /// The same failure for who has options and no command line: `--queue-depth` becomes
    /// `queue_depth`, `--to memfd` becomes `to="memfd"`, and what is called differently there
    /// becomes what `others` say. Places stay as they are: they may be anybody's words.
    #[doc(hidden)]
    pub fn for_library(&self, others: &[(&str, &str)]) -> Self {
        let mut parts = self.0.clone();
        for text in [&mut parts.what, &mut parts.why, &mut parts.remedy] {
            *text = without_dashes(text, others);
        }
        Self(parts)
    }

    /// How to take it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The errno behind it, as the positive number of `errno(3)`, where there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.errno.map(Errno::raw_os_error)
    }

    /// The file, offset or limit it happened at; empty where there is none.
    pub fn place(&self) -> &str {
        &self.0.place
    }

    /// What would mend it; empty where nothing is known to.
    pub fn remedy_text(&self) -> &str {
        &self.0.remedy
    }
}

/// Each `--option` of a text, as [`Error::for_library`] says.
fn without_dashes(text: &str, others: &[(&str, &str)]) -> String {
    const VALUES: [&str; 10] = [
        "anon", "auto", "buffered", "direct", "dma-buf", "dmafile", "huge", "memfd", "thp",
        "udmabuf",
    ];
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    let (mut made, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("--") {
        let (before, found) = rest.split_at(at);
        made.push_str(before);
        let found = &found[2..];
        let end = found.find(|c| !is_part(c)).unwrap_or(found.len());
        let (name, behind) = found.split_at(end);
        rest = behind;
        let is_word = before.is_empty() || before.ends_with([' ', '(']);
        if !is_word || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
            // Somebody's name for something.
            made.push_str("--");
            made.push_str(name);
            continue;
        }
        match others.iter().find(|(other, _)| *other == name) {
            Some((_, called)) => made.push_str(called),
            None => made.push_str(&name.replace('-', "_")),
        }
        let value = behind.strip_prefix(' ').and_then(|next| {
            let end = next.find(|c| !is_part(c)).unwrap_or(next.len());
            VALUES.into_iter().find(|value| *value == &next[..end])
        });
        if let Some(value) = value {
            made.push_str(&format!("=\"{value}\""));
            rest = &behind[1 + value.len()..];
        }
    }
    made + rest
}

/// The name of an errno (`ENOENT`), as `errno(3)` spells it.
pub fn errno_name(raw: i32) -> String {
    match nix::errno::Errno::from_raw(raw) {
        nix::errno::Errno::UnknownErrno => format!("errno {raw}"),
        // nix names the twin of EAGAIN and EOPNOTSUPP by their first spelling, as Linux does.
        named => format!("{named:?}"),
    }
}

/// A text of whatever origin for a line on a terminal: characters that would break the line or
/// command the terminal are spelled out, and what is long is cut.
#[doc(hidden)]
pub fn one_line(text: &str) -> String {
    const MOST: usize = 1000;
    let commands = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}')
            || ('\u{202a}'..='\u{202e}').contains(&c)
            || ('\u{2066}'..='\u{2069}').contains(&c)
    };
    let mut line = String::new();
    for c in text.chars() {
        if line.len() > MOST {
            line.push('…');
            break;
        }
        match commands(c) {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
    }
    line
}

/// Serialises a path whatever its bytes.
pub(crate) fn lossy<S: serde::Serializer>(
    path: &std::path::Path,
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// What helps most often; callers that know better say so with `remedy`.
fn usual_remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT => "check the path",
        Errno::ACCESS => "ask for read permission on it, or run as its owner",
        Errno::LOOP => "the path is a loop of symbolic links: mend the links",
        Errno::MFILE => "raise the limit on open files: ulimit -n",
        Errno::NFILE => "the system has no file left: raise fs.file-max",
        Errno::IO => "the device failed to read: see the kernel log",
        _ => "",
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = &*self.0;
        f.write_str(&one_line(&parts.what))?;
        if !parts.place.is_empty() {
            write!(f, ": {}", one_line(&parts.place))?;
        }
        write!(f, ": {}", one_line(&parts.why))?;
        if let Some(errno) = parts.errno {
            write!(f, " ({})", errno_name(errno.raw_os_error()))?;
        }
        if !parts.remedy.is_empty() {
            write!(f, "; {}", one_line(&parts.remedy))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} [{:?}]", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stand_in_their_order() {
        let error = Error::os("cannot open", Errno::NOENT).at("model.gguf");
        assert_eq!(
            error.to_string(),
            "cannot open: model.gguf: No such file or directory (ENOENT); check the path"
        );
        assert_eq!(error.raw_os_error(), Some(2));
    }

    #[test]
    fn a_library_has_options_without_dashes() {
        let error = Error::new("--queue-depth", "0 is out of range")
            .at("/tmp/--io of")
            .remedy("leave --method and --io to auto, try a--b, -- or --no-memory-check");
        assert_eq!(
            error
                .for_library(&[("no-memory-check", "memory_check=False")])
                .to_string(),
            "queue_depth: /tmp/--io of: 0 is out of range; leave method and io to auto, try a--b, \
             -- or memory_check=False"
        );
        for (line, library) in [
            ("load it --to memfd", "load it to=\"memfd\""),
            ("(--io direct, --length)", "(io=\"direct\", length)"),
            ("'--io' is no pattern", "'--io' is no pattern"),
            ("--to memfds", "to memfds"),
            ("--", "--"),
        ] {
            assert_eq!(without_dashes(line, &[]), library);
        }
    }

    #[test]
    fn a_message_is_one_line_whatever_it_names() {
        let error = Error::os("cannot open", Errno::NOENT).at("a\nb\u{1b}[2J\u{202e}\0");
        assert_eq!(
            error.to_string(),
            "cannot open: a\\nb\\u{1b}[2J\\u{202e}\\u{0}: No such file or directory (ENOENT); check \
             the path"
        );
        let long = Error::new("x", "y".repeat(1 << 20));
        assert!(long.to_string().len() < 1100);
    }

    #[test]
    fn errnos_have_their_names() {
        assert_eq!(errno_name(22), "EINVAL");
        assert_eq!(errno_name(95), "EOPNOTSUPP");
        assert_eq!(errno_name(4242), "errno 4242");
    }
}
