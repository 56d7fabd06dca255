//! What a URL names.

use dmafile::internal::{URL_SCHEMES, without_secrets};
use dmafile::{Error, Result};
use url::Url;

/// An object, or a folder of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UrlPlace {
    Web(Url),
    Hub {
        /// `OWNER/NAME`
        repository: String,
        revision: String,
        /// A file or a folder in it; empty for all of it.
        path: String,
    },
    Bucket {
        dialect: Dialect,
        bucket: String,
        key: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    S3,
    Gcs,
    Azure,
}

fn scheme(text: &str) -> Option<&'static str> {
    let (own, _) = text.split_once("://")?;
    URL_SCHEMES
        .into_iter()
        .find(|scheme| own.eq_ignore_ascii_case(scheme))
}

impl UrlPlace {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let invalid = |why: &str| {
            let shown = without_secrets(text);
            Error::usage("URL", format!("'{shown}' is not valid: {why}"))
        };
        let Some(scheme) = scheme(text) else {
            return Err(invalid(&format!(
                "it begins with none of {}",
                URL_SCHEMES.map(|one| format!("{one}://")).join(", ")
            )));
        };
        let (_, rest) = text.split_once("://").unwrap_or_default();
        if text.contains(char::is_control) {
            return Err(invalid("it has control characters"));
        }
        match scheme {
            "https" | "http" => {
                let url = Url::parse(text).map_err(|error| invalid(&error.to_string()))?;
                match url.host_str() {
                    Some(host) if !host.is_empty() => Ok(Self::Web(url)),
                    _ => Err(invalid("it names no host")),
                }
            }
            "hf" => {
                Self::hub(rest).ok_or_else(|| invalid("it is hf://OWNER/NAME[@REVISION][/FILE]"))
            }
            _ => {
                let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
                let dialect = match scheme {
                    "s3" | "s3a" => Dialect::S3,
                    "gs" => Dialect::Gcs,
                    _ => Dialect::Azure,
                };
                // CONTAINER@ACCOUNT.dfs.core.windows.net
                let bucket = bucket.split('@').next().unwrap_or_default();
                if bucket.is_empty() {
                    return Err(invalid("it names no bucket"));
                }
                Ok(Self::Bucket {
                    dialect,
                    bucket: bucket.to_string(),
                    key: key.to_string(),
                })
            }
        }
    }

    /// Its path within the server, the model or the bucket.
    pub(crate) fn path(&self) -> &str {
        match self {
            Self::Web(url) => url.path(),
            Self::Hub { path, .. } => path,
            Self::Bucket { key, .. } => key,
        }
    }

    /// True for a folder; a web server does not say what is in one.
    pub(crate) fn is_folder(&self) -> bool {
        let path = self.path();
        !matches!(self, Self::Web(_)) && (path.is_empty() || path.ends_with('/'))
    }

    fn hub(rest: &str) -> Option<Self> {
        let mut parts = rest.splitn(3, '/');
        let (owner, second) = (parts.next()?, parts.next()?);
        let path = parts.next().unwrap_or("").to_string();
        let (name, revision) = second.split_once('@').unwrap_or((second, "main"));
        // A branch may have a slash in its name, as %2F.
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        let is_word = |text: &str| {
            let allowed = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
            !text.is_empty() && text.chars().all(allowed) && !matches!(text, "." | "..")
        };
        (is_word(owner) && is_word(name) && !revision.is_empty()).then(|| Self::Hub {
            repository: format!("{owner}/{name}"),
            revision,
            path,
        })
    }
}

/// As [`without_secrets`], for each URL in a message.
pub(crate) fn message_without_secrets(text: &str) -> String {
    let words = text.split(' ').map(|word| match word.find("http") {
        Some(at) => word[..at].to_string() + &without_secrets(&word[at..]),
        None => word.split('?').next().unwrap_or_default().to_string(),
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmafile::internal::is_url;

    #[test]
    fn each_scheme_names_its_place() {
        let hub = |repository: &str, revision: &str, path: &str| UrlPlace::Hub {
            repository: repository.to_string(),
            revision: revision.to_string(),
            path: path.to_string(),
        };
        let bucket = |dialect, bucket: &str, key: &str| UrlPlace::Bucket {
            dialect,
            bucket: bucket.to_string(),
            key: key.to_string(),
        };
        for (text, place) in [
            ("hf://Qwen/Qwen3-8B", hub("Qwen/Qwen3-8B", "main", "")),
            (
                "hf://a/b@0123abc/x/y.gguf",
                hub("a/b", "0123abc", "x/y.gguf"),
            ),
            ("hf://a/b@refs%2Fpr%2F1", hub("a/b", "refs/pr/1", "")),
            ("s3://bucket/a/b c", bucket(Dialect::S3, "bucket", "a/b c")),
            ("S3://bucket", bucket(Dialect::S3, "bucket", "")),
            ("gs://bucket/a/", bucket(Dialect::Gcs, "bucket", "a/")),
            ("az://c/k", bucket(Dialect::Azure, "c", "k")),
            (
                "abfss://c@account.dfs.core.windows.net/k",
                bucket(Dialect::Azure, "c", "k"),
            ),
        ] {
            assert_eq!(UrlPlace::parse(text).unwrap(), place, "{text}");
            assert!(is_url(text));
        }
        assert!(matches!(
            UrlPlace::parse("https://h/x?y"),
            Ok(UrlPlace::Web(_))
        ));
        for bad in [
            "hf://a",
            "hf://a/..",
            "hf://a/b@",
            "hf:///b",
            "s3://",
            "s3:///k",
            "ftp://h/x",
            "http://",
            "s3://a/\n",
        ] {
            let error = UrlPlace::parse(bad).unwrap_err();
            assert_eq!(error.kind(), dmafile::ErrorKind::Usage, "{bad}");
        }
        assert!(!is_url("model.gguf") && !is_url("./s3://x") && !is_url("http:/x"));
    }

    #[test]
    fn secrets_are_not_shown() {
        let shown = without_secrets("https://me:hunter2@host/a@b?signature=hunter2#x");
        assert_eq!(shown, "https://host/a@b");
        assert_eq!(without_secrets("http://@host"), "http://host");
        assert_eq!(without_secrets("s3://bucket/a@b"), "s3://bucket/a@b");
        let shown = message_without_secrets(
            "error: PUT (https://me:hunter2@host/a?sig=hunter2) for /a?sig=hunter2: it is full",
        );
        assert_eq!(shown, "error: PUT (https://host/a for /a it is full");
    }
}
