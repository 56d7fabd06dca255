//! `dmafile load MODEL -- COMMAND … {}`: any program can open the path, and nothing of it remains afterwards.

mod common;

use common::sandbox::{any, refuse};
use common::{Dir, MIB, POOL, end, eventually, is_root, memfd, sha256, skip, start};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LEN: u64 = 5 * MIB + 77;

/// A folder for the folders of links, separate from those of other tests.
struct Temporary(PathBuf);

impl Temporary {
    fn new(dir: &Dir) -> Self {
        let path = dir.path("tmp");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o1777)).unwrap();
        Self(path)
    }

    /// `dmafile load ARGS -- COMMAND`, whose path is in this folder.
    fn load(&self, dir: &Dir, args: &str, command: &[&str]) -> Command {
        let mut load = dir.dmafile(&format!("load {args} --quiet --"));
        load.args(command).env("TMPDIR", &self.0);
        load.env_remove("XDG_RUNTIME_DIR");
        load
    }

    fn is_empty(&self) -> bool {
        fs::read_dir(&self.0).unwrap().next().is_none()
    }

    /// A cleanup process removes the folder after COMMAND has ended; nothing waits for that process.
    fn gets_empty(&self) {
        eventually("the folder is gone", || self.is_empty());
    }
}

/// The digest in each line of `sha256sum`.
fn digests(text: &str) -> Vec<&str> {
    text.lines()
        .map(|line| line.split(' ').next().unwrap())
        .collect()
}

#[test]
fn programs_open_the_memory_by_path() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    let file = dir.file("model.gguf", LEN);
    let want = sha256(&file, 0, LEN);
    let printed = |command: &[&str]| {
        let ended = end(&mut temporary.load(&dir, "model.gguf", command)).ok();
        temporary.gets_empty();
        ended.stdout
    };
    assert_eq!(digests(&printed(&["sha256sum", "{}"])), [&want]);
    // Inside an argument, and more than once; also in a program without the descriptor.
    let script = r#"
        case $0 in */model.gguf) ;; *) exit 3;; esac
        [ "$0" = "$DMAFILE_PATH" ] && [ "$1" = "--in=$0+$0" ] || exit 4
        stat -Lc %s:%F "$0"
        sha256sum "$0"
        sh -c 'eval "exec $DMAFILE_FD<&-"; [ ! -e /proc/self/fd/$DMAFILE_FD ] && sha256sum "$DMAFILE_PATH"'
        cp "$0" copy && sha256sum copy
        printf x | dd of="$0" conv=notrunc status=none
        head -c1 "$0"; : 2>&- >>"$0" && dd if=copy of="$0" conv=notrunc status=none
        dd if="$0" bs=1000 status=none | sha256sum"#;
    let text = printed(&["sh", "-c", script, "{}", "--in={}+{}"]);
    let (kind, rest) = text.split_once('\n').unwrap();
    assert_eq!(kind, format!("{LEN}:regular file"));
    let rest = rest.replace("\nx", "\n");
    assert_eq!(digests(&rest), [&want; 4], "{text}");
    // The program wrote to memory, not to the file.
    assert_eq!(sha256(&file, 0, LEN), want);
}

#[test]
fn a_range_and_an_existing_memfd_have_a_path() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    let file = dir.file("file", LEN);
    let sum = |args: &str| {
        let ended = end(&mut temporary.load(&dir, args, &["sha256sum", "{}"])).ok();
        ended.stdout.split(' ').next().unwrap().to_string()
    };
    let range = "file --offset 1M --length 70001";
    assert_eq!(sum(range), sha256(&file, MIB, 70_001));
    let memory = memfd(LEN);
    let fd = memory.as_raw_fd();
    // SAFETY: changes a flag of a descriptor that this test owns.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
    assert_eq!(sum(&format!("file --to fd:{fd}")), sha256(&file, 0, LEN));
}

