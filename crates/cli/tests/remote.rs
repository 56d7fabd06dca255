//! URLs in place of paths: the same bytes, from servers that speak as the hub and as S3 do.
#![cfg(feature = "remote")]

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dmafile_testkit::server::{Fault, Server, Upload};
use dmafile_testkit::{bytes_digest, models, noise};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn dmafile(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmafile"));
    command
        .args(args)
        .env_remove("HTTPS_PROXY")
        .env_remove("HTTP_PROXY");
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        if ["AWS_", "HF_", "GOOGLE_", "AZURE_"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Variables that lead to a server of the test, with secrets.
trait Leads {
    fn of_s3(&mut self, server: &Server) -> &mut Self;
    fn of_hub(&mut self, server: &Server) -> &mut Self;
}

impl Leads for Command {
    fn of_s3(&mut self, server: &Server) -> &mut Self {
        self.env("AWS_ENDPOINT_URL", server.url(""))
            .env("AWS_ACCESS_KEY_ID", "me")
            .env("AWS_SECRET_ACCESS_KEY", "hunter2")
    }

    fn of_hub(&mut self, server: &Server) -> &mut Self {
        self.env("HF_ENDPOINT", server.url(""))
            .env("HF_TOKEN", "hf_hunter2")
    }
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8(both).unwrap()
}

fn good(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// The digest of the bytes that COMMAND gets, by sha256sum.
const SUM: &str = "sha256sum < \"/proc/self/fd/$DMAFILE_FD\" | cut -d' ' -f1";

/// A model of two files with an index and a configuration, as (name, bytes).
fn model() -> Vec<(String, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    let shards = [("a", 4), ("b", 3)].map(|(name, count)| models::tensors(name, count, 100_000));
    models::sharded(dir.path(), &shards);
    std::fs::write(dir.path().join("config.json"), b"{\"a\": 1}").unwrap();
    let entries = std::fs::read_dir(dir.path()).unwrap().flatten();
    let read = |path: &Path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (name, std::fs::read(path).unwrap())
    };
    entries.map(|entry| read(&entry.path())).collect()
}

/// The hub with a model `o/m`, whose large files are redirected to another server.
fn hub() -> (Server, Server, Vec<(String, Vec<u8>)>) {
    let (hub, store) = (Server::plain(), Server::plain());
    let files = model();
    let names: Vec<_> = files
        .iter()
        .map(|(name, _)| format!(r#"{{"rfilename":"{name}"}}"#))
        .collect();
    let info = format!(r#"{{"sha":"c0ffee","siblings":[{}]}}"#, names.join(","));
    hub.put("/api/models/o/m/revision/main", info.into_bytes());
    for (name, bytes) in &files {
        let path = format!("/o/m/resolve/c0ffee/{name}");
        // Files have the tags that the real hub gives them.
        let tag = format!("\"{}\"", bytes_digest(bytes));
        hub.put_tagged(&path, bytes.clone(), &tag);
        hub.say(&path, &format!("X-Linked-Etag: {tag}\r\n"));
        store.put(&path, bytes.clone());
    }
    let tags: Vec<_> = files
        .iter()
        .map(|(name, bytes)| (name.clone(), bytes_digest(bytes)))
        .collect();
    let place = store.url("");
    hub.decide(move |asked| {
        // It is busy at first.
        if asked.number == 0 {
            return Fault::Status(429, "Retry-After: 0\r\n".to_string());
        }
        if asked.field("authorization") != Some("Bearer hf_hunter2") {
            return Fault::Status(401, String::new());
        }
        if !asked.target.ends_with(".safetensors") {
            return Fault::None;
        }
        let (_, tag) = tags
            .iter()
            .find(|tag| asked.target.ends_with(&tag.0))
            .unwrap();
        let target = &asked.target;
        Fault::Redirect(format!(
            "{place}{target}?signature=1\r\nX-Linked-Etag: \"{tag}\""
        ))
    });
    (hub, store, files)
}

#[test]
fn a_file_of_a_web_server_is_loaded_shown_and_explained() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    models::safetensors(&path, &models::tensors("a", 3, 1_000_000));
    let bytes = std::fs::read(&path).unwrap();
    let url = server.put("/x.safetensors", bytes.clone()) + "?signature=hunter2";
    let sum = good(&mut dmafile(&["load", "-q", &url, "--", "sh", "-c", SUM]));
    assert_eq!(sum.trim(), bytes_digest(&bytes));
    let name = good(&mut dmafile(&[
        "load",
        "-q",
        &url,
        "--",
        "sh",
        "-c",
        "basename {}; cat {} | sha256sum",
    ]));
    assert!(
        name.starts_with("x.safetensors\n") && name.contains(&bytes_digest(&bytes)),
        "{name}"
    );
    let shown = good(&mut dmafile(&["show", &url]));
    assert!(
        shown.contains("3 tensors") && shown.contains("a.2.w"),
        "{shown}"
    );
    let plan = good(&mut dmafile(&["explain", &url]));
    assert!(
        plan.contains("fetch") && plan.contains("to receive"),
        "{plan}"
    );
    server.decide(|asked| match asked.number {
        1 => Fault::Status(503, String::new()),
        _ => Fault::None,
    });
    let loaded = good(&mut dmafile(&["load", "-v", &url, "--tensor", "a.1.w"]));
    assert!(
        loaded.contains("received") && loaded.contains(" requests, 1 of them again: status 503\n"),
        "{loaded}"
    );
    for said in [shown, plan, loaded] {
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[test]
fn a_model_of_the_hub_is_a_folder_for_command() {
    let (hub, store, files) = hub();
    let mut load = dmafile(&["load", "-q", "hf://o/m", "--"]);
    load.args([
        "sh",
        "-c",
        "basename {}; cd {}; sha256sum * | cut -c1-64,66-",
    ]);
    load.of_hub(&hub);
    let said = good(&mut load);
    assert!(said.starts_with("m\n"), "{said}");
    for (name, bytes) in &files {
        assert!(
            said.contains(&format!("{} {name}", bytes_digest(bytes))),
            "{name}: {said}"
        );
    }
    assert_eq!(said.lines().count(), files.len() + 1);
    let asked = store.asked();
    assert!(!asked.is_empty());
    assert!(
        asked
            .iter()
            .all(|asked| asked.field("authorization").is_none())
    );
    // Every file was asked for by its commit; which one that is, only once, and again because the hub was busy.
    let asked = hub.asked();
    let (revisions, files): (Vec<_>, Vec<_>) = asked
        .iter()
        .partition(|asked| asked.target.contains("/api/"));
    assert_eq!(revisions.len(), 2);
    assert!(
        files
            .iter()
            .all(|asked| asked.target.contains("/resolve/c0ffee/"))
    );
    let without = dmafile(&["load", "hf://o/m"])
        .env("HF_ENDPOINT", hub.url(""))
        .env("HOME", "/nowhere")
        .output();
    let refused = text(&without.unwrap());
    assert!(refused.contains("(EACCES); set HF_TOKEN"), "{refused}");
    let mut one = dmafile(&[
        "load",
        "-q",
        "hf://o/m/config.json",
        "--",
        "sh",
        "-c",
        "cat {}",
    ]);
    one.of_hub(&hub);
    assert_eq!(good(&mut one), "{\"a\": 1}");
}

#[test]
fn an_interrupted_load_of_a_url_ends() {
    let server = Server::plain();
    let url = server.put("/model.bin", noise(8 << 20, 3));
    server.decide(|asked| match asked.number {
        0 => Fault::None,
        _ => Fault::Silent(1000),
    });
    let mut load = dmafile(&["load", "-q", &url]).spawn().unwrap();
    while server.asked().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&load);
    // Where the tests run in the background, SIGINT may be ignored.
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(load.wait().unwrap().code(), Some(130));
}

#[test]
fn credentials_that_are_missing_are_asked_for_in_one_line() {
    for (url, words) in [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ] {
        let mut load = dmafile(&["load", url]);
        // Nothing answers there.
        load.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
            .env("AWS_EC2_METADATA_DISABLED", "true");
        let output = load.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output);
        assert!(
            said.contains(words) && said.trim_end().lines().count() == 1,
            "{said}"
        );
    }
    let none = "there are no credentials for S3 (EACCES); set AWS_ACCESS_KEY_ID";
    for url in ["s3://bucket/x", "s3://bucket/folder/"] {
        let mut load = dmafile(&["load", url]);
        let output = load
            .env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
            .output();
        let said = text(&output.unwrap());
        assert!(said.contains(none), "{said}");
    }
    let mut load = dmafile(&["load", "s3://bucket/x"]);
    load.env("AWS_PROFILE", "me")
        .env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9");
    let said = text(&load.output().unwrap());
    assert!(said.contains("aws configure export-credentials"), "{said}");
}

#[test]
fn a_model_of_the_hub_is_held_and_taken() {
    let (hub, store, files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let socket = socket.to_str().unwrap();
    let mut hold = dmafile(&["hold", "hf://o/m/", "--name", "m", "--socket", socket]);
    hold.of_hub(&hub);
    let mut holder = hold.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let out = holder.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    assert!(
        line.contains("hf://o/m@c0ffee/model-00001-of-00002.safetensors"),
        "{line}"
    );
    let before = store.asked().len();
    assert!(before > 0);
    for _ in 0..2 {
        let mut take = dmafile(&["take", "m", "--socket", socket, "--", "sh", "-c"]);
        let said = good(take.arg("cd {}; sha256sum * | cut -c1-64,66-"));
        for (name, bytes) in files.iter().filter(|file| file.0.ends_with(".safetensors")) {
            assert!(
                said.contains(&format!("{} {name}", bytes_digest(bytes))),
                "{name}: {said}"
            );
        }
    }
    assert_eq!(store.asked().len(), 0, "nothing was fetched again");
    let holds = good(&mut dmafile(&["holds", "--socket", socket]));
    assert!(!holds.contains("changed on the disk"), "{holds}");
    good(&mut dmafile(&["release", "m", "--socket", socket]));
    assert!(holder.wait().unwrap().success());
}

#[test]
fn a_bucket_in_another_region_says_which() {
    let server = Server::plain();
    server.decide(|_| Fault::Status(301, "x-amz-bucket-region: eu-west-1\r\n".to_string()));
    let mut load = dmafile(&["load", "s3://bucket/x"]);
    load.env("AWS_ENDPOINT_URL", server.url(""));
    load.env("AWS_ACCESS_KEY_ID", "me")
        .env("AWS_SECRET_ACCESS_KEY", "hunter2");
    let said = text(&load.output().unwrap());
    assert!(
        said.ends_with("another region, eu-west-1 (EINVAL); set AWS_REGION=eu-west-1\n"),
        "{said}"
    );
    assert!(!said.contains("hunter2"));
}

#[test]
fn what_a_url_stands_for_does_not_depend_on_files_here() {
    let server = Server::plain();
    let bytes = noise(1000, 5);
    let url = server.put("/models", bytes.clone());
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("models")).unwrap();
    let mut load = dmafile(&["load", "-q", &url, "--", "sh", "-c", SUM]);
    assert_eq!(
        good(load.current_dir(dir.path())).trim(),
        bytes_digest(&bytes)
    );
}

#[test]
fn all_parts_of_a_split_model_on_a_web_server_are_loaded() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let mut first = String::new();
    for number in 0..3 {
        let path = dir.path().join("part");
        let tensors = models::tensors(&format!("t{number}"), 2, 10_000);
        models::gguf(&path, &tensors, Some((number, 3)));
        let name = format!("/m-{:05}-of-00003.gguf", number + 1);
        let url = server.put(&name, std::fs::read(&path).unwrap());
        first = if number == 0 { url } else { first };
    }
    let shown = good(&mut dmafile(&["show", &first]));
    assert!(
        shown.contains("6 tensors") && shown.contains("3 files"),
        "{shown}"
    );
    server.decide(|asked| {
        if asked.target.contains("00002-of") {
            return Fault::Status(404, String::new());
        }
        Fault::None
    });
    let said = text(&dmafile(&["load", &first]).output().unwrap());
    assert!(
        said.contains("m-00002-of-00003.gguf: there is no such object"),
        "{said}"
    );
}

/// CRC-64/NVME, bit by bit, in base64.
fn crc64nvme(bytes: &[u8]) -> String {
    let mut sum = u64::MAX;
    for byte in bytes {
        sum ^= u64::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0x9a6c_9329_ac4b_c9b5 * (sum & 1));
        }
    }
    BASE64_STANDARD.encode((!sum).to_be_bytes())
}

#[test]
fn bytes_are_compared_with_what_their_store_says_of_them() {
    let bytes = noise(300_001, 7);
    let sum = crc64nvme(&bytes);
    let server = Server::plain();
    let load = |url: &str| {
        let mut load = dmafile(&["load", "-q", "--verify", "store", "--json", url]);
        load.of_s3(&server);
        load
    };
    let refused = |load: &mut Command, words: &str| {
        let output = load.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        let said = text(&output);
        assert!(said.contains(words), "{said}");
    };
    let path = "/bucket/x";
    let url = server.put(path, bytes.clone());
    refused(&mut load(&url), "keeps no digest of all its bytes");
    refused(&mut load("s3://bucket/x"), "keeps no digest of all");
    server.say(path, &format!("x-amz-checksum-crc64nvme: {sum}\r\n"));
    server.asked();
    let said = good(&mut load("s3://bucket/x"));
    assert!(
        said.contains("crc64nvme") && said.contains("\"matched\":true"),
        "{said}"
    );
    server.say(
        path,
        "x-goog-hash: md5=x\r\nx-goog-hash: crc32c=AAAAAA==\r\n",
    );
    refused(&mut load(&url), "crc32c is");
    refused(&mut load(&url), "and should be 00000000 (EBADMSG)");
    // The sum of the sums of parts is no digest of the bytes.
    server.say(
        path,
        &format!("x-amz-checksum-crc64nvme: {sum}\r\nx-amz-checksum-type: COMPOSITE\r\n"),
    );
    refused(&mut load(&url), "keeps no digest of all its bytes");
    // S3 only says it where it is asked to, which is signed as all of its own fields are.
    server.say(path, "");
    server.asked();
    refused(&mut load("s3://bucket/x"), "keeps no digest of all");
    let asked = server.asked();
    let head = asked.iter().find(|asked| asked.method == "HEAD").unwrap();
    assert_eq!(head.field("x-amz-checksum-mode"), Some("ENABLED"));
    assert!(head.field("if-match").is_some());
    let signed = head.field("authorization").unwrap();
    assert!(signed.contains("x-amz-checksum-mode"), "{signed}");
    server.decide(|asked| match asked.method.as_str() {
        "HEAD" => Fault::Status(403, String::new()),
        _ => Fault::None,
    });
    refused(
        &mut load("s3://bucket/x"),
        "does not say what its digest is (status 403)",
    );
    // Neither is one asked for that no store keeps.
    server.asked();
    let mut other = dmafile(&["load", "-q", "--verify", "xxh3", "s3://bucket/x"]);
    good(other.of_s3(&server));
    assert!(server.asked().iter().all(|asked| asked.method == "GET"));
    // A digest that nobody asked for is not fetched.
    good(dmafile(&["load", "-q", &url]).env("AWS_ENDPOINT_URL", server.url("")));
}

#[test]
fn files_of_the_hub_are_compared_with_their_tags() {
    let bytes = noise(500_001, 8);
    let right = bytes_digest(&bytes);
    let wrong = right.replace(['1', '2', '3'], "4");
    let (hub, elsewhere) = (Server::plain(), Server::plain());
    let info = r#"{"sha":"c0ffee","siblings":[{"rfilename":"w.bin"}]}"#;
    hub.put("/api/models/o/m/revision/main", info.into());
    let place = elsewhere.put_tagged("/w", bytes, &format!("\"{wrong}\""));
    for tag in [&right, &wrong] {
        let answer = format!("{place}\r\nETag: \"its own\"\r\nX-Linked-Etag: \"{tag}\"");
        hub.decide(move |asked| {
            if asked.target.contains("/resolve/") {
                return Fault::Redirect(answer.clone());
            }
            Fault::None
        });
        let url = "hf://o/m/w.bin";
        let mut load = dmafile(&["load", "-q", "--json", "--verify", "store", url]);
        let said = text(&load.env("HF_ENDPOINT", hub.url("")).output().unwrap());
        let word = if *tag == right {
            "\"matched\":true"
        } else {
            "(EBADMSG)"
        };
        assert!(said.contains(word), "{said}");
    }
}

/// All bytes that a COMMAND reads, by the sha256sum of each file and the name of the folder.
const SUMS: &str = "basename {}; cd {}; sha256sum *";

#[test]
fn a_model_of_the_hub_is_fetched_once_and_then_in_the_cache() {
    let (hub, store, files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().to_str().unwrap();
    let load = |more: &[&str]| {
        let mut load = dmafile(&["load", "-q", "hf://o/m", "--cache", cache]);
        load.args(more).args(["--", "sh", "-c", SUMS]).of_hub(&hub);
        load
    };
    let first = good(&mut load(&[]));
    assert!(first.starts_with("m\n"), "{first}");
    let repository = dir.path().join("models--o--m");
    let read = |path: &str| std::fs::read_to_string(repository.join(path));
    assert_eq!(read("refs/main").unwrap(), "c0ffee");
    for (name, bytes) in &files {
        let digest = bytes_digest(bytes);
        assert!(first.contains(&digest), "{name}: {first}");
        let link = std::fs::read_link(repository.join("snapshots/c0ffee").join(name)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(&digest));
        assert_eq!(
            std::fs::read(repository.join("blobs").join(&digest)).unwrap(),
            *bytes
        );
    }
    assert_eq!(
        std::fs::read_dir(repository.join("blobs")).unwrap().count(),
        files.len()
    );
    store.asked();
    hub.asked();
    assert_eq!(good(&mut load(&[])), first);
    assert_eq!(good(&mut load(&["--verify", "store"])), first);
    // The same for a COMMAND that reads all of it from one descriptor.
    let other = dir.path().join("other");
    let bytes = "echo $DMAFILE_BYTES; sha256sum < /proc/self/fd/$DMAFILE_FD";
    let mut said = Vec::new();
    for _ in 0..2 {
        store.asked();
        let mut one = dmafile(&["load", "-q", "hf://o/m", "--cache"]);
        one.arg(&other).args(["--", "sh", "-c", bytes]).of_hub(&hub);
        said.push((good(&mut one), store.asked().is_empty()));
    }
    assert_eq!(said[0].0, said[1].0);
    assert!(!said[0].1 && said[1].1, "{said:?}");
    hub.asked();
    // Only which commit it is was asked for.
    assert!(store.asked().is_empty());
    assert!(
        hub.asked()
            .iter()
            .all(|asked| asked.target.contains("/api/"))
    );
    let plan = good(dmafile(&["explain", "hf://o/m", "--cache", cache]).of_hub(&hub));
    assert!(
        !plan.contains("fetch") && plan.contains("snapshots/c0ffee"),
        "{plan}"
    );
    // A file that is not there is fetched, and a model is one only if all of it is there.
    std::fs::remove_file(repository.join("blobs").join(bytes_digest(&files[0].1))).unwrap();
    assert_eq!(good(&mut load(&[])), first);
    let before = hub.asked().len();
    assert_eq!(good(&mut load(&["--offline"])), first);
    assert!(before > 0 && hub.asked().is_empty());
    let mut other = dmafile(&["load", "-q", "hf://o/other", "--cache", cache, "--offline"]);
    let said = text(&other.output().unwrap());
    assert!(
        said.ends_with(
            "hf://o/other: it is not in the cache (ENOENT); load it once without --offline\n"
        ),
        "{said}"
    );
}

#[test]
fn an_object_in_the_cache_is_the_version_that_the_store_has() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let load = |more: &[&str]| {
        let cache = dir.path().to_str().unwrap();
        let mut load = dmafile(&["load", "-q", "s3://bucket/a b/x.bin", "--cache", cache]);
        load.args(more).args(["--", "sh", "-c", SUM]).of_s3(&server);
        load
    };
    let blobs = || {
        let mut all = Vec::new();
        for repository in std::fs::read_dir(dir.path()).unwrap().flatten() {
            let blobs = std::fs::read_dir(repository.path().join("blobs"));
            all.extend(
                blobs
                    .into_iter()
                    .flatten()
                    .flatten()
                    .map(|blob| blob.path()),
            );
        }
        all
    };
    let path = "/bucket/a%20b/x.bin";
    // More than the first request gets.
    for number in 0..2 {
        let bytes = noise(700_001, 10 + number);
        server.put_tagged(path, bytes.clone(), &format!("\"{number}\""));
        for time in 0..3 {
            server.asked();
            assert_eq!(good(&mut load(&[])).trim(), bytes_digest(&bytes));
            // One request says which version the store has.
            assert_eq!(server.asked().len() == 1, time > 0);
        }
        assert_eq!(blobs().len() as u64, number + 1);
    }
    // What was not used for the longest time is removed.
    server.put_tagged(path, noise(700_001, 12), "\"2\"");
    // What was used just now is not, because somebody may be about to open it.
    good(&mut load(&["--cache-limit", "1500000"]));
    assert_eq!(blobs().len(), 3);
    for blob in blobs() {
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        let times = std::fs::FileTimes::new()
            .set_accessed(then)
            .set_modified(then);
        std::fs::File::open(blob).unwrap().set_times(times).unwrap();
    }
    server.put_tagged(path, noise(700_001, 13), "\"3\"");
    good(&mut load(&["--cache-limit", "1500000"]));
    assert_eq!(blobs().len(), 2);
}

#[test]
fn processes_that_need_the_same_at_the_same_time_fetch_it_once() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(20 << 20, 30);
    let url = server.put("/x.bin", bytes.clone());
    let load = || {
        let mut load = dmafile(&["load", "-q", &url, "--cache", dir.path().to_str().unwrap()]);
        load.args(["--", "sh", "-c", SUM]);
        load.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let all = [load(), load(), load()];
    for one in all {
        let output = one.wait_with_output().unwrap();
        assert_eq!(text(&output).trim(), bytes_digest(&bytes));
    }
    let fetched: u64 = server
        .asked()
        .iter()
        .filter_map(|asked| asked.range())
        .filter(|range| range.0 > 0)
        .map(|(first, last)| last.min((20 << 20) - 1) - first + 1)
        .sum();
    assert_eq!(fetched, (20 << 20) - (256 << 10));
}

#[test]
fn what_a_server_says_leads_out_of_no_cache() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    std::fs::write(dir.path().join("x.bin"), b"another").unwrap();
    for (commit, name) in [("../../..", "x.bin"), ("c0ffee", "../../../../x.bin")] {
        let info = format!(r#"{{"sha":"{commit}","siblings":[{{"rfilename":"{name}"}}]}}"#);
        server.put("/api/models/o/m/revision/main", info.into_bytes());
        // Whatever the file is.
        server.decide(|asked| {
            if asked.target.contains("/resolve/") {
                return Fault::Status(404, String::new());
            }
            Fault::None
        });
        for file in [name, ""] {
            let url = format!("hf://o/m/{file}");
            let mut load = dmafile(&["load", "-q", &url, "--cache", cache.to_str().unwrap()]);
            load.args(["--", "sh", "-c", "cat /proc/self/fd/$DMAFILE_FD"]);
            let output = load.env("HF_ENDPOINT", server.url("")).output().unwrap();
            assert_eq!(
                output.status.code(),
                Some(1),
                "{commit} {url}: {}",
                text(&output)
            );
        }
    }
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2);
}

