//! Headers that must be read, and headers that must be refused.

use super::*;
use crate::format::tests::{assert_sound, read, refusal};
use proptest::prelude::*;

/// A file of version 3 with pairs and tensors written by `pair` and `tensor`.
fn file(pairs: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((pairs.len() as u64).to_le_bytes());
    file.extend(pairs.concat());
    file.extend(tensors.concat());
    file.resize(file.len().next_multiple_of(32) + data, 0);
    file
}

fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn pair(key: impl AsRef<[u8]>, kind: ValueType, value: &[u8]) -> Vec<u8> {
    [&text(key)[..], &(kind as u32).to_le_bytes(), value].concat()
}

fn list(kind: ValueType, count: u64, values: &[u8]) -> Vec<u8> {
    [
        &(kind as u32).to_le_bytes()[..],
        &count.to_le_bytes(),
        values,
    ]
    .concat()
}

/// `dims` are in the order of the file.
fn tensor(name: impl AsRef<[u8]>, dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
    let mut tensor = text(name);
    tensor.extend((dims.len() as u32).to_le_bytes());
    tensor.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    tensor.extend(dtype.to_le_bytes());
    tensor.extend(offset.to_le_bytes());
    tensor
}

#[test]
fn values_and_tensors_are_read() {
    let file = file(
        &[
            pair("general.architecture", ValueType::Text, &text("llama")),
            pair("split.no", ValueType::U16, &[1, 0]),
            pair("list", ValueType::List, &list(ValueType::I8, 2, &[0xff, 1])),
            pair(
                "lists",
                ValueType::List,
                &list(
                    ValueType::List,
                    2,
                    &[
                        list(ValueType::Bool, 1, &[1]),
                        list(ValueType::Text, 0, &[]),
                    ]
                    .concat(),
                ),
            ),
        ],
        &[tensor("b", &[64, 2], 2, 64), tensor("a", &[3, 4], 0, 0)],
        // As llama.cpp pads the last tensor.
        64 + 96,
    );
    let table = read(&file).unwrap();
    assert_eq!(table.format, Format::Gguf);
    assert_eq!(
        table.metadata["general.architecture"],
        Value::Text("llama".into())
    );
    assert_eq!(table.metadata["split.no"], Value::Unsigned(1));
    assert_eq!(table.metadata["list"], Value::Signeds(vec![-1, 1]));
    assert_eq!(
        table.metadata["lists"],
        Value::Lists(vec![Value::Bools(vec![true]), Value::Texts(vec![])])
    );
    let [a, b] = &table.tensors[..] else {
        panic!("{:?}", table.tensors);
    };
    assert_eq!(
        (&*a.name, a.dtype, &a.shape[..]),
        ("a", Dtype::F32, &[4, 3][..])
    );
    assert_eq!((a.offset, a.bytes), (table.data, 48));
    assert_eq!(
        (&*b.name, b.dtype, &b.shape[..]),
        ("b", Dtype::Q4_0, &[2, 64][..])
    );
    assert_eq!((b.offset, b.bytes), (table.data + 64, 72));
}

#[test]
fn a_vocabulary_has_no_tensors_and_may_end_with_its_metadata() {
    let mut file = file(&[pair("k", ValueType::U8, &[7])], &[], 0);
    file.truncate(24 + 8 + 1 + 4 + 1);
    let table = read(&file).unwrap();
    assert_eq!((table.data, table.tensors.len()), (file.len() as u64, 0));
}

#[test]
fn the_alignment_comes_from_the_metadata() {
    let aligned = |bytes: u32| pair(ALIGNMENT, ValueType::U32, &bytes.to_le_bytes());
    let tensors = [tensor("a", &[8], 24, 0), tensor("b", &[8], 24, 8)];
    for bytes in [1, 2, 4, 8] {
        let table = read(&file(&[aligned(bytes)], &tensors, 32)).unwrap();
        assert_eq!(table.tensors[1].offset, table.data + 8);
        assert!(table.data.is_multiple_of(bytes.into()));
    }
    let text = refusal(&file(&[aligned(1 << 31)], &tensors[..1], 32));
    assert!(text.contains("but the data has 0 bytes"), "{text}");
    for bytes in [0, 24, 33] {
        let text = refusal(&file(&[aligned(bytes)], &tensors, 32));
        assert!(text.contains("general.alignment is"), "{text}");
    }
    let text = refusal(&file(
        &[pair(ALIGNMENT, ValueType::U64, &[8, 0, 0, 0, 0, 0, 0, 0])],
        &[],
        0,
    ));
    assert!(text.contains("not an unsigned number of 32 bits"), "{text}");
    let text = refusal(&file(&[], &tensors, 32));
    assert!(text.contains("not at a multiple of 32"), "{text}");
}