#[test]
fn the_variable_has_the_path_if_command_has_no_placeholder() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    let file = dir.file("file", LEN);
    let script = "sha256sum $DMAFILE_PATH; echo ${DMAFILE_PATH:-none}";
    let run = |args: &str| {
        let mut load = temporary.load(&dir, args, &["sh", "-c", script]);
        end(load.env("DMAFILE_PATH", "/nowhere")).ok().stdout
    };
    let text = run("file");
    assert_eq!(digests(&text)[0], sha256(&file, 0, LEN));
    assert!(text.contains("/fd/") && temporary.is_empty(), "{text}");
    // Other bytes precede this range in memory, so there is no path; an inherited variable is removed.
    assert!(run("file --offset 1").ends_with("none\n"));
}

#[test]
fn command_replaces_the_process_and_has_no_child() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    dir.file("file", LEN);
    let run = |script: &str| {
        let mut load = temporary.load(&dir, "file", &["sh", "-c", script, "{}"]);
        let running = start(&mut load);
        let pid = running.pid().to_string();
        let ended = running.end();
        temporary.gets_empty();
        (ended, pid)
    };
    let (ended, pid) = run("read children </proc/$$/task/$$/children; echo $$ $children; exit 7");
    assert_eq!(ended.status.code(), Some(7));
    assert_eq!(ended.stdout.trim_end(), pid);
    let (ended, _) = run("kill -KILL $$");
    assert_eq!(ended.status.code(), None);
    let line = |command: &str, status| {
        let mut load = temporary.load(&dir, "file", &[command, "{}"]);
        dir.refusal(&mut load, status)
    };
    assert!(line("./nothing", 127).contains("(ENOENT)"));
    temporary.gets_empty();
}

/// The /proc folders of the cleanup processes of a folder, or of a subfolder.
fn removers(folder: &Path) -> Vec<PathBuf> {
    let needle = folder.to_str().unwrap();
    let all = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = all.filter(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains("remove-links") && line.contains(needle)
    });
    pids.map(|entry| entry.path()).collect()
}

/// A signal to that group may come before the cleanup process has its own session.
#[test]
fn the_cleanup_process_is_not_in_the_process_group_of_command() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    dir.file("file", LEN);
    let script = "echo ready; exec sleep 1000";
    let load = temporary.load(&dir, "file", &["sh", "-c", script, "{}"]);
    let mut load = refuse(load, &any(libc::SYS_setsid), libc::EPERM);
    let mut running = start(&mut load);
    running.until_written("ready");
    // COMMAND may be faster than its start.
    eventually("the cleanup process has started", || {
        !removers(&temporary.0).is_empty()
    });
    for process in removers(&temporary.0) {
        let stat = fs::read_to_string(process.join("stat")).unwrap();
        // proc_pid_stat(5): state, parent and group follow the name, which is in brackets.
        let group = stat.rsplit(')').next().unwrap().split(' ').nth(3).unwrap();
        assert_ne!(group, running.pid().to_string(), "{stat}");
    }
    // Kills the group.
    drop(running);
    temporary.gets_empty();
}

/// Otherwise the memory would stay until COMMAND has ended, even if COMMAND closed it long before.
#[test]
fn the_cleanup_process_holds_no_memory_and_outlives_command() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    dir.file("file", LEN);
    let script = r#"echo ready; read line; kill -TERM -$$; sleep 100"#;
    let mut load = temporary.load(&dir, "file", &["sh", "-c", script, "{}"]);
    let (stdin, go) = io::pipe().unwrap();
    let mut running = start(load.stdin(stdin));
    // Not before: the cleanup process is started before COMMAND.
    running.until_written("ready");
    let folder = fs::read_dir(&temporary.0)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert_eq!(
        fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let remover = || removers(&folder);
    eventually("the cleanup process has started", || !remover().is_empty());
    let found = remover();
    assert_eq!(found.len(), 1, "{found:?}");
    let fds = fs::read_dir(found[0].join("fd")).unwrap();
    let targets = fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    let memory: Vec<_> = targets
        .filter(|to| to.to_string_lossy().contains("memfd"))
        .collect();
    assert!(memory.is_empty(), "{memory:?}");
    drop(go);
    running.end();
    temporary.gets_empty();
    eventually("the cleanup process has ended", || remover().is_empty());
}