/// `dmafile save SRC s3://bucket/KEY` with these options.
fn save(server: &Server, args: &[&str]) -> Command {
    let mut save = dmafile(&["save", "-q", "--json"]);
    save.args(args).of_s3(server);
    save
}

#[test]
fn files_and_pipes_are_saved_as_objects() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = path.to_str().unwrap();
    for size in [
        0,
        1,
        (8 << 20) - 1,
        8 << 20,
        (8 << 20) + 1,
        (25 << 20) + 777,
    ] {
        let bytes = noise(size, 40);
        std::fs::write(&path, &bytes).unwrap();
        for source in [file, "-"] {
            let mut one = save(
                &server,
                &[source, "s3://bucket/a b/x+y", "--verify", "sha256"],
            );
            let said = good(one.stdin(std::fs::File::open(&path).unwrap()));
            assert!(said.contains(&bytes_digest(&bytes)), "{said}");
            let saved = server.object("/bucket/a%20b/x%2By").unwrap();
            assert!(saved == bytes, "{size} bytes of {source}");
            // The store can compare each part.
            let asked = server.asked();
            let parts = asked.iter().filter(|asked| asked.method == "PUT");
            let sums: Vec<_> = parts
                .map(|part| part.field("x-amz-checksum-crc64nvme").unwrap().to_string())
                .collect();
            assert_eq!(sums.len(), size.div_ceil(8 << 20).max(1), "{size} {source}");
            if sums.len() == 1 {
                assert_eq!(sums[0], crc64nvme(&bytes));
            }
        }
    }
    let part = good(&mut save(
        &server,
        &[file, "s3://bucket/part", "--length", "9000000"],
    ));
    assert!(
        part.contains("\"bytes\":9000000,") && part.contains("\"parts\":2"),
        "{part}"
    );
    assert!(server.object("/bucket/part").unwrap() == noise((25 << 20) + 777, 40)[..9_000_000]);
    assert!(server.uploads().is_empty());
}

