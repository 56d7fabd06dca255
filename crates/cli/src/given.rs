//! The options of loads and saves, as the engine lists them, as arguments.

use crate::args::{TUNING, WHAT, WHERE, size, word};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use dmafile::{
    Error, Load, Method, Operation, Opt, OptionGroup, OptionInfo, OptionType, OptionValue, Origin,
    Pattern, Save,
};
use std::ffi::OsStr;
use std::str::FromStr;

/// The number of the subset of a hold.
const HOLD: usize = 2;

/// Those of one of the [`SUBSETS`] that were given, in the order of the list.
#[derive(Clone, Debug)]
pub struct Given<const SUBSET: usize>(Vec<(Opt, OptionValue)>);

/// What to load, and into which memory.
pub type OfLoad = Given<0>;
/// How to load.
pub type HowToLoad = Given<1>;
/// What a hold has, which loads whole files.
pub type OfHold = Given<HOLD>;
/// What a list of tensors has.
pub type OfShow = Given<3>;
/// What to save.
pub type OfSave = Given<4>;
/// How to save.
pub type HowToSave = Given<5>;

/// Whose options, the heading of those that say what, and which they are.
type Subset = (
    Operation,
    Option<&'static str>,
    fn(&'static OptionInfo) -> bool,
);

const SUBSETS: [Subset; 6] = [
    (Operation::Load, Some(WHAT), |info| !is_tuning(info)),
    (Operation::Load, None, is_tuning),
    (Operation::Load, None, |info| {
        matches!(info.option, Opt::Verify | Opt::To | Opt::Pages)
    }),
    (Operation::Load, None, |info| info.option == Opt::Tensors),
    (Operation::Save, None, |info| !is_tuning(info)),
    (Operation::Save, None, is_tuning),
];
/// Kinds of memory that other processes can take, for holds.
const SHAREABLE: &[&str] = &["memfd", "udmabuf", "heap:system", "module", "dma-buf"];

fn is_tuning(info: &OptionInfo) -> bool {
    info.group == OptionGroup::Tuning
}

impl<const SUBSET: usize> Given<SUBSET> {
    pub fn has(&self, option: Opt) -> bool {
        self.0.iter().any(|(given, _)| *given == option)
    }

    /// The texts that were given for an option.
    pub fn texts(&self, option: Opt) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(move |given| match given {
            (given, OptionValue::Text(text)) if *given == option => Some(text.as_str()),
            _ => None,
        })
    }

    pub fn parsed<T: FromStr<Err = Error>>(&self, option: Opt) -> Result<Vec<T>, Error> {
        self.texts(option).map(str::parse).collect()
    }

    /// The number that was given for an option.
    #[cfg_attr(not(feature = "remote"), allow(dead_code))]
    pub fn number(&self, option: Opt) -> Option<u64> {
        self.0.iter().find_map(|(given, value)| match value {
            OptionValue::Number(number) if *given == option => Some(*number),
            _ => None,
        })
    }

    /// All that were given.
    pub fn all(&self) -> &[(Opt, OptionValue)] {
        &self.0
    }

    fn subset() -> impl Iterator<Item = &'static OptionInfo> {
        let (of, _, has) = SUBSETS[SUBSET];
        dmafile_gpu::options(of).filter(move |info| has(info))
    }
}

