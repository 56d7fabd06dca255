//! `dmafile load MODEL -- COMMAND … {}`: any program can open the path, and nothing of it remains afterwards.

mod common;

use common::sandbox::{any, refuse};
use common::{Dir, MIB, NOBODY, POOL, Running, done, end, eventually, ignoring, is_root};
use common::{memfd, own_mounts, run_as, sha256, skip, start};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, PipeWriter};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LEN: u64 = 5 * MIB + 77;

/// A folder for the folders of links, separate from those of other tests. Not in a [`Dir`], in which any user may
/// write.
struct Temporary(
    PathBuf,
    #[allow(dead_code, reason = "removed when dropped")] tempfile::TempDir,
);

impl Temporary {
    fn new() -> Self {
        let above = tempfile::tempdir().unwrap();
        mode(above.path(), 0o755);
        let path = above.path().canonicalize().unwrap().join("tmp");
        fs::create_dir(&path).unwrap();
        mode(&path, 0o1777);
        Self(path, above)
    }

    /// A command with a path, which runs until the pipe is closed, and the folder of its links.
    fn running(&self, dir: &Dir) -> (Running, PipeWriter, PathBuf) {
        let mut load = self.load(dir, "file", &["sh", "-c", "echo $0; read line; :", "{}"]);
        let (stdin, go) = io::pipe().unwrap();
        let mut running = start(load.stdin(stdin));
        running.until_written("\n");
        let path = PathBuf::from(running.written()[0].trim_end());
        (running, go, path.parent().unwrap().to_path_buf())
    }

    fn names(&self) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// `dmafile load ARGS -- COMMAND`, whose path is in this folder.
    fn load(&self, dir: &Dir, args: &str, command: &[&str]) -> Command {
        let mut load = dir.dmafile(&format!("load {args} --quiet --"));
        self.for_links_of(load.args(command));
        load
    }

    fn for_links_of<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("TMPDIR", &self.0).env_remove("XDG_RUNTIME_DIR")
    }

    fn is_empty(&self) -> bool {
        self.names().is_empty()
    }

    /// A cleanup process removes the folder after COMMAND has ended; nothing waits for that process.
    fn gets_empty(&self) {
        eventually("the folder is gone", || self.is_empty());
    }
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
    dir.file("file", LEN);
    let shown = |runtime: &Path, temporary_folder: &Path| {
        let mut load = dir.dmafile("load file --quiet -- echo {}");
        load.env("XDG_RUNTIME_DIR", runtime)
            .env("TMPDIR", temporary_folder);
        PathBuf::from(end(&mut load).ok().stdout.trim_end())
    };
    let nowhere = dir.path("nowhere");
    let second = temporary.1.path().join("second");
    fs::create_dir(&second).unwrap();
    assert!(shown(&second, &temporary.0).starts_with(&second));
    assert!(shown(&nowhere, &temporary.0).starts_with(&temporary.0));
    assert!(shown(&nowhere, &nowhere).starts_with("/tmp"));
    temporary.gets_empty();
}

#[test]
fn memory_without_a_path_is_refused_before_the_load() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", LEN);
    for (args, status, want) in [
        ("file --to udmabuf", 2, "--to udmabuf has no path for {}"),
        ("file --to heap:system", 2, "use --to memfd"),
        ("file --to anon", 2, "cannot be inherited by COMMAND"),
        ("file --tensor x", 2, "{} needs whole files"),
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
}

/// Sandboxes refuse what is newer than their rules.
#[test]
fn a_path_needs_no_system_call_that_sandboxes_refuse() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    let file = dir.file("file", LEN);
    for errno in [libc::EPERM, libc::ENOSYS] {
        let load = temporary.load(&dir, "file", &["cmp", "{}", file.to_str().unwrap()]);
        end(&mut refuse(load, &any(libc::SYS_pidfd_open), errno)).ok();
        temporary.gets_empty();
    }
}

