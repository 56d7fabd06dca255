//! What was decided during one run and why: one log, from the first look at the file to the report.

use crate::sync::lock;
use serde::Serialize;
use std::sync::Mutex;

/// One choice and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Reason {
    /// What was decided: `method`, `io`, `pages`, …
    pub about: &'static str,
    /// What it was decided to be.
    pub choice: String,
    /// Why.
    pub why: String,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.about, self.choice, self.why)
    }
}

/// The log of one run. Threads of a transfer add to it too.
#[derive(Debug, Default)]
pub(crate) struct Reasons(Mutex<Vec<Reason>>);

impl Reasons {
    pub(crate) fn add(&self, about: &'static str, choice: impl ToString, why: impl Into<String>) {
        let reason = Reason {
            about,
            choice: choice.to_string(),
            why: why.into(),
        };
        lock(&self.0).push(reason);
    }

    /// All of them so far, in their order.
    pub(crate) fn list(&self) -> Vec<Reason> {
        lock(&self.0).clone()
    }
}
