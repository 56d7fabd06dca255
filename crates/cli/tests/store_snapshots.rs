//! Snapshots in a folder of a store: whatever happens to a saver, the folder has a whole one.
#![cfg(feature = "remote")]

use dmafile_testkit::server::{Asked, Fault, Server, Upload};
use dmafile_testkit::{bytes_digest, noise};
use std::ops::Range;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const URL: &str = "s3://bucket/a/task/";
const FOLDER: &str = "/bucket/a/task/";
const MANIFEST: &str = "/bucket/a/task/dmafile-snapshot.json";
/// More than a part, less than one, and nothing.
const SIZES: [usize; 3] = [(8 << 20) + 77, 1000, 0];

/// Sources that differ from all others, and the digests of their bytes.
struct Sources {
    dir: tempfile::TempDir,
    digests: Vec<String>,
}

impl Sources {
    fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |(number, size): (usize, &usize)| {
            let bytes = noise(*size, 10 * seed + number as u64);
            std::fs::write(dir.path().join(number.to_string()), &bytes).unwrap();
            bytes_digest(&bytes)
        };
        let digests = SIZES.iter().enumerate().map(write).collect();
        Self { dir, digests }
    }

    fn save(&self, endpoint: &str) -> Command {
        let mut save = dmafile(endpoint, &["save", "-q"]);
        for number in 0..SIZES.len() {
            let path = self.dir.path().join(number.to_string());
            save.arg(format!("{}=s{number}", path.display()));
        }
        save.arg(URL);
        save
    }

    /// True if these are loaded.
    fn are_loaded(&self, server: &Server) -> bool {
        let said = good(&mut load(&server.url("")));
        said.lines().eq(&self.digests)
    }
}

fn dmafile(endpoint: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmafile"));
    command
        .args(args)
        .env_remove("HTTPS_PROXY")
        .env_remove("HTTP_PROXY")
        .env("AWS_ENDPOINT_URL", endpoint)
        .env("AWS_ACCESS_KEY_ID", "me")
        .env("AWS_SECRET_ACCESS_KEY", "hunter2");
    command
}

/// Prints the digest of each source.
fn load(endpoint: &str) -> Command {
    // The memory may be larger: whole huge pages.
    let sums = "i=0; for fd in $(echo $DMAFILE_FD | tr , ' '); do i=$((i + 1)); \
        head -c $(echo $DMAFILE_BYTES | cut -d, -f$i) < /proc/self/fd/$fd | sha256sum | cut -d' ' -f1; done";
    dmafile(endpoint, &["load", "-q", URL, "--", "sh", "-c", sums])
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8(both).unwrap();
    assert!(!text.contains("hunter2"));
    text
}

fn good(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// It fails with these words in one line.
fn fails(command: &mut Command, words: &str) {
    let output = command.output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains(words) && said.lines().count() == 1,
        "{words}: {said}"
    );
}

/// The folder has nothing but a snapshot of this generation.
fn holds_only(server: &Server, generation: u64) {
    holds_with_claims(server, generation, 0..0);
}

/// It has these claims of saves that have failed, too: nobody else gets their names.
fn holds_with_claims(server: &Server, generation: u64, claims: Range<u64>) {
    let sources = 0..SIZES.len();
    let mut names: Vec<_> = sources
        .map(|number| format!("{FOLDER}s{number}.{generation}.dmafile"))
        .collect();
    names.insert(0, MANIFEST.to_string());
    let claims = claims.map(|number| format!("{FOLDER}.dmafile-snapshot.{number}.lock"));
    names.splice(0..0, claims);
    assert_eq!(server.paths(FOLDER), names);
    assert!(server.uploads().is_empty());
}

/// True for a request that saves the manifest.
fn is_publication(asked: &Asked) -> bool {
    asked.method == "PUT" && asked.target.contains("dmafile-snapshot.json")
}

