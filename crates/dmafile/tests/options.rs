//! The list of options agrees with what the builders accept, and documents with the list.

use dmafile::{
    Load, OPTIONS, Operation, Opt, OptionGroup, OptionInfo, OptionType, OptionValue, Origin, Save,
};
use std::fs;
use std::path::Path;

/// What an option's builder says about a value; None if it accepts it.
fn refusal(of: Operation, info: &OptionInfo, value: impl Into<OptionValue>) -> Option<String> {
    let checked = match of {
        Operation::Load => Load::new("file")
            .kinds(dmafile_gpu::parse_kind)
            .set(info.option, value)
            .check(),
        _ => {
            let save = Save::new(Origin::File("file".into()), "to");
            save.set(info.option, value).check()
        }
    };
    checked.err().map(|error| error.to_string())
}

fn each(check: impl Fn(Operation, &'static OptionInfo)) {
    for of in [Operation::Load, Operation::Save] {
        dmafile_gpu::options(of).for_each(|info| check(of, info));
    }
}

#[test]
fn each_option_of_the_list_is_accepted_in_its_range_only() {
    each(|of, info| {
        let name = info.option.name();
        let accepts = |value: OptionValue| assert_eq!(refusal(of, info, value), None, "{name}");
        let refuses = |value: OptionValue, why: &str| {
            let error = refusal(of, info, value).expect(name);
            assert_eq!(error.split_once(": "), Some((name, why)));
        };
        match info.accepts {
            OptionType::Flag(_) => {
                accepts(true.into());
                accepts(false.into());
                refuses(1.into(), "it is either true or false");
            }
            OptionType::Bytes(low, high) | OptionType::Count(low, high) => {
                accepts(low.into());
                accepts(high.into());
                let out = |number: u64| format!("{number} is out of range: {low} to {high}");
                for number in [low.checked_sub(1), high.checked_add(1)]
                    .into_iter()
                    .flatten()
                {
                    refuses(number.into(), &out(number));
                }
                refuses("many".into(), "it is a number");
            }
            OptionType::Word(words) => {
                words().into_iter().for_each(|word| accepts(word.into()));
                let error = refusal(of, info, "other").unwrap();
                assert!(error.contains("'other' is not one of "), "{error}");
                refuses(1.into(), "it is a text");
            }
            OptionType::Text(words) => {
                words.iter().for_each(|&word| accepts(word.into()));
                let error = refusal(of, info, "other").unwrap();
                assert!(error.contains("'other' is not one of "), "{error}");
            }
            // A model has them, before there is a load.
            _ => refuses("other".into(), "it is not an option here"),
        }
    });
}

#[test]
fn options_of_the_other_operation_are_refused() {
    for info in OPTIONS {
        let other = match info.of {
            Operation::Load => Operation::Save,
            Operation::Save => Operation::Load,
            _ => continue,
        };
        if dmafile_gpu::options(other).all(|own| own.option != info.option) {
            let error = refusal(other, info, "x").unwrap();
            assert!(error.ends_with(": it is not an option here"), "{error}");
        }
    }
}

#[test]
fn the_first_wrong_value_is_reported() {
    let set = |name: &str| OptionInfo::named(Operation::Load, name).unwrap().option;
    let load = Load::new("missing")
        .set(set("io"), "twice")
        .set(set("method"), 7);
    let says = "io: 'twice' is not one of auto, direct, buffered";
    assert_eq!(load.plan().unwrap_err().to_string(), says);
}

/// Where the texts of the list are repeated. With BLESS=1 they are written there.
#[test]
fn documents_repeat_the_list() {
    for (path, change) in [
        ("docs/options.md", &in_options as &dyn Fn(&str) -> String),
        ("python/dmafile/_load.py", &|text| {
            in_python(text, "load", Operation::Load, &[])
        }),
        ("python/dmafile/_save.py", &|text| {
            in_python(text, "save", Operation::Save, &[])
        }),
        ("python/dmafile/_record.py", &|text| {
            in_python(text, "__init__", Operation::Save, RECORDER)
        }),
        ("crates/capi/src/options.rs", &|text| {
            let text = in_struct(text, "Options", Operation::Load);
            in_flag(&text, "dmafile_options", Operation::Load)
        }),
        ("crates/capi/src/save.rs", &|text| {
            let text = in_struct(text, "SaveOptions", Operation::Save);
            in_flag(&text, "dmafile_save_options", Operation::Save)
        }),
        ("crates/capi/src/recorder.rs", &|text| {
            in_struct(text, "RecorderOptions", Operation::Save)
        }),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(path);
        let text = fs::read_to_string(&path).unwrap();
        let right = change(&text);
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &right).unwrap();
        }
        let place = path.display();
        assert!(
            text == right || std::env::var_os("BLESS").is_some(),
            "{place} differs from the list of options: BLESS=1 cargo test -p dmafile --test options, then \
             BLESS=1 cargo test -p dmafile-capi --test header"
        );
    }
}

