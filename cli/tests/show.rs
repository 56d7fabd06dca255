//! `dmafile show`, and models on the command line.

mod common;
#[path = "../../engine/tests/common/models.rs"]
mod models;

use common::{Dir, end, sha256};
use models::{gguf, safetensors, sharded, tensors};
use std::fs;

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
        "--verify: chosen tensors have no digest of their own; leave out --verify or --tensor",
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