#[test]
fn a_snapshot_in_a_store_is_loaded_byte_for_byte() {
    let server = Server::plain();
    server.put("/bucket/a/task/notes", b"mine".to_vec());
    server.put("/bucket/a/task/deeper/x.9.dmafile", b"not ours".to_vec());
    let endpoint = server.url("");
    for generation in 1..4 {
        let sources = Sources::new(generation);
        let report = good(
            sources
                .save(&endpoint)
                .args(["--json", "--verify", "sha256"]),
        );
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["generation"], generation);
        assert_eq!(report["to"], "s3://bucket/a/task");
        assert_eq!(report["bytes"], SIZES.iter().sum::<usize>());
        let digest = format!("sha256 {}", sources.digests[1]);
        assert_eq!(report["sources"][1]["digest"], *digest);
        assert!(sources.are_loaded(&server));
        let left = server.paths(FOLDER);
        assert_eq!(left.len(), 3 + SIZES.len(), "{left:?}");
        // The report names objects that exist.
        let manifest = server.object(MANIFEST).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        for (source, digest) in manifest["sources"]
            .as_array()
            .unwrap()
            .iter()
            .zip(&sources.digests)
        {
            let path = format!("{FOLDER}{}", source["file"].as_str().unwrap());
            assert_eq!(bytes_digest(&server.object(&path).unwrap()), *digest);
            assert_eq!(source["digest"], **digest);
        }
    }
    let paths = [
        "load",
        "-q",
        URL,
        "--",
        "sh",
        "-c",
        "cd {}; sha256sum *; pwd",
    ];
    let said = good(&mut dmafile(&endpoint, &paths));
    assert!(said.contains("s2\n") && said.ends_with("/task\n"), "{said}");
    // It is not kept there.
    let cache = tempfile::tempdir().unwrap();
    let kept = cache.path().join("cache");
    good(dmafile(&endpoint, &["load", "-q", URL, "--cache"]).arg(&kept));
    let plan = good(&mut dmafile(&endpoint, &["explain", URL]));
    assert!(
        plan.contains("source s1") && plan.contains("an empty memfd"),
        "{plan}"
    );
}

#[test]
fn googles_store_is_asked_for_generations() {
    let server = Server::plain();
    server.count_generations();
    let (old, other, new) = (Sources::new(1), Sources::new(2), Sources::new(3));
    let at = server.url("");
    let gs = move |mut command: Command| {
        let args: Vec<_> = command.get_args().map(|arg| arg.to_os_string()).collect();
        command = dmafile(&at, &[]);
        let url = |arg: std::ffi::OsString| {
            if arg == URL {
                return URL.replace("s3:", "gs:").into();
            }
            arg
        };
        command.args(args.into_iter().map(url));
        command
            .env("GOOGLE_BASE_URL", &at)
            .env("GOOGLE_SKIP_SIGNATURE", "true");
        command
    };
    let loaded = || good(&mut gs(load("")));
    for sources in [&old, &other] {
        good(&mut gs(sources.save("")));
        assert!(loaded().lines().eq(&sources.digests));
    }
    holds_only(&server, 2);
    let (once, saver) = (AtomicUsize::new(0), gs.clone());
    server.decide(move |asked| {
        if is_publication(asked) && once.fetch_add(1, Ordering::Relaxed) == 0 {
            good(&mut saver(other.save("")));
        }
        Fault::None
    });
    server.asked();
    fails(&mut gs(new.save("")), "saved there meanwhile (EBUSY)");
    holds_only(&server, 4);
    // Google's store would let others keep a public one for an hour.
    for asked in server.asked().iter().filter(|asked| is_publication(asked)) {
        assert_eq!(asked.field("cache-control"), Some("no-store"));
    }
}

#[test]
fn options_that_mean_nothing_there_are_refused() {
    let server = Server::plain();
    let (sources, endpoint) = (Sources::new(1), server.url(""));
    for option in [
        &["--offset", "0"][..],
        &["--no-sync"],
        &["--io", "direct"],
        &["--explain"],
        &["--length", "7"],
        &["--if-none-match"],
        &["--if-match", "x"],
    ] {
        let output = sources.save(&endpoint).args(option).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{option:?}");
    }
    let one = format!("{}=a", sources.dir.path().join("0").display());
    let object = dmafile(
        &endpoint,
        &["save", &one, &one.replace("=a", "=b"), "s3://bucket/x"],
    )
    .output()
    .unwrap();
    assert!(text(&object).contains("end it with a slash"));
    assert!(server.asked().is_empty());
}

