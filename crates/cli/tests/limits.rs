//! Resource limits: a load stays within them, or names the one that it exceeds.

mod common;

use common::{
    Dir, KIB, MIB, NOBODY, POOL, done, end, hard_limit, limit, own_user, reads_directly, run_as,
    sha256, skip,
};
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

#[test]
fn low_memlock_falls_back_to_unregistered_buffers() {
    let dir = Dir::new();
    let file = dir.file("file", 20 * MIB);
    if !reads_directly(&dir) {
        return;
    }
    // Memory locked by other processes of the same user counts too, so this user has no others.
    let uid = own_user(2);
    let run = |args: &str, locked| {
        let mut command = dir.load(&format!("file --io direct {args}"));
        limit(&mut command, libc::RLIMIT_MEMLOCK, locked);
        let loaded = dir.loaded(run_as(&mut command, uid));
        assert_eq!(loaded.digest, sha256(&file, 0, 20 * MIB), "{args}");
        loaded
    };
    for locked in [0, 256 * KIB] {
        let loaded = run("", locked);
        let few = format!(
            "not uring direct registered: 4 windows of {} KiB exceed the limit on pinned \
             memory, {} KiB (RLIMIT_MEMLOCK)",
            (32 * MIB + 2 * huge_page()) / KIB,
            locked / KIB
        );
        // Some kernels count the ring itself.
        let none = "not uring direct: io_uring is refused (ENOMEM)";
        let reasons = loaded.reasons();
        let told = reasons.contains(&few) || (locked == 0 && reasons.contains(none));
        assert!(told, "{reasons}");
    }
    // Buffers that fit into the limit are registered, from the first window to the last.
    for (args, locked) in [
        ("--block 4K --queue-depth 2 --pages base", 256 * KIB),
        ("--block 64K --queue-depth 4 --pages base", 2 * MIB),
    ] {
        let loaded = run(&format!("--method uring {args}"), locked);
        let reasons = loaded.reasons();
        assert!(
            reasons.contains("method uring direct registered: "),
            "{args}: {reasons}"
        );
        assert!(!reasons.contains("ended"), "{args}: {reasons}");
    }
}

/// The size of a transparent huge page, or of a base page if the kernel has none.
fn huge_page() -> u64 {
    let size = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    size.map_or(4 * KIB, |size| size.trim().parse().unwrap())
}

#[test]
fn a_low_limit_on_open_files_loads_or_is_named() {
    let dir = Dir::new();
    let file = dir.file("file", 9 * MIB);
    let digest = sha256(&file, 0, 9 * MIB);
    let (mut loads, mut refusals) = (0, 0);
    // After stdin, stdout and stderr, the dynamic loader needs one.
    for files in 4..20 {
        for args in ["", "--method bounce", "--method uring", "--to anon"] {
            let mut command =
                dir.dmafile(&format!("load file --quiet --json --verify sha256 {args}"));
            let ended = end(hard_limit(&mut command, libc::RLIMIT_NOFILE, files));
            if ended.status.success() {
                loads += 1;
                assert_eq!(ended.json()["verify"]["digest"], *digest);
                continue;
            }
            refusals += 1;
            let line = ended.line(1);
            assert!(line.contains("(EMFILE)"), "{files} {args}: {line}");
            assert_eq!(dir.names(), ["file"]);
        }
    }
    assert!(
        loads > 20 && refusals > 5,
        "{loads} loads, {refusals} refusals"
    );
    let mut command = dir.dmafile("load file --quiet --io buffered --method threads");
    assert_eq!(
        dir.refusal(hard_limit(&mut command, libc::RLIMIT_NOFILE, 3 + 1), 1),
        "cannot create the buffer: memfd, 9437184 bytes: Too many open files (EMFILE); raise the \
         limit on open files: ulimit -n"
    );
}

/// A model of this many files; returns the tensors of each.
fn shards(dir: &Dir, count: u64) -> Vec<Vec<dmafile_testkit::models::Written>> {
    fs::create_dir(dir.path("model")).unwrap();
    let shard = |number| dmafile_testkit::models::tensors(&format!("shard{number}"), 2, 3000);
    let shards: Vec<_> = (0..count).map(shard).collect();
    dmafile_testkit::models::sharded(&dir.path("model"), &shards);
    shards
}

