//! Models on the Hugging Face Hub, and on what speaks as it does.

use crate::answer::busy;
use crate::http::{Client, WaitCheck};
use crate::origin::{Web, follow};
use crate::retry::{Budget, Trouble};
use dmafile::{Error, Result};
use rustix::io::Errno;
use serde::Deserialize;
use std::path::PathBuf;
use url::Url;

impl std::fmt::Debug for Hub {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name_of(""))
    }
}

/// A revision of a model.
pub(crate) struct Hub {
    endpoint: Url,
    authorization: Option<String>,
    repository: String,
    /// The commit, which does not change.
    pub commit: String,
    /// Its files.
    pub names: Vec<String>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// Asks which commit a revision is, and which files it has.
    pub(crate) fn open(
        client: &Client,
        repository: &str,
        revision: &str,
        check: WaitCheck<'_>,
    ) -> Result<Self> {
        let name = format!("hf://{repository}@{revision}");
        let failed =
            |why: String, errno| Error::new("cannot fetch", why).with_errno(errno).at(&name);
        let endpoint =
            variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        let endpoint = Url::parse(&format!("{}/", endpoint.trim_end_matches('/')));
        let endpoint =
            endpoint.map_err(|error| failed(format!("HF_ENDPOINT: {error}"), Errno::INVAL))?;
        let authorization = token().map(|token| format!("Bearer {token}"));
        let url = joined(
            &endpoint,
            &format!("api/models/{repository}/revision/"),
            &[revision],
        );
        let secret = authorization.as_deref().map(|secret| (&endpoint, secret));
        let (head, text) = Budget::default().tried(
            &name,
            check,
            || 0,
            || {
                let answer = follow(client, &url, Vec::new(), secret, check)
                    .and_then(|(answer, _)| answer.text(client, check));
                let (head, text) = answer.map_err(|error| Trouble::of(error, &name))?;
                match busy(&head) {
                    Some((why, after)) => Err(Trouble::busy(why, after)),
                    None => Ok((head, text)),
                }
            },
        )?;
        let remedy = match &authorization {
            None => "set HF_TOKEN, if it is a private or gated one",
            Some(_) => "check that the token may read it, and that its terms have been accepted",
        };
        match head.status {
            200 => {}
            401 | 403 => {
                let why = format!("the hub does not allow it (status {})", head.status);
                return Err(failed(why, Errno::ACCESS).with_remedy(remedy));
            }
            404 => {
                let why = "there is no such model or revision (status 404)".to_string();
                return Err(failed(why, Errno::NOENT).with_remedy(remedy));
            }
            status => {
                return Err(failed(
                    format!("the hub answers with status {status}"),
                    Errno::PROTO,
                ));
            }
        }
        let info: Info = serde_json::from_slice(&text).map_err(|error| {
            failed(
                format!("the hub's answer is not clear: {error}"),
                Errno::PROTO,
            )
        })?;
        Ok(Self {
            endpoint,
            authorization,
            repository: repository.to_string(),
            commit: info.sha,
            names: info
                .siblings
                .into_iter()
                .map(|file| file.rfilename)
                .collect(),
        })
    }

    /// One of its files.
    pub(crate) fn file(&self, name: &str) -> Web {
        let start = format!("{}/resolve/{}/", self.repository, self.commit);
        let parts: Vec<_> = name.split('/').collect();
        Web::new(
            joined(&self.endpoint, &start, &parts),
            self.authorization.clone(),
            "hf",
        )
    }

    /// Its name in messages.
    pub(crate) fn name_of(&self, name: &str) -> String {
        format!("hf://{}@{}/{name}", self.repository, self.commit)
    }
}

/// A URL below another one; the last parts are names, in which anything is allowed.
fn joined(base: &Url, start: &str, parts: &[&str]) -> Url {
    let mut url = base.clone();
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty();
        path.extend(start.split('/').filter(|part| !part.is_empty()));
        path.extend(parts);
    }
    url
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .filter(|value| !value.trim().is_empty())
}

/// The token of `huggingface-cli login`, or of the environment.
fn token() -> Option<String> {
    if let Some(token) = variable("HF_TOKEN") {
        return Some(token.trim().to_string());
    }
    let file = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| {
        let home = variable("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
            Some(cache?.join("huggingface"))
        })?;
        Some(home.join("token"))
    })?;
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.trim().to_string()).filter(|token| !token.is_empty())
}