/// When another saver saves a snapshot while one runs; whether the first one replaces that nevertheless, because it had
/// not begun; and the generation that is there in the end, after an old one.
const MOMENTS: [(&str, &str, bool, u64); 4] = [
    ("PUT", ".lock", true, 2),
    ("GET", "dmafile-snapshot.json", true, 3),
    ("P", "s0.", false, 2),
    ("PUT", "dmafile-snapshot.json", false, 2),
];

#[test]
fn of_two_savers_one_wins() {
    for (method, word, wins, generation) in MOMENTS {
        for olds in 0..2 {
            let server = Server::plain();
            let endpoint = server.url("");
            let [old, own, other] = [1, 2, 3].map(|seed| Arc::new(Sources::new(seed)));
            if olds > 0 {
                good(&mut old.save(&endpoint));
            }
            let (once, saver, at) = (AtomicUsize::new(0), Arc::clone(&other), endpoint.clone());
            server.decide(move |asked| {
                let is_now = asked.method.starts_with(method) && asked.target.contains(word);
                if is_now && once.fetch_add(1, Ordering::Relaxed) == 0 {
                    good(&mut saver.save(&at));
                }
                Fault::None
            });
            let winner = if wins {
                good(&mut own.save(&endpoint));
                own
            } else {
                fails(&mut own.save(&endpoint), "saved there meanwhile (EBUSY)");
                other
            };
            assert!(winner.are_loaded(&server), "{word} {olds}");
            holds_only(&server, olds + generation);
        }
    }
}

#[test]
fn what_was_saved_after_the_folder_was_listed_is_removed_too() {
    let server = Server::plain();
    let endpoint = server.url("");
    let (own, other) = (Sources::new(1), Sources::new(2));
    let (once, at) = (AtomicUsize::new(0), endpoint.clone());
    server.decide(move |asked| {
        let is_claim = asked.method == "PUT" && asked.target.contains(".lock");
        if is_claim && once.fetch_add(1, Ordering::Relaxed) == 0 {
            good(&mut other.save(&at));
            // It has not ended yet.
            let claim = format!("{URL}.dmafile-snapshot.1.lock");
            good(&mut dmafile(&at, &["save", "-q", "/dev/null", &claim]));
        }
        Fault::None
    });
    good(&mut own.save(&endpoint));
    assert!(own.are_loaded(&server));
    holds_only(&server, 2);
}