#[test]
fn more_files_than_the_soft_limit_are_loaded_and_command_gets_that_limit() {
    let dir = Dir::new();
    let count = 90;
    shards(&dir, count);
    let few = |mut command: Command| {
        limit(&mut command, libc::RLIMIT_NOFILE, 40);
        end(&mut command).ok()
    };
    let load = |args: &str| dir.dmafile(&format!("load model --quiet {args}"));
    few(load(""));
    few(dir.dmafile("show model"));
    // One descriptor, below the limit.
    let mut command = load("--");
    command.args(["sh", "-c", "ulimit -Sn"]);
    assert_eq!(few(command).stdout, "40\n");
    // The limit is below the numbers of the inherited descriptors: with it, COMMAND could not open a file.
    let mut command = load("--");
    command.args([
        "sh",
        "-c",
        "cd {} && sha256sum *.safetensors && cat /dev/null",
    ]);
    let sums = few(command).stdout;
    let files: Vec<_> = sums
        .lines()
        .map(|line| line.split_once("  ").unwrap())
        .collect();
    assert_eq!(files.len() as u64, count);
    for (sum, name) in files {
        let path = dir.path("model").join(name);
        assert_eq!(sum, sha256(&path, 0, fs::metadata(&path).unwrap().len()));
    }
}

#[test]
fn more_files_than_the_soft_limit_are_held_and_taken() {
    let dir = Dir::new();
    shards(&dir, 90);
    fs::create_dir(dir.path("run")).unwrap();
    fs::set_permissions(dir.path("run"), Permissions::from_mode(0o700)).unwrap();
    let few = |args: &str| {
        let mut command = dir.dmafile(args);
        limit(&mut command, libc::RLIMIT_NOFILE, 40);
        command
    };
    let mut holder = common::start(&mut few("hold model --name m --socket run/socket"));
    holder.until_written("\n");
    let taken = end(&mut few("take m --socket run/socket --json"))
        .ok()
        .json();
    assert_eq!(taken["files"].as_array().unwrap().len(), 90);
    end(&mut few("release m --socket run/socket")).ok();
    holder.end().ok();
}

#[test]
fn files_with_room_for_one_descriptor_each_are_read_through_the_page_cache() {
    let dir = Dir::new();
    shards(&dir, 90);
    let run = |args: &str, most| {
        let mut command = dir.dmafile(args);
        end(hard_limit(&mut command, libc::RLIMIT_NOFILE, most))
    };
    let ended = run("load model --quiet --json", 180).ok();
    let why = "90 files need two descriptors each for that, and this process may have 180 (RLIMIT_NOFILE)";
    assert!(common::reasons(&ended.json()).contains(why), "{ended:?}");
    let line = run("load model --quiet", 80).line(1).to_string();
    assert!(
        line.ends_with("(EMFILE); raise the limit on open files: ulimit -n"),
        "{line}"
    );
}

#[test]
fn a_low_limit_on_address_space_loads_or_is_named() {
    let dir = Dir::new();
    let file = dir.file("file", 64 * MIB);
    let digest = sha256(&file, 0, 64 * MIB);
    // Below this the kernel cannot even map the program, whose size depends on how it was built.
    let starts = |mib: &u64| {
        let mut command = dir.dmafile("--version");
        end(limit(&mut command, libc::RLIMIT_AS, mib * MIB))
            .status
            .success()
    };
    let program = (1..=16).map(|n| 8 * n).find(starts).unwrap();
    let mut refusals = 0;
    for mib in [0, 8, 24, 40, 48, 56, 72, 104, 232, 1000].map(|more| program + more) {
        for args in ["", "--method threads", "--method bounce", "--verify crc32c"] {
            let mut command = dir.load(&format!("file --quiet --pages thp {args}"));
            let ended = end(limit(&mut command, libc::RLIMIT_AS, mib * MIB));
            if ended.status.success() {
                assert_eq!(dir.handed(&ended).digest, digest, "{mib} {args}");
                continue;
            }
            refusals += 1;
            let line = ended.line(1);
            assert!(
                line.contains("(ENOMEM)") || line.contains("(EAGAIN)"),
                "{mib} {args}: {line}"
            );
            assert_eq!(dir.names(), ["file"]);
        }
    }
    assert!((12..40).contains(&refusals), "{refusals} refusals");
    let most = (program + 16).min(63) * MIB;
    for kind in ["memfd", "anon"] {
        let mut command = dir.dmafile(&format!("load file --quiet --to {kind} --pages base"));
        assert_eq!(
            dir.refusal(limit(&mut command, libc::RLIMIT_AS, most), 1),
            format!(
                "cannot create the buffer: {kind}, 67108864 bytes: it exceeds the limit on \
                 address space, {most} bytes (ENOMEM); raise it: ulimit -v"
            )
        );
    }
}

