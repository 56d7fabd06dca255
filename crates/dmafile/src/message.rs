//! Texts that name options. Which option is meant is a value; its name depends on the interface that
//! shows the text: the command writes `--queue-depth`, a library `queue_depth`.

use std::fmt;
use strum::IntoStaticStr;

/// An option of a load, or of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Opt {
    /// [`Load::to`](crate::Load::to).
    To,
    /// [`Load::pages`](crate::Load::pages).
    Pages,
    /// [`Load::method`](crate::Load::method).
    Method,
    /// [`Load::io`](crate::Load::io).
    Io,
    /// [`Load::offset`](crate::Load::offset).
    Offset,
    /// [`Load::length`](crate::Load::length).
    Length,
    /// [`Load::chunk`](crate::Load::chunk).
    Chunk,
    /// [`Load::block`](crate::Load::block).
    Block,
    /// [`Load::queue_depth`](crate::Load::queue_depth).
    QueueDepth,
    /// [`Load::limit`](crate::Load::limit).
    Limit,
    /// [`Load::allocation`](crate::Load::allocation).
    Allocation,
    /// `Load::verify`.
    Verify,
    /// The patterns of `Model::load_tensors`.
    Tensors,
    /// [`Load::check_memory`](crate::Load::check_memory).
    CheckMemory,
    /// The [`Origin`](crate::Origin) of a save.
    From,
    /// [`Save::offset`](crate::Save::offset).
    #[strum(serialize = "offset")]
    InPlace,
    /// [`Save::sync`](crate::Save::sync).
    Sync,
    /// The [`Ring`](crate::Ring) of [`Load::run_through`](crate::Load::run_through).
    Ring,
    /// A device, such as one that memory is pinned for.
    Device,
}

impl Opt {
    /// Its name in this crate: that of the method of [`Load`](crate::Load) or
    /// [`Save`](crate::Save) that sets it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// This option with a value.
    #[doc(hidden)]
    pub fn set(self, value: impl ToString) -> Part {
        Part::Set(self, value.to_string())
    }
}

/// How an interface names the options in a [`Message`]. The defaults are the names of this crate.
pub trait Names: Sync {
    /// An option by itself.
    fn option(&self, option: Opt) -> String {
        option.name().to_string()
    }

    /// An option with a value: a word that it accepts, or `false`.
    fn set(&self, option: Opt, value: &str) -> String {
        format!("{}={value}", self.option(option))
    }
}

/// The names of this crate, which [`Display`](fmt::Display) writes.
pub struct Builder;

impl Names for Builder {}

/// A piece of a [`Message`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// Words.
    Text(String),
    /// An option.
    Option(Opt),
    /// An option with a value.
    Set(Opt, String),
}

/// A text that may name options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message(Vec<Part>);

impl Message {
    /// The text on one line, its options named by `names`.
    pub fn render(&self, names: &dyn Names) -> String {
        let parts = self.0.iter();
        parts
            .map(|part| match part {
                Part::Text(text) => one_line(text),
                Part::Option(option) => names.option(*option),
                Part::Set(option, value) => names.set(*option, &one_line(value)),
            })
            .collect()
    }

    /// Its parts in order.
    pub fn parts(&self) -> &[Part] {
        &self.0
    }

    /// Returns `true` if it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[doc(hidden)]
    pub fn concat(messages: impl IntoIterator<Item = Self>) -> Self {
        Self(messages.into_iter().flat_map(|message| message.0).collect())
    }

    #[doc(hidden)]
    pub fn join(messages: impl IntoIterator<Item = Self>, between: &str) -> Self {
        let mut all = Vec::new();
        for message in messages {
            if !all.is_empty() {
                all.push(between.into());
            }
            all.push(message);
        }
        Self::concat(all)
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(&Builder))
    }
}

impl From<Part> for Message {
    fn from(part: Part) -> Self {
        Self(vec![part])
    }
}

impl From<Opt> for Message {
    fn from(option: Opt) -> Self {
        Part::Option(option).into()
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        if text.is_empty() {
            Self::default()
        } else {
            Part::Text(text).into()
        }
    }
}

impl From<&String> for Message {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl From<&str> for Message {
    fn from(text: &str) -> Self {
        text.to_string().into()
    }
}

/// A [`Message`] of texts, options and messages.
#[doc(hidden)]
#[macro_export]
macro_rules! message {
    ($($part:expr),+ $(,)?) => {
        $crate::Message::concat([$($crate::Message::from($part)),+])
    };
}
pub(crate) use message;

/// Why a name cannot be in a list with commas, as in the variables that COMMAND gets; None if it can. The text goes
/// on after the name.
#[doc(hidden)]
pub fn unlisted(name: &str) -> Option<&'static str> {
    match name {
        _ if name.contains(',') => Some("contains a comma"),
        _ if name.contains(char::is_control) => Some("contains a control character"),
        _ => None,
    }
}

/// Formats a text of unknown origin for one line on a terminal: escapes characters that would break
/// the line or control the terminal, and truncates long texts.
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
        if commands(c) {
            line.extend(c.escape_default())
        } else {
            line.push(c)
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_front_end_uses_its_own_names_of_options() {
        struct Command;
        impl Names for Command {
            fn option(&self, option: Opt) -> String {
                format!("--{}", option.name().replace('_', "-"))
            }
            fn set(&self, option: Opt, value: &str) -> String {
                format!("{} {value}", self.option(option))
            }
        }
        let text = message![
            "raise ",
            Opt::QueueDepth,
            format!(" by {}, ", 2),
            message!["or use ", Opt::To.set("memfd")],
        ];
        assert_eq!(text.to_string(), "raise queue_depth by 2, or use to=memfd");
        assert_eq!(
            text.render(&Command),
            "raise --queue-depth by 2, or use --to memfd"
        );
    }

    #[test]
    fn untrusted_text_is_escaped_and_not_taken_for_an_option() {
        let text = message!["'--io\n' is none of ", Opt::Io.set("a\u{1b}[2J")];
        assert_eq!(text.to_string(), "'--io\\n' is none of io=a\\u{1b}[2J");
    }
}
