//! The head of an answer: its status and its fields.

use std::io;

/// The longest head in bytes. Those of stores have 1 to 2 KiB.
pub(crate) const LONGEST: usize = 16 << 10;
const MOST_FIELDS: usize = 100;

/// A parsed head.
#[derive(Clone, Debug)]
pub(crate) struct AnswerHead {
    pub status: u16,
    fields: Vec<(String, String)>,
    /// The server keeps the connection open after the body.
    pub keeps: bool,
}

/// How long a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyLength {
    Bytes(u64),
    Chunked,
    /// Up to the end of the connection.
    UntilClosed,
}

pub(crate) fn bad(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

impl AnswerHead {
    /// Parses a head, and returns it with its length; None if it is not complete yet.
    pub(crate) fn parse(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
        let mut answer = httparse::Response::new(&mut fields);
        let length = match answer.parse(bytes) {
            Ok(httparse::Status::Complete(length)) if length <= LONGEST => length,
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST => return Ok(None),
            Ok(_) => return Err(bad(format!("the head has more than {LONGEST} bytes"))),
            Err(error) => return Err(bad(format!("the answer is not HTTP ({error})"))),
        };
        let newer = answer.version == Some(1);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
        let fields = answer.headers.iter();
        let fields = fields.map(|field| (field.name.to_string(), text(field.value)));
        let mut head = Self {
            status: answer.code.unwrap_or(0),
            fields: fields.collect(),
            keeps: newer,
        };
        if let Some(said) = head.field("connection") {
            let says = |word: &str| {
                said.split(',')
                    .any(|one| one.trim().eq_ignore_ascii_case(word))
            };
            head.keeps = !says("close") && (newer || says("keep-alive"));
        }
        Ok(Some((head, length)))
    }

    /// All fields.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields
            .iter()
            .map(|field| (field.0.as_str(), field.1.as_str()))
    }

    /// The value of a field; None without one, and for one that occurs several times with different values.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let mut values = self.fields.iter();
        let mut values = values
            .by_ref()
            .filter(|field| field.0.eq_ignore_ascii_case(name))
            .map(|field| field.1.as_str());
        let first = values.next()?;
        values.all(|value| value == first).then_some(first)
    }

    /// The number that is the value of a field.
    pub(crate) fn number(&self, name: &str) -> io::Result<Option<u64>> {
        let Some(text) = self.field(name) else {
            let repeated = self
                .fields
                .iter()
                .any(|field| field.0.eq_ignore_ascii_case(name));
            return if repeated {
                Err(bad(format!("{name} has several values")))
            } else {
                Ok(None)
            };
        };
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits => Ok(Some(number)),
            _ => Err(bad(format!("{name} is not a number"))),
        }
    }

    /// The length of its body, for an answer to GET, PUT or POST.
    pub(crate) fn body(&self) -> io::Result<BodyLength> {
        if matches!(self.status, 100..200 | 204 | 304) {
            return Ok(BodyLength::Bytes(0));
        }
        let length = self.number("content-length")?;
        match (self.field("transfer-encoding"), length) {
            (None, Some(length)) => Ok(BodyLength::Bytes(length)),
            (None, None) => Ok(BodyLength::UntilClosed),
            // Two lengths are how answers are smuggled in.
            (Some(_), Some(_)) => Err(bad("it has a length and a transfer encoding")),
            (Some(coding), None) if coding.eq_ignore_ascii_case("chunked") => {
                Ok(BodyLength::Chunked)
            }
            (Some(_), None) => Err(bad("its transfer encoding is unknown")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> AnswerHead {
        AnswerHead::parse(text.as_bytes()).unwrap().unwrap().0
    }

    #[test]
    fn a_head_is_parsed_when_it_is_complete() {
        let text = "HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nETag: \"a\"\r\n\r\nhello";
        for end in 0..text.len() - 5 {
            assert!(
                AnswerHead::parse(&text.as_bytes()[..end])
                    .unwrap()
                    .is_none(),
                "{end}"
            );
        }
        let (head, length) = AnswerHead::parse(text.as_bytes()).unwrap().unwrap();
        assert_eq!((head.status, length), (206, text.len() - 5));
        assert_eq!(head.field("etag"), Some("\"a\""));
        assert_eq!(head.body().unwrap(), BodyLength::Bytes(5));
        assert!(head.keeps);
    }

    #[test]
    fn heads_that_are_too_long_or_no_heads_are_refused() {
        let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(17 << 10));
        assert!(AnswerHead::parse(long.as_bytes()).is_err());
        assert!(AnswerHead::parse(&long.as_bytes()[..LONGEST]).is_err());
        assert!(
            AnswerHead::parse(&long.as_bytes()[..LONGEST - 1])
                .unwrap()
                .is_none()
        );
        for text in [
            "SSH-2.0-OpenSSH_9.2\r\n\r\n",
            "\u{16}\u{3}",
            "HTTP/2 200\r\n\r\n",
        ] {
            assert!(AnswerHead::parse(text.as_bytes()).is_err(), "{text}");
        }
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(200));
        assert!(AnswerHead::parse(many.as_bytes()).is_err());
    }

    #[test]
    fn a_body_has_one_length_or_is_refused() {
        let body = |fields: &str| parsed(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")).body();
        assert_eq!(body("").unwrap(), BodyLength::UntilClosed);
        assert_eq!(
            body("Content-Length: 7\r\nContent-Length: 7\r\n").unwrap(),
            BodyLength::Bytes(7)
        );
        assert_eq!(
            body("Transfer-Encoding: Chunked\r\n").unwrap(),
            BodyLength::Chunked
        );
        for bad in [
            "Content-Length: 7\r\nContent-Length: 8\r\n",
            "Content-Length: -1\r\n",
            "Content-Length: +7\r\n",
            "Content-Length: 7 7\r\n",
            "Content-Length: 99999999999999999999\r\n",
            "Content-Length: 7\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip\r\n",
        ] {
            assert!(body(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_server_says_whether_the_connection_stays() {
        for (text, keeps) in [
            ("HTTP/1.1 200 OK\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\nConnection: foo, Close\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n\r\n", true),
        ] {
            assert_eq!(parsed(text).keeps, keeps, "{text}");
        }
    }
}