#[test]
fn a_limit_on_file_size_is_an_error_without_a_signal() {
    let dir = Dir::new();
    let file = dir.file("file", 9 * MIB);
    let run = |args: &str, most| {
        let mut command = dir.dmafile(&format!("load file --quiet {args}"));
        limit(&mut command, libc::RLIMIT_FSIZE, most);
        command
    };
    for method in common::METHODS {
        assert_eq!(
            dir.refusal(&mut run(&format!("--method {method}"), 9 * MIB - 1), 1),
            "cannot create the buffer: memfd, 9437184 bytes: it exceeds the limit on file size \
             (EFBIG); raise it: ulimit -f"
        );
    }
    end(&mut run("--to anon", MIB)).ok();
    let mut command = dir.load("file");
    let loaded = dir.loaded(limit(&mut command, libc::RLIMIT_FSIZE, 9 * MIB));
    assert_eq!(loaded.digest, sha256(&file, 0, 9 * MIB));
    for option in ["json", "trace"] {
        let args = format!("--to anon --{option}=out.json");
        assert_eq!(
            dir.refusal(&mut run(&args, 100), 1),
            "cannot write: out.json: File too large (EFBIG)"
        );
    }
}

#[test]
fn a_memfd_above_the_limit_on_file_size_causes_no_signal() {
    let dir = Dir::new();
    dir.file("file", 2 * MIB);
    for method in common::METHODS {
        let args = format!("load file --quiet --to fd:0 --method {method}");
        let mut command = dir.dmafile(&args);
        command.stdin(common::memfd(3 * MIB));
        let ended = end(limit(&mut command, libc::RLIMIT_FSIZE, MIB));
        match ended.status.code() {
            Some(0) => {}
            _ => assert!(ended.line(1).contains("(EFBIG)"), "{method}: {ended:?}"),
        }
    }
}

#[test]
fn a_load_works_when_no_thread_can_be_created() {
    let dir = Dir::new();
    let file = dir.file("file", 9 * MIB);
    let digest = sha256(&file, 0, 9 * MIB);
    for args in common::METHODS
        .map(|method| format!("--method {method}"))
        .into_iter()
        .chain([
            "--io buffered".to_string(),
            "--allocation before".to_string(),
            format!("--verify sha256={digest}"),
            format!("--method threads --verify sha256={digest}"),
        ])
    {
        let mut command = dir.dmafile(&format!("load file --quiet {args}"));
        common::evict(&File::open(&file).unwrap());
        // This COMMAND needs no second process.
        command.args(["--", "sh", "-c", "exec sha256sum /proc/self/fd/$DMAFILE_FD"]);
        // This user has no other process.
        run_as(&mut command, own_user(1));
        let ended = end(limit(&mut command, libc::RLIMIT_NPROC, 1)).ok();
        assert!(ended.stdout.starts_with(&digest), "{args}: {ended:?}");
    }
}

#[test]
fn a_save_works_when_no_thread_can_be_created() {
    let dir = Dir::new();
    let file = dir.file("file", 9 * MIB);
    let digest = sha256(&file, 0, 9 * MIB);
    // Another user writes there.
    fs::set_permissions(dir.path("."), Permissions::from_mode(0o777)).unwrap();
    for args in [
        "",
        "--method uring",
        "--method threads",
        "--method bounce",
        "--io buffered",
        "--verify sha256=",
        "--method threads --verify sha256=",
        "--method bounce --verify sha256=",
    ] {
        let args = args.replace("sha256=", &format!("sha256={digest}"));
        let mut command = dir.dmafile(&format!("save fd:0 new --quiet {args}"));
        let memory = common::memfd(9 * MIB);
        std::os::unix::fs::FileExt::write_all_at(&memory, &fs::read(&file).unwrap(), 0).unwrap();
        command.stdin(memory);
        run_as(&mut command, own_user(3));
        end(limit(&mut command, libc::RLIMIT_NPROC, 1)).ok();
        let saved = dir.path("new");
        assert_eq!(sha256(&saved, 0, 9 * MIB), digest, "{args}");
        fs::remove_file(saved).unwrap();
    }
}