#[test]
fn the_folder_is_made_in_the_first_usable_place() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    dir.file("file", LEN);
    let shown = |runtime: &Path, temporary_folder: &Path| {
        let mut load = dir.dmafile("load file --quiet -- echo {}");
        load.env("XDG_RUNTIME_DIR", runtime)
            .env("TMPDIR", temporary_folder);
        PathBuf::from(end(&mut load).ok().stdout.trim_end())
    };
    let nowhere = dir.path("nowhere");
    let second = dir.path("second");
    fs::create_dir(&second).unwrap();
    assert!(shown(&second, &temporary.0).starts_with(&second));
    assert!(shown(&nowhere, &temporary.0).starts_with(&temporary.0));
    assert!(shown(&nowhere, &nowhere).starts_with("/dev/shm"));
    temporary.gets_empty();
}

#[test]
fn memory_without_a_path_is_refused_before_the_load() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    dir.file("file", LEN);
    for (args, status, want) in [
        ("file --to udmabuf", 2, "--to udmabuf has no path for {}"),
        ("file --to heap:system", 2, "use --to memfd"),
        ("file --to anon", 2, "cannot be inherited by COMMAND"),
        ("file --tensor x", 2, "no whole file is loaded for {}"),
        (
            "file --offset 5",
            1,
            "a path: file: its bytes begin at byte 5 of",
        ),
    ] {
        let mut load = temporary.load(&dir, args, &["cat", "{}"]);
        let line = dir.refusal(&mut load, status);
        assert!(line.contains(want), "{line} should say {want}");
        assert!(temporary.is_empty());
    }
    let load = temporary.load(&dir, "file", &["cat", "{}"]);
    let mut load = refuse(load, &any(libc::SYS_pidfd_open), libc::ENOSYS);
    let line = dir.refusal(&mut load, 1);
    assert!(line.contains("(ENOSYS)"), "{line}");
    temporary.gets_empty();
}

#[test]
fn hugetlb_pages_are_used_only_on_request() {
    if !is_root() {
        return skip("only root changes the pool of huge pages");
    }
    let dir = Dir::alone_with_pool();
    let temporary = Temporary::new(&dir);
    let file = dir.file("file", LEN);
    let pool = || {
        fs::read_to_string(POOL)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    let before = pool();
    // In addition to the pages that other processes use.
    fs::write(POOL, (before + 4).to_string()).unwrap();
    let run = |args: &str| {
        let script = "stat -Lc %s $0; head -c $DMAFILE_BYTES $0 | sha256sum; tail -c +$((DMAFILE_BYTES + 1)) $0 | tr -d '\\0' | wc -c";
        let mut load = temporary.load(&dir, args, &["sh", "-c", script, "{}"]);
        end(&mut load)
    };
    let got = pool();
    let [auto, huge] = ["file", "file --pages huge"].map(run);
    fs::write(POOL, before.to_string()).unwrap();
    let lines = |text: &str| text.lines().map(str::to_string).collect::<Vec<_>>();
    let want = sha256(&file, 0, LEN);
    let auto = lines(&auto.ok().stdout);
    assert_eq!(
        (&auto[0], digests(&auto[1])[0]),
        (&LEN.to_string(), &want[..])
    );
    if got < before + 4 {
        return skip("no huge pages are available");
    }
    let huge = lines(&huge.ok().stdout);
    assert_eq!(
        (&huge[0][..], digests(&huge[1])[0], &huge[2][..]),
        ("6291456", &want[..], "0")
    );
}

#[test]
fn a_snapshot_is_a_folder_with_a_file_for_each_source() {
    let dir = Dir::new();
    let temporary = Temporary::new(&dir);
    let sums = ["a", "b"].map(|name| {
        let bytes = LEN + u64::from(name.as_bytes()[0]);
        sha256(&dir.file(name, bytes), 0, bytes)
    });
    fs::create_dir(dir.path("to")).unwrap();
    dir.run("save --from a=one --from b=two to").ok();
    let script = "cd $0 && sha256sum * && echo $DMAFILE_NAMES";
    let mut load = temporary.load(&dir, "to", &["sh", "-c", script, "{}"]);
    let ended = end(&mut load).ok();
    let want = format!("{}  one\n{}  two\none,two\n", sums[0], sums[1]);
    assert_eq!(ended.stdout, want);
    temporary.gets_empty();
}