#[test]
fn a_save_that_fails_leaves_the_old_object_and_no_parts() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (file, url) = (path.to_str().unwrap(), "s3://bucket/x");
    let bytes = noise((20 << 20) + 5, 50);
    std::fs::write(&path, &bytes).unwrap();
    server.put("/bucket/x", b"old".to_vec());
    let fails = |args: &[&str], words: &str| {
        let output = save(&server, &[&[file, url], args].concat())
            .output()
            .unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(words) && said.trim_end().lines().count() == 1,
            "{said}"
        );
        assert!(!said.contains("hunter2"));
        assert_eq!(server.object("/bucket/x").unwrap(), b"old");
        assert!(server.uploads().is_empty(), "{words}");
    };
    fails(&["--verify", "crc32c=00000000"], "wrong digest");
    fails(
        &["--length", "7", "--verify", "crc32c=00000000"],
        "wrong digest",
    );
    fails(&["--if-none-match"], "(EEXIST)");
    fails(&["--length", "7", "--if-none-match"], "(EEXIST)");
    fails(&["--if-match", "\"other\""], "(ESTALE)");
    server.decide(|asked| {
        if asked.target.contains("partNumber=2") {
            return Fault::Status(403, String::new());
        }
        Fault::None
    });
    fails(&[], "(EACCES)");
    server.decide(|asked| {
        if asked.target.contains("partNumber=2") {
            return Fault::Status(400, String::new());
        }
        Fault::None
    });
    fails(&[], "400 Bad Request");
    // What may pass is sent again.
    server.decide(|asked| match asked.number {
        3 | 5 => Fault::Status(503, String::new()),
        4 | 6 => Fault::Reset(0),
        _ => Fault::None,
    });
    good(&mut save(&server, &[file, url]));
    assert!(server.object("/bucket/x").unwrap() == bytes);
    server.decide(|_| Fault::None);
    let tag = format!("\"{}\"", bytes_digest(&bytes));
    for (condition, value) in [("--if-match", Some(&*tag)), ("--if-none-match", None)] {
        let to = match value {
            Some(_) => url,
            None => "s3://bucket/new",
        };
        let args: Vec<_> = [file, to, condition].into_iter().chain(value).collect();
        good(&mut save(&server, &args));
    }
    assert!(server.object("/bucket/new").unwrap() == bytes);
}