fn pool() -> u64 {
    fs::read_to_string(POOL).unwrap().trim().parse().unwrap()
}

/// A larger pool; it gets its old size back when this is dropped.
struct Grown(u64);

impl Grown {
    /// None without permission, or if memory is too fragmented.
    fn by(pages: u64) -> Option<Self> {
        let before = pool();
        fs::write(POOL, (before + pages).to_string()).ok()?;
        let grown = Self(before);
        (pool() == before + pages).then_some(grown)
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        fs::write(POOL, self.0.to_string()).unwrap();
    }
}

#[test]
fn a_hugetlb_pool_that_is_too_small_is_named_and_auto_does_not_use_it() {
    let dir = Dir::alone_with_pool();
    // Data at both ends, and a hole between them that is larger than the pool: it needs pool pages too.
    let size = pool() * 2 * MIB + 64 * MIB;
    let file = dir.file("file", MIB);
    let handle = File::options().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&handle, b"the end", size - 7).unwrap();
    common::evict(&handle);
    let page = fs::read_to_string("/proc/meminfo").unwrap();
    if !page.contains("Hugepagesize:       2048 kB") {
        return skip("huge pages of another size than 2 MiB");
    }
    for kind in ["memfd", "anon"] {
        assert_eq!(
            dir.refuses(&format!("file --quiet --pages huge --to {kind}"), 1),
            format!(
                "cannot create the buffer: {kind}, {size} bytes: the hugetlb pool is too small \
                 for it (ENOMEM); enlarge it: sysctl vm.nr_hugepages=N, or use --pages thp"
            )
        );
    }
    let loaded = dir.loaded(&mut dir.load("file --pages auto"));
    assert_eq!(loaded.digest, sha256(&file, 0, size));
    assert_ne!(loaded.report["pages"], "huge");
}

#[test]
fn a_hugetlb_pool_with_enough_pages_is_used() {
    let dir = Dir::alone_with_pool();
    let Some(_grown) = Grown::by(16) else {
        return skip("the pool of huge pages cannot be grown");
    };
    let size = 20 * MIB + 5;
    let file = dir.file("file", size);
    for args in [
        "--pages huge",
        "--pages auto",
        "--pages huge --method threads",
        "--pages huge --method bounce",
        "--pages huge --io buffered",
        "--pages huge --offset 12345",
    ] {
        let loaded = dir.loaded(&mut dir.load(&format!("file {args}")));
        let offset = if args.contains("offset") { 12345 } else { 0 };
        assert_eq!(
            loaded.digest,
            sha256(&file, offset, size - offset),
            "{args}"
        );
        assert_eq!(loaded.report["pages"], "huge", "{args}");
    }
    let mut command = dir.load("file --pages auto");
    let loaded = dir.loaded(run_as(&mut command, NOBODY));
    assert_eq!(loaded.digest, sha256(&file, 0, size), "an ordinary user");
    let mut command = dir.dmafile("load file --to fd:0 --json");
    let memfd = common::huge_memfd(22 * MIB);
    command.stdin(memfd.try_clone().unwrap());
    assert_eq!(end(&mut command).ok().json()["pages"], "huge");
    let filled = format!("/proc/{}/fd/{}", std::process::id(), memfd.as_raw_fd());
    let filled = PathBuf::from(filled);
    assert_eq!(sha256(&filled, 0, size), sha256(&file, 0, size));
}

/// A cgroup that allows less of the pool than the pool holds; removed when dropped.
struct PoolLimit {
    group: PathBuf,
    /// The file by which the controller was enabled, if it was.
    switched: Option<PathBuf>,
}

