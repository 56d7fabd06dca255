//! Reading a header allocates at most a small multiple of the bytes of the header, whatever it claims.
//! A separate binary with one test, because memory is counted for the whole process.

use dmafile::format::Table;
use peak_alloc::PeakAlloc;
use std::fs;
use std::path::Path;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Allowed for any file: the first bytes of a header, buffers, messages.
const ALWAYS: usize = 2 << 20;

/// Allowed for each byte of a header: `1,` becomes a number of 8 bytes, `"":"",` a map entry of 48 bytes or
/// more, in vectors and maps with spare capacity. The measured maximum is 11.
const PER_BYTE: usize = 16;

/// The peak memory of reading a file, without the file itself.
fn peak(file: &[u8]) -> usize {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let table = Table::read(&mut &file[..], file.len() as u64);
    let peak = MEMORY.peak_usage() - before;
    drop(table);
    peak
}

fn assert_bounded(name: &str, file: &[u8]) {
    let (peak, most) = (peak(file), ALWAYS + PER_BYTE * file.len());
    assert!(
        peak <= most,
        "{name}: {peak} bytes for a file of {}",
        file.len()
    );
}

fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

/// A GGUF file with a list of as many values of at least `least` bytes as fit into `bytes`.
fn list(kind: u8, least: usize, bytes: usize) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
    file.extend(b"\x01\0\0\0\0\0\0\0k\x09\0\0\0");
    file.extend([kind, 0, 0, 0]);
    file.extend(((bytes / least) as u64).to_le_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

#[test]
fn memory_is_at_most_a_small_multiple_of_the_header() {
    let attacks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../attacks");
    for entry in fs::read_dir(attacks).unwrap() {
        let path = entry.unwrap().path();
        assert_bounded(&path.display().to_string(), &fs::read(&path).unwrap());
    }

    // Headers that need the most memory per byte.
    let bytes = 6 << 20;
    let shape = format!(r#"{{"a":{{"shape":[1{}]}}}}"#, ",1".repeat(bytes / 2));
    assert_bounded("a long shape", &safetensors(&shape));
    let names: Vec<_> = (0..bytes / 9).map(|n| format!(r#""{n:x}":"""#)).collect();
    let metadata = format!(r#"{{"__metadata__":{{{}}}}}"#, names.join(","));
    assert_bounded("many texts by name", &safetensors(&metadata));
    let tensor = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let names: Vec<_> = (0..bytes / 50)
        .map(|n| format!(r#""{n:x}":{tensor}"#))
        .collect();
    assert_bounded(
        "many tensors",
        &safetensors(&format!("{{{}}}", names.join(","))),
    );
    let quoted = format!(r#"{{"a":{{"dtype":"{}"}}}}"#, "x".repeat(bytes));
    assert_bounded("a long dtype", &safetensors(&quoted));
    let deep = format!(r#"{{"a":{{"b":{}"#, "[".repeat(bytes));
    assert_bounded("deep lists", &safetensors(&deep));

    for (kind, least) in [
        (0, 1),
        (2, 2),
        (4, 4),
        (6, 4),
        (7, 1),
        (8, 8),
        (9, 12),
        (10, 8),
    ] {
        assert_bounded(&format!("a list of {kind}"), &list(kind, least, bytes));
    }
    let mut pairs = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    let count = bytes / 17;
    pairs.extend((count as u64).to_le_bytes());
    for n in 0..count {
        pairs.extend(b"\x04\0\0\0\0\0\0\0");
        pairs.extend([0, 7, 14, 21].map(|bits| (n >> bits & 0x7f) as u8));
        pairs.extend(b"\0\0\0\0\0");
    }
    assert_bounded("many pairs", &pairs);
    let count = bytes / 28;
    let mut tensors = b"GGUF\x03\0\0\0".to_vec();
    tensors.extend((count as u64).to_le_bytes());
    tensors.extend([0; 8]);
    for n in 0..count {
        tensors.extend(b"\x04\0\0\0\0\0\0\0");
        tensors.extend([0, 7, 14, 21].map(|bits| (n >> bits & 0x7f) as u8));
        tensors.extend([0; 16]);
    }
    assert_bounded("many tensors of GGUF", &tensors);
}
