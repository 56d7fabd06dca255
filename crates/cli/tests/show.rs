//! `dmafile show`, and models on the command line.

mod common;

use common::{Dir, end, limit, sha256};
use dmafile_testkit::models::{gguf, safetensors, sharded, tensors};
use std::fs;
use std::process::Stdio;

#[test]
fn text_lists_the_tensors() {
    let dir = Dir::new();
    safetensors(&dir.path("a.safetensors"), &tensors("a", 2, 1000));
    let ended = dir.run("show a.safetensors").ok();
    let size = fs::metadata(dir.path("a.safetensors")).unwrap().len();
    let data = size - 1000 - 1777;
    assert_eq!(
        ended.stdout,
        format!(
            "a.safetensors: safetensors, 2 tensors, 2.71 KiB in 1 file\n\
             \x20 who = a test\n\
             a.0.w  U8  [1000]  1000 bytes at {data}\n\
             a.1.w  U8  [1777]  1777 bytes at {}\n",
            data + 1000
        )
    );
}

#[test]
fn columns_are_aligned_by_display_width() {
    let dir = Dir::new();
    let mut written = tensors("a", 1, 1000);
    for name in ["ä", "漢字"] {
        written.extend(tensors(name, 1, 20_000));
    }
    safetensors(&dir.path("a.safetensors"), &written);
    let text = dir.run("show a.safetensors").ok().stdout;
    // A Chinese character takes two columns.
    for line in [
        "\na.0.w     U8  [1000]    1000 bytes",
        "\nä.0.w     U8  [20000]  20000 bytes",
        "\n漢字.0.w  U8  [20000]  20000 bytes",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
}

#[test]
fn json_gives_the_location_of_each_tensor() {
    let dir = Dir::new();
    let shards = [tensors("a", 2, 3_000_000), tensors("b", 2, 1000)];
    fs::create_dir(dir.path("m")).unwrap();
    sharded(&dir.path("m"), &shards);
    for path in ["m", "m/model.safetensors.index.json"] {
        let json = dir.run(&format!("show {path} --json")).ok().json();
        assert_eq!(json["format"], "safetensors");
        assert_eq!(json["metadata"]["who"], "a test");
        let (files, list) = (&json["shards"], json["tensors"].as_array().unwrap());
        assert_eq!(list.len(), 4);
        for (tensor, written) in list.iter().zip(shards.concat()) {
            assert_eq!(tensor["name"], written.0.as_str());
            assert_eq!(tensor["dtype"], "U8");
            assert_eq!(tensor["shape"], serde_json::json!(written.2));
            let file = &files[tensor["shard"].as_u64().unwrap() as usize];
            let (at, offset) = (&tensor["at"], tensor["offset"].as_u64().unwrap());
            assert_eq!(at.as_u64().unwrap(), file["at"].as_u64().unwrap() + offset);
        }
        let some = dir.run(&format!("show {path} --tensor b.* --json")).ok();
        assert_eq!(some.json()["tensors"].as_array().unwrap().len(), 2);
        // COMMAND finds the bytes there, whether all tensors are loaded or one.
        for chosen in ["", "--tensor b.1.w"] {
            let last = &list[3];
            let (at, bytes) = (
                last["at"].as_u64().unwrap(),
                last["bytes"].as_u64().unwrap(),
            );
            let script = format!(
                "tail -c +$((DMAFILE_OFFSET + {at} + 1)) /proc/self/fd/$DMAFILE_FD | \
                 head -c {bytes} | sha256sum"
            );
            let mut command = dir.dmafile(&format!("load {path} --quiet {chosen}"));
            command.args(["--", "sh", "-c", &script]);
            let ended = end(&mut command).ok();
            fs::write(dir.path("want"), &shards[1][1].3).unwrap();
            let want = sha256(&dir.path("want"), 0, bytes);
            assert!(ended.stdout.starts_with(&want), "{path} {chosen}");
        }
    }
    let plan = dir.run("explain m --json").ok().json();
    assert_eq!(plan["file"], "m");
}

#[test]
fn model_errors_are_one_line() {
    let dir = Dir::new();
    dir.file("noise", 5000);
    let bad = |args: &str, status, want: &str| {
        let line = dir.refusal(&mut dir.dmafile(args), status);
        assert!(line.contains(want), "{line} should say {want}");
    };
    bad("show noise", 1, "not a valid model file: noise: ");
    bad("show nothing", 1, "(ENOENT); check the path");
    bad("show .", 1, "without a model in it (EISDIR)");
    bad(
        "load noise --tensor x",
        1,
        "not a valid model file: noise: ",
    );
    gguf(&dir.path("a.gguf"), &tensors("a", 1, 1000), None);
    bad(
        "show a.gguf --tensor b",
        1,
        "no such tensor: a.gguf: nothing matches 'b' (ENOENT)",
    );
    bad("load a.gguf --tensor re:(", 2, "is not a valid pattern");
    bad(
        "load a.gguf --tensor a.0.w --offset 5",
        2,
        "leave out --offset and --length",
    );
    bad(
        "load a.gguf --tensor a.0.w --verify sha256",
        2,
        "--verify: cannot verify selected tensors; load whole files, or drop --verify",
    );
}

/// Names come from untrusted files: they must not control the terminal.
#[test]
fn control_characters_in_names_are_escaped() {
    let dir = Dir::new();
    let mut written = tensors("a", 1, 1000);
    written[0].0 = "a\\u001b[2Jb".to_string();
    safetensors(&dir.path("a.safetensors"), &written);
    let ended = dir.run("show a.safetensors").ok();
    assert!(!ended.stdout.contains('\u{1b}'), "{ended:?}");
    assert!(ended.stdout.contains("a\\u{1b}[2Jb"), "{ended:?}");
    let (a, b) = ("m/a\u{1b}[31m.safetensors", "m/b.safetensors");
    fs::create_dir(dir.path("m")).unwrap();
    safetensors(&dir.path(a), &tensors("a", 1, 1000));
    safetensors(&dir.path(b), &tensors("b", 1, 1000));
    let ended = dir.run("show m").ok();
    assert!(!ended.stdout.contains('\u{1b}'), "{ended:?}");
    safetensors(&dir.path(b), &tensors("a", 1, 1000));
    fs::rename(dir.path(b), dir.path("m/c\u{1b}\n.safetensors")).unwrap();
    let line = dir.refusal(&mut dir.dmafile("show m"), 1);
    assert!(!line.contains('\u{1b}'), "{line}");
}

/// macOS puts `._NAME` next to each NAME on disks of other systems.
#[test]
fn hidden_files_belong_to_no_model() {
    let dir = Dir::new();
    fs::create_dir(dir.path("m")).unwrap();
    sharded(
        &dir.path("m"),
        &[tensors("a", 2, 5000), tensors("b", 1, 5000)],
    );
    fs::write(dir.path("m/config.json"), "{}").unwrap();
    let mut names: Vec<_> = fs::read_dir(dir.path("m"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in &names {
        fs::write(dir.path(&format!("m/._{name}")), b"\0\x05\x16\x07").unwrap();
    }
    let text = dir.run("show m").ok().stdout;
    assert!(text.starts_with("m: safetensors, 3 tensors"), "{text}");
    let mut load = dir.dmafile("load m --quiet");
    let ended = end(load.args(["--", "ls", "-A", "{}"])).ok();
    assert_eq!(ended.stdout.lines().collect::<Vec<_>>(), names);
}

/// What is not text is escaped, in each way of showing it.
#[test]
fn values_that_are_not_utf8_are_escaped() {
    let dir = Dir::new();
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/corpus/gguf/wide.gguf"
    );
    let json = dir.run(&format!("show {model} --json")).ok().json();
    let metadata = &json["metadata"];
    assert_eq!(metadata["s"], r"a\xfe");
    let tokens = serde_json::json!(["é", r"\xc3", r"\xa9\xff"]);
    assert_eq!(metadata["tokenizer.ggml.tokens"], tokens);
    assert_eq!(
        json["tensors"][0]["shape"],
        serde_json::json!([2, 1, 3, 1, 4])
    );
    let text = dir.run(&format!("show {model}")).ok().stdout;
    assert!(text.contains("  s = a\\xfe\n"), "{text}");
    assert!(
        text.contains(".weight  I8  [2, 1, 3, 1, 4]  24 bytes at"),
        "{text}"
    );
}

/// A path is bytes: JSON replaces what is not UTF-8, and the command does not fail.
#[test]
fn paths_need_not_be_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let dir = Dir::new();
    let name = std::ffi::OsStr::from_bytes(b"m\xff");
    fs::create_dir(dir.path("plain")).unwrap();
    let folder = dir.path("plain").with_file_name(name);
    fs::create_dir(&folder).unwrap();
    sharded(&folder, &[tensors("a", 1, 5000), tensors("b", 1, 5000)]);
    for args in [
        &["show", "--json"][..],
        &["load", "--quiet", "--json", "--verify", "sha256"],
        &["explain", "--json"],
    ] {
        let mut command = dir.dmafile(args[0]);
        let json = end(command.args(&args[1..]).arg(&folder)).ok().json();
        assert!(json.is_object());
    }
}

/// The size of the longest header of the tests below.
const HEADER: usize = 8 << 20;

/// A GGUF file with these counts of tensors and values.
fn counted(tensors: usize, values: usize, rest: &[u8]) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors as u64).to_le_bytes());
    file.extend((values as u64).to_le_bytes());
    file.extend(rest);
    file
}

