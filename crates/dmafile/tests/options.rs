//! The list of options agrees with what the builders accept.

use dmafile::{Load, OPTIONS, Operation, OptionInfo, OptionType, OptionValue, Origin, Save};

/// What an option's builder says about a value; None if it accepts it.
fn refusal(of: Operation, info: &OptionInfo, value: impl Into<OptionValue>) -> Option<String> {
    let checked = match of {
        Operation::Load => Load::new("file").set(info.option, value).check(),
        _ => {
            let save = Save::new(Origin::File("file".into()), "to");
            save.set(info.option, value).check()
        }
    };
    checked.err().map(|error| error.to_string())
}

fn each(check: impl Fn(Operation, &'static OptionInfo)) {
    for of in [Operation::Load, Operation::Save] {
        OptionInfo::all(of).for_each(|info| check(of, info));
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
        if OptionInfo::all(other).all(|own| own.option != info.option) {
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