#[test]
fn without_a_signature_nobody_is_asked_for_credentials() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let save = |args: &[&str]| {
        let mut save = dmafile(&["save", "-q", path.to_str().unwrap(), "gs://bucket/x"]);
        save.args(args)
            .env("GOOGLE_BASE_URL", server.url(""))
            .env("GOOGLE_SKIP_SIGNATURE", "true");
        save
    };
    for size in [1000, 9 << 20] {
        let bytes = noise(size, 80);
        std::fs::write(&path, &bytes).unwrap();
        good(&mut save(&[]));
        assert!(server.object("/bucket/x").unwrap() == bytes);
        let said = text(&save(&["--if-match", "x"]).output().unwrap());
        assert!(said.contains("(EOPNOTSUPP)"), "{said}");
    }
}

#[test]
fn what_a_crashed_save_left_behind_is_removed_by_the_next_one() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, noise(9 << 20, 60)).unwrap();
    let (old, new) = ("2026-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z");
    for (name, path, at) in [
        ("old", "/bucket/a/x", old),
        ("new", "/bucket/a/x", new),
        ("longer", "/bucket/a/xy", old),
    ] {
        server
            .uploads()
            .insert(name.to_string(), Upload::begun(path, at));
    }
    good(&mut save(
        &server,
        &[path.to_str().unwrap(), "s3://bucket/a/x"],
    ));
    let left: Vec<_> = server.uploads().keys().cloned().collect();
    assert_eq!(left, ["longer", "new"]);
}

