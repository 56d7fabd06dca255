//! `dmafile pins` with a process that pins and locks known memory.

mod common;

use common::{Dir, MIB, end, eventually, is_root, limit, own_user, run_as, skip};
use io_uring::IoUring;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

/// Set for the child process in which [`the_pinning_process`] pins memory.
const PINS: &str = "DMAFILE_TEST_PINS";
/// Slots of its ring; the second one stays empty.
const SLOTS: u32 = 4;
/// Pages of the buffers in the first and the third one.
const BUFFERS: [u64; 2] = [3, 5];
/// Pages that are locked.
const LOCKED: u64 = 7;
/// Its limit on pinned and locked memory together, unless its hard limit is lower.
const LIMIT: u64 = 6 * MIB;

/// An ordinary user, for tests that run as root.
fn user() -> u32 {
    own_user(0)
}

fn page() -> u64 {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) }
        .try_into()
        .unwrap()
}

/// Base pages, all of them allocated.
fn pages(count: u64) -> *mut u8 {
    let len = (count * page()) as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, written within its length and never unmapped.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        // EINVAL without transparent huge pages.
        libc::madvise(at, len, libc::MADV_NOHUGEPAGE);
        at.cast::<u8>().write_bytes(1, len);
        at.cast()
    }
}

/// Not a test, but the process that the tests inspect: a separate process, so that its numbers are
/// exact. It reports each step, and continues at each line that it receives.
#[test]
fn the_pinning_process() {
    if std::env::var_os(PINS).is_none() {
        return;
    }
    let say = |what: &str| writeln!(std::io::stderr(), "{what}").unwrap();
    let lines = &mut std::io::stdin().lines();
    let mut go_on = || drop(lines.next().expect("the test has ended").unwrap());
    let ring = match IoUring::new(2) {
        Ok(ring) => ring,
        Err(error) => return say(&format!("no io_uring: {error}")),
    };
    if let Err(error) = ring.submitter().register_buffers_sparse(SLOTS) {
        return say(&format!("no empty slots: {error}"));
    }
    let memory = BUFFERS.map(pages);
    for (slot, (at, count)) in [0, 2].into_iter().zip(memory.into_iter().zip(BUFFERS)) {
        let iov = libc::iovec {
            iov_base: at.cast(),
            iov_len: (count * page()) as usize,
        };
        // SAFETY: the memory is never unmapped.
        let done = unsafe { ring.submitter().register_buffers_update(slot, &[iov], None) };
        match done {
            Ok(()) => {}
            // Other pins of this user count too.
            Err(error) => return say(&format!("no room below the limit: {error}")),
        }
    }
    let (locked, len) = (pages(LOCKED).cast(), (LOCKED * page()) as usize);
    // SAFETY: the memory is never unmapped.
    assert_eq!(unsafe { libc::mlock(locked, len) }, 0);
    let addresses = memory.map(|at| at as u64);
    say(&json!({"addresses": addresses, "limit": memlock()}).to_string());
    go_on();
    ring.submitter().unregister_buffers().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(locked, len) }, 0);
    say("released");
    go_on();
}

/// The soft limit of this process on locked memory; None means no limit.
fn memlock() -> Option<u64> {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes one limit to memory for one.
    let done = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limits) };
    assert_eq!(done, 0);
    Some(limits.rlim_cur).filter(|&limit| limit != libc::RLIM_INFINITY)
}

/// Whether this is root with the needed capabilities in the initial user namespace, not in a container.
fn rules() -> bool {
    let (ipc_lock, sys_ptrace) = (1 << 14, 1 << 19);
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
    let users = fs::read_link("/proc/self/ns/user");
    is_root()
        && mask & ipc_lock != 0
        && mask & sys_ptrace != 0
        && users.is_ok_and(|link| link.as_os_str() == "user:[4026531837]")
}

/// [`the_pinning_process`]; dropping this kills it.
struct Pinning {
    child: Child,
    stdin: ChildStdin,
    said: BufReader<std::process::ChildStderr>,
    /// The addresses of its buffers, and its limit.
    facts: Value,
}

