//! Headers that must be read, and headers that must be refused.

use super::*;
use crate::format::tests::{assert_sound, read, refusal};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn one(dtype: &str, shape: &str, offsets: &str, data: usize) -> Vec<u8> {
    file(
        &format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#),
        data,
    )
}

#[test]
fn tensors_are_in_the_order_of_their_bytes() {
    let table = read(&file(
        r#"{"b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},
            "__metadata__":{"format":"pt"},
            "a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}   "#,
        12,
    ))
    .unwrap();
    assert_eq!(table.format, Format::Safetensors);
    assert_eq!(table.metadata["format"], Value::Text("pt".into()));
    let [a, b] = &table.tensors[..] else {
        panic!("{:?}", table.tensors);
    };
    assert_eq!(
        (&*a.name, a.dtype, &a.shape[..]),
        ("a", Dtype::U8, &[4][..])
    );
    assert_eq!((a.offset, a.bytes), (table.data, 4));
    assert_eq!(
        (&*b.name, b.dtype, &b.shape[..]),
        ("b", Dtype::F32, &[2, 1][..])
    );
    assert_eq!((b.offset, b.bytes), (table.data + 4, 8));
}

#[test]
fn every_dtype_of_the_format_has_its_name_and_size() {
    let mut known = 0;
    for &dtype in Dtype::ALL {
        if let Ok(theirs) = serde_json::from_value::<Theirs>(dtype.name().into()) {
            assert_eq!(ours(theirs), Some(dtype));
            assert_eq!(theirs.bitsize() as u64, dtype.block_bits());
            assert_eq!(dtype.block_elements(), 1);
            known += 1;
        }
    }
    // The message of the crate lists its dtypes, so this fails if a new version adds one.
    let list = serde_json::from_value::<Theirs>("".into())
        .unwrap_err()
        .to_string();
    assert_eq!(list.matches('`').count() / 2 - 1, known, "{list}");
}