#[test]
fn an_interrupted_save_to_a_store_ends() {
    // After the second one, no connection is left that the parts could be removed over.
    let faults = [
        || Fault::Status(503, "Retry-After: 1\r\n".to_string()),
        || Fault::Reset(0),
    ];
    for fault in faults {
        let server = Server::plain();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, noise(20 << 20, 70)).unwrap();
        server.decide(move |asked| {
            if asked.target.contains("partNumber=") {
                return fault();
            }
            Fault::None
        });
        let mut one = save(&server, &[path.to_str().unwrap(), "s3://bucket/x"])
            .spawn()
            .unwrap();
        while !server
            .asked()
            .iter()
            .any(|asked| asked.target.contains("partNumber="))
        {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let pid = rustix::process::Pid::from_child(&one);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(one.wait().unwrap().code(), Some(130));
        assert!(server.uploads().is_empty());
    }
}

#[test]
fn the_mark_of_a_folder_is_no_file_in_it() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    models::safetensors(&path, &models::tensors("a", 1, 1000));
    let bytes = std::fs::read(&path).unwrap();
    server.put("/bucket/m/x.safetensors", bytes.clone());
    let item = |key: &str, size: usize| {
        format!(
            "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>x</ETag>\
             <LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
        )
    };
    let list = |items: &str| format!("<ListBucketResult>{items}</ListBucketResult>").into_bytes();
    let both = item("m/", 0) + &item("m/x.safetensors", bytes.len());
    server.put("/bucket", list(&both));
    let s3 = |command: &mut Command| command.of_s3(&server).output().unwrap();
    let words = ["load", "-q", "s3://bucket/m/", "--", "sh", "-c", "ls {}"];
    assert_eq!(text(&s3(&mut dmafile(&words))), "x.safetensors\n");
    server.put("/bucket", list(""));
    let said = text(&s3(&mut dmafile(&["load", "s3://bucket/m/"])));
    assert!(
        said.contains("s3://bucket/m/: there are no objects in this folder (ENOENT)"),
        "{said}"
    );
    for (status, words) in [
        (403, "does not allow to list it (status 403) (EACCES)\n"),
        (404, "there is no such bucket (status 404) (ENOENT)\n"),
    ] {
        server.decide(move |_| Fault::Status(status, String::new()));
        let said = text(&s3(&mut dmafile(&["load", "s3://bucket/m/"])));
        assert!(said.ends_with(words), "{said}");
    }
    // A slash at the beginning would be lost.
    let said = text(&s3(&mut dmafile(&["load", "s3://bucket//m/x.safetensors"])));
    assert!(said.contains("it begins with a slash"), "{said}");
}