#[test]
fn invalid_tensors_are_refused() {
    for (dims, dtype, offset, expected) in [
        (
            &[8][..],
            24,
            64,
            "8 bytes at data offset 64, but the data has 64",
        ),
        (&[65], 24, 0, "65 bytes at data offset 0"),
        (
            &[8],
            24,
            u64::MAX - 31,
            "8 bytes at data offset 18446744073709551584",
        ),
        (&[8], 24, 1, "not at a multiple of 32"),
        (&[1 << 32, 1 << 31], 24, 0, "shape whose size overflows"),
        (&[1 << 62], 28, 0, "has a size that overflows"),
        (&[31, 32], 2, 0, "rows of 31 elements"),
        (&[31, 0], 2, 0, "rows of 31 elements"),
        (&[], 2, 0, "rows of 1 elements"),
        (&[1], 4, 0, "unknown type 4"),
        (&[1], u32::MAX, 0, "unknown type 4294967295"),
    ] {
        let text = refusal(&file(&[], &[tensor("a", dims, dtype, offset)], 64));
        assert!(text.contains(expected), "{text}");
    }
    let two = [tensor("a", &[33], 24, 0), tensor("b", &[1], 24, 32)];
    assert!(refusal(&file(&[], &two, 64)).contains(r#"the tensors "a" and "b" share bytes"#));
    let twice = [tensor("a", &[1], 24, 0), tensor("a", &[1], 24, 32)];
    assert!(refusal(&file(&[], &twice, 64)).contains("two tensors are named \"a\""));
    let unfit = [tensor(b"a\xff", &[1], 24, 0)];
    assert!(refusal(&file(&[], &unfit, 64)).contains("not UTF-8"));
    let mut many = tensor("a", &[1, 1, 1], 24, 0);
    many[9..13].fill(0xff);
    let text = refusal(&file(&[], &[many], 64));
    assert!(text.contains("4294967295 dimensions claimed"), "{text}");
}

/// ggml has room for 4 dimensions and names of 63 bytes. The format has no such limits, and other programs
/// write more.
#[test]
fn names_and_shapes_that_ggml_has_no_room_for_are_read() {
    let name = "n".repeat(100_000);
    let dims = [2, 2, 1, 3, 4, 1, 2];
    let key = "k".repeat(70_000);
    let pairs = [
        pair(&key, ValueType::U8, &[1]),
        pair("", ValueType::U8, &[2]),
    ];
    let table = read(&file(&pairs, &[tensor(&name, &dims, 0, 0)], 384)).unwrap();
    assert_eq!(table.metadata[&key], Value::Unsigned(1));
    assert_eq!(table.metadata[""], Value::Unsigned(2));
    let tensor = &table.tensors[0];
    assert_eq!((&tensor.name, tensor.bytes), (&name, 384));
    assert_eq!(tensor.shape, [2, 1, 4, 3, 1, 2, 2]);
}

#[test]
fn empty_tensors_of_blocks_are_read() {
    for dims in [&[0][..], &[32, 0], &[0, 7]] {
        let table = read(&file(&[], &[tensor("a", dims, 2, 0)], 0)).unwrap();
        assert_eq!(
            (table.tensors[0].dtype, table.tensors[0].bytes),
            (Dtype::Q4_0, 0)
        );
    }
}

/// Tokens of a vocabulary may be parts of characters.
#[test]
fn values_that_are_not_utf8_are_escaped() {
    let texts = [
        text("é"),
        text(b"\xc3"),
        text(b"\xa9 \xff\x00"),
        text(b"\xed\xa0\x80"),
    ];
    let pairs = [
        pair("one", ValueType::Text, &text(b"a\xff\xfe\xc3\xa9")),
        pair(
            "many",
            ValueType::List,
            &list(ValueType::Text, 4, &texts.concat()),
        ),
    ];
    let metadata = read(&file(&pairs, &[], 0)).unwrap().metadata;
    assert_eq!(metadata["one"], Value::Text(r"a\xff\xfeé".into()));
    let many = ["é", r"\xc3", "\\xa9 \\xff\0", r"\xed\xa0\x80"];
    assert_eq!(metadata["many"], Value::Texts(many.map(Into::into).into()));
}

#[test]
fn invalid_metadata_is_refused() {
    let mut deep = list(ValueType::U8, 0, &[]);
    for _ in 1..MAX_DEPTH {
        deep = list(ValueType::List, 1, &deep);
    }
    assert!(read(&file(&[pair("k", ValueType::List, &deep)], &[], 0)).is_ok());
    let deeper = list(ValueType::List, 1, &deep);
    let byte = pair("k", ValueType::U8, &[0]);
    for (pairs, expected) in [
        (
            vec![pair("k", ValueType::List, &deeper)],
            "arrays nested more than 4 deep",
        ),
        (vec![pair("k", ValueType::Bool, &[2])], "boolean of 2"),
        (vec![byte.clone(), byte], "two values for the key \"k\""),
        (vec![pair(b"k\xff", ValueType::U8, &[0])], "not UTF-8"),
        (
            vec![pair("k", ValueType::Text, &[0xff; 8])],
            "18446744073709551615 bytes of a string",
        ),
        (
            vec![pair(
                "k",
                ValueType::List,
                &list(ValueType::U64, 1 << 61, &[]),
            )],
            "2305843009213693952 values of an array",
        ),
        (
            vec![[text("k"), vec![13, 0, 0, 0]].concat()],
            "unknown type 13",
        ),
    ] {
        let text = refusal(&file(&pairs, &[], 0));
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn unknown_versions_are_refused() {
    for (version, expected) in [
        (0_u32, "version 0"),
        (1, "version 1, which is no longer"),
        (4, "version 4"),
        (3 << 24, "big-endian GGUF (version 3)"),
    ] {
        let mut file = file(&[], &[], 0);
        file[4..8].copy_from_slice(&version.to_le_bytes());
        let text = refusal(&file);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_header_above_the_maximum_size_is_refused() {
    // A file of 200 MB whose only text is longer than the maximum header.
    let start = file(
        &[pair("k", ValueType::Text, &(MAX_HEADER).to_le_bytes())],
        &[],
        0,
    );
    let text = Table::read(&mut start.chain(std::io::repeat(b'x')), 2 * MAX_HEADER)
        .unwrap_err()
        .to_string();
    assert!(text.contains("100000000 bytes of a string"), "{text}");
}

/// A value: its type, its bytes and the parsed result.
fn value() -> impl Strategy<Value = (ValueType, Vec<u8>, Value)> {
    macro_rules! number {
        ($type:ident, $kind:ident, $one:ident, $many:ident) => {
            prop_oneof![
                any::<$type>().prop_map(|n| (
                    ValueType::$kind,
                    n.to_le_bytes().to_vec(),
                    Value::$one(n.into())
                )),
                prop::collection::vec(any::<$type>(), 0..5).prop_map(|all| {
                    let bytes: Vec<u8> = all.iter().flat_map(|n| n.to_le_bytes()).collect();
                    let list = list(ValueType::$kind, all.len() as u64, &bytes);
                    let all = all.into_iter().map(Into::into).collect();
                    (ValueType::List, list, Value::$many(all))
                })
            ]
        };
    }
    let texts = prop::collection::vec(".*", 0..4);
    let bools = prop::collection::vec(any::<bool>(), 0..4);
    prop_oneof![
        number!(u8, U8, Unsigned, Bytes),
        number!(i8, I8, Signed, Signeds),
        number!(u16, U16, Unsigned, Unsigneds),
        number!(i16, I16, Signed, Signeds),
        number!(u32, U32, Unsigned, Unsigneds),
        number!(i32, I32, Signed, Signeds),
        number!(u64, U64, Unsigned, Unsigneds),
        number!(i64, I64, Signed, Signeds),
        number!(f32, F32, Float, Floats),
        number!(f64, F64, Float, Floats),
        any::<bool>().prop_map(|bit| (ValueType::Bool, vec![bit.into()], Value::Bool(bit))),
        bools.prop_map(|all| {
            let bytes: Vec<u8> = all.iter().map(|&bit| bit.into()).collect();
            (
                ValueType::List,
                list(ValueType::Bool, all.len() as u64, &bytes),
                Value::Bools(all),
            )
        }),
        ".*".prop_map(|all| (ValueType::Text, text(&all), Value::Text(all))),
        texts.prop_map(|all| {
            let bytes: Vec<u8> = all.iter().flat_map(text).collect();
            (
                ValueType::List,
                list(ValueType::Text, all.len() as u64, &bytes),
                Value::Texts(all),
            )
        }),
    ]
}

/// A file and the table in it.
fn good() -> impl Strategy<Value = (Vec<u8>, Table)> {
    let types: Vec<u32> = (0..64).filter(|&id| dtype(id).is_some()).collect();
    let shape = prop::collection::vec(1_u64..4, 0..=5);
    let tensors =
        prop::collection::btree_map(".{0,90}", (prop::sample::select(types), shape), 0..6);
    let metadata = prop::collection::btree_map("[a-z0-9_.]{0,20}", value(), 0..6);
    (metadata, tensors, 0..8_u32).prop_map(|(mut metadata, tensors, shift)| {
        let alignment = 1_u32 << shift;
        metadata.insert(
            ALIGNMENT.into(),
            (
                ValueType::U32,
                alignment.to_le_bytes().to_vec(),
                Value::Unsigned(alignment.into()),
            ),
        );
        let mut entries = Vec::new();
        let mut written = Vec::new();
        let mut end = 0;
        for (name, (id, mut dims)) in tensors {
            let dtype = dtype(id).unwrap();
            match dims.first_mut() {
                Some(row) => *row *= dtype.block_elements(),
                None if dtype.block_elements() > 1 => dims.push(dtype.block_elements()),
                None => {}
            }
            let offset = u64::next_multiple_of(end, alignment.into());
            written.push(tensor(&name, &dims, id, offset));
            let bytes = dtype.bytes(dims.iter().product()).unwrap();
            end = offset + bytes;
            dims.reverse();
            entries.push(Entry {
                name,
                dtype,
                shape: dims,
                offset,
                bytes,
            });
        }
        let pairs: Vec<_> = metadata
            .iter()
            .map(|(key, (kind, bytes, _))| pair(key, *kind, bytes))
            .collect();
        let mut file = file(&pairs, &written, 0);
        let header = 24 + pairs.concat().len() + written.concat().len();
        let data = header.next_multiple_of(alignment as usize) as u64;
        file.resize((data + end) as usize, 0);
        entries.iter_mut().for_each(|entry| entry.offset += data);
        let table = Table {
            format: Format::Gguf,
            metadata: metadata
                .into_iter()
                .map(|(key, (.., value))| (key, value))
                .collect(),
            has_metadata: true,
            tensors: entries,
            data,
        };
        (file, table)
    })
}

proptest! {
    #[test]
    fn written_files_are_read_back((file, table) in good()) {
        assert_sound(&table, file.len() as u64);
        // Compared as text, so that NaN equals NaN.
        prop_assert_eq!(format!("{:?}", read(&file).unwrap()), format!("{table:?}"));
    }

    #[test]
    fn changed_files_are_refused_or_valid(
        (mut file, _) in good(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
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
            Ok(table) => assert_sound(&table, file.len() as u64),
            Err(_) => drop(refusal(&file)),
        }
    }

    #[test]
    fn no_input_causes_a_panic(rest in prop::collection::vec(prop_oneof![Just(0), 0_u8..16, any::<u8>()], 0..300)) {
        let file = [&MAGIC[..], &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], &rest].concat();
        if let Ok(table) = read(&file) {
            assert_sound(&table, file.len() as u64);
        }
    }
}
