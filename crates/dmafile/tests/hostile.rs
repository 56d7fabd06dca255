//! Untrusted files: every attack is refused with the documented error, and no change to a valid file makes a
//! reader panic or return a range outside of the file.

use dmafile::format::{Format, Table, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn models(folder: impl AsRef<Path>) -> BTreeMap<String, Vec<u8>> {
    let folder = repository().join(folder);
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|suffix| suffix == "safetensors" || suffix == "gguf")
        {
            let name = path.file_name().unwrap().to_str().unwrap().to_string();
            files.insert(name, fs::read(path).unwrap());
        }
    }
    files
}

fn read(file: &[u8]) -> dmafile::Result<Table> {
    Table::read(&mut &file[..], file.len() as u64)
}

/// Asserts that a file is refused in one line, or that its tensors are in order, disjoint and inside the
/// file.
fn assert_refused_or_sound(file: &[u8]) {
    let table = match read(file) {
        Ok(table) => table,
        Err(error) => {
            let text = error.to_string();
            assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{text}");
            assert!(
                text.len() < 600 && !text.contains(char::is_control),
                "{text:?}"
            );
            return;
        }
    };
    let mut end = table.data;
    for tensor in &table.tensors {
        assert!(tensor.offset >= end, "{table:?}");
        end = tensor.offset.checked_add(tensor.bytes).unwrap();
        let elements = tensor.shape.iter().product();
        assert_eq!(
            tensor.dtype.bytes(elements),
            Some(tensor.bytes),
            "{table:?}"
        );
    }
    assert!(end <= file.len() as u64, "{table:?}");
}

#[test]
fn every_attack_is_refused_with_the_documented_error() {
    let attacks = models("attacks");
    let mut told = fs::read_to_string(repository().join("attacks/README.md"))
        .unwrap()
        .lines()
        .filter_map(|line| {
            line.strip_prefix("| `")?
                .strip_suffix(" |")?
                .split_once("` | ")
        })
        .map(|(file, rest)| {
            (
                file.to_string(),
                rest.split_once(" | ").unwrap().1.to_string(),
            )
        })
        .collect::<BTreeMap<_, _>>();
    assert!(attacks.len() > 40);
    for (name, file) in attacks {
        let expected = told
            .remove(&name)
            .unwrap_or_else(|| panic!("{name} is not in the table"));
        let error = read(&file).expect_err(&name);
        let text = error.to_string();
        assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{name}: {text}");
        assert!(text.contains(&expected), "{name}: {text}");
        assert!(!text.contains(char::is_control), "{name}: {text:?}");
    }
    assert!(told.is_empty(), "no such files: {told:?}");
}

/// Name, type, shape and bytes of each tensor.
fn outline(table: &Table) -> Vec<(&str, &str, &[u64], u64)> {
    let tensors = table.tensors.iter();
    tensors
        .map(|tensor| {
            let (name, dtype) = (&*tensor.name, tensor.dtype.name());
            (name, dtype, &tensor.shape[..], tensor.bytes)
        })
        .collect()
}

#[test]
fn files_of_the_reference_writers_are_read() {
    let files = models("fuzz/corpus/safetensors");
    let plain = read(&files["plain.safetensors"]).unwrap();
    assert_eq!(plain.format, Format::Safetensors);
    assert_eq!(
        outline(&plain),
        [
            ("b", "F32", &[2, 3][..], 24),
            ("e", "F16", &[0, 3], 0),
            ("a", "I8", &[4], 4)
        ]
    );
    let metadata = read(&files["metadata.safetensors"]).unwrap().metadata;
    assert_eq!(metadata["ключ"], Value::Text("значение \"q\"".into()));

    let files = models("fuzz/corpus/gguf");
    let plain = read(&files["plain.gguf"]).unwrap();
    assert_eq!(plain.format, Format::Gguf);
    assert_eq!(
        outline(&plain),
        [("t", "F32", &[2, 3][..], 24), ("u", "Q8_0", &[2, 32], 68)]
    );
    let aligned = read(&files["aligned.gguf"]).unwrap();
    assert!(
        aligned
            .tensors
            .iter()
            .all(|tensor| tensor.offset % 256 == 0)
    );
    // More dimensions and longer names than ggml has room for, and tokens that are not UTF-8.
    let wide = read(&files["wide.gguf"]).unwrap();
    let name = format!("patch_embedding.{}weight", "block.".repeat(10));
    assert_eq!(outline(&wide), [(&*name, "I8", &[2, 1, 3, 1, 4][..], 24)]);
    assert_eq!(wide.metadata["s"], Value::Text(r"a\xfe".into()));
    assert_eq!(
        wide.metadata["tokenizer.ggml.tokens"],
        Value::Texts(["é", r"\xc3", r"\xa9\xff"].map(Into::into).to_vec())
    );
    let metadata = read(&files["metadata.gguf"]).unwrap().metadata;
    for (key, value) in [
        ("split.no", Value::Unsigned(0)),
        ("split.tensors.count", Value::Signed(3)),
        ("b", Value::Bool(true)),
        ("d", Value::Float(-2.5)),
        ("u", Value::Unsigned(1 << 63)),
        ("i8", Value::Signed(-3)),
        (
            "tokens",
            Value::Texts(["<s>", "é", ""].map(Into::into).to_vec()),
        ),
        ("scores", Value::Floats(vec![0.5, -1.0])),
        ("types", Value::Signeds(vec![1, 2, 3])),
        ("flags", Value::Bools(vec![true, false])),
    ] {
        assert_eq!(metadata[key], value, "{key}");
    }
}

#[test]
fn every_changed_byte_and_every_truncation_is_refused_or_valid() {
    for format in ["safetensors", "gguf"] {
        for mut file in models(format!("fuzz/corpus/{format}")).into_values() {
            let header = read(&file).unwrap().data as usize;
            for cut in 0..file.len() {
                assert_refused_or_sound(&file[..cut]);
            }
            for place in 0..header {
                let was = file[place];
                for byte in 0..=255 {
                    file[place] = byte;
                    assert_refused_or_sound(&file);
                }
                file[place] = was;
            }
        }
    }
}
