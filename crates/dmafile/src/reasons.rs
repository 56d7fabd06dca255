//! The decisions of one run and their reasons: one log, from opening the file to the report.

use crate::message::{Builder, Message, Names};
use crate::sync::lock;
use serde::Serialize;
use std::sync::Mutex;
use strum::{Display, IntoStaticStr};

/// What a decision is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Display, IntoStaticStr)]
#[serde(into = "&'static str")]
#[strum(serialize_all = "kebab-case")]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum About {
    Allocation,
    Cache,
    Chunk,
    Depth,
    Device,
    File,
    Folder,
    Got,
    Io,
    Keeps,
    Kind,
    Left,
    Limit,
    Links,
    Method,
    Mode,
    Mount,
    Node,
    /// A method, or a kind of memory, that was left out.
    Not,
    Pages,
    Place,
    PreMapped,
    Removed,
    Ring,
    Space,
    Sync,
    Verify,
}

impl About {
    /// Its word.
    pub fn word(self) -> &'static str {
        self.into()
    }
}

/// A decision and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Reason {
    /// What was decided.
    pub about: About,
    /// The decision.
    pub choice: String,
    /// Why.
    pub why: String,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.about, self.choice, self.why)
    }
}

/// The log of one run. Threads of a transfer add to it, too.
pub struct Reasons {
    list: Mutex<Vec<Reason>>,
    /// How the reader names options.
    names: &'static dyn Names,
}

impl Default for Reasons {
    fn default() -> Self {
        Self::named(&Builder)
    }
}

impl Reasons {
    /// An empty log; these are the names of options in it.
    pub fn named(names: &'static dyn Names) -> Self {
        Self {
            list: Mutex::default(),
            names,
        }
    }

    /// Adds a choice and its reason.
    pub fn add(&self, about: About, choice: impl ToString, why: impl Into<Message>) {
        let reason = Reason {
            about,
            choice: choice.to_string(),
            why: why.into().render(self.names),
        };
        lock(&self.list).push(reason);
    }

    /// All entries so far, in order.
    pub fn list(&self) -> Vec<Reason> {
        lock(&self.list).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Opt, message};

    #[test]
    fn reasons_use_the_option_names_of_the_front_end() {
        struct Dashes;
        impl Names for Dashes {
            fn option(&self, option: Opt) -> String {
                format!("--{}", option.name())
            }
        }
        let log = Reasons::named(&Dashes);
        log.add(
            About::Not,
            "udmabuf",
            message!["use ", Opt::To.set("memfd")],
        );
        assert_eq!(log.list()[0].to_string(), "not udmabuf: use --to=memfd");
    }
}