impl Pinning {
    /// A process of user `uid`; None, and the test is skipped, if it cannot pin.
    fn start(uid: u32) -> Option<Self> {
        // Another user may lack permission to enter the build folder.
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--exact", "the_pinning_process", "--nocapture"])
            .env(PINS, "1")
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if uid != 0 {
            run_as(&mut command, uid);
        }
        let mut child = limit(&mut command, libc::RLIMIT_MEMLOCK, LIMIT)
            .spawn()
            .unwrap();
        let mut pinning = Self {
            stdin: child.stdin.take().unwrap(),
            said: BufReader::new(child.stderr.take().unwrap()),
            child,
            facts: Value::Null,
        };
        let line = pinning.hear();
        if line.starts_with("no ") {
            skip(&line);
            return None;
        }
        pinning.facts = serde_json::from_str(&line).unwrap();
        Some(pinning)
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "it died: {line}");
        line
    }

    fn release(&mut self) {
        writeln!(self.stdin).unwrap();
        assert_eq!(self.hear(), "released\n");
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn buffers(&self) -> Value {
        let addresses = self.facts["addresses"].as_array().unwrap();
        let buffers = addresses.iter().zip(BUFFERS);
        buffers
            .map(|(address, count)| json!({"address": address, "bytes": count * page()}))
            .collect()
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

/// `dmafile pins ARGS --json`, run by user `uid`.
fn pins(args: &str, uid: u32) -> Value {
    let mut command = Dir::new().dmafile(&format!("pins {args} --json"));
    command.current_dir("/");
    if uid != 0 {
        run_as(&mut command, uid);
    }
    end(&mut command).ok().json()
}

/// The one process of `dmafile pins PID`.
fn process(pins: &Value) -> Value {
    let processes = pins["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 1, "{pins}");
    processes[0].clone()
}

#[test]
fn pins_of_a_process_are_shown_until_it_releases_them() {
    let Some(mut pinning) = Pinning::start(user()) else {
        return;
    };
    let pid = pinning.pid().to_string();
    let json = pins(&pid, user());
    let shown = process(&json);
    let pinned = BUFFERS.iter().sum::<u64>() * page();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let name = status.lines().next().unwrap().strip_prefix("Name:\t");
    assert_eq!(shown["pid"], pinning.pid());
    assert_eq!(shown["name"].as_str(), name);
    assert_eq!(shown["pinned"], pinned);
    assert_eq!(shown["locked"], LOCKED * page());
    assert_eq!(shown["limit"], pinning.facts["limit"]);
    let rings = shown["rings"].as_array().unwrap();
    assert_eq!(rings.len(), 1, "{shown}");
    assert_eq!(rings[0]["count"], 2);
    assert_eq!(rings[0]["bytes"], pinned);
    assert_eq!(rings[0]["buffers"], pinning.buffers());
    assert_eq!(json["unreadable"], 0);

    let text = end(run_as(
        &mut Dir::new().dmafile(&format!("pins {pid}")),
        user(),
    ))
    .ok();
    assert_eq!(text.stderr, "");
    let rows: Vec<_> = text.stdout.lines().map(str::trim_start).collect();
    let row = |by: &str| {
        let ours = rows
            .iter()
            .filter(|row| row.starts_with(&format!("{pid} ")));
        let mut of_kind = ours.filter(|row| row.contains(by));
        let row = of_kind
            .next()
            .unwrap_or_else(|| panic!("no {by} in {text:?}"));
        assert!(of_kind.next().is_none(), "{text:?}");
        row.split_whitespace().take(4).collect::<Vec<_>>().join(" ")
    };
    let words = |bytes: u64| format!("{pid} {} {:.2} KiB", shown["uid"], bytes as f64 / 1024.0);
    assert_eq!(row("io_uring buffer"), words(pinned));
    assert_eq!(row("VmPin"), words(pinned));
    assert_eq!(row("VmLck"), words(LOCKED * page()));
    let held: Vec<_> = json["holders"].as_array().unwrap().iter().collect();
    let kinds: Vec<_> = held.iter().map(|one| (&one["by"], &one["bytes"])).collect();
    assert_eq!(
        kinds,
        [
            (&json!("io-uring"), &json!(pinned)),
            (&json!("pinned"), &json!(pinned)),
            (&json!("locked"), &json!(LOCKED * page())),
        ]
    );
    assert!(held.iter().all(|one| one["pid"] == pinning.pid()), "{json}");

    pinning.release();
    // Older kernels unpin some time after the call returns.
    eventually("unpinned", || process(&pins(&pid, user()))["pinned"] == 0);
    let shown = process(&pins(&pid, user()));
    assert_eq!(shown["locked"], 0);
    let ring = &shown["rings"][0];
    assert_eq!((&ring["count"], &ring["bytes"]), (&json!(0), &json!(0)));
    assert_eq!(ring["buffers"], json!([]));
}

#[test]
fn without_a_pid_all_pinning_processes_and_their_users_are_listed() {
    let (Some(mut one), Some(two)) = (Pinning::start(user()), Pinning::start(user())) else {
        return;
    };
    let json = pins("", user());
    let listed = |json: &Value, pid: u32| {
        let processes = json["processes"].as_array().unwrap();
        processes.iter().find(|shown| shown["pid"] == pid).cloned()
    };
    for pinning in [&one, &two] {
        let shown = listed(&json, pinning.pid()).unwrap();
        assert_eq!(shown["rings"][0]["buffers"], pinning.buffers());
    }
    // One limit for both: registered buffers are counted by user.
    let both = 2 * BUFFERS.iter().sum::<u64>() * page();
    let uid = listed(&json, one.pid()).unwrap()["uid"].clone();
    let of_user = |json: &Value| {
        let users = json["users"].as_array().unwrap();
        users.iter().find(|user| user["uid"] == uid).cloned()
    };
    assert!(of_user(&json).unwrap()["pinned"].as_u64().unwrap() >= both);
    let json = pins(&one.pid().to_string(), user());
    assert!(of_user(&json).unwrap()["pinned"].as_u64().unwrap() >= both);
    if is_root() {
        // `run_as` dropped CAP_IPC_LOCK, so all pins are charged.
        assert!(of_user(&json).unwrap()["charged"].as_u64().unwrap() >= both);
    }
    one.release();
    eventually("not listed", || {
        let json = pins("", user());
        listed(&json, one.pid()).is_none() && listed(&json, two.pid()).is_some()
    });
}

#[test]
fn unreadable_processes_are_counted_and_their_public_data_is_shown() {
    let own;
    let pid = if is_root() {
        let Some(pinning) = Pinning::start(0) else {
            return;
        };
        own = pinning;
        own.pid()
    } else if fs::read_link("/proc/1/fd/0").is_ok() {
        return skip("no process of another user");
    } else {
        1
    };
    let json = pins(&pid.to_string(), user());
    let shown = process(&json);
    assert_eq!(shown["rings"], Value::Null);
    assert_eq!(json["unreadable"], 1);
    if is_root() {
        assert_eq!(shown["pinned"], BUFFERS.iter().sum::<u64>() * page());
        assert_eq!(shown["locked"], LOCKED * page());
    }
    let remark = "1 process could not be inspected; run as root";
    for (args, remark) in [
        (format!("pins {pid}"), remark),
        ("pins".into(), "; run as root"),
    ] {
        let text = end(run_as(&mut Dir::new().dmafile(&args), user())).ok();
        assert!(text.stdout.contains(remark), "{text:?}");
    }
    assert!(pins("", user())["unreadable"].as_u64().unwrap() >= 1);
}

#[test]
fn root_sees_all_processes_and_whether_a_limit_applies_to_them() {
    if !rules() {
        return skip("not root, or with less than all of its capabilities");
    }
    for (uid, lifted) in [(0, true), (user(), false)] {
        let Some(pinning) = Pinning::start(uid) else {
            return;
        };
        let json = pins(&pinning.pid().to_string(), 0);
        let shown = process(&json);
        assert_eq!(shown["uid"], uid);
        assert_eq!(shown["rings"][0]["buffers"], pinning.buffers());
        assert_eq!(shown["cap_ipc_lock"], lifted);
        let user = &json["users"][0];
        assert_eq!(user["uid"], uid);
        let charged = user["charged"].as_u64().unwrap();
        let pinned = user["pinned"].as_u64().unwrap();
        let own = BUFFERS.iter().sum::<u64>() * page();
        assert!(
            if lifted {
                charged + own <= pinned
            } else {
                charged >= own
            },
            "{json}"
        );
    }
}

/// This root has every capability, but only in its own user namespace.
#[test]
fn limits_apply_to_the_root_of_a_user_namespace() {
    let dir = Dir::new();
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "sh", "-c", script]);
        command.current_dir(dir.path("")).stdin(Stdio::null());
        limit(&mut command, libc::RLIMIT_MEMLOCK, 64 << 10);
        command
    };
    match inside("grep -q 'CapEff:.*f$' /proc/self/status").status() {
        Ok(status) if status.success() => {}
        failed => return skip(&format!("no user namespace: {failed:?}")),
    }
    let binary = env!("CARGO_BIN_EXE_dmafile");
    let json = end(&mut inside(&format!("exec {binary} pins $$ --json")))
        .ok()
        .json();
    assert_eq!(process(&json)["cap_ipc_lock"], false);
    let json = end(&mut inside(&format!("{binary} doctor --json")))
        .ok()
        .json();
    let mut checks = json["checks"].as_array().unwrap().iter();
    let memlock = checks.find(|check| check["name"] == "memlock").unwrap();
    assert_eq!(memlock["health"], "fair", "{memlock}");
}