#[test]
fn a_hold_keeps_what_it_fetches_and_is_served_from_the_cache() {
    let (hub, store, files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let socket = socket.to_str().unwrap();
    let cache = dir.path().join("cache");
    let mut fetched = Vec::new();
    for _ in 0..2 {
        store.asked();
        let mut hold = dmafile(&[
            "hold",
            "hf://o/m/",
            "--name",
            "m",
            "--socket",
            socket,
            "--cache",
        ]);
        hold.arg(&cache).of_hub(&hub);
        let mut holder = hold.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let out = holder.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        let mut take = dmafile(&["take", "m", "--socket", socket, "--", "sh", "-c"]);
        let said = good(take.arg("cd {}; sha256sum * | cut -c1-64,66-"));
        for (name, bytes) in files.iter().filter(|file| file.0.ends_with(".safetensors")) {
            let expected = format!("{} {name}", bytes_digest(bytes));
            assert!(said.contains(&expected), "{name}: {said}");
        }
        fetched.push(store.asked().len());
        // It is written beside the holder.
        let mut offline = dmafile(&["show", "hf://o/m", "--offline", "--cache"]);
        let begin = std::time::Instant::now();
        while !offline.arg(&cache).output().unwrap().status.success() {
            assert!(begin.elapsed().as_secs() < 120, "it is not written");
            std::thread::sleep(std::time::Duration::from_millis(50));
            offline = dmafile(&["show", "hf://o/m", "--offline", "--cache"]);
        }
        good(&mut dmafile(&["release", "m", "--socket", socket]));
        assert!(holder.wait().unwrap().success());
    }
    assert!(fetched[0] > 0 && fetched[1] == 0, "{fetched:?}");
}

/// `SEED=N SCHEDULES=M` for others.
#[test]
fn random_faults_of_a_store_make_no_wrong_object() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let seed = number("SEED").unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("SEED={seed}");
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (mut saved, mut failed) = (0, 0);
    for schedule in 0..number("SCHEDULES").unwrap_or(12) {
        // Three parts, or one request.
        let size = if schedule % 3 == 0 {
            1000
        } else {
            (17 << 20) + 3
        };
        let bytes = noise(size, seed + schedule);
        std::fs::write(&path, &bytes).unwrap();
        let old = noise(100, schedule);
        server.put("/bucket/x", old.clone());
        let nameless = Arc::new(AtomicBool::new(false));
        let begun = Arc::clone(&nameless);
        server.decide(move |asked| {
            // The first numbers of a seed resemble each other.
            let dice = noise(128, (seed << 20) ^ (schedule << 10) ^ asked.number as u64);
            // What removes the parts of a save that failed is not tried again and again.
            if asked.method == "DELETE" || dice[64] > 80 {
                return Fault::None;
            }
            if asked.target.contains("?uploads") {
                begun.fetch_or(dice[100] % 8 == 6, Ordering::Relaxed);
            }
            match dice[100] % 8 {
                0..3 => Fault::Reset(0),
                3..5 => Fault::Status(503, String::new()),
                5 => Fault::Status(500, String::new()),
                6 => Fault::Lost,
                _ => Fault::Status(403, String::new()),
            }
        });
        let output = save(&server, &[path.to_str().unwrap(), "s3://bucket/x"])
            .output()
            .unwrap();
        let said = text(&output);
        let object = server.object("/bucket/x").unwrap();
        if output.status.success() {
            assert!(object == bytes, "{schedule}: {said}");
            saved += 1;
        } else {
            let unclear = said.contains("may have the new object nevertheless");
            assert!(
                object == old || (unclear && object == bytes) || size == 1000,
                "{schedule}: {said}"
            );
            assert_eq!(said.trim_end().lines().count(), 1, "{said}");
            failed += 1;
        }
        assert!(object == old || object == bytes, "{schedule}: a mixture");
        // An upload whose name did not arrive is removed a day later.
        let left = std::mem::take(&mut *server.uploads());
        assert!(
            left.is_empty() || nameless.load(Ordering::Relaxed),
            "{schedule}: parts are left: {said}"
        );
    }
    eprintln!("{saved} saved, {failed} failed");
}

