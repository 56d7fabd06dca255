//! What an answer to a request for a range means: every answer is checked before a byte of it counts.

use crate::http::{AnswerHead, BodyLength};
use crate::retry;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dmafile::Algorithm;
use std::time::Duration;

/// What is known of an object: each later answer must be about the same one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    pub size: u64,
    /// A strong ETag.
    pub etag: Option<String>,
    /// When it was changed, if there is no such ETag.
    pub modified: Option<String>,
}

impl Version {
    /// The field that makes a request fail if the object is another one by now.
    pub(crate) fn condition(&self) -> Option<(&'static str, String)> {
        let etag = self.etag.clone().map(|etag| ("If-Match", etag));
        etag.or_else(|| Some(("If-Unmodified-Since", self.modified.clone()?)))
    }

    fn of(head: &AnswerHead, size: u64) -> Self {
        let etag = head.field("etag").filter(|etag| etag.starts_with('"'));
        Self {
            size,
            etag: etag.map(str::to_string),
            modified: head.field("last-modified").map(str::to_string),
        }
    }

    /// Why an answer is about another object; None if it is about this one.
    fn differs(&self, head: &AnswerHead, size: u64) -> Option<String> {
        let other = Self::of(head, size);
        if other.size != self.size {
            return Some(format!(
                "it has {} bytes now, and had {}",
                other.size, self.size
            ));
        }
        match (&self.etag, &other.etag) {
            (Some(one), Some(other)) if one != other => Some("its ETag has changed".to_string()),
            (None, _) if self.modified != other.modified => {
                Some("the time of its last change is another one".to_string())
            }
            _ => None,
        }
    }
}

/// The meaning of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    /// The body is what was asked for: this many bytes of this version.
    Range(u64, Version),
    /// The object has no bytes.
    Empty,
    /// Ask again, after this time if the server says so.
    Again(String, Option<Duration>),
    /// The credentials are not accepted, or not any more.
    Denied(u16),
    /// It is not there.
    Missing(u16),
    /// The object is another one by now.
    Changed(String),
    /// The server answers wrongly, or in a way that cannot be used.
    Wrong(String),
}

/// Why the server cannot answer now, and when it may, if it says so; None if that is not the answer.
pub(crate) fn busy(head: &AnswerHead) -> Option<(String, Option<Duration>)> {
    let after = || head.field("retry-after").and_then(retry::after);
    matches!(head.status, 408 | 429 | 500 | 502 | 503 | 504)
        .then(|| (format!("status {}", head.status), after()))
}

/// An algorithm, and a digest in hexadecimal.
pub(crate) type KnownDigest = (Algorithm, String);

/// The digest of the whole object that an answer of a store names.
pub(crate) fn digest(head: &AnswerHead) -> Option<KnownDigest> {
    // A digest of the digests of an object's parts is of no use here.
    let whole = head
        .field("x-amz-checksum-type")
        .is_none_or(|kind| kind.eq_ignore_ascii_case("FULL_OBJECT"));
    let amazon = [
        ("x-amz-checksum-crc64nvme", Algorithm::Crc64Nvme),
        ("x-amz-checksum-sha256", Algorithm::Sha256),
        ("x-amz-checksum-crc32c", Algorithm::Crc32c),
    ];
    let amazon = amazon.into_iter().filter(|_| whole);
    let mut amazon = amazon
        .filter_map(|(name, algorithm)| Some((algorithm, hex(algorithm, head.field(name)?)?)));
    let google = || {
        let mut hashes = head
            .fields()
            .filter(|field| field.0.eq_ignore_ascii_case("x-goog-hash"));
        hashes.find_map(|(_, hashes)| {
            let sum = hashes
                .split(',')
                .find_map(|hash| hash.trim().strip_prefix("crc32c="))?;
            Some((Algorithm::Crc32c, hex(Algorithm::Crc32c, sum)?))
        })
    };
    amazon.next().or_else(google)
}

/// The digest that the tag of a file of the hub is: SHA-256 of a large file, git's name of a small one.
pub(crate) fn digest_of_tag(tag: &str) -> Option<KnownDigest> {
    let name = tag.trim_start_matches("W/").trim_matches('"');
    let known = [Algorithm::Sha256, Algorithm::GitSha1];
    let algorithm = known.into_iter().find(|one| one.digits() == name.len())?;
    let digits = name.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| (algorithm, name.to_ascii_lowercase()))
}

/// A digest in base64, in hexadecimal.
fn hex(algorithm: Algorithm, text: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(text.trim()).ok()?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    (hex.len() == algorithm.digits()).then_some(hex)
}