impl PoolLimit {
    /// None without permission to make one.
    fn new(bytes: u64) -> Option<Self> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let has = |file: PathBuf| fs::read_to_string(file).is_ok_and(|on| on.contains("hugetlb"));
        let root = roots
            .into_iter()
            .find(|root| has(root.join("cgroup.controllers")))?;
        let control = root.join("cgroup.subtree_control");
        let on = has(control.clone());
        let mut limit = Self {
            group: root.join(format!("dmafile-pool-{}", std::process::id())),
            switched: None,
        };
        if !on {
            fs::write(&control, "+hugetlb").ok()?;
            limit.switched = Some(control);
        }
        fs::create_dir(&limit.group).ok()?;
        fs::write(limit.group.join("hugetlb.2MB.max"), bytes.to_string()).ok()?;
        Some(limit)
    }
}

impl Drop for PoolLimit {
    fn drop(&mut self) {
        // As for a memory cgroup.
        let _ = fs::remove_dir(&self.group);
        if let Some(control) = &self.switched {
            let _ = fs::write(control, "-hugetlb");
        }
    }
}

#[test]
fn auto_does_not_use_hugetlb_pages_that_a_cgroup_forbids() {
    let dir = Dir::alone_with_pool();
    let (Some(_grown), Some(limit)) = (Grown::by(16), PoolLimit::new(8 * MIB)) else {
        return skip("no pool of huge pages, or no cgroup that limits it");
    };
    let file = dir.file("file", 20 * MIB);
    let confined = |mut command: Command, hidden| {
        confine(&mut command, &limit.group);
        if hidden {
            hide_cgroups(&mut command);
        }
        command
    };
    for to in ["memfd", "anon"] {
        // `auto` sees the limit and does not use the pool.
        let mut command = confined(dir.dmafile(&format!("load file --json --to {to}")), false);
        assert_ne!(end(&mut command).ok().json()["pages"], "huge");
        // In a container, the limit is only met when the pages are allocated.
        let mut command = confined(
            dir.dmafile(&format!("load file --quiet --to {to} --pages huge")),
            true,
        );
        let line = dir.refusal(&mut command, 1);
        let middle = "a cgroup limits hugetlb pages to less (EFAULT); raise its hugetlb limit";
        assert!(line.contains(middle), "{line}");
    }
    fs::write(limit.group.join("hugetlb.2MB.max"), "0").unwrap();
    let mut command = confined(dir.load("file"), true);
    let loaded = dir.loaded(&mut command);
    assert_eq!(loaded.digest, sha256(&file, 0, 20 * MIB));
    let reasons = loaded.reasons();
    assert!(reasons.contains("no hugetlb pages: "), "{reasons}");
}

/// Their pages are allocated by what receives the bytes: the kernel, or this process, which decrypts them.
#[cfg(feature = "remote")]
#[test]
fn objects_are_received_into_pages_of_the_pool_that_a_cgroup_may_refuse() {
    use dmafile_testkit::server::Server;

    let dir = Dir::alone_with_pool();
    let (Some(_grown), Some(limit)) = (Grown::by(16), PoolLimit::new(64 * MIB)) else {
        return skip("no pool of huge pages, or no cgroup that limits it");
    };
    let size = 20 * MIB + 777;
    let file = dir.file("file", size);
    // The page that is refused is the last one, of which the object fills less than a base page.
    let tail = dir.file("tail", 2 * MIB + 777);
    let (secure, certificate) = Server::with_tls("localhost");
    for server in [&Server::plain(), &secure] {
        server.put("/file", fs::read(&file).unwrap());
        server.put("/tail", fs::read(&tail).unwrap());
        let command = |object: &str, bytes: u64| {
            fs::write(limit.group.join("hugetlb.2MB.max"), bytes.to_string()).unwrap();
            let mut command = dir.dmafile("load");
            command.arg(server.url(object));
            command.args(["--quiet", "--pages=huge", "--json=report"]);
            command.args([
                "--",
                "sh",
                "-c",
                "head -c $DMAFILE_BYTES <&$DMAFILE_FD | sha256sum",
            ]);
            command.env("SSL_CERT_FILE", certificate.path());
            confine(&mut command, &limit.group);
            hide_cgroups(&mut command);
            command
        };
        let ended = end(&mut command("/file", 64 * MIB));
        assert!(
            ended.stdout.starts_with(&sha256(&file, 0, size)),
            "{ended:?}"
        );
        let report = fs::read_to_string(dir.path("report")).unwrap();
        assert!(report.contains("\"choice\":\"in-read\""), "{report}");
        for (object, bytes) in [("/file", 8 * MIB), ("/tail", 2 * MIB)] {
            let line = dir.refusal(&mut command(object, bytes), 1);
            let middle = "a cgroup limits hugetlb pages to less (EFAULT); raise its hugetlb limit";
            assert!(line.contains(middle), "{line}");
        }
    }
}

