//! `dmafile save` of several sources and `dmafile load` of their folder, as scripts see them: the loaded bytes
//! are correct, and the folder always has a whole snapshot, whatever happens to a saver.

mod common;

use common::sandbox::{any, no_nameless, refuse, refuse_on};
use common::{
    Dir, Ended, KIB, MIB, content, done, end, is_root, memfd, own_mounts, sha256, skip, start,
};
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Sizes of the two sources: more than a window of registered memory, and not a multiple of the block size.
const SIZES: [u64; 2] = [66 * MIB + 77, 3 * MIB + 5];
const MANIFEST: &str = "dmafile-snapshot.json";

/// The memory of two sources, which commands inherit, and the checksum of each.
struct Pair([(File, String); 2]);

impl Pair {
    /// No two sources have the same bytes, in any pair.
    fn of(dir: &Dir, number: u64) -> Self {
        Self::sized(dir, number, SIZES)
    }

    fn sized(dir: &Dir, number: u64, sizes: [u64; 2]) -> Self {
        Self([0, 1].map(|index| {
            let bytes = sizes[index];
            let memory = memfd(bytes);
            let from = (2 * number + index as u64 + 1) << 30;
            memory
                .write_all_at(&content(from, bytes as usize), 0)
                .unwrap();
            let path = dir.path("scratch");
            fs::copy(format!("/proc/self/fd/{}", memory.as_raw_fd()), &path).unwrap();
            let digest = sha256(&path, 0, bytes);
            fs::remove_file(path).unwrap();
            (memory, digest)
        }))
    }

    /// `dmafile save fd:N=a fd:M=b to ARGS`.
    fn save(&self, dir: &Dir, args: &str) -> Command {
        let [a, b] = self.0.each_ref().map(|source| source.0.as_raw_fd());
        dir.dmafile(&format!("save fd:{a}=a fd:{b}=b to {args}"))
    }

    fn digests(&self) -> Digests {
        let names = ["a", "b"].map(str::to_string);
        names
            .into_iter()
            .zip(self.0.each_ref().map(|source| source.1.clone()))
            .collect()
    }
}

/// The checksum of each source, by its name.
type Digests = BTreeMap<String, String>;

/// Prints the name and the checksum of each buffer that it has inherited.
const EACH: &str = r#"
    number=1
    for fd in $(echo $DMAFILE_FD | tr , ' '); do
        field() { echo "$1" | cut -d, -f$number; }
        bytes=$(field $DMAFILE_BYTES) offset=$(field $DMAFILE_OFFSET)
        sum=$(tail -c +$((offset + 1)) /proc/self/fd/$fd | head -c $bytes | sha256sum)
        echo "$(field "$DMAFILE_NAMES"):${sum%% *}"
        number=$((number + 1))
    done"#;

/// What a COMMAND gets from the snapshot in the folder `to`.
fn loaded(dir: &Dir, args: &str) -> Digests {
    let mut command = dir.dmafile(&format!("load to --quiet {args}"));
    command.args(["--", "sh", "-c", EACH]);
    let ended = end(&mut command).ok();
    let lines = ended
        .stdout
        .lines()
        .map(|line| line.split_once(':').unwrap());
    lines
        .map(|(name, digest)| (name.to_string(), digest.to_string()))
        .collect()
}