/// Options of a recorder that are those of a save.
const RECORDER: &[Opt] = &[Opt::Method, Opt::Io];

/// What an option is, in sentences.
fn sentences(info: &OptionInfo) -> String {
    let first = match info.accepts {
        OptionType::Flag(_) => format!("{}.", info.help),
        OptionType::Word(words) => {
            let words = words().into_iter().map(|word| match word {
                "auto" => "`auto` (default)".to_string(),
                _ => format!("`{word}`"),
            });
            let words: Vec<_> = words.collect();
            format!("{}: {}.", info.help, words.join(", "))
        }
        _ => format!("{}; default: {}.", info.help, info.default),
    };
    format!("{first} {}", info.details).trim().to_string()
}

/// The text with something else between the two comments that mark its place.
fn between(text: &str, mark: &str, new: &str) -> String {
    let mark = format!("<!-- options: {mark} -->\n");
    let (head, rest) = text.split_once(&mark).expect(&mark);
    let (_, tail) = rest.split_once("<!-- end -->").unwrap();
    format!("{head}{mark}\n{new}\n<!-- end -->{tail}")
}

fn in_options(text: &str) -> String {
    let rows = |of| {
        let head = "| option | command | C | default | |\n|---|---|---|---|---|\n".to_string();
        dmafile_gpu::options(of).fold(head, |table, info| {
            let name = info.option.name();
            let dashes = name.replace('_', "-");
            let command = match (info.option, info.accepts) {
                (Opt::Tensors, _) => format!("--tensor {}", info.value),
                (_, OptionType::Flag(_)) => format!("--no-{dashes}"),
                _ => format!("--{dashes} {}", info.value.replace('|', "\\|")),
            };
            let c = match (info.option, of) {
                (Opt::CheckMemory, _) => "`DMAFILE_NO_CHECK_MEMORY`",
                (Opt::Sync, _) => "`DMAFILE_SAVE_NO_SYNC`",
                (Opt::InPlace, _) => "`offset` and `DMAFILE_SAVE_IN_PLACE`",
                (Opt::Length, Operation::Save) => "`bytes` of the part",
                (Opt::Tensors, _) => "of `dmafile_model_load`",
                _ => "the same",
            };
            let default = match info.accepts {
                OptionType::Word(_) => "`auto`",
                _ => info.default,
            };
            let what = sentences(info).replace(&format!("; default: {}", info.default), "");
            let what = what.replace(" (default)", "");
            format!("{table}| `{name}` | `{command}` | {c} | {default} | {what} |\n")
        })
    };
    let text = between(text, "loads", &rows(Operation::Load));
    between(&text, "saves", &rows(Operation::Save))
}

/// The lines of a text, with `first` before the first one and `rest` before the others.
fn wrapped(text: &str, width: usize, first: &str, rest: &str) -> Vec<String> {
    let mut lines = vec![first.to_string()];
    for word in text.split(' ') {
        let last = lines.last_mut().unwrap();
        let is_empty = last == first || last == rest;
        if !is_empty && last.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("{rest}{word}"));
        } else {
            *last += if is_empty { "" } else { " " };
            *last += word;
        }
    }
    lines
}