/// Judges the answer to a request for `[start, end)`, or up to the end of the object if that comes first. `known` is
/// what earlier answers were about.
pub(crate) fn judge(
    head: &AnswerHead,
    (start, end): (u64, u64),
    known: Option<&Version>,
) -> Answered {
    match head.status {
        206 => {}
        200 => return whole(head, (start, end), known),
        401 | 403 => return Answered::Denied(head.status),
        404 | 410 => return Answered::Missing(head.status),
        412 => return Answered::Changed("the server says so (status 412)".to_string()),
        416 => {
            return match head.field("content-range").and_then(total_only) {
                Some(0) => Answered::Empty,
                // Any other object has a first byte.
                None if start == 0 && known.is_none() => Answered::Empty,
                Some(size) if known.is_some_and(|known| known.size != size) => {
                    Answered::Changed(format!("it has {size} bytes now"))
                }
                _ => Answered::Wrong("the server refuses the range (status 416)".to_string()),
            };
        }
        status => {
            return match busy(head) {
                Some((why, after)) => Answered::Again(why, after),
                None => Answered::Wrong(format!("the server answers with status {status}")),
            };
        }
    }
    let wrong = |why: &str| Answered::Wrong(why.to_string());
    match head.field("content-encoding") {
        None => {}
        Some(coding) if coding.eq_ignore_ascii_case("identity") => {}
        Some(coding) => {
            return Answered::Wrong(format!(
                "its bytes are encoded ({}), so ranges of them mean something else",
                word(coding)
            ));
        }
    }
    let Some(said) = head.field("content-range") else {
        // Several ranges in one body have none, either.
        return wrong("the answer does not say which range it has");
    };
    let Some((first, last, total)) = range(said) else {
        return Answered::Wrong(format!("the answer's range is not clear: {}", word(said)));
    };
    let expected = end.min(total);
    if (first, last + 1) != (start, expected) || first > last {
        return Answered::Wrong(format!(
            "the answer has bytes {first} to {last} instead of {start} to {}",
            expected.saturating_sub(1)
        ));
    }
    let version = Version::of(head, total);
    if let Some(why) = known.and_then(|known| known.differs(head, total)) {
        return Answered::Changed(why);
    }
    match head.body() {
        Ok(BodyLength::Bytes(length)) if length == expected - start => {
            Answered::Range(length, version)
        }
        Ok(BodyLength::Bytes(length)) => Answered::Wrong(format!(
            "the answer has {length} bytes instead of {}",
            expected - start
        )),
        Ok(BodyLength::Chunked | BodyLength::UntilClosed) => {
            wrong("the answer does not say how long it is")
        }
        Err(error) => Answered::Wrong(error.to_string()),
    }
}

/// Judges an answer that has the whole object, which is as good if that is what was asked for.
fn whole(head: &AnswerHead, (start, end): (u64, u64), known: Option<&Version>) -> Answered {
    let plain = head
        .field("content-encoding")
        .is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
    match head.body() {
        // It may be the length of the range: some servers answer with a part, and the status of the whole.
        _ if head.field("content-range").is_some() => {
            Answered::Wrong("the server answers a range with status 200".to_string())
        }
        Ok(BodyLength::Bytes(0)) if start == 0 => Answered::Empty,
        Ok(BodyLength::Bytes(size)) if plain && start == 0 && size <= end => {
            match known.and_then(|known| known.differs(head, size)) {
                Some(why) => Answered::Changed(why),
                None => Answered::Range(size, Version::of(head, size)),
            }
        }
        _ => Answered::Wrong(
            "the server does not support ranges (it answers with status 200)".to_string(),
        ),
    }
}

/// Text of a server, for a message.
fn word(text: &str) -> String {
    text.chars()
        .filter(|char| !char.is_control())
        .take(60)
        .collect()
}

/// `bytes FIRST-LAST/TOTAL`
fn range(text: &str) -> Option<(u64, u64, u64)> {
    let (unit, rest) = text.split_once(' ')?;
    let (range, total) = rest.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse::<u64>().ok().filter(|_| digits);
        // No larger object can be addressed.
        number.filter(|number| *number < i64::MAX as u64)
    };
    let all = (number(first)?, number(last)?, number(total)?);
    unit.eq_ignore_ascii_case("bytes").then_some(all)
}

