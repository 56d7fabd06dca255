//! The options of loads and saves, as the engine lists them, as arguments.

use crate::args::{TUNING, WHAT, WHERE, size, word};
use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches, value_parser};
use dmafile::{
    Error, Method, Operation, Opt, OptionGroup, OptionInfo, OptionType, OptionValue, Pattern,
    Verify,
};
use std::ffi::OsStr;
use std::marker::PhantomData;
use std::str::FromStr;

/// Some of these options.
pub trait Subset {
    /// Where those that say what belong in the help.
    const HEADING: Option<&str>;
    /// Whose options.
    const OF: Operation;
    /// The kinds of memory, if there are fewer than usual.
    const KINDS: Option<&'static [&'static str]>;

    fn has(info: &OptionInfo) -> bool;

    fn all() -> impl Iterator<Item = &'static OptionInfo> {
        dmafile_gpu::options(Self::OF).filter(|info| Self::has(info))
    }
}

macro_rules! subsets {
    ($($(#[$about:meta])* $name:ident: $of:ident, $heading:expr, $kinds:expr, $has:expr;)+) => {$(
        $(#[$about])*
        #[derive(Clone, Debug)]
        pub struct $name;

        impl Subset for $name {
            const HEADING: Option<&str> = $heading;
            const OF: Operation = Operation::$of;
            const KINDS: Option<&'static [&'static str]> = $kinds;

            fn has(info: &OptionInfo) -> bool {
                let has: fn(&OptionInfo) -> bool = $has;
                has(info)
            }
        }
    )+};
}

/// Memory that other processes can take.
const SHAREABLE: &[&str] = &["memfd", "udmabuf", "heap:system", "module", "dma-buf"];

subsets! {
    /// What to load, and into which memory.
    OfLoad: Load, Some(WHAT), None, |info| info.group != OptionGroup::Tuning;
    /// How to load.
    HowToLoad: Load, None, None, |info| info.group == OptionGroup::Tuning;
    /// What a hold has, which loads whole files.
    OfHold: Load, None, Some(SHAREABLE), |info| {
        matches!(info.option, Opt::Verify | Opt::To | Opt::Pages)
    };
    /// What a list of tensors has.
    OfShow: Load, None, None, |info| info.option == Opt::Tensors;
    /// What to save.
    OfSave: Save, None, None, |info| info.group != OptionGroup::Tuning;
    /// How to save.
    HowToSave: Save, None, None, |info| info.group == OptionGroup::Tuning;
}

/// Those of a subset that were given, in the order of the list.
#[derive(Clone, Debug)]
pub struct Given<S> {
    values: Vec<(Opt, OptionValue)>,
    subset: PhantomData<S>,
}

impl<S> Given<S> {
    pub fn has(&self, option: Opt) -> bool {
        self.values.iter().any(|(given, _)| *given == option)
    }

    /// The text that was given for an option.
    pub fn text(&self, option: Opt) -> Option<&str> {
        self.texts(option).next()
    }

    fn texts(&self, option: Opt) -> impl Iterator<Item = &str> {
        self.values.iter().filter_map(move |given| match given {
            (given, OptionValue::Text(text)) if *given == option => Some(text.as_str()),
            _ => None,
        })
    }

    /// The same, parsed.
    pub fn parsed<T: FromStr<Err = Error>>(&self, option: Opt) -> Result<Option<T>, Error> {
        self.text(option).map(str::parse).transpose()
    }

    /// The patterns for tensors.
    pub fn tensors(&self) -> Result<Vec<Pattern>, Error> {
        self.texts(Opt::Tensors).map(str::parse).collect()
    }

    /// Sets those that were given.
    pub fn apply<B>(&self, to: B, set: impl Fn(B, Opt, OptionValue) -> B) -> B {
        self.apply_some(to, set, |_| true)
    }

    /// Sets some of them.
    pub fn apply_some<B>(
        &self,
        to: B,
        set: impl Fn(B, Opt, OptionValue) -> B,
        which: impl Fn(Opt) -> bool,
    ) -> B {
        let some = self.values.iter().filter(|given| which(given.0));
        some.fold(to, |to, (option, value)| set(to, *option, value.clone()))
    }
}

impl<S: Subset> Args for Given<S> {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(S::all().map(argument::<S>))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl<S: Subset> FromArgMatches for Given<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut values = Vec::new();
        for OptionInfo {
            option, accepts, ..
        } in S::all()
        {
            match accepts {
                OptionType::Flag(_) if matches.get_flag(option.name()) => {
                    values.push((*option, false.into()));
                }
                OptionType::Flag(_) => {}
                _ => {
                    let given = matches.get_many::<OptionValue>(option.name());
                    values.extend(
                        given
                            .into_iter()
                            .flatten()
                            .map(|one| (*option, one.clone())),
                    );
                }
            }
        }
        let subset = PhantomData;
        Ok(Self { values, subset })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The name of an option on the command line, without its dashes.
pub fn long(option: Opt) -> String {
    let is_flag =
        |info: &OptionInfo| info.option == option && matches!(info.accepts, OptionType::Flag(_));
    match option {
        Opt::Tensors => "tensor".to_string(),
        _ if dmafile::OPTIONS.iter().any(is_flag) => {
            format!("no-{}", option.name().replace('_', "-"))
        }
        _ => option.name().replace('_', "-"),
    }
}

fn argument<S: Subset>(info: &'static OptionInfo) -> Arg {
    let arg = Arg::new(info.option.name())
        .long(long(info.option))
        .help_heading(match info.group {
            OptionGroup::Tuning => Some(TUNING),
            OptionGroup::Where => Some(WHERE),
            _ => S::HEADING,
        })
        .hide_short_help(info.group == OptionGroup::Tuning);
    let (arg, help) = match info.accepts {
        OptionType::Flag(off) => (arg.action(ArgAction::SetTrue), off.to_string()),
        OptionType::Texts => (
            arg.action(ArgAction::Append),
            format!("{} (repeat for more)", info.help),
        ),
        _ => {
            let help = format!("{} [default: {}]", info.help, info.default);
            (arg.action(ArgAction::Set), help)
        }
    };
    let arg = match info.accepts {
        OptionType::Flag(_) => arg,
        _ => arg
            .value_name(info.value)
            .value_parser(Accepted(info, S::KINDS))
            .hide_possible_values(info.option == Opt::To && S::KINDS.is_none()),
    };
    let plain = |text: String| text.replace('`', "");
    let (help, details) = match (info.option, S::KINDS) {
        (Opt::To, Some(_)) => ("Kind of memory [default: memfd]".to_string(), String::new()),
        _ => (plain(help), plain(info.details.to_string())),
    };
    match details.is_empty() {
        true => arg.help(help),
        false => arg.long_help(format!("{help}\n\n{details}")).help(help),
    }
}

/// Parses a value of an option; completions offer the words that it lists.
#[derive(Clone)]
struct Accepted(&'static OptionInfo, Option<&'static [&'static str]>);

impl Accepted {
    fn words(&self) -> Vec<PossibleValue> {
        let words = match (self.0.accepts, self.1) {
            (OptionType::Text(_), Some(kinds)) if self.0.option == Opt::To => kinds.to_vec(),
            (OptionType::Text(words), _) => words.to_vec(),
            (OptionType::Word(words), _) => words(),
            _ => Vec::new(),
        };
        let value = |word| match word {
            "xxh3" => PossibleValue::new(word).alias("xxh3-64"),
            _ => PossibleValue::new(word),
        };
        words.into_iter().map(value).collect()
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
        let text = match (self.0.accepts, self.0.option) {
            (OptionType::Bytes(..), _) => {
                return size.parse_ref(command, arg, value).map(Into::into);
            }
            (OptionType::Count(..), _) => {
                let number = value_parser!(u64).parse_ref(command, arg, value)?;
                return Ok(number.into());
            }
            (OptionType::Texts, _) => {
                word::<Pattern>.parse_ref(command, arg, value)?;
                value
            }
            // Some kinds have a name or a number in them.
            (_, Opt::To) => value,
            (_, Opt::Verify) => {
                let text = value.to_string_lossy();
                let name = text.split('=').next().unwrap_or_default();
                PossibleValuesParser::new(self.words()).parse_ref(command, arg, name.as_ref())?;
                word::<Verify>.parse_ref(command, arg, value)?;
                value
            }
            // What other loaders have, and the engine refuses with a reason, is answered with it.
            (_, Opt::Method) if value.to_str().and_then(Method::refused).is_some() => {
                word::<Method>.parse_ref(command, arg, value)?;
                value
            }
            _ => {
                PossibleValuesParser::new(self.words()).parse_ref(command, arg, value)?;
                value
            }
        };
        StringValueParser::new()
            .parse_ref(command, arg, text)
            .map(Into::into)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = self.words();
        (!words.is_empty()).then(|| Box::new(words.into_iter()) as _)
    }
}