#[test]
fn without_proc_there_is_no_path() {
    if !is_root() {
        return skip("only root mounts without FUSE");
    }
    let dir = Dir::new();
    dir.file("file", LEN);
    // Not by its descriptor, which is in /proc.
    let mut load = Command::new(env!("CARGO_BIN_EXE_dmafile"));
    load.args(["load", "file", "--", "cat", "{}"]);
    load.current_dir(dir.path(""));
    // SAFETY: system calls only, between fork and exec; all strings are constants.
    unsafe {
        load.pre_exec(|| {
            own_mounts()?;
            let (at, what, none) = (c"/proc".as_ptr(), c"tmpfs".as_ptr(), std::ptr::null());
            done(libc::mount(none, at, what, 0, none.cast()))
        });
    }
    let line = dir.refusal(&mut load, 1);
    let says = "cannot give COMMAND a path: /proc/self/stat: No such file or directory (ENOENT); the proc file system is \
                missing there: mount it, or use DMAFILE_FD";
    assert_eq!(line, says);
}

/// Whoever may write to a folder that the path leads through chooses what COMMAND opens.
#[test]
fn a_path_leads_through_no_folder_of_other_users() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", 5000);
    let other = temporary.1.path().join("other");
    let below = other.join("below");
    fs::create_dir_all(&below).unwrap();
    let folder = |variable: &str, place: &Path, user: Option<u32>| {
        let mut load = temporary.load(&dir, "file", &["echo", "{}"]);
        if let Some(user) = user {
            run_as(&mut load, user);
        }
        // As the environment of another user, which `su` and `sudo --preserve-env` keep.
        load.env("TMPDIR", "/nowhere").env(variable, place);
        let path = PathBuf::from(end(&mut load).ok().stdout.trim_end());
        path.ancestors().nth(2).unwrap().to_path_buf()
    };
    let refused = |place: &Path, user| {
        for variable in ["XDG_RUNTIME_DIR", "TMPDIR"] {
            let used = folder(variable, place, user);
            let all = [Path::new("/tmp"), Path::new("/dev/shm")];
            assert!(all.contains(&&*used), "{}, {user:?}", used.display());
        }
    };
    let used = |place: &Path, user| {
        for variable in ["XDG_RUNTIME_DIR", "TMPDIR"] {
            assert_eq!(folder(variable, place, user), place.canonicalize().unwrap());
        }
    };
    used(&other, None);
    used(&below, None);
    // Anybody may rename what is in it.
    mode(&other, 0o777);
    refused(&other, None);
    refused(&below, None);
    mode(&other, 0o1777);
    used(&other, None);
    used(&below, None);
    // The path is that of the folder, not that of a link, which may be changed.
    symlink(&below, temporary.1.path().join("link")).unwrap();
    used(&temporary.1.path().join("link"), None);
    if !is_root() {
        return skip("only root can give folders to other users");
    }
    let user = Some(NOBODY);
    used(&other, user);
    mode(&other, 0o777);
    refused(&other, user);
    for (bits, owner) in [(0o700, NOBODY), (0o1777, NOBODY), (0o775, 0)] {
        mode(&other, bits);
        chown(&other, Some(owner), Some(NOBODY)).unwrap();
        refused(&other, None);
        refused(&below, None);
    }
    chown(&below, Some(NOBODY), None).unwrap();
    mode(&other, 0o755);
    chown(&other, Some(20_000), Some(20_000)).unwrap();
    refused(&below, user);
}