/// A list of values of this type, as many as fit.
fn list(kind: u8, least: usize) -> Vec<u8> {
    let mut rest = b"\x01\0\0\0\0\0\0\0k\x09\0\0\0".to_vec();
    rest.extend([kind, 0, 0, 0]);
    rest.extend(((HEADER / least) as u64).to_le_bytes());
    rest.resize(rest.len() + HEADER, 0);
    // Numbers with as many digits as there can be.
    if least < 8 && kind != 7 && kind != 9 {
        let start = rest.len() - HEADER;
        rest[start..].fill(0x9c);
    }
    counted(0, 1, &rest)
}

/// Entries with four bytes of name each, and then `after`; `first` comes before them.
fn named(count: usize, first: &[u8], after: &[u8]) -> Vec<u8> {
    let mut rest = first.to_vec();
    for n in 0..count {
        rest.extend(b"\x04\0\0\0\0\0\0\0");
        rest.extend([0, 7, 14, 21].map(|bits| (n >> bits & 0x7f) as u8));
        rest.extend(after);
    }
    rest
}

/// Whatever a header contains, showing it takes little more memory than reading it: nothing is collected to be
/// written.
#[test]
fn memory_is_a_small_multiple_of_the_header() {
    /// Allowed for any file: the program itself, and its thread's stack.
    const ALWAYS: usize = 16 << 20;
    const PER_BYTE: usize = 16;
    /// Of I8, without elements, at the start of the data.
    const EMPTY: &[u8] = b"\x01\0\0\0\0\0\0\0\0\0\0\0\x18\0\0\0\0\0\0\0\0\0\0\0";
    let dir = Dir::new();
    let kinds = [
        (0, 1),
        (1, 1),
        (2, 2),
        (5, 4),
        (6, 4),
        (7, 1),
        (8, 8),
        (9, 12),
        (12, 8),
    ];
    let mut files: Vec<_> = kinds
        .map(|(kind, least)| (format!("a list of type {kind}"), list(kind, least)))
        .into();
    let pairs = HEADER / 17;
    let values = counted(0, pairs, &named(pairs, &[], &[0; 5]));
    files.push(("many values".into(), values));
    let count = HEADER / 36;
    let tensors = counted(count, 0, &named(count, &[], EMPTY));
    files.push(("many tensors".into(), tensors));
    // Not all lines are as wide as the longest.
    let first = [&500_u64.to_le_bytes()[..], &[b'n'; 500], EMPTY].concat();
    let tensors = counted(count + 1, 0, &named(count, &first, EMPTY));
    files.push(("a long name".into(), tensors));
    let dims = HEADER / 8;
    let mut first = b"\x01\0\0\0\0\0\0\0n".to_vec();
    first.extend((dims as u32).to_le_bytes());
    first.extend([0, 0, 0, 0, 0, 0, 0, 0].repeat(dims));
    first.extend([24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    files.push(("many dimensions".into(), counted(1, 0, &first)));
    for (name, file) in &files {
        fs::write(dir.path("large"), file).unwrap();
        let most = (ALWAYS + PER_BYTE * file.len()) as u64;
        for args in ["show large", "show large --json"] {
            let mut command = dir.dmafile(args);
            command.stdout(Stdio::null());
            limit(&mut command, libc::RLIMIT_DATA, most);
            assert!(command.status().unwrap().success(), "{args} of {name}");
        }
    }
}
