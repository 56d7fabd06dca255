//! What went wrong, where, why, and what to do about it.

use crate::message::{Message, Names, message};
use crate::sys::sandbox::{self, Call, refused};
use rustix::io::Errno;
use std::fmt;
use std::io;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How to handle an [`Error`]; the command derives its exit status from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An invalid request: a value out of range, or options that exclude each other.
    Usage,
    /// A valid request that could not be carried out.
    Failed,
    /// A [`CancelToken`](crate::CancelToken) was set.
    Cancelled,
}

/// A failure: `what: where: why (ERRNO); remedy`.
///
/// [`Display`](fmt::Display) joins the parts that are not empty in this order, and names options as
/// this crate does (`queue_depth`, `to=memfd`); [`Error::render`] uses other names.
#[derive(Clone)]
pub struct Error(Box<ErrorParts>);

#[derive(Clone, Debug)]
struct ErrorParts {
    kind: ErrorKind,
    what: What,
    place: String,
    why: Message,
    errno: Option<Errno>,
    remedy: Message,
}

/// What failed.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub enum What {
    /// "cannot load", "cannot save", …
    Cannot(Verb),
    /// Other words.
    Words(Message),
}

/// What could not be done; code that several operations share names the usual one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Verb {
    /// A file.
    Load,
    /// Memory, a file or a stream.
    Save,
    /// The destination of a save.
    Write,
    /// A buffer, by a recorder.
    Record,
    /// What a holder has.
    Take,
    /// Holds.
    List,
    /// A hold.
    Release,
    /// Processes.
    Freeze,
    /// Frozen processes.
    Thaw,
}

impl From<Verb> for What {
    fn from(verb: Verb) -> Self {
        Self::Cannot(verb)
    }
}

impl<T: Into<Message>> From<T> for What {
    fn from(words: T) -> Self {
        Self::Words(words.into())
    }
}

impl From<&What> for Message {
    fn from(what: &What) -> Self {
        match what {
            What::Cannot(verb) => format!("cannot {verb}").into(),
            What::Words(words) => words.clone(),
        }
    }
}

/// To make one; for dmafile's own crates.
#[doc(hidden)]
impl Error {
    /// A failure that the kernel reported with an errno.
    pub fn os(what: impl Into<What>, errno: Errno) -> Self {
        let why = nix::errno::Errno::from_raw(errno.raw_os_error()).desc();
        Self(Box::new(ErrorParts {
            kind: ErrorKind::Failed,
            what: what.into(),
            place: String::new(),
            why: why.into(),
            errno: Some(errno),
            remedy: usual_remedy(errno).into(),
        }))
    }

    /// A failure that dmafile detected itself.
    pub fn new(what: impl Into<What>, why: impl Into<Message>) -> Self {
        Self(Box::new(ErrorParts {
            kind: ErrorKind::Failed,
            what: what.into(),
            place: String::new(),
            why: why.into(),
            errno: None,
            remedy: Message::default(),
        }))
    }

    /// An invalid request.
    pub fn usage(what: impl Into<What>, why: impl Into<Message>) -> Self {
        let mut error = Self::new(what, why);
        error.0.kind = ErrorKind::Usage;
        error
    }

    /// The token cancelled an operation.
    pub fn cancelled(verb: Verb, place: impl Into<String>) -> Self {
        let why = "cancelled before it was complete";
        let mut error = Self::new(verb.to_string(), why).at(place);
        error.0.kind = ErrorKind::Cancelled;
        error.0.errno = Some(Errno::CANCELED);
        error
    }

    /// For code that several operations share: names the one that failed.
    pub fn of(mut self, verb: Verb) -> Self {
        if let What::Cannot(shared) = &mut self.0.what {
            *shared = verb;
        }
        self
    }

    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.0.place = place.into();
        self
    }

    pub fn with_why(mut self, why: impl Into<Message>) -> Self {
        self.0.why = why.into();
        self
    }

    pub fn with_errno(mut self, errno: Errno) -> Self {
        self.0.errno = Some(errno);
        self
    }

    pub fn with_remedy(mut self, remedy: impl Into<Message>) -> Self {
        self.0.remedy = remedy.into();
        self
    }

    /// If a sandbox refuses one of the calls that may have failed, says so: neither the file nor its owner can
    /// be the reason then. Replaces the cause and the remedy.
    pub fn of_calls(self, calls: &[Call]) -> Self {
        match self.0.errno.and_then(|errno| refused(errno, calls)) {
            Some(call) => self.with_why(call.why()).with_remedy(call.remedy()),
            None => self,
        }
    }
}