/// Makes a command run without a view of cgroups.
fn hide_cgroups(command: &mut Command) {
    // SAFETY: system calls between fork and exec; all strings are constants.
    unsafe {
        command.pre_exec(|| {
            common::own_mounts()?;
            let none = std::ptr::null();
            let (at, what) = (c"/sys/fs/cgroup".as_ptr(), c"tmpfs".as_ptr());
            done(libc::mount(none, at, what, 0, none.cast()))
        });
    }
}

/// A memory cgroup below that of this process, removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    /// None without permission to make one.
    fn new(limit: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let place = |line: &str| {
            let (_, rest) = line.split_once(':')?;
            let (root, file, path) = match rest.split_once(':')? {
                ("memory", path) => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", path),
                ("", path) => ("/sys/fs/cgroup", "memory.max", path),
                _ => return None,
            };
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("dmafile-test-{}-{number}", std::process::id());
            let own = Path::new(root).join(path.trim_start_matches('/'));
            let group = Self(own.join(name));
            fs::create_dir(&group.0).ok()?;
            fs::write(group.0.join(file), limit.to_string()).ok()?;
            Some(group)
        };
        own.lines().find_map(place)
    }
}

/// Makes a command run in a cgroup.
fn confine(command: &mut Command, group: &Path) {
    let procs = File::options()
        .write(true)
        .open(group.join("cgroup.procs"))
        .unwrap();
    // SAFETY: one system call between fork and exec; the file is open.
    unsafe {
        command.pre_exec(
            move || match libc::write(procs.as_raw_fd(), c"0".as_ptr().cast(), 1) {
                1 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // It may not exist, if `new` failed; processes in it have been waited for.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_file_above_the_memory_limit_of_a_cgroup_is_refused_early() {
    let Some(group) = Cgroup::new(64 * MIB) else {
        return skip("no memory cgroup can be made");
    };
    let dir = Dir::new();
    let file = dir.file("file", 100 * MIB);
    let confined = |args: &str| {
        let mut command = dir.dmafile(args);
        confine(&mut command, &group.0);
        command
    };
    let line = dir.refusal(&mut confined("load file"), 1);
    let start = "not enough memory: file: 104857600 bytes are needed and ";
    assert!(line.starts_with(start), "{line}");
    let room = line[start.len()..].split(' ').next().unwrap();
    assert!(room.parse::<u64>().unwrap() < 64 * MIB, "{line}");
    let end_of_line = " (ENOMEM); free memory, load a range (--offset, --length), or try \
                       anyway with --no-check-memory";
    assert!(line.contains(group.0.to_str().unwrap()), "{line}");
    assert!(line.ends_with(end_of_line), "{line}");
    // A range that fits is loaded; holes take no memory.
    let mut command = dir.load("file --length 20M --offset 5");
    confine(&mut command, &group.0);
    assert_eq!(dir.loaded(&mut command).digest, sha256(&file, 5, 20 * MIB));
    let sparse = File::create(dir.path("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    end(&mut confined("load sparse --quiet")).ok();
}

#[test]
fn page_cache_of_a_cgroup_below_the_limit_counts_as_free() {
    let Some(group) = Cgroup::new(64 * MIB) else {
        return skip("no memory cgroup can be made");
    };
    let below = Cgroup(group.0.join("below"));
    fs::create_dir(&below.0).unwrap();
    let dir = Dir::new();
    let file = dir.file("file", 30 * MIB);
    dir.file("other", 60 * MIB);
    let mut command = Command::new("cat");
    command.arg(dir.path("other"));
    confine(&mut command, &below.0);
    let null = File::options().write(true).open("/dev/null").unwrap();
    assert!(common::end_with_stdout(&mut command, null).status.success());
    for group in [&group.0, &below.0] {
        let mut command = dir.load("file");
        confine(&mut command, group);
        assert_eq!(dir.loaded(&mut command).digest, sha256(&file, 0, 30 * MIB));
    }
}
