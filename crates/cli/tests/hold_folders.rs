//! The folders of `dmafile hold`: whom they are trusted from, and what `--replace` and `--folder` change together.

mod common;

use common::{Dir, NOBODY, Running, end, is_root, run_as, sha256, skip, start};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

const LEN: u64 = 300_077;

/// A folder that other users may enter, with an own one for sockets.
fn new_dir() -> Dir {
    let dir = Dir::new();
    fs::create_dir(dir.path("run")).unwrap();
    mode(&dir.path("run"), 0o755);
    mode(&dir.path("."), 0o755);
    dir
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A holder that is ready.
fn hold(dir: &Dir, args: &str) -> Running {
    holds_with(&mut dir.dmafile(&format!("hold {args}")))
}

fn holds_with(command: &mut Command) -> Running {
    let mut running = start(command);
    running.until_written("\n");
    let [stdout, stderr] = running.written();
    serde_json::from_str::<Value>(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    running
}

fn stop(running: Running) {
    running.signal(libc::SIGTERM);
    running.end().ok();
}

/// The one line of a command that must fail, and must leave nothing behind.
fn refuses(dir: &Dir, args: &str) -> String {
    dir.refusal(&mut dir.dmafile(args), 1)
}

/// SHA-256 of the only file of a hold, computed by another program.
fn taken(dir: &Dir, at: &str, name: &str) -> String {
    let mut take = dir.dmafile(&format!("take {name} --socket {at} -- sha256sum {{}}"));
    let ended = end(&mut take).ok();
    ended.stdout.split(' ').next().unwrap().to_string()
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_socket_is_not_put_where_others_may_change_names() {
    let dir = new_dir();
    dir.file("file", LEN);
    let refused = |why: &str| {
        let line = refuses(&dir, "hold file --socket run/socket");
        assert!(line.contains("(EPERM)") && line.contains(why), "{line}");
        assert!(names(&dir.path("run")).is_empty());
    };
    mode(&dir.path("run"), 0o777);
    refused("every user may write to it");
    mode(&dir.path("run"), 0o1777);
    refused("every user may write to it");
    if !is_root() {
        return skip("other groups and users need root");
    }
    chown(dir.path("run"), None, Some(NOBODY)).unwrap();
    mode(&dir.path("run"), 0o2775);
    refused("its group (65534) may write to it");
    chown(dir.path("run"), Some(NOBODY), None).unwrap();
    mode(&dir.path("run"), 0o755);
    refused("it belongs to another user (65534)");
}

#[test]
fn a_planted_socket_is_not_taken_from() {
    if !is_root() {
        return skip("other users need root");
    }
    let dir = new_dir();
    mode(&dir.file("file", LEN), 0o644);
    fs::create_dir(dir.path("theirs")).unwrap();
    chown(dir.path("theirs"), Some(NOBODY), Some(NOBODY)).unwrap();
    let mut command = dir.dmafile("hold file --name m --socket theirs/socket --mode 0666");
    let holder = holds_with(run_as(&mut command, NOBODY));
    // Whoever names a user's own folder means that user's socket.
    taken(&dir, "theirs/socket", "m");
    let refused = |why: &str| {
        for verb in ["take m", "holds", "release m"] {
            let line = refuses(&dir, &format!("{verb} --socket run/socket"));
            assert!(
                line.contains("(EPERM)") && line.contains(why),
                "{verb}: {line}"
            );
        }
    };
    let plant = dir.path("run/socket");
    chown(dir.path("run"), None, Some(NOBODY)).unwrap();
    mode(&dir.path("run"), 0o2775);
    end(run_as(
        Command::new("mv")
            .arg(dir.path("theirs/socket"))
            .arg(&plant),
        NOBODY,
    ))
    .ok();
    refused("its group (65534) may write to it");
    // It stays another user's when the group may no longer write there.
    mode(&dir.path("run"), 0o755);
    refused("it belongs to user 65534, and its folder to user 0");
    stop(holder);
}

#[test]
fn a_default_folder_of_another_user_is_not_looked_in() {
    if !is_root() {
        return skip("other users need root");
    }
    let dir = new_dir();
    mode(&dir.file("file", LEN), 0o644);
    let theirs = dir.path("theirs");
    fs::create_dir_all(theirs.join("dmafile")).unwrap();
    for folder in [&theirs, &theirs.join("dmafile")] {
        chown(folder, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let with = |args: &str, uid| {
        let mut command = dir.dmafile(args);
        run_as(&mut command, uid).env("XDG_RUNTIME_DIR", &theirs);
        command
    };
    let holder = holds_with(&mut with("hold file --name m --mode 0666", NOBODY));
    end(&mut with("take m", NOBODY)).ok();
    let line = dir.refusal(&mut with("take m", NOBODY - 1), 1);
    assert!(line.contains("belongs to another user (65534)"), "{line}");
    let line = dir.refusal(&mut with("hold file --name n", NOBODY - 1), 1);
    assert!(line.contains("belongs to another user (65534)"), "{line}");
    stop(holder);
}

#[test]
fn a_folder_of_links_is_made_only_where_others_cannot_change_it() {
    let dir = new_dir();
    dir.file("file", LEN);
    let refused = |errno: &str, why: &str| {
        let line = refuses(&dir, "hold file --socket run/socket --folder there/links");
        assert!(line.contains(errno) && line.contains(why), "{line}");
        assert!(names(&dir.path("run")).is_empty());
    };
    let (there, links) = (dir.path("there"), dir.path("there/links"));
    fs::create_dir(&there).unwrap();
    // A link, whatever it leads to.
    fs::create_dir(dir.path("empty")).unwrap();
    symlink(dir.path("empty"), &links).unwrap();
    refused("(EEXIST)", "it is a link, or not a folder");
    assert!(names(&dir.path("empty")).is_empty());
    fs::remove_file(&links).unwrap();

    // A mark that leads elsewhere would be overwritten.
    fs::create_dir(&links).unwrap();
    fs::write(dir.path("canary"), "canary").unwrap();
    symlink(dir.path("canary"), links.join(".dmafile-hold")).unwrap();
    refused("(EEXIST)", "it is not empty");
    fs::remove_file(links.join(".dmafile-hold")).unwrap();
    fs::hard_link(dir.path("canary"), links.join(".dmafile-hold")).unwrap();
    refused("(EEXIST)", "it is not empty");
    assert_eq!(fs::read(dir.path("canary")).unwrap(), b"canary");
    fs::remove_dir_all(&links).unwrap();

    // Another user could put another folder in its place.
    mode(&there, 0o777);
    refused(
        "(EPERM)",
        "another user may rename or replace what is in it",
    );
    assert!(!links.exists());
    // Not in a sticky folder, unless the folder itself is another user's.
    mode(&there, 0o1777);
    stop(hold(&dir, "file --socket run/socket --folder there/links"));
    if is_root() {
        fs::create_dir(&links).unwrap();
        chown(&links, Some(NOBODY), None).unwrap();
        refused("(EPERM)", "it belongs to another user (65534)");
        chown(&links, Some(0), Some(NOBODY)).unwrap();
        mode(&links, 0o775);
        refused("(EPERM)", "its group (65534) may write to it");
    }
}

#[test]
fn only_links_that_were_made_are_removed() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let holder = hold(&dir, "file --socket run/socket --folder links");
    assert_eq!(sha256(&dir.path("links/file"), 0, LEN), want);
    // The folder is moved, and another one with links has its name.
    fs::rename(dir.path("links"), dir.path("moved")).unwrap();
    fs::create_dir(dir.path("links")).unwrap();
    symlink("/bin", dir.path("links/file")).unwrap();
    symlink("/bin", dir.path("moved/own")).unwrap();
    stop(holder);
    assert_eq!(names(&dir.path("links")), ["file"]);
    assert_eq!(names(&dir.path("moved")), ["own"]);

    // The same for a link in place of the folder.
    fs::remove_dir_all(dir.path("links")).unwrap();
    fs::rename(dir.path("moved"), dir.path("victim")).unwrap();
    let holder = hold(&dir, "file --socket run/socket --folder links");
    fs::rename(dir.path("links"), dir.path("moved")).unwrap();
    symlink("victim", dir.path("links")).unwrap();
    symlink("/bin", dir.path("victim/file")).unwrap();
    stop(holder);
    assert_eq!(names(&dir.path("victim")), ["file", "own"]);
    assert!(dir.path("links").is_symlink());

    // And for the next start after a killed one.
    fs::remove_file(dir.path("links")).unwrap();
    let holder = hold(&dir, "file --socket run/socket --folder links");
    holder.signal(libc::SIGKILL);
    holder.end();
    symlink("/bin", dir.path("links/own")).unwrap();
    let line = refuses(&dir, "hold file --socket run/socket --folder links");
    assert!(line.contains("it is not empty"), "{line}");
    fs::remove_file(dir.path("links/own")).unwrap();
    let holder = hold(&dir, "file --socket run/socket --folder links");
    assert_eq!(sha256(&dir.path("links/file"), 0, LEN), want);
    stop(holder);
    assert!(!dir.path("links").exists());
}

#[test]
fn a_folder_is_replaced_together_with_its_holder() {
    let dir = new_dir();
    let mut first = hold_version(&dir, 0);
    for version in 1..4 {
        let before = fs::metadata(dir.path("links")).unwrap().ino();
        let next = hold_version(&dir, version);
        first.end().ok();
        assert_ne!(fs::metadata(dir.path("links")).unwrap().ino(), before);
        let want = sha256(&dir.path("file"), 0, LEN + version);
        assert_eq!(taken(&dir, "run/socket", "file"), want);
        assert_eq!(sha256(&dir.path("links/file"), 0, LEN + version), want);
        assert_eq!(names(&dir.path("run")), ["socket"]);
        assert_eq!(names(&dir.path(".")), ["file", "links", "run"]);
        first = next;
    }
    // A replaced holder may have been killed.
    first.signal(libc::SIGKILL);
    first.end();
    let last = hold_version(&dir, 5);
    assert_eq!(
        sha256(&dir.path("links/file"), 0, LEN + 5),
        sha256(&dir.path("file"), 0, LEN + 5)
    );
    stop(last);
    assert_eq!(names(&dir.path(".")), ["file", "run"]);
}

fn hold_version(dir: &Dir, version: u64) -> Running {
    dir.file("file", LEN + version);
    hold(dir, "file --socket run/socket --folder links --replace")
}

#[test]
fn a_replacement_that_fails_changes_nothing() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let first = hold(&dir, "file --socket run/socket --folder links");
    let inode = fs::metadata(dir.path("links")).unwrap().ino();
    fs::create_dir(dir.path("full")).unwrap();
    fs::write(dir.path("full/other"), "").unwrap();
    let deaf = "no/such/manager";
    for (args, errno) in [
        ("--folder full", "(EEXIST)"),
        ("--folder full/other", "(EEXIST)"),
        ("--folder no/such", "(ENOENT)"),
        ("--folder links --notify", "(ENOENT)"),
        ("--notify", "(ENOENT)"),
        ("--folder other --notify", "(ENOENT)"),
        ("--group 4294967294 --folder other", "(EPERM)"),
    ] {
        if args.contains("--group") && is_root() {
            continue;
        }
        let mut again = dir.dmafile(&format!("hold file --socket run/socket --replace {args}"));
        let line = dir.refusal(again.env("NOTIFY_SOCKET", deaf), 1);
        assert!(line.contains(errno), "{args}: {line}");
        assert_eq!(taken(&dir, "run/socket", "file"), want, "{args}");
        assert_eq!(
            fs::metadata(dir.path("links")).unwrap().ino(),
            inode,
            "{args}"
        );
        assert_eq!(sha256(&dir.path("links/file"), 0, LEN), want, "{args}");
        assert_eq!(names(&dir.path("run")), ["socket"], "{args}");
        assert_eq!(
            names(&dir.path(".")),
            ["file", "full", "links", "run"],
            "{args}"
        );
    }
    stop(first);
}

#[test]
fn a_folder_has_one_holder_at_a_time() {
    let dir = new_dir();
    let want = sha256(&dir.file("file", LEN), 0, LEN);
    let first = hold(&dir, "file --socket run/one --folder links");
    for args in ["", "--replace"] {
        let line = refuses(
            &dir,
            &format!("hold file --socket run/two --folder links {args}"),
        );
        assert!(line.contains("another holder uses it (EBUSY)"), "{line}");
    }
    let second = hold(&dir, "file --socket run/two --folder others");
    stop(second);
    assert_eq!(sha256(&dir.path("links/file"), 0, LEN), want);
    stop(first);
    assert_eq!(names(&dir.path(".")), ["file", "run"]);
}

#[test]
fn every_option_can_be_given_to_a_replacement() {
    let dir = new_dir();
    dir.file("file", LEN);
    let mut first = hold(&dir, "file --name m --socket run/socket");
    for (version, args) in [
        "",
        "--folder links",
        "--folder links",
        "--folder others",
        "--mode 0666",
        "--writable",
        "--idle 1h",
        "--verify sha256",
        "--pages base --folder links",
        "--io buffered --method threads",
        "--no-check-memory --allocation before",
        "--block 64K --queue-depth 2 --chunk 1M",
        "--to memfd --folder links",
        "",
    ]
    .into_iter()
    .enumerate()
    {
        let len = LEN + version as u64;
        let want = sha256(&dir.file("file", len), 0, len);
        let next = hold(
            &dir,
            &format!("file --name m --socket run/socket --replace {args}"),
        );
        first.end().ok();
        assert_eq!(taken(&dir, "run/socket", "m"), want, "{args}");
        let folder = args.split(' ').skip_while(|arg| *arg != "--folder").nth(1);
        let mut left = vec!["file", "run"];
        left.splice(1..1, folder);
        left.sort_unstable();
        assert_eq!(names(&dir.path(".")), left, "{args}");
        if let Some(folder) = folder {
            assert_eq!(
                sha256(&dir.path(folder).join("file"), 0, len),
                want,
                "{args}"
            );
        }
        first = next;
    }
    stop(first);
    assert_eq!(names(&dir.path("run")), [""; 0]);
}