#[test]
fn empty_metadata_differs_from_no_metadata() {
    for (header, has) in [
        ("{}", false),
        (r#"{"__metadata__":{}}"#, true),
        (r#"{"__metadata__":null}"#, false),
    ] {
        let table = read(&file(header, 0)).unwrap();
        assert_eq!((table.has_metadata, table.metadata.len()), (has, 0));
    }
}

#[test]
fn empty_tensors_and_scalars_are_read() {
    assert_eq!(
        read(&one("F32", "[]", "[0,4]", 4)).unwrap().tensors[0].bytes,
        4
    );
    assert_eq!(
        read(&one("F32", "[7,0]", "[0,0]", 0)).unwrap().tensors[0].bytes,
        0
    );
    assert_eq!(
        read(&one("F4", "[3,2]", "[0,3]", 3)).unwrap().tensors[0].bytes,
        3
    );
}

#[test]
fn invalid_offsets_and_shapes_are_refused() {
    for (file, expected) in [
        (
            one("U8", "[2]", "[0,3]", 3),
            "has 3 bytes, but its shape and U8 make 2",
        ),
        (one("U8", "[2]", "[2,0]", 2), "ends before it starts"),
        (
            one("U8", "[2]", "[0,2]", 1),
            "ends at data offset 2, but the data has 1 bytes",
        ),
        (
            one("U8", "[2]", "[0,2]", 3),
            "1 bytes that belong to no tensor",
        ),
        (one("U8", "[2]", "[1,3]", 3), "a gap of 1 bytes"),
        (one("F4", "[3]", "[0,1]", 1), "not a whole number of bytes"),
        (
            one("U8", "[4294967296,4294967296]", "[0,0]", 0),
            "shape whose size overflows",
        ),
        (
            one("U8", "[0,18446744073709551615]", "[0,0]", 0),
            "shape whose size overflows",
        ),
        (one("U8", "[-1]", "[0,0]", 0), "integer `-1`"),
        (
            one("Q4_K", "[256]", "[0,144]", 144),
            "unknown variant `Q4_K`",
        ),
        (
            one("U8", "[1]", "[0,18446744073709551616]", 1),
            "floating point",
        ),
        (one("U8", "[1]", "[0,1,1]", 1), "line 1"),
    ] {
        let text = refusal(&file);
        assert!(text.contains(expected), "{text}");
    }
}

/// As the safetensors crate reads it: JSON's whitespace, and nothing else.
#[test]
fn only_whitespace_may_be_around_the_json() {
    for around in ["", " ", "\t", "\r", "\n", " \t\r\n"] {
        let text = format!("{around}{{}}{around}");
        let file = file(&text, 0);
        assert_agrees(&read(&file).unwrap(), &file);
    }
    let refused = |header: &str| refusal(&file(header, 0));
    for other in ["\0", "\u{b}", "\u{c}", "\u{a0}", "\u{feff}", "x"] {
        assert!(refused(&format!("{other}{{}}")).contains("does not start with {"));
        assert!(refused(&format!("{{}}{other}")).contains("does not end with } and whitespace"));
    }
    assert!(refused("{} {}").contains("trailing characters"));
    assert!(refused("").contains("does not start with {"));
    assert!(refused(" ").contains("does not start with {"));
    let unfit = refusal(b"\x03\0\0\0\0\0\0\0{\xff}");
    assert!(unfit.contains("not UTF-8 from byte 9"), "{unfit}");
}

#[test]
fn duplicate_names_are_refused() {
    let tensor = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    // The second name is the same, written with an escape.
    for header in [
        format!(r#"{{"a":{tensor},"\u0061":{tensor}}}"#),
        r#"{"__metadata__":{"a":"","a":""}}"#.to_string(),
        r#"{"__metadata__":{},"__metadata__":{}}"#.to_string(),
        r#"{"__metadata__":null,"__metadata__":{}}"#.to_string(),
        r#"{"__metadata__":{},"__metadata__":null}"#.to_string(),
    ] {
        let text = refusal(&file(&header, 0));
        assert!(
            text.contains("appears twice") || text.contains("two tensors"),
            "{text}"
        );
    }
}

#[test]
fn untrusted_text_is_truncated_in_messages() {
    let text = refusal(&one(&"\\n".repeat(1000), "[]", "[0,0]", 0));
    assert!(text.contains(r"unknown variant `\n\n"), "{text}");
}

/// Files written by the safetensors crate.
fn good() -> impl Strategy<Value = Vec<u8>> {
    let dtypes: Vec<Theirs> = Dtype::ALL
        .iter()
        .filter_map(|dtype| serde_json::from_value(dtype.name().into()).ok())
        .collect();
    let shape = prop::collection::vec(0_usize..4, 0..4);
    let tensor = (prop::sample::select(dtypes), shape);
    let metadata = prop::collection::hash_map(".*", ".*", 0..3);
    (prop::collection::hash_map("[^_].*", tensor, 0..8), metadata).prop_map(
        |(tensors, metadata)| {
            let tensors: BTreeMap<_, _> = tensors
                .into_iter()
                .map(|(name, (dtype, mut shape))| {
                    // Types narrower than a byte need a whole number of bytes.
                    if dtype.bitsize() < 8 {
                        shape.push(4);
                    }
                    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                    (name, (dtype, shape, vec![0; bytes]))
                })
                .collect();
            let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
                (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            });
            // The crate writes invalid JSON for no tensors with empty metadata.
            let metadata = (!metadata.is_empty()).then(|| metadata.into_iter().collect());
            safetensors::serialize(views, metadata).unwrap()
        },
    )
}

/// Asserts that the table equals what the safetensors crate reads from the whole file.
fn assert_agrees(table: &Table, file: &[u8]) {
    assert_sound(table, file.len() as u64);
    let (header, theirs) = SafeTensors::read_metadata(file).unwrap();
    assert_eq!(table.data, PREFIX + header as u64);
    assert_eq!(table.tensors.len(), theirs.tensors().len());
    for tensor in &table.tensors {
        let info = theirs.info(&tensor.name).unwrap();
        assert_eq!(ours(info.dtype), Some(tensor.dtype));
        assert!(
            info.shape
                .iter()
                .map(|&dim| dim as u64)
                .eq(tensor.shape.iter().copied())
        );
        assert_eq!(info.data_offsets.0 as u64, tensor.offset - table.data);
        assert_eq!(
            info.data_offsets.1 as u64,
            tensor.offset - table.data + tensor.bytes
        );
    }
    assert_eq!(table.has_metadata, theirs.metadata().is_some());
    let metadata = theirs.metadata().clone().unwrap_or_default();
    assert_eq!(table.metadata.len(), metadata.len());
    for (name, text) in metadata {
        assert_eq!(table.metadata[&name], Value::Text(text));
    }
}

proptest! {
    #[test]
    fn files_of_the_safetensors_crate_are_read_equally(file in good()) {
        assert_agrees(&read(&file).unwrap(), &file);
    }

    #[test]
    fn changed_files_are_refused_or_read_equally(
        mut file in good(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        for (place, byte) in changes {
            let place = place.index(file.len());
            file[place] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len() + 1));
        }
        match read(&file) {
            Ok(table) => assert_agrees(&table, &file),
            Err(_) => drop(refusal(&file)),
        }
    }

    #[test]
    fn no_header_causes_a_panic(header in r#"\{("[a_]{1,2}":(\{("(dtype|shape|data_offsets)":("U8"|1|\[[0-9]{0,3}(,[0-9])?\]),?){0,3}\}|[0-9]|""),?){0,3}\}"#) {
        let _ = read(&file(&header, 3));
    }
}

/// cargo test --release -p dmafile large_headers -- --ignored --nocapture
#[test]
#[ignore = "measures time, which is only useful in a release build"]
fn large_headers_are_timed() {
    let mut header = String::from("{");
    for layer in 0..10_000 {
        let start = layer * 64;
        header.push_str(&format!(
            "{}\"model.layers.{layer}.self_attn.q_proj.weight\":{{\"dtype\":\"BF16\",\"shape\":[4,8],\
             \"data_offsets\":[{start},{}]}}",
            if layer == 0 { "" } else { "," },
            start + 64
        ));
    }
    header.push('}');
    let file = file(&header, 640_000);
    for _ in 0..5 {
        let start = std::time::Instant::now();
        let table = read(&file).unwrap();
        println!("{} tensors in {:?}", table.tensors.len(), start.elapsed());
        let start = std::time::Instant::now();
        let (_, theirs) = SafeTensors::read_metadata(&file).unwrap();
        println!(
            "the safetensors crate: {} in {:?}",
            theirs.tensors().len(),
            start.elapsed()
        );
    }
}