/// Not even its owner makes the cleanup remove anything by moving the folder.
#[test]
fn nothing_outside_the_folder_is_removed() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", LEN);
    let victim = temporary.1.path().join("victim");
    fs::create_dir_all(victim.join("sub")).unwrap();
    symlink("nowhere", victim.join("link")).unwrap();
    symlink("nowhere", victim.join("sub/link")).unwrap();
    let links = || [victim.join("link"), victim.join("sub/link")].map(|link| link.is_symlink());
    // What is at the name of the folder when COMMAND ends: a link, or a folder with links.
    for is_link in [true, false] {
        let (running, go, folder) = temporary.running(&dir);
        let moved = temporary.0.join("moved");
        fs::rename(&folder, &moved).unwrap();
        if is_link {
            symlink(&victim, &folder).unwrap()
        } else {
            fs::rename(&victim, &folder).unwrap()
        }
        drop(go);
        running.end().ok();
        eventually("the cleanup process has ended", || {
            removers(&folder).is_empty()
        });
        if is_link {
            fs::remove_file(&folder).unwrap()
        } else {
            fs::rename(&folder, &victim).unwrap()
        }
        assert_eq!(links(), [true; 2], "{is_link}");
        // The links of COMMAND are gone, wherever they are.
        assert!(fs::read_dir(&moved).unwrap().next().is_none());
        fs::remove_dir(&moved).unwrap();
    }
    // What COMMAND has put there stays.
    let script =
        "cp $0 ${0%/*}/copy; ln -s x ${0%/*}/link; mkdir -p ${0%/*}/1/2; ln -s x ${0%/*}/1/2/link";
    end(&mut temporary.load(&dir, "file", &["sh", "-c", script, "{}"])).ok();
    eventually("the cleanup process has ended", || {
        removers(&temporary.0).is_empty()
    });
    let folder = temporary.names().into_iter().next().unwrap();
    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|one| one.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["1", "copy"]);
    assert!(folder.join("1/2/link").is_symlink());
}

/// A machine that fails, or the end of a container, also ends the cleanup process.
#[test]
fn the_next_run_removes_what_was_left() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", LEN);
    let next = || {
        end(&mut temporary.load(&dir, "file", &["true", "{}"])).ok();
        eventually("only one is there", || temporary.names().len() < 2);
        temporary.names().into_iter().next()
    };
    let (running, _go, folder) = temporary.running(&dir);
    eventually("the cleanup process is killed", || {
        let all = removers(&folder);
        for process in &all {
            let pid = process.file_name().unwrap().to_str().unwrap();
            // SAFETY: a process that this test has started; it does not end as long as COMMAND runs.
            unsafe { libc::kill(pid.parse().unwrap(), libc::SIGKILL) };
        }
        !all.is_empty()
    });
    eventually("it has ended", || removers(&folder).is_empty());
    // As long as COMMAND runs.
    assert_eq!(next().as_ref(), Some(&folder));
    running.signal(libc::SIGKILL);
    running.end();
    // A folder with another name, or one that others may enter, was not made for this.
    let name = folder.file_name().unwrap().to_str().unwrap();
    let other = temporary.0.join(name.replace("path", "paths"));
    fs::rename(&folder, &other).unwrap();
    assert_eq!(next().as_ref(), Some(&other));
    fs::rename(&other, &folder).unwrap();
    mode(&folder, 0o755);
    assert_eq!(next().as_ref(), Some(&folder));
    assert!(folder.join("file").is_symlink());
    mode(&folder, 0o700);
    next();
    temporary.gets_empty();
}

/// The parent of all orphans: the first process of a container, or one that asked for it.
#[test]
fn command_gets_no_child_even_if_it_adopts_orphans() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", LEN);
    let script = "read children </proc/$$/task/$$/children; echo ${children:-none}; cmp $0 file";
    let command = ["sh", "-c", script, "{}"];
    let mut load = temporary.load(&dir, "file", &command);
    // SAFETY: a system call between fork and exec, after which the attribute stays.
    unsafe {
        load.pre_exec(|| done(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)));
    }
    assert_eq!(end(&mut load).ok().stdout, "none\n");
    if is_root() {
        let mut load = Command::new("unshare");
        load.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--"]);
        load.arg(env!("CARGO_BIN_EXE_dmafile"));
        load.args("load file --quiet --".split(' ')).args(command);
        load.current_dir(dir.path(""));
        assert_eq!(end(temporary.for_links_of(&mut load)).ok().stdout, "none\n");
    } else {
        skip("only root makes PID namespaces");
    }
    assert_eq!(temporary.names().len(), 1);
    end(&mut temporary.load(&dir, "file", &command)).ok();
    temporary.gets_empty();
}