/// Python: the entries of a docstring, and the arguments of the function.
fn in_python(text: &str, function: &str, of: Operation, only: &[Opt]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    let all = dmafile_gpu::options(of).filter(|info| info.option != Opt::Tensors);
    for info in all.filter(|info| only.is_empty() || only.contains(&info.option)) {
        let name = info.option.name();
        let begin = text.find(&format!("def {function}(")).unwrap();
        let (head, _) = text[begin..].split_once(" -> ").unwrap();
        assert!(
            head.contains(&format!(" {name}: ")),
            "{function}: no {name}"
        );
        // What other functions take as `**options`; only `save` has a place in the file.
        let is_key = text[..begin].contains(&format!("\n    {name}: ")) || of == Operation::Save;
        assert!(is_key, "{name} is in no TypedDict before {function}");
        let after = if only.is_empty() {
            text[..begin].lines().count()
        } else {
            0
        };
        let entry = format!("        {name}: ");
        let is_entry = |line: &String| line.starts_with(&entry);
        let start = lines.iter().skip(after).position(is_entry).expect(name) + after;
        let is_more = |line: &&String| line.starts_with("            ");
        let more = lines[start + 1..].iter().take_while(is_more).count();
        let new = wrapped(&sentences(info), 100, &entry, "            ");
        lines.splice(start..=start + more, new);
    }
    lines.join("\n") + "\n"
}

/// Rust: replaces the comment of the line that begins so, which a header for C gets.
fn commented(text: &str, line: &str, indent: &str, new: &str) -> String {
    let at = text.find(&format!("\n{indent}{line}")).expect(line);
    let comment = format!("{indent}///");
    let head: Vec<&str> = text[..at].lines().collect();
    let comments = head
        .iter()
        .rev()
        .take_while(|line| line.starts_with(&comment));
    let kept = head.len() - comments.count();
    let new = new.replace('`', "\"");
    let prefix = format!("{comment} ");
    let new = wrapped(&new, 110, &prefix, &prefix).join("\n");
    format!("{}\n{new}{}", head[..kept].join("\n"), &text[at..])
}

fn in_struct(text: &str, name: &str, of: Operation) -> String {
    let (head, rest) = text
        .split_once(&format!("\npub struct {name} {{\n"))
        .unwrap();
    let (members, tail) = rest.split_once("\n}\n").unwrap();
    let head = format!("{head}\npub struct {name} {{\n");
    let members = dmafile_gpu::options(of).fold(members.to_string(), |members, info| {
        let line = format!("pub {}: ", info.option.name());
        if info.option != Opt::InPlace && members.contains(&line) {
            commented(&members, &line, "    ", &sentences(info))
        } else {
            members
        }
    });
    format!("{head}{members}\n}}\n{tail}")
}

fn in_flag(text: &str, name: &str, of: Operation) -> String {
    dmafile_gpu::options(of).fold(text.to_string(), |text, info| match info.accepts {
        OptionType::Flag(off) => {
            let off = off[..1].to_lowercase() + &off[1..];
            let new = format!("For {name}.flags: {off}.");
            let save = if of == Operation::Save { "SAVE_" } else { "" };
            let option = info.option.name().to_uppercase();
            commented(
                &text,
                &format!("pub const DMAFILE_{save}NO_{option}"),
                "",
                &new,
            )
        }
        _ => text,
    })
}

#[test]
fn the_tuning_page_has_every_option_of_tuning() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tuning.md");
    let page = fs::read_to_string(page).unwrap();
    let tuning = |info: &&OptionInfo| {
        info.group == OptionGroup::Tuning && !matches!(info.accepts, OptionType::Flag(_))
    };
    for info in dmafile_gpu::options(Operation::Load).filter(tuning) {
        let option = format!("| `--{}` | ", info.option.name().replace('_', "-"));
        assert!(page.contains(&option), "no row {option}");
    }
}