/// Fails where libraries that use hash tables would panic.
///
/// # Errors
/// EACCES from a sandbox that refuses getrandom(2).
pub fn can_hash(verb: Verb) -> Result<()> {
    match sandbox::hash_refused() {
        None => Ok(()),
        Some(errno) => Err(Error::new(verb, sandbox::GETRANDOM.why())
            .with_errno(errno)
            .with_remedy(sandbox::GETRANDOM.remedy())),
    }
}

impl Error {
    /// Its kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Its errno as a positive number, if it has one.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.errno.map(Errno::raw_os_error)
    }

    /// The file, offset or limit where it happened; empty if there is none.
    pub fn place(&self) -> &str {
        &self.0.place
    }

    /// The cause.
    pub fn why(&self) -> &Message {
        &self.0.why
    }

    /// What would help; empty if nothing is known to.
    pub fn remedy(&self) -> &Message {
        &self.0.remedy
    }

    /// The whole error on one line, as [`Display`](fmt::Display) writes it, with options named by
    /// `names`.
    pub fn render(&self, names: &dyn Names) -> String {
        Message::from(self).render(names)
    }
}

/// The name of an errno (`ENOENT`), as `errno(3)` spells it.
pub fn errno_name(raw: i32) -> String {
    match nix::errno::Errno::from_raw(raw) {
        nix::errno::Errno::UnknownErrno => format!("errno {raw}"),
        // nix uses the first spelling of EAGAIN and EOPNOTSUPP, as Linux does.
        named => format!("{named:?}"),
    }
}

/// Serialises a path that may not be UTF-8.
pub fn lossy<S: serde::Serializer>(
    path: &std::path::Path,
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// The most common remedy; callers that know better set `remedy`.
fn usual_remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT => "check the path",
        Errno::ACCESS => "ask for read permission on it, or run as its owner",
        Errno::LOOP => "fix the loop of symbolic links",
        Errno::MFILE => "raise the limit on open files: ulimit -n",
        Errno::NFILE => "the system is out of file descriptors: raise fs.file-max",
        Errno::IO => "the device failed to read: see the kernel log",
        _ => "",
    }
}

impl From<&Error> for Message {
    fn from(error: &Error) -> Self {
        let ErrorParts {
            kind: _,
            what,
            place,
            why,
            errno,
            remedy,
        } = &*error.0;
        let mut all = vec![what.into()];
        if !place.is_empty() {
            all.push(message![": ", place.as_str()]);
        }
        all.push(message![": ", why.clone()]);
        if let Some(errno) = errno {
            all.push(format!(" ({})", errno_name(errno.raw_os_error())).into());
        }
        if !remedy.is_empty() {
            all.push(message!["; ", remedy.clone()]);
        }
        Self::concat(all)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Message::from(self).fmt(f)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} [{:?}]", self.0.kind)
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    /// Its kind is derived from the errno, if there is one; the source is the error itself.
    fn from(error: Error) -> Self {
        let kind = match (error.raw_os_error(), error.kind()) {
            (Some(errno), _) => Self::from_raw_os_error(errno).kind(),
            (None, ErrorKind::Usage) => io::ErrorKind::InvalidInput,
            (None, _) => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Opt;

    #[test]
    fn a_message_has_its_parts_in_order() {
        let error = Error::os("cannot open", Errno::NOENT).at("model.gguf");
        assert_eq!(
            error.to_string(),
            "cannot open: model.gguf: No such file or directory (ENOENT); check the path"
        );
        assert_eq!(error.raw_os_error(), Some(2));
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
    fn an_error_converts_to_io_error() {
        let missing = io::Error::from(Error::os("cannot open", Errno::NOENT).at("model"));
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        assert!(missing.to_string().starts_with("cannot open: model: "));
        let inside = missing.get_ref().and_then(|inner| inner.downcast_ref());
        assert_eq!(inside.and_then(Error::raw_os_error), Some(2));
        let usage = io::Error::from(Error::usage(Opt::Block, "0 is out of range"));
        assert_eq!(usage.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(usage.to_string(), "block: 0 is out of range");
    }

    #[test]
    fn errnos_have_their_names() {
        assert_eq!(errno_name(22), "EINVAL");
        assert_eq!(errno_name(95), "EOPNOTSUPP");
        assert_eq!(errno_name(4242), "errno 4242");
    }
}