#[test]
fn hidepid_is_reported() {
    let dir = Dir::new();
    // A separate /proc, because the option applies to all mounts of the same one. Its first process,
    // the shell, stays root.
    let ask = |args: &str| {
        let script = "mount -o remount,hidepid=2 /proc && exec 3<\"$0\" || exit 77
            setpriv --reuid 65534 --regid 65534 --clear-groups /proc/self/fd/3 pins $1; exit $?";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"])
            .args([script, env!("CARGO_BIN_EXE_dmafile"), args])
            .current_dir(dir.path(""))
            .stdin(Stdio::null());
        end(&mut command)
    };
    if !rules() {
        return skip("not root, or with less than all of its capabilities");
    }
    let json = ask("--json");
    if json.status.code() == Some(77) {
        return skip(&format!("no hidepid: {}", json.stderr));
    }
    let json = json.ok().json();
    assert_eq!(
        (&json["hidden"], &json["unreadable"]),
        (&true.into(), &0.into())
    );
    let text = ask("").ok().stdout;
    assert!(
        text.contains("/proc hides processes of other users"),
        "{text}"
    );
    let why = "cannot inspect: process 1: Operation not permitted (EPERM); run as root";
    assert_eq!(ask("1").line(1), why);
    assert_eq!(pins("", 0)["hidden"], false);
}