/// `bytes */TOTAL`
fn total_only(text: &str) -> Option<u64> {
    let total = text.strip_prefix("bytes */")?;
    total.parse().ok()
}

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/head.rs"]
pub(crate) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, fields: &str) -> AnswerHead {
        let text = format!("HTTP/1.1 {status} X\r\n{fields}\r\n\r\n");
        AnswerHead::parse(text.as_bytes()).unwrap().unwrap().0
    }

    const GOOD: &str = "Content-Range: bytes 10-19/100\r\nContent-Length: 10\r\nETag: \"a\"";

    fn version() -> Version {
        Version {
            size: 100,
            etag: Some("\"a\"".to_string()),
            modified: None,
        }
    }

    fn judged(fields: &str) -> Answered {
        judge(&head(206, fields), (10, 20), Some(&version()))
    }

    #[test]
    fn only_the_range_of_the_version_that_was_asked_for_is_good() {
        assert_eq!(judged(GOOD), Answered::Range(10, version()));
        let last = "Content-Range: bytes 90-99/100\r\nContent-Length: 10\r\nETag: \"a\"";
        let judged_last = judge(&head(206, last), (90, 1000), Some(&version()));
        assert_eq!(judged_last, Answered::Range(10, version()));
        for (from, to) in [
            ("bytes 10-19/100", "bytes 11-20/100"),
            ("bytes 10-19/100", "bytes 10-18/100"),
            ("bytes 10-19/100", "bytes 10-20/100"),
            ("bytes 10-19/100", "bytes 19-10/100"),
            ("bytes 10-19/100", "bytes 10-19/*"),
            ("bytes 10-19/100", "bytes 10-19/99999999999999999999"),
            ("bytes 10-19/100", "bytes -10-19/100"),
            ("bytes 10-19/100", "lines 10-19/100"),
            ("Content-Range: bytes 10-19/100", "X: y"),
            ("Content-Length: 10", "Content-Length: 11"),
            ("Content-Length: 10", "Content-Length: 9"),
            ("Content-Length: 10", "Transfer-Encoding: chunked"),
            (
                "Content-Length: 10",
                "Content-Length: 10\r\nContent-Encoding: gzip",
            ),
            ("Content-Length: 10", "Content-Type: multipart/byteranges"),
        ] {
            let fields = GOOD.replace(from, to);
            assert!(
                matches!(judged(&fields), Answered::Wrong(_)),
                "{to}: {:?}",
                judged(&fields)
            );
        }
        for (from, to) in [("\"a\"", "\"b\""), ("/100", "/101")] {
            let fields = GOOD.replace(from, to);
            assert!(matches!(judged(&fields), Answered::Changed(_)), "{to}");
        }
    }

    #[test]
    fn each_status_has_its_meaning() {
        let of = |status, fields| judge(&head(status, fields), (10, 20), Some(&version()));
        assert!(matches!(of(200, GOOD), Answered::Wrong(_)));
        let all = judge(&head(200, "Content-Length: 20"), (0, 20), None);
        assert!(matches!(all, Answered::Range(20, _)));
        let part = "Content-Length: 20\r\nContent-Range: bytes 0-19/100";
        let part = judge(&head(200, part), (0, 20), None);
        assert!(matches!(part, Answered::Wrong(_)));
        let more = judge(&head(200, "Content-Length: 21"), (0, 20), None);
        assert!(matches!(more, Answered::Wrong(_)));
        assert!(matches!(of(302, "X: y"), Answered::Wrong(_)));
        assert_eq!(of(403, "X: y"), Answered::Denied(403));
        assert_eq!(of(404, "X: y"), Answered::Missing(404));
        assert!(matches!(of(412, "X: y"), Answered::Changed(_)));
        assert_eq!(of(416, "Content-Range: bytes */0"), Answered::Empty);
        let silent = |start, known| judge(&head(416, "X: y"), (start, 20), known);
        assert_eq!(silent(0, None), Answered::Empty);
        assert!(matches!(silent(10, None), Answered::Wrong(_)));
        assert!(matches!(silent(0, Some(&version())), Answered::Wrong(_)));
        assert!(matches!(
            of(416, "Content-Range: bytes */7"),
            Answered::Changed(_)
        ));
        let again = Answered::Again("status 503".to_string(), Some(Duration::from_secs(7)));
        assert_eq!(of(503, "Retry-After: 7"), again);
        assert!(matches!(of(418, "X: y"), Answered::Wrong(_)));
        assert!(matches!(of(304, "X: y"), Answered::Wrong(_)));
    }

    #[test]
    fn without_a_strong_etag_the_time_of_the_last_change_counts() {
        let fields = "Content-Range: bytes 0-9/10\r\nContent-Length: 10\r\nETag: W/\"a\"\r\n\
                      Last-Modified: Sat, 28 Nov 2026 10:00:00 GMT";
        let Answered::Range(10, version) = judge(&head(206, fields), (0, 10), None) else {
            panic!("it is good");
        };
        let condition = version.condition().unwrap();
        assert_eq!(condition.0, "If-Unmodified-Since");
        let later = fields.replace("10:00:00", "10:00:01");
        let later = judge(&head(206, &later), (0, 10), Some(&version));
        assert!(matches!(later, Answered::Changed(_)));
    }
}