/// A listing of a bucket `bucket`, with these objects and their tags.
fn listing(objects: &[(&str, usize, Option<&str>)]) -> Vec<u8> {
    let items = objects.iter().map(|(key, size, tag)| {
        let tag = tag
            .map(|tag| format!("<ETag>{tag}</ETag>"))
            .unwrap_or_default();
        format!(
            "<Contents><Key>{key}</Key><Size>{size}</Size>{tag}\
             <LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
        )
    });
    format!(
        "<ListBucketResult>{}</ListBucketResult>",
        items.collect::<String>()
    )
    .into_bytes()
}

#[test]
fn a_folder_is_cached_only_if_its_store_tells_versions() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    for tags in [false, true] {
        for seed in 0..2 {
            models::safetensors(&path, &models::tensors(&format!("t{seed}"), 1, 5000));
            let bytes = std::fs::read(&path).unwrap();
            let tag = format!("\"{}\"", bytes_digest(&bytes));
            server.put_tagged("/bucket/m/m.safetensors", bytes.clone(), &tag);
            let told = tags.then_some(&*tag);
            server.put(
                "/bucket",
                listing(&[("m/m.safetensors", bytes.len(), told)]),
            );
            for time in 0..2 {
                server.asked();
                let mut load = dmafile(&["load", "-q", "s3://bucket/m/", "--cache"]);
                load.arg(dir.path().join("cache"))
                    .args(["--", "sh", "-c", "sha256sum < {}/m.safetensors"])
                    .of_s3(&server);
                let said = good(&mut load);
                assert!(said.starts_with(&bytes_digest(&bytes)), "{said}");
                let asked = server.asked();
                let fetched = asked.iter().any(|asked| asked.range().is_some());
                assert_eq!(fetched, time == 0 || !tags, "{tags} {seed} {time}");
            }
        }
    }
}