#[test]
fn a_pid_without_a_process_is_an_error() {
    let dir = Dir::new();
    // Linux assigns no PID above 4194304 (PID_MAX_LIMIT).
    for pid in [0, 4_194_305, u32::MAX] {
        for json in ["", "--json"] {
            let line = dir.refusal(&mut dir.dmafile(&format!("pins {pid} {json}")), 1);
            assert_eq!(
                line,
                format!(
                    "cannot inspect: process {pid}: No such process (ESRCH); \
                     list those that pin memory: dmafile pins"
                )
            );
        }
    }
}

#[test]
fn system_counters_equal_those_in_proc_vmstat() {
    let counter = |name: &str| {
        let text = fs::read_to_string("/proc/vmstat").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().parse::<u64>().unwrap())
    };
    let names = ["nr_foll_pin_acquired ", "nr_foll_pin_released "];
    let before = names.map(counter);
    let json = pins("", user());
    let after = names.map(counter);
    let system = &json["system"];
    for (index, key) in ["acquired", "released"].into_iter().enumerate() {
        let between = before[index].zip(after[index]).map(|(least, most)| {
            let value = system[key].as_u64().unwrap();
            (least..=most).contains(&value)
        });
        assert!(between.unwrap_or(system[key].is_null()), "{system}");
    }
    let number = |key: &str| system[key].as_u64();
    let difference = number("acquired")
        .zip(number("released"))
        .map(|(acquired, released)| acquired.saturating_sub(released));
    assert_eq!(number("pages"), difference);
    assert_eq!(number("bytes"), difference.map(|pages| pages * page()));
}

#[test]
fn system_counters_include_the_pins_of_a_process() {
    let Some(_pinning) = Pinning::start(user()) else {
        return;
    };
    if pins("", user())["system"]["pages"].is_null() {
        return skip("this kernel does not count pins");
    }
    // CPUs add their counts to the global ones about once a second.
    eventually("counted", || {
        let pages = pins("", user())["system"]["pages"].as_u64().unwrap();
        pages >= BUFFERS.iter().sum::<u64>()
    });
}
