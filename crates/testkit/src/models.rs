//! Writers of model files, simple and independent of the readers under test.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::path::{Path, PathBuf};

/// A tensor to write: name, dtype, shape, bytes.
pub type Written = (String, &'static str, Vec<u64>, Vec<u8>);

/// `count` tensors whose bytes differ everywhere; their sizes are unaligned on purpose.
pub fn tensors(prefix: &str, count: u64, scale: u64) -> Vec<Written> {
    (0..count)
        .map(|no| {
            let len = scale + no * 777;
            let word =
                |at: u64| (at ^ (no + 1).wrapping_mul(0x9e37_79b9)).wrapping_mul(0xff51_afd7);
            let bytes = (0..len).map(|at| (word(at) >> 16) as u8).collect();
            (format!("{prefix}.{no}.w"), "U8", vec![len], bytes)
        })
        .collect()
}

/// A safetensors file.
pub fn safetensors(path: &Path, tensors: &[Written]) {
    let mut at = 0;
    let entry = |(name, dtype, shape, bytes): &Written| {
        let (start, end) = (at, at + bytes.len());
        at = end;
        format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        )
    };
    let entries: Vec<_> = tensors.iter().map(entry).collect();
    let header = format!(
        r#"{{"__metadata__":{{"who":"a test"}},{}}}"#,
        entries.join(",")
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    for (_, _, _, bytes) in tensors {
        file.extend(bytes);
    }
    fs::write(path, file).unwrap();
}

/// Writes several safetensors files and their index; returns the path of the index.
pub fn sharded(folder: &Path, shards: &[Vec<Written>]) -> PathBuf {
    let mut places = Vec::new();
    for (no, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", no + 1, shards.len());
        safetensors(&folder.join(&name), shard);
        places.extend(
            shard
                .iter()
                .map(|tensor| format!(r#""{}":"{name}""#, tensor.0)),
        );
    }
    let index = folder.join("model.safetensors.index.json");
    let text = format!(
        r#"{{"metadata":{{}},"weight_map":{{{}}}}}"#,
        places.join(",")
    );
    fs::write(&index, text).unwrap();
    index
}

/// A GGUF file of I8 tensors; `split` is its number, from 0, and the number of files.
pub fn gguf(path: &Path, tensors: &[Written], split: Option<(u16, u16)>) {
    const ALIGNMENT: usize = 32;
    let text = |text: &str| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes
    };
    let mut pairs: Vec<(&str, u32, Vec<u8>)> = vec![("general.name", 8, text("a test"))];
    if let Some((no, count)) = split {
        pairs.push(("split.no", 2, no.to_le_bytes().to_vec()));
        pairs.push(("split.count", 2, count.to_le_bytes().to_vec()));
    }
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((pairs.len() as u64).to_le_bytes());
    for (key, kind, value) in pairs {
        file.extend(text(key));
        file.extend(kind.to_le_bytes());
        file.extend(value);
    }
    let mut offset = 0;
    for (name, _, shape, bytes) in tensors {
        file.extend(text(name));
        file.extend((shape.len() as u32).to_le_bytes());
        for dimension in shape.iter().rev() {
            file.extend(dimension.to_le_bytes());
        }
        // GGML_TYPE_I8
        file.extend(24_u32.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += bytes.len().next_multiple_of(ALIGNMENT);
    }
    for (_, _, _, bytes) in tensors {
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(bytes);
    }
    fs::write(path, file).unwrap();
}