#[test]
fn savers_at_the_same_time_leave_one_whole_snapshot() {
    let server = Server::plain();
    let endpoint = server.url("");
    let all: Vec<_> = (1..5).map(Sources::new).collect();
    for _ in 0..5 {
        let savers: Vec<_> = all
            .iter()
            .map(|sources| {
                sources
                    .save(&endpoint)
                    .stderr(std::process::Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let outputs: Vec<_> = savers
            .into_iter()
            .map(|saver| saver.wait_with_output().unwrap())
            .collect();
        assert!(outputs.iter().any(|output| output.status.success()));
        for output in outputs.iter().filter(|output| !output.status.success()) {
            assert!(text(output).contains("(EBUSY)"), "{}", text(output));
        }
        let winners = all.iter().zip(&outputs);
        let mut winners = winners.filter(|winner| winner.1.status.success());
        assert!(winners.any(|winner| winner.0.are_loaded(&server)));
        let mut paths = server.paths(FOLDER);
        // Those of the savers that have failed.
        paths.retain(|path| !path.ends_with(".lock"));
        assert_eq!(paths.len(), SIZES.len() + 1, "{paths:?}");
    }
}

#[test]
fn a_save_that_fails_leaves_the_old_snapshot() {
    let server = Server::plain();
    let (old, new, endpoint) = (Sources::new(1), Sources::new(2), server.url(""));
    good(&mut old.save(&endpoint));
    let words = [".lock", "s0.", "s1.", "dmafile-snapshot.json"];
    for (next, word) in (2..).zip(words) {
        server.decide(move |asked| match asked.method.as_str() {
            "PUT" if asked.target.contains(word) => Fault::Status(403, String::new()),
            _ => Fault::None,
        });
        fails(&mut new.save(&endpoint), "(EACCES)");
        server.decide(|_| Fault::None);
        holds_with_claims(&server, 1, 2..next);
        assert!(old.are_loaded(&server));
    }
    good(&mut new.save(&endpoint));
    holds_only(&server, 5);
    // A request that was given up arrives after all.
    server.put(&format!("{FOLDER}s1.4.dmafile"), b"late".to_vec());
    assert!(new.are_loaded(&server));
    good(&mut old.save(&endpoint));
    holds_only(&server, 6);
}

#[test]
fn generations_end() {
    let server = Server::plain();
    let (sources, endpoint) = (Sources::new(1), server.url(""));
    let claim = |number: u64| format!("{FOLDER}.dmafile-snapshot.{number}.lock");
    let last = 999_999_999_999_999;
    // Those of nobody.
    let others = [0, last + 1, u64::MAX].map(claim);
    for other in &others {
        server.put(other, Vec::new());
    }
    good(&mut sources.save(&endpoint));
    let left = server.paths(FOLDER);
    assert!(others.iter().all(|other| left.contains(other)), "{left:?}");
    assert!(left.contains(&format!("{FOLDER}s0.1.dmafile")), "{left:?}");
    server.put(&claim(last - 1), Vec::new());
    let taken = claim(last);
    server.decide(move |asked| {
        if asked.target == taken {
            return Fault::Status(412, String::new());
        }
        Fault::None
    });
    fails(&mut sources.save(&endpoint), "(EOVERFLOW)");
    assert!(sources.are_loaded(&server));
}

#[test]
fn a_store_that_always_says_that_there_is_an_object_is_left() {
    for status in [412, 409] {
        let server = Server::plain();
        server.decide(move |asked| match asked.field("if-none-match") {
            Some(_) => Fault::Status(status, String::new()),
            None => Fault::None,
        });
        let (sources, endpoint) = (Sources::new(1), server.url(""));
        fails(&mut sources.save(&endpoint), "(EBUSY)");
        assert!(server.paths(FOLDER).is_empty());
    }
}

/// Ends a command after the server was asked for something; returns how long that takes.
fn interrupted(server: &Server, mut command: Command, is: impl Fn(&Asked) -> bool) -> Duration {
    server.asked();
    let mut child = command.spawn().unwrap();
    while !server.asked().iter().any(&is) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let begin = Instant::now();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    begin.elapsed()
}

#[test]
fn a_list_ends() {
    let server = Server::plain();
    let folders: String = (0..2000)
        .map(|number| format!("<CommonPrefixes><Prefix>a/task/{number}/</Prefix></CommonPrefixes>"))
        .collect();
    let page = format!(
        "<ListBucketResult><IsTruncated>true</IsTruncated>{folders}\
         <NextContinuationToken>x</NextContinuationToken></ListBucketResult>"
    );
    server.put("/bucket", page.into_bytes());
    let endpoint = server.url("");
    fails(
        &mut load(&endpoint),
        "100000 objects in this folder (EFBIG)",
    );
    fails(&mut Sources::new(1).save(&endpoint), "(EFBIG)");
    server.decide(|_| Fault::Silent(1));
    let is_list = |asked: &Asked| asked.target.contains("list-type");
    let time = interrupted(&server, load(&endpoint), is_list);
    assert!(time < Duration::from_secs(5), "{time:?}");
}

#[test]
fn a_cancelled_save_does_not_wait_for_its_removals() {
    let server = Server::plain();
    let endpoint = server.url("");
    server.decide(|asked| match asked.method.as_str() {
        "DELETE" => {
            std::thread::sleep(Duration::from_secs(3600));
            Fault::None
        }
        "PUT" if asked.target.contains("s1.") => Fault::Status(503, String::new()),
        _ => Fault::None,
    });
    let save = Sources::new(1);
    let is_sent = |asked: &Asked| asked.target.contains("s1.");
    let time = interrupted(&server, save.save(&endpoint), is_sent);
    assert!(time < Duration::from_secs(9), "{time:?}");
    server.decide(|_| Fault::None);
    good(&mut save.save(&endpoint));
    holds_only(&server, 2);
}

#[test]
fn what_a_killed_saver_leaves_is_removed_by_the_next() {
    for word in ["s1.", "dmafile-snapshot.json"] {
        let server = Server::plain();
        let (old, new, endpoint) = (Sources::new(1), Sources::new(2), server.url(""));
        good(&mut old.save(&endpoint));
        let (asked, reached) = std::sync::mpsc::channel();
        server.decide(move |request| {
            if request.method == "PUT" && request.target.contains(word) {
                asked.send(()).unwrap();
                std::thread::sleep(Duration::from_secs(3600));
            }
            Fault::None
        });
        let mut saver = new.save(&endpoint).spawn().unwrap();
        reached.recv().unwrap();
        saver.kill().unwrap();
        saver.wait().unwrap();
        server.decide(|_| Fault::None);
        assert!(old.are_loaded(&server));
        assert!(server.paths(FOLDER).len() > SIZES.len() + 1);
        good(&mut new.save(&endpoint));
        assert!(new.are_loaded(&server));
        holds_only(&server, 3);
    }
}

#[test]
fn an_interrupted_save_removes_what_it_has_sent() {
    let server = Server::plain();
    let (old, new, endpoint) = (Sources::new(1), Sources::new(2), server.url(""));
    good(&mut old.save(&endpoint));
    server.decide(|asked| {
        if asked.method == "PUT" && asked.target.contains("s1.") {
            return Fault::Status(503, "Retry-After: 1\r\n".to_string());
        }
        Fault::None
    });
    interrupted(&server, new.save(&endpoint), |asked| {
        asked.target.contains("s1.")
    });
    holds_with_claims(&server, 1, 2..3);
    server.decide(|_| Fault::None);
    assert!(old.are_loaded(&server));
}

#[test]
fn requests_and_answers_that_are_lost_change_nothing() {
    for lost in [
        Fault::Lost,
        Fault::Reset(0),
        Fault::Status(503, String::new()),
    ] {
        let server = Server::plain();
        let endpoint = server.url("");
        // The first manifest, and one that replaces it.
        let words = [
            "dmafile-snapshot.json",
            ".lock",
            "s1.",
            "dmafile-snapshot.json",
        ];
        for (seed, word) in words.into_iter().enumerate() {
            let sources = Sources::new(seed as u64);
            let (once, lost) = (AtomicUsize::new(0), lost.clone());
            server.decide(move |asked| {
                let is_one = asked.method == "PUT" && asked.target.contains(word);
                if is_one && once.fetch_add(1, Ordering::Relaxed) == 0 {
                    return lost.clone();
                }
                Fault::None
            });
            good(&mut sources.save(&endpoint));
            assert!(sources.are_loaded(&server), "{word}");
        }
    }
}

#[test]
fn a_manifest_that_may_be_valid_keeps_its_files() {
    let server = Server::plain();
    let (old, new, endpoint) = (Sources::new(1), Sources::new(2), server.url(""));
    good(&mut old.save(&endpoint));
    server.decide(|asked| {
        if is_publication(asked) {
            return Fault::Reset(0);
        }
        Fault::None
    });
    fails(
        &mut new.save(&endpoint),
        "the store may have the new snapshot nevertheless",
    );
    server.decide(|_| Fault::None);
    assert!(old.are_loaded(&server));
    assert_eq!(server.paths(FOLDER).len(), 2 * (SIZES.len() + 1));
    good(&mut new.save(&endpoint));
    holds_only(&server, 3);
}

#[test]
fn a_reader_gets_one_snapshot_or_the_other() {
    // When it is replaced: while it is opened, and while its bytes are fetched.
    for word in ["s0.", "s1."] {
        for nth in [1, 2] {
            let server = Server::plain();
            let (old, new, endpoint) = (Sources::new(1), Arc::new(Sources::new(2)), server.url(""));
            good(&mut old.save(&endpoint));
            let (count, saver, at) = (AtomicUsize::new(0), Arc::clone(&new), endpoint.clone());
            server.decide(move |asked| {
                let is_one = asked.method == "GET" && asked.target.contains(word);
                if is_one && count.fetch_add(1, Ordering::Relaxed) + 1 == nth {
                    good(&mut saver.save(&at));
                }
                Fault::None
            });
            let said = good(&mut load(&endpoint));
            let is = |sources: &Sources| said.lines().eq(&sources.digests);
            assert!(is(&old) || is(&new), "{word} {nth}: {said}");
            // The small one is fetched when it is opened.
            assert_eq!(is(&new), (word, nth) != ("s1.", 2), "{word} {nth}");
        }
    }
}

#[test]
fn a_manifest_may_be_replaced_while_it_is_read() {
    let server = Server::plain();
    let (old, new, endpoint) = (Sources::new(1), Arc::new(Sources::new(2)), server.url(""));
    good(&mut old.save(&endpoint));
    // So large that its end is asked for separately.
    let mut manifest = server.object(MANIFEST).unwrap();
    manifest.resize(400 << 10, b' ');
    server.put(MANIFEST, manifest);
    let (once, saver, at) = (AtomicUsize::new(0), Arc::clone(&new), endpoint.clone());
    server.decide(move |asked| {
        let is_end = asked.target.contains("dmafile-snapshot.json")
            && asked.range().is_some_and(|range| range.0 > 0);
        if is_end && once.fetch_add(1, Ordering::Relaxed) == 0 {
            good(&mut saver.save(&at));
        }
        Fault::None
    });
    assert!(new.are_loaded(&server));
    holds_only(&server, 2);
}

#[test]
fn old_files_that_cannot_be_listed_are_named() {
    let server = Server::plain();
    let (sources, endpoint) = (Sources::new(1), server.url(""));
    server.decide(|asked| {
        // The list before the claim is the second request: the first one asks for uploads.
        if asked.target.contains("list-type") && asked.number > 1 {
            return Fault::Status(403, String::new());
        }
        Fault::None
    });
    let report = good(sources.save(&endpoint).arg("--json"));
    assert!(report.contains("cannot list them now"), "{report}");
    server.decide(|_| Fault::None);
    holds_only(&server, 1);
}

#[test]
fn a_snapshot_that_is_damaged_is_named() {
    let server = Server::plain();
    let (sources, endpoint) = (Sources::new(1), server.url(""));
    good(&mut sources.save(&endpoint));
    let path = format!("{FOLDER}s1.1.dmafile");
    server.put_tagged(&path, noise(1000, 99), "\"other\"");
    fails(&mut load(&endpoint), "s3://bucket/a/task/s1.1.dmafile");
    server.put_tagged(&path, noise(999, 99), "\"other\"");
    fails(
        &mut load(&endpoint),
        "it has 999 bytes and should have 1000",
    );
    server.put(MANIFEST, b"{}".to_vec());
    fails(&mut load(&endpoint), "invalid manifest");
    fails(&mut sources.save(&endpoint), "invalid manifest");
    server.put(MANIFEST, vec![b' '; (1 << 20) + 1]);
    fails(&mut load(&endpoint), "more than 1048576 bytes");
    server.put(MANIFEST, vec![b' '; 17 << 20]);
    // Credentials would not help.
    fails(&mut sources.save(&endpoint), "(EIO)\n");
}

#[test]
fn a_model_is_listed_once() {
    let server = Server::plain();
    let path = tempfile::tempdir().unwrap();
    let file = path.path().join("m.safetensors");
    dmafile_testkit::models::safetensors(&file, &dmafile_testkit::models::tensors("t", 1, 5000));
    server.put(
        &format!("{FOLDER}m.safetensors"),
        std::fs::read(&file).unwrap(),
    );
    let endpoint = server.url("");
    for args in [&["load", "-q", URL][..], &["explain", URL]] {
        server.asked();
        good(&mut dmafile(&endpoint, args));
        let lists = server.asked();
        let lists = lists
            .iter()
            .filter(|asked| asked.target.contains("list-type="));
        assert_eq!(lists.count(), 1, "{args:?}");
    }
}

#[test]
fn what_crashed_parts_left_is_removed() {
    let server = Server::plain();
    let (old, new) = ("2026-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z");
    for (name, path, at) in [
        ("old", "s0.7.dmafile", old),
        ("new", "s0.8.dmafile", new),
        ("other", "notes", old),
        ("alike", "model.dmafile", old),
        ("deeper", "x/s0.7.dmafile", old),
    ] {
        server.uploads().insert(
            name.to_string(),
            Upload::begun(&format!("{FOLDER}{path}"), at),
        );
    }
    good(&mut Sources::new(1).save(&server.url("")));
    let left: Vec<_> = server.uploads().keys().cloned().collect();
    assert_eq!(left, ["alike", "deeper", "new", "other"]);
}