/// As under some daemons; then no status of a child can be read.
#[test]
fn an_ignored_sigchld_stays_ignored() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    dir.file("file", LEN);
    // Whether the child ends before it is waited for is a matter of chance.
    for _ in 0..5 {
        // One program: a shell would wait for its children, too.
        let command = ["grep", "-ah", "SigIgn:", "/proc/self/status", "{}"];
        let mut load = temporary.load(&dir, "file", &command);
        let text = end(ignoring(&mut load, libc::SIGCHLD)).ok().stdout;
        let mask = u64::from_str_radix(text.trim_start_matches("SigIgn:").trim(), 16).unwrap();
        assert_eq!(mask >> (libc::SIGCHLD - 1) & 1, 1, "{text}");
        temporary.gets_empty();
    }
}

#[test]
fn names_are_bytes() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    let name = OsStr::from_bytes(b"caf\xe9 \xff.bin");
    fs::rename(dir.file("file", LEN), dir.path("").join(name)).unwrap();
    let script = r#"cmp "$0" "$1" && printf %s "${0##*/}" >name"#;
    let mut load = dir.dmafile("load --quiet");
    load.arg(name)
        .args(["--", "sh", "-c", script, "{}"])
        .arg(name);
    end(temporary.for_links_of(&mut load)).ok();
    assert_eq!(fs::read(dir.path("name")).unwrap(), name.as_bytes());
}

#[test]
fn a_name_with_a_comma_is_not_in_a_list() {
    let dir = Dir::new();
    let temporary = Temporary::new();
    let model = dir.path("model");
    fs::create_dir(&model).unwrap();
    dmafile_testkit::models::sharded(
        &model,
        &[
            dmafile_testkit::models::tensors("x", 3, 9000),
            dmafile_testkit::models::tensors("y", 2, 7000),
        ],
    );
    let index = model.join("model.safetensors.index.json");
    let shard = fs::read_dir(&model)
        .unwrap()
        .map(|one| one.unwrap().file_name());
    let shard = shard.map(|name| name.into_string().unwrap());
    let shard = shard
        .filter(|name| name.ends_with(".safetensors"))
        .min()
        .unwrap();
    fs::rename(model.join(&shard), model.join("a,b.safetensors")).unwrap();
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace(&shard, "a,b.safetensors")).unwrap();
    // One buffer, and no list.
    end(&mut temporary.load(&dir, "model", &["true"])).ok();
    let line = dir.refusal(&mut temporary.load(&dir, "model", &["true", "{}"]), 1);
    assert!(
        line.contains("a,b.safetensors: the name contains a comma"),
        "{line}"
    );
    assert!(temporary.is_empty());
}

#[test]
fn hugetlb_pages_are_used_only_on_request() {
    if !is_root() {
        return skip("only root changes the pool of huge pages");
    }
    let dir = Dir::alone_with_pool();
    let temporary = Temporary::new();
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
    let temporary = Temporary::new();
    let sums = ["a", "b"].map(|name| {
        let bytes = LEN + u64::from(name.as_bytes()[0]);
        sha256(&dir.file(name, bytes), 0, bytes)
    });
    fs::create_dir(dir.path("to")).unwrap();
    dir.run("save a=one b=two to").ok();
    let script = "cd $0 && sha256sum * && echo $DMAFILE_NAMES";
    let mut load = temporary.load(&dir, "to", &["sh", "-c", script, "{}"]);
    let ended = end(&mut load).ok();
    let want = format!("{}  one\n{}  two\none,two\n", sums[0], sums[1]);
    assert_eq!(ended.stdout, want);
    temporary.gets_empty();
}