#[test]
fn a_model_of_which_only_a_part_is_cached_is_none_offline() {
    let (hub, _store, files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let load = |url: &str, more: &[&str]| {
        let mut load = dmafile(&["load", "-q", url, "--cache", dir.path().to_str().unwrap()]);
        load.args(more).of_hub(&hub);
        load
    };
    let one = files
        .iter()
        .find(|file| file.0.ends_with(".safetensors"))
        .unwrap();
    let url = format!("hf://o/m/{}", one.0);
    good(&mut load(&url, &[]));
    good(&mut load(&url, &["--offline"]));
    let said = text(&load("hf://o/m", &["--offline"]).output().unwrap());
    assert!(
        said.contains("it is not known whether all of it is in the cache"),
        "{said}"
    );
    good(&mut load("hf://o/m", &[]));
    good(&mut load("hf://o/m", &["--offline"]));
    // What is missing later, too.
    let blob = dir
        .path()
        .join("models--o--m/blobs")
        .join(bytes_digest(&one.1));
    std::fs::remove_file(blob).unwrap();
    let said = text(&load("hf://o/m", &["--offline"]).output().unwrap());
    assert!(said.contains("(ENOENT)"), "{said}");
}

#[test]
fn a_cache_touches_nothing_outside_of_it() {
    let server = Server::plain();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let victim = |name: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, b"precious").unwrap();
        path
    };
    let load = |url: &str| {
        let mut load = dmafile(&["load", "-q", url, "--cache-limit", "1", "--cache"]);
        load.arg(&cache).env("HF_ENDPOINT", server.url(""));
        load.output().unwrap()
    };
    let url = server.put("/x.bin", noise(300_000, 80));
    assert!(load(&url).status.success());
    let entries = std::fs::read_dir(&cache).unwrap().flatten();
    let mut entries = entries.map(|entry| entry.path());
    let own = entries.find(|path| path.join("refs").exists()).unwrap();
    let only = |path: &Path| {
        std::fs::read_dir(path)
            .unwrap()
            .flatten()
            .next()
            .unwrap()
            .path()
    };
    // Names that are links.
    let reference = only(&own.join("refs"));
    std::fs::remove_file(&reference).unwrap();
    std::os::unix::fs::symlink(victim("a"), &reference).unwrap();
    let lock = only(&cache.join(".locks")).join("dmafile.lock");
    // A repository that is a link, and one whose blobs are.
    let docs = dir.path().join("docs");
    std::fs::create_dir_all(docs.join("blobs")).unwrap();
    let name = "0".repeat(64);
    let old = std::time::SystemTime::UNIX_EPOCH;
    for path in [docs.join(&name), docs.join("blobs").join(&name)] {
        std::fs::write(&path, b"precious").unwrap();
        let times = std::fs::FileTimes::new()
            .set_accessed(old)
            .set_modified(old);
        std::fs::File::open(&path)
            .unwrap()
            .set_times(times)
            .unwrap();
    }
    std::fs::create_dir(cache.join("evil")).unwrap();
    std::os::unix::fs::symlink(&docs, cache.join("evil/blobs")).unwrap();
    std::os::unix::fs::symlink(&docs, cache.join("worse")).unwrap();
    server.put_tagged("/x.bin", noise(300_000, 81), "\"new\"");
    assert!(load(&url).status.success());
    assert!(!std::fs::symlink_metadata(&reference).unwrap().is_symlink());
    std::fs::remove_file(&lock).unwrap();
    std::os::unix::fs::symlink(victim("b"), &lock).unwrap();
    server.put_tagged("/x.bin", noise(300_000, 82), "\"newer\"");
    let said = load(&url);
    assert!(said.status.success(), "it is loaded, and not kept");
    assert!(
        text(&said).contains("cannot lock the cache"),
        "{}",
        text(&said)
    );
    // A revision that leads elsewhere.
    let info = r#"{"sha":"c0ffee","siblings":[{"rfilename":"x.bin"}]}"#;
    server.put(
        "/api/models/o/m/revision/..%2F..%2F..%2Foutside",
        info.into(),
    );
    server.put("/o/m/resolve/c0ffee/x.bin", noise(1000, 83));
    load("hf://o/m@..%2F..%2F..%2Foutside/x.bin");
    for path in ["a", "b"].map(|name| dir.path().join(name)) {
        assert_eq!(
            std::fs::read(&path).unwrap(),
            b"precious",
            "{}",
            path.display()
        );
    }
    assert_eq!(std::fs::read(docs.join(&name)).unwrap(), b"precious");
    assert_eq!(
        std::fs::read(docs.join("blobs").join(&name)).unwrap(),
        b"precious"
    );
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
    names.retain(|entry| {
        !["a", "b", "docs", "cache"]
            .iter()
            .any(|own| entry.file_name() == *own)
    });
    assert!(names.is_empty(), "{names:?}");
}

#[test]
fn files_of_one_repository_are_held_with_a_cache() {
    let (hub, _store, files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let socket = socket.to_str().unwrap();
    let weights = files.iter().filter(|file| file.0.ends_with(".safetensors"));
    let urls: Vec<_> = weights.map(|file| format!("hf://o/m/{}", file.0)).collect();
    let mut hold = dmafile(&["hold", "--name", "two", "--socket", socket, "--cache"]);
    hold.arg(dir.path().join("cache"))
        .args(&urls)
        .of_hub(&hub)
        .stdout(std::process::Stdio::piped());
    let mut holder = hold.spawn().unwrap();
    let mut line = String::new();
    let out = holder.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    assert!(line.contains("\"files\":["), "{line}");
    good(&mut dmafile(&["release", "two", "--socket", socket]));
    assert!(holder.wait().unwrap().success());
}

#[test]
fn command_has_each_descriptor_once() {
    let (hub, _store, _files) = hub();
    let dir = tempfile::tempdir().unwrap();
    let says = |cache: bool, words: &str| {
        let mut load = dmafile(&["load", "-q", "hf://o/m"]);
        if cache {
            load.args(["--cache", dir.path().to_str().unwrap()]);
        }
        load.args(["--", "sh", "-c", words]).of_hub(&hub);
        good(&mut load)
    };
    let twice = "for fd in /proc/self/fd/*; do case $(readlink $fd) in /memfd*) stat -Lc %i $fd;; \
                 esac; done | sort | uniq -d";
    for words in [format!("ls {{}} > /dev/null; {twice}"), twice.to_string()] {
        for cache in [false, true] {
            assert_eq!(says(cache, &words), "", "{cache} {words}");
        }
        std::fs::remove_dir_all(dir.path().join("models--o--m")).unwrap();
    }
}

#[test]
fn doctor_says_what_a_store_keeps_and_what_this_machine_lacks() {
    let server = Server::plain();
    let bytes = noise(5000, 9);
    server.put("/b/x.bin", bytes);
    let said = good(dmafile(&["doctor", "s3://b/x.bin"]).of_s3(&server));
    let line = |name: &str| said.lines().find(|line| line.contains(name)).unwrap();
    assert!(
        line(" store ").contains("s3://b/x.bin: 5000 bytes in "),
        "{said}"
    );
    assert!(
        line("receive window").contains("MiB per round trip"),
        "{said}"
    );
    assert!(
        !said.contains("hunter2") && !said.contains("file system"),
        "{said}"
    );
    let said = good(dmafile(&["doctor", "s3://b/none"]).of_s3(&server));
    assert!(said.contains("(ENOENT)"), "{said}");
    // Without certificates there is no https.
    let empty = tempfile::NamedTempFile::new().unwrap();
    let mut doctor = dmafile(&["doctor"]);
    doctor
        .env("SSL_CERT_FILE", empty.path())
        .env_remove("SSL_CERT_DIR");
    let said = good(&mut doctor);
    assert!(said.contains("only http: "), "{said}");
}