impl<const SUBSET: usize> Args for Given<SUBSET> {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(Self::subset().map(|info| Accepted(info, SUBSET).argument()))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl<const SUBSET: usize> FromArgMatches for Given<SUBSET> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = Self::subset().flat_map(|info| {
            let name = info.option.name();
            let values = match info.accepts {
                OptionType::Flag(_) => {
                    if matches.get_flag(name) {
                        vec![false.into()]
                    } else {
                        Vec::new()
                    }
                }
                _ => matches
                    .get_many(name)
                    .into_iter()
                    .flatten()
                    .cloned()
                    .collect(),
            };
            values
                .into_iter()
                .map(|value: OptionValue| (info.option, value))
        });
        Ok(Self(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The name of an option on the command line, without its dashes.
pub fn long(option: Opt) -> String {
    let mut infos = dmafile::OPTIONS.iter().filter(|info| info.option == option);
    let name = option.name().replace('_', "-");
    match option {
        Opt::Tensors => "tensor".to_string(),
        _ if infos.any(|info| matches!(info.accepts, OptionType::Flag(_))) => format!("no-{name}"),
        _ => name,
    }
}

/// An option of a subset. Parses its value; completions offer the words that it lists.
#[derive(Clone)]
struct Accepted(&'static OptionInfo, usize);

impl Accepted {
    fn argument(self) -> Arg {
        let info = self.0;
        let arg = Arg::new(info.option.name())
            .long(long(info.option))
            .hide_short_help(is_tuning(info))
            .hide_possible_values(info.option == Opt::To && !self.shares())
            .help_heading(match info.group {
                OptionGroup::Tuning => Some(TUNING),
                OptionGroup::Where => Some(WHERE),
                _ => SUBSETS[self.1].1,
            });
        let (help, details) = if self.shares() {
            ("Kind of memory", "")
        } else {
            (info.help, info.details)
        };
        let (arg, help) = match info.accepts {
            OptionType::Flag(off) => (arg.action(ArgAction::SetTrue), off.to_string()),
            OptionType::Texts => (
                arg.action(ArgAction::Append),
                format!("{help} (repeat for more)"),
            ),
            _ => (arg, format!("{help} [default: {}]", info.default)),
        };
        let arg = match info.accepts {
            OptionType::Flag(_) => arg,
            _ => arg.value_name(info.value).value_parser(self),
        };
        let help = help.replace('`', "");
        match details {
            "" => arg.help(help),
            _ => arg
                .long_help(format!("{help}\n\n{}", details.replace('`', "")))
                .help(help),
        }
    }

    /// True if it is the kind of memory of a hold.
    fn shares(&self) -> bool {
        self.0.option == Opt::To && self.1 == HOLD
    }

    fn value(&self, text: &str) -> Result<OptionValue, String> {
        let (info, value) = (self.0, OptionValue::from(text));
        let checked = match (info.accepts, SUBSETS[self.1].0) {
            (OptionType::Bytes(..), _) => {
                // A rate, in bytes.
                let text = match info.option {
                    Opt::Limit => text.strip_suffix("/s").unwrap_or(text),
                    _ => text,
                };
                return size(text).map(Into::into);
            }
            (OptionType::Count(..), _) => {
                let number = text.parse::<u64>().map_err(|error| error.to_string())?;
                return Ok(number.into());
            }
            (OptionType::Texts, _) => return word::<Pattern>(text).map(|_| value),
            // A descriptor that is not open is no bad usage.
            _ if info.option == Opt::To => return Ok(value),
            (_, Operation::Load) => Load::new("").set(info.option, text).check(),
            _ => Save::new(Origin::File("".into()), "")
                .set(info.option, text)
                .check(),
        };
        let why = |error: Error| error.why().render(&crate::Options);
        checked.map(|()| value).map_err(why)
    }
}

impl TypedValueParser for Accepted {
    type Value = OptionValue;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<OptionValue, clap::Error> {
        if let OptionType::Word(words) = self.0.accepts
            && value.to_str().and_then(Method::refused).is_none()
        {
            // It knows similar words.
            let word = PossibleValuesParser::new(words()).parse_ref(command, arg, value)?;
            return Ok(word.as_str().into());
        }
        let accepted = self.clone();
        (move |text: &str| accepted.value(text)).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = match self.0.accepts {
            OptionType::Word(words) => words(),
            OptionType::Text(_) if self.shares() => SHAREABLE.to_vec(),
            OptionType::Text(words) => words.to_vec(),
            _ => return None,
        };
        Some(Box::new(words.into_iter().map(PossibleValue::new)))
    }
}