/// The names in the folder `to`, sorted.
fn names(dir: &Dir) -> Vec<String> {
    let entries = fs::read_dir(dir.path("to")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Asserts that the folder has the snapshot of this pair, and nothing else.
fn is_just(dir: &Dir, pair: &Pair) {
    assert_eq!(loaded(dir, ""), pair.digests());
    let names = names(dir);
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(names[2], MANIFEST);
}

fn with_folder() -> Dir {
    let dir = Dir::new();
    fs::create_dir(dir.path("to")).unwrap();
    dir
}

#[test]
fn command_gets_every_saved_source() {
    let dir = with_folder();
    let pair = Pair::of(&dir, 0);
    let file = dir.file("source", 5000);
    let empty = memfd(0);
    let [a, b] = pair.0.each_ref().map(|source| source.0.as_raw_fd());
    let mut command = dir.dmafile(&format!(
        "save -v --json --verify sha256 -- fd:{a}=weights source=a.file -=pipe fd:{b}@4097=part \
         fd:{}=empty to",
        empty.as_raw_fd()
    ));
    command.stdin(File::open(&file).unwrap());
    let ended = end(&mut command).ok();
    let report = ended.json();
    let (file, part) = (sha256(&file, 0, 5000), SIZES[1] - 4097);
    let memory = dir.path("to/part.1.dmafile");
    let want: Digests = [
        ("weights", pair.0[0].1.clone()),
        ("a.file", file.clone()),
        ("pipe", file),
        ("part", sha256(&memory, 0, part)),
        ("empty", sha256(&memory, 0, 0)),
    ]
    .map(|(name, digest)| (name.to_string(), digest))
    .into();
    // From byte 4097 of the second.
    let mut cut = content((2 + 1 - 1) << 30, SIZES[1] as usize);
    cut.drain(..4097);
    assert!(fs::read(&memory).unwrap() == cut);

    assert_eq!(report["bytes"], SIZES[0] + 5000 + 5000 + part);
    assert_eq!(report["generation"], 1);
    assert_eq!(report["sync"], true);
    for source in report["sources"].as_array().unwrap() {
        let name = source["name"].as_str().unwrap();
        assert_eq!(source["verify"]["digest"], want[name].as_str(), "{name}");
        assert_eq!(source["atomic"], true);
    }
    for line in [
        "snapshot 1 in to, sha256 digests",
        "source weights",
        "snapshot 1 saved: ",
    ] {
        assert!(ended.stderr.contains(line), "{ended:?}");
    }
    assert_eq!(names(&dir).len(), 6);
    assert_eq!(loaded(&dir, "--json=report.json"), want);
    let text = fs::read(dir.path("report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let sources = report["sources"].as_array().unwrap();
    assert_eq!(sources[0]["saved_from"], "memfd");
    assert_eq!(sources[0]["report"]["verify"]["matched"], true);
    assert_eq!(sources[2]["saved_from"], "pipe");
    assert!(sources[4]["report"].is_null());
    assert_eq!(
        loaded(&dir, "--pages base --method threads --io buffered"),
        want
    );
    // Without a COMMAND, the snapshot is only loaded and checked.
    let ended = dir.run("load to").ok();
    assert!(ended.stdout.contains("snapshot 1 loaded: "), "{ended:?}");
    assert_eq!(dir.run("load to --quiet --to anon").ok().stdout, "");

    // One source with a name is a snapshot too. If the target is a file, the source may have "=" in its
    // name.
    let mut command = dir.dmafile(&format!("save fd:{b}=only to --quiet"));
    end(&mut command).ok();
    assert_eq!(names(&dir), [MANIFEST, "only.2.dmafile"]);
    dir.file("x=y", 5000);
    dir.run("save x=y copy --quiet").ok();
    assert_eq!(fs::read(dir.path("copy")).unwrap(), content(0, 5000));
}

#[test]
fn explain_shows_plans_and_writes_nothing() {
    let dir = with_folder();
    let pair = Pair::sized(&dir, 0, [MIB, 0]);
    for args in ["--explain", "--explain --verify blake3"] {
        let text = end(&mut pair.save(&dir, args)).ok().stdout;
        assert!(text.starts_with("snapshot 1 in to, "), "{text}");
        assert_eq!(text.matches("\n  place       atomic ").count(), 2, "{text}");
    }
    let plan = end(&mut pair.save(&dir, "--explain --json")).ok().json();
    assert_eq!(plan["sources"][0]["to"], "to/a.1.dmafile");
    assert_eq!(plan["sources"][0]["to_write"], MIB);
    assert!(names(&dir).is_empty());
    end(&mut pair.save(&dir, "--quiet")).ok();
    let text = dir.run("explain to").ok().stdout;
    assert!(text.starts_with("source a\nplan\n"), "{text}");
    assert!(
        text.ends_with("source b\nplan\n  to          an empty memfd\n"),
        "{text}"
    );
    let plan = dir.run("explain to --json").ok().json();
    assert_eq!(plan["sources"][0]["plan"]["bytes"], MIB);
    is_just(&dir, &pair);
}

#[test]
fn usage_errors_have_status_2() {
    let dir = with_folder();
    let pair = Pair::sized(&dir, 0, [5000, 5000]);
    end(&mut pair.save(&dir, "--quiet")).ok();
    dir.file("x", 5000);
    for args in [
        "save x=a x to",
        "save x x to",
        "save x= to",
        "save x=.a to",
        "save x=a/b to",
        "save x=a x=a to",
        "save x=a to --length 1",
        "save x=a to --offset 1",
        "save x=a to --verify crc32c=00000000",
        "save x=a to --trace t.json",
        "save x=a to --method heap-read",
        "load to --offset 1",
        "load to --length 1",
        "load to --tensor x",
        "load to --verify xxh3",
        "load to --trace t.json",
        "load to --to anon -- true",
        "explain to --length 1",
    ] {
        dir.refusal(&mut dir.dmafile(args), 2);
    }
    let target = memfd(2 * MIB);
    let args = format!("load to --quiet --to fd:{}", target.as_raw_fd());
    let line = dir.refusal(&mut dir.dmafile(&args), 2);
    assert!(line.contains("holds only one source"), "{line}");
    // A source without a name cannot be part of a snapshot.
    let line = dir.refusal(&mut dir.dmafile("save x to"), 1);
    assert!(line.contains("it is a folder (EISDIR)"), "{line}");
    let line = dir.refusal(&mut dir.dmafile("save x=a x=b no"), 1);
    assert!(line.contains("(ENOENT); create it first"), "{line}");
    let line = dir.refusal(&mut dir.dmafile("save x=a x=b x"), 1);
    assert!(line.contains("(ENOTDIR); name a folder"), "{line}");
    is_just(&dir, &pair);
}

#[test]
fn a_damaged_file_is_named() {
    let dir = with_folder();
    let pair = Pair::sized(&dir, 0, [MIB, 5000]);
    end(&mut pair.save(&dir, "--quiet")).ok();
    let path = dir.path("to/b.1.dmafile");
    let byte = fs::read(&path).unwrap()[4999];
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[!byte], 4999).unwrap();
    let mut command = dir.dmafile("load to --quiet -- echo started");
    let line = dir.refusal(&mut command, 1);
    assert!(
        line.starts_with("wrong digest: to/b.1.dmafile: xxh3 is "),
        "{line}"
    );
    assert!(
        line.ends_with(" (EBADMSG); it is damaged: use another snapshot"),
        "{line}"
    );
    file.set_len(4999).unwrap();
    let line = dir.refusal(&mut command, 1);
    let says = "wrong size: to/b.1.dmafile: it has 4999 bytes and should have 5000 (EBADMSG)";
    assert!(line.starts_with(says), "{line}");
}

/// Each failing system call has its message, leaves the previous snapshot, and leaves nothing else behind,
/// with and without O_TMPFILE.
#[test]
fn a_failed_system_call_leaves_the_previous_snapshot() {
    let dir = with_folder();
    let sizes = [3 * MIB + 5, 70 * KIB + 1];
    let (old, new) = (Pair::sized(&dir, 0, sizes), Pair::sized(&dir, 1, sizes));
    end(&mut old.save(&dir, "--quiet")).ok();
    let calls = [
        (libc::SYS_fallocate, libc::ENOSPC, "(ENOSPC); free space"),
        (libc::SYS_fallocate, libc::EDQUOT, "(EDQUOT); free space"),
        (
            libc::SYS_pwrite64,
            libc::EIO,
            "(EIO); the device failed to write",
        ),
        (libc::SYS_fsync, libc::EIO, "cannot sync: to/a.2.dmafile: "),
        (libc::SYS_ftruncate, libc::EFBIG, "(EFBIG); raise the limit"),
        // With O_TMPFILE, only the manifest is renamed, and gets permissions.
        (libc::SYS_renameat, libc::EIO, "cannot write: to/"),
        (libc::SYS_fchmod, libc::EIO, " permissions: to/"),
        (
            libc::SYS_flock,
            libc::EAGAIN,
            "another snapshot is being saved there (EBUSY); wait",
        ),
        (
            libc::SYS_flock,
            libc::ENOLCK,
            "cannot lock the folder (flock(2)) (ENOLCK)",
        ),
        (
            libc::SYS_getdents64,
            libc::EIO,
            "cannot list the folder: to: ",
        ),
    ];
    let manifest = dir.path("to/dmafile-snapshot.json");
    fs::set_permissions(manifest, Permissions::from_mode(0o640)).unwrap();
    for (number, errno, says) in calls {
        for nameless in [true, false] {
            let command = new.save(&dir, "--quiet");
            let command = if nameless {
                command
            } else {
                refuse(command, &no_nameless(), libc::EOPNOTSUPP)
            };
            let ended = end(&mut refuse(command, &any(number), errno));
            let line = ended.line(1);
            assert!(line.contains(says), "{number}: {line}");
            if errno == libc::EAGAIN {
                // Left to the save that seems to have locked it.
                fs::remove_file(dir.path("to/.dmafile-snapshot.lock")).unwrap();
            }
            is_just(&dir, &old);
        }
    }
    // The next save removes old files that could not be removed.
    let command = new.save(&dir, "--json");
    let ended = end(&mut refuse(command, &any(libc::SYS_unlinkat), libc::EACCES)).ok();
    let reasons = common::reasons(&ended.json());
    assert!(
        reasons.contains("left 2 old files: cannot remove them now"),
        "{reasons}"
    );
    assert_eq!(loaded(&dir, ""), new.digests());
    // With what was locked.
    assert_eq!(names(&dir).len(), 6);
    let ended = end(&mut old.save(&dir, "--json")).ok();
    let reasons = common::reasons(&ended.json());
    assert!(reasons.contains("removed 2 files: "), "{reasons}");
    is_just(&dir, &old);
    // With --no-sync, fsync(2) is not called.
    let command = new.save(&dir, "--no-sync --json");
    let ended = end(&mut refuse(command, &any(libc::SYS_fsync), libc::EIO)).ok();
    assert_eq!(ended.json()["sync"], false);
    is_just(&dir, &new);
}

/// Makes a command inherit only these descriptors, so that its own have the same numbers each time.
fn alone(command: &mut Command, kept: &Pair) {
    let kept = kept.0.each_ref().map(|source| source.0.as_raw_fd());
    let close = move || {
        for fd in (3..1024).filter(|fd| !kept.contains(fd)) {
            // SAFETY: makes exec close this descriptor, if it is open.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        Ok(())
    };
    // SAFETY: system calls only, between fork and exec.
    unsafe { command.pre_exec(close) };
}

/// The file of each source, its name in the folder, and the manifest are synced. If one sync fails, the save
/// fails too, and the folder has a whole snapshot.
#[test]
fn every_file_is_synced_before_the_snapshot_is_valid() {
    let dir = with_folder();
    let sizes = [MIB + 5, 5000];
    let (old, new) = (Pair::sized(&dir, 0, sizes), Pair::sized(&dir, 1, sizes));
    let mut failed = BTreeMap::<String, u32>::new();
    for fd in 3..64 {
        end(&mut old.save(&dir, "--quiet")).ok();
        is_just(&dir, &old);
        let mut command = new.save(&dir, "--quiet");
        alone(&mut command, &new);
        let ended = end(&mut refuse_on(command, libc::SYS_fsync, fd, libc::EIO));
        if ended.status.success() {
            is_just(&dir, &new);
            continue;
        }
        let line = ended.line(1);
        assert!(line.contains("(EIO)"), "{line}");
        let of = line.strip_prefix("cannot sync: to/").expect(line);
        let (of, why) = of.split_once(": ").unwrap();
        let (name, _) = of.split_once('.').unwrap();
        let placed = why.starts_with("the new file is in its place");
        let key = format!("{name}{}", if placed { "'s name" } else { "" });
        *failed.entry(key).or_default() += 1;
        if name == "dmafile-snapshot" && placed {
            // A crash could leave either of them, so both are kept.
            assert_eq!(loaded(&dir, ""), new.digests());
            assert_eq!(names(&dir).len(), 5);
        } else {
            is_just(&dir, &old);
        }
    }
    let keys = ["a", "a's name", "b", "b's name"];
    for key in keys {
        assert_eq!(failed.get(key), Some(&1), "{key}: {failed:?}");
    }
    // The manifest may reuse the descriptor number of a source.
    let known = failed
        .keys()
        .all(|key| keys.contains(&&key[..]) || key.starts_with("dmafile-snapshot"));
    assert!(known, "{failed:?}");
}

/// Kills saves at many moments: the folder has the whole old or new snapshot, and the next save removes what
/// the kill left behind.
fn killed(prepare: impl Fn(Command) -> Command) {
    const KILLS: u32 = 50;
    let dir = with_folder();
    let sizes = [9 * MIB + 77, 70 * KIB];
    let pairs = [0, 1].map(|number| Pair::sized(&dir, number, sizes));
    end(&mut pairs[0].save(&dir, "--quiet")).ok();
    let begin = std::time::Instant::now();
    end(&mut prepare(pairs[1].save(&dir, "--quiet"))).ok();
    let lasts = begin.elapsed();
    let mut now = 1;
    let (mut seen, mut seen_left) = ([0, 0], 0);
    for kill in 0..KILLS {
        let other = 1 - now;
        let running = start(&mut prepare(pairs[other].save(&dir, "--quiet")));
        // Moments that cover the whole save in random order, however fast the machine is.
        let share = (f64::from(kill) * 0.618_033_988_749_895).fract();
        std::thread::sleep(lasts.mul_f64(share));
        running.signal(libc::SIGKILL);
        running.end();
        seen_left += u32::from(names(&dir).len() > 3);
        let got = loaded(&dir, "");
        let which = pairs.iter().position(|pair| pair.digests() == got);
        let which = which.unwrap_or_else(|| panic!("a mixture: {got:?}"));
        seen[usize::from(which == other)] += 1;
        now = which;
        if kill % 5 == 4 {
            // Not after every kill, so that leftovers of several kills accumulate.
            now = 1 - now;
            end(&mut prepare(pairs[now].save(&dir, "--quiet"))).ok();
            is_just(&dir, &pairs[now]);
        }
    }
    if seen[0] == 0 || seen_left == 0 {
        skip("no kill came early enough to leave something");
    }
    end(&mut prepare(pairs[0].save(&dir, "--quiet"))).ok();
    is_just(&dir, &pairs[0]);
}

#[test]
fn a_kill_leaves_the_old_snapshot_or_the_new_one() {
    killed(|command| command);
}

#[test]
fn the_next_save_removes_what_a_kill_left() {
    killed(|command| refuse(command, &no_nameless(), libc::EOPNOTSUPP));
}

/// The saver waits for more bytes from a pipe, which the test writes.
#[test]
fn a_signal_or_a_concurrent_save_leaves_the_previous_snapshot() {
    let dir = with_folder();
    let old = Pair::sized(&dir, 0, [MIB, 5000]);
    end(&mut old.save(&dir, "--quiet")).ok();
    for (calls, signal) in [(vec![], libc::SIGINT), (no_nameless(), libc::SIGTERM)] {
        let (read, mut write) = std::io::pipe().unwrap();
        let source = dir.file("source", 5000);
        let command = dir.dmafile("save -v source=a fd:0=b to");
        let mut command = refuse(command, &calls, libc::EOPNOTSUPP);
        let mut running = start(command.stdin(read));
        write.write_all(&vec![7; 3 * MIB as usize]).unwrap();
        running.until_written("source b");
        // The first file exists, but the snapshot is not valid yet.
        running.until(|_| names(&dir).iter().any(|name| name == "a.2.dmafile"));
        write.write_all(&vec![7; 3 * MIB as usize]).unwrap();
        let line = dir.refusal(&mut old.save(&dir, "--quiet"), 1);
        let says =
            "cannot save a snapshot: to: another snapshot is being saved there (EBUSY); wait";
        assert!(line.starts_with(says), "{line}");
        assert_eq!(loaded(&dir, ""), old.digests());
        running.signal(signal);
        let ended: Ended = running.end();
        assert_eq!(ended.status.code(), Some(130), "{ended:?}");
        let says = ": cancelled before it was complete (ECANCELED)";
        assert!(ended.stderr.contains(says), "{ended:?}");
        is_just(&dir, &old);
        fs::remove_file(source).unwrap();
    }
}

#[test]
fn a_full_file_system_is_found_before_the_first_write() {
    if !is_root() || own_mounts().is_err() {
        return skip("needs root to mount");
    }
    let dir = with_folder();
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", "size=8m", "none"]);
    if !command.arg(dir.path("to")).status().unwrap().success() {
        return skip("cannot mount a tmpfs");
    }
    let old = Pair::sized(&dir, 0, [2 * MIB, 5000]);
    end(&mut old.save(&dir, "--quiet")).ok();
    // Each of the two would fit alone.
    let large = Pair::sized(&dir, 1, [5 * MIB, 5 * MIB]);
    let ended = end(&mut large.save(&dir, ""));
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(
        ended
            .stderr
            .contains("to/b.2.dmafile: No space left on device (ENOSPC)"),
        "{ended:?}"
    );
    is_just(&dir, &old);
    let both = Pair::sized(&dir, 2, [4 * MIB, 5000]);
    end(&mut both.save(&dir, "--quiet")).ok();
    is_just(&dir, &both);
    let path = std::ffi::CString::new(dir.path("to").to_str().unwrap()).unwrap();
    // SAFETY: a path that ends with a zero; the mount is this test's.
    done(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }).unwrap();
}
