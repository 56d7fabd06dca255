//! The library as a C programmer uses it: installed, found by pkg-config, compiled with all warnings as
//! errors, and run, also under valgrind.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::SystemTime;

const HERE: &str = env!("CARGO_MANIFEST_DIR");
const VERSION: &str = env!("CARGO_PKG_VERSION");
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];
/// Not a multiple of any block size.
const LEN: usize = (3 << 20) + 4567;

/// An installed library and programs linked with it, or the name of a missing tool.
static KIT: LazyLock<Result<Kit, String>> = LazyLock::new(Kit::make);

fn kit() -> Option<&'static Kit> {
    KIT.as_ref().map_err(|why| skip(why)).ok()
}

struct Kit {
    dir: PathBuf,
    /// A file of pseudo-random bytes, and their sum.
    file: PathBuf,
    sum: u64,
}

impl Kit {
    fn make() -> Result<Self, String> {
        for tool in ["make", "cc", "c++", "pkg-config", "nm", "readelf"] {
            if Command::new(tool).arg("--version").output().is_err() {
                let why = "is missing (Debian: build-essential pkg-config)";
                return Err(format!("{tool} {why}"));
            }
        }
        // On the disk of the build folder; /tmp may be memory. Statics are never dropped, so this removes
        // the folder of the previous run.
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi-install");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("noise");
        let bytes = noise();
        let mut written = std::fs::File::create(&file).unwrap();
        written.write_all(&bytes).unwrap();
        written.sync_all().unwrap();
        let sum = bytes.iter().map(|&byte| u64::from(byte)).sum();
        let kit = Self { dir, file, sum };
        done(kit.make_command("all"));
        done(kit.make_command("install"));
        let version = format!("-DVERSION=\"{VERSION}\"");
        let flags = kit.pkg_config(&["--cflags", "--libs"]);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let c99 = [&["-std=c99"], &flags[..]].concat();
        kit.compile("cc", "examples/load.c", "load", &c99);
        let cpp = [&["-std=c++17"], &flags[..]].concat();
        kit.compile("c++", "examples/load.cpp", "load++", &cpp);
        let own = [&["-std=c99", "-pthread", "-g", &version], &flags[..]].concat();
        kit.compile("cc", "tests/exercise.c", "exercise", &own);
        kit.compile("cc", "tests/record.c", "record", &own);
        kit.compile("cc", "tests/save.c", "save-checks", &own);
        kit.compile("cc", "examples/save.c", "save", &c99);
        kit.compile("cc", "examples/record_camera.c", "record_camera", &c99);
        kit.compile("cc", "examples/take.c", "take", &c99);
        kit.compile("cc", "tests/hold.c", "hold", &own);
        kit.compile("cc", "tests/stream.c", "stream", &own);
        Ok(kit)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// `make TARGET` with a prefix of this test, and the archive that this test was built with.
    fn make_command(&self, target: &str) -> Command {
        let mut make = Command::new("make");
        make.args(["--silent", "-C", HERE, target])
            .arg(format!("ARCHIVE={}", archive().display()))
            .arg(format!("BUILD={}", self.path("build").display()))
            .arg(format!("PREFIX={}", self.path("usr").display()))
            // Variables of an outer make must not apply to this one.
            .env_remove("MAKEFLAGS")
            .env_remove("DESTDIR");
        make
    }

    fn pkg_config(&self, args: &[&str]) -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command
            .args(args)
            .arg("dmafile")
            .env("PKG_CONFIG_PATH", self.path("usr/lib/pkgconfig"));
        words(&done(command))
    }

    fn compile(&self, compiler: &str, source: &str, program: &str, flags: &[&str]) {
        let mut command = Command::new(compiler);
        command
            .args(WARNINGS)
            .arg(Path::new(HERE).join(source))
            .args(flags)
            .arg("-o")
            .arg(self.path(program));
        done(command);
    }

    /// A program that finds the installed library.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.path(name));
        command.env("LD_LIBRARY_PATH", self.path("usr/lib"));
        command
    }

    /// The same under valgrind, which exits with 9 after a bad access or a leak.
    fn checked(&self, name: &str) -> Command {
        let mut command = Command::new("valgrind");
        command
            .args(["--quiet", "--error-exitcode=9", "--leak-check=full"])
            .arg(format!("--suppressions={HERE}/valgrind.supp"))
            .arg(self.path(name))
            .env("LD_LIBRARY_PATH", self.path("usr/lib"));
        command
    }
}

/// The archive that Cargo has built for this test. Its name has a hash, and the newest one matches the current
/// source.
fn archive() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let deps = deps.parent().unwrap();
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libdmafile_capi") && name.ends_with(".a")
    };
    let age = |path: &PathBuf| -> SystemTime { path.metadata().unwrap().modified().unwrap() };
    let all = std::fs::read_dir(deps).unwrap();
    let all = all.map(|entry| entry.unwrap().path()).filter(is_ours);
    all.max_by_key(age).expect("cargo builds the staticlib")
}

/// Pseudo-random bytes, different in every block.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..LEN.div_ceil(8)).flat_map(next).collect();
    bytes.truncate(LEN);
    bytes
}

/// Prints, past the test harness, what was not tested; with CI=true this is an error.
fn skip(why: &str) {
    let name = std::thread::current()
        .name()
        .unwrap_or_default()
        .to_string();
    let line = format!("SKIPPED: {name}: {why}\n");
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(!ci, "{line}");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Whether valgrind is wanted (`make test` does without), is installed and works.
fn valgrind() -> bool {
    if std::env::var_os("QUICK").is_some() {
        return false;
    }
    let runs = Command::new("valgrind").args(["--quiet", "true"]).output();
    let runs = runs.is_ok_and(|output| output.status.success());
    if !runs {
        skip("valgrind is missing, or cannot run (Debian: valgrind libc6-dbg)");
    }
    runs
}

/// Drops a file from the page cache, so that it is read from the disk.
fn evict(path: &Path) {
    let mut dd = Command::new("dd");
    dd.arg(format!("if={}", path.display()))
        .args(["iflag=nocache", "count=0", "status=none"]);
    done(dd);
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn words(output: &Output) -> Vec<String> {
    let words = text(&output.stdout);
    words.split_whitespace().map(str::to_string).collect()
}

/// Runs a command that must succeed.
fn done(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

fn sha256sum(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    words(&child.wait_with_output().unwrap())[0].clone()
}

fn exported() -> BTreeSet<String> {
    let map = std::fs::read_to_string(Path::new(HERE).join("dmafile.map")).unwrap();
    let lines = map.lines().filter(|line| line.starts_with("\tdmafile_"));
    lines
        .map(|line| line.trim().trim_end_matches(';').to_string())
        .collect()
}

#[test]
fn the_shared_library_exports_only_versioned_dmafile_functions() {
    let Some(kit) = kit() else { return };
    let library = kit.path("usr/lib/libdmafile.so");
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--with-symbol-versions"])
        .arg(&library);
    let symbols = text(&done(nm).stdout);
    let symbols: BTreeSet<String> = symbols
        .lines()
        .map(|line| line.split_once(' ').unwrap().1.to_string())
        .collect();
    let mut wanted: BTreeSet<String> = exported()
        .iter()
        .map(|name| format!("T {name}@@DMAFILE_0.1"))
        .collect();
    // The symbol of the version itself.
    wanted.insert("A DMAFILE_0.1".to_string());
    assert_eq!(symbols, wanted);

    let mut readelf = Command::new("readelf");
    readelf.args(["-dV", "--wide"]).arg(&library);
    let says = text(&done(readelf).stdout);
    assert!(says.contains("Library soname: [libdmafile.so.0]"), "{says}");
    assert!(says.contains("Name: DMAFILE_0.1"), "{says}");
    assert!(!says.contains("TEXTREL"), "{says}");
    // A program requires the version, so that a library with another ABI is not used.
    let mut nm = Command::new("nm");
    nm.args(["-D", "--undefined-only", "--with-symbol-versions"])
        .arg(kit.path("load"));
    let says = text(&done(nm).stdout);
    assert!(says.contains("dmafile_load@DMAFILE_0.1"), "{says}");
}

#[test]
fn the_installed_library_is_found_and_can_be_uninstalled() {
    let Some(kit) = kit() else { return };
    let lib = kit.path("usr/lib");
    let link = |name: &str| std::fs::read_link(lib.join(name)).unwrap();
    assert_eq!(link("libdmafile.so"), Path::new("libdmafile.so.0"));
    let whole = format!("libdmafile.so.{VERSION}");
    assert_eq!(link("libdmafile.so.0"), Path::new(&whole));
    assert_eq!(kit.pkg_config(&["--modversion"]), [VERSION]);

    // Packages are built with DESTDIR, in another folder than their final one.
    let stage = kit.path("stage");
    let stage = |target| {
        let mut make = kit.make_command(target);
        make.arg(format!("DESTDIR={}", stage.display()))
            .args(["PREFIX=/usr", "LIBDIR=/usr/lib/x86_64-linux-gnu"]);
        done(make);
        let mut find = Command::new("find");
        find.arg(&stage)
            .args(["!", "-type", "d", "-printf", "%P\n"]);
        let mut names = words(&done(find));
        names.sort();
        names
    };
    let lib = "usr/lib/x86_64-linux-gnu";
    let installed = stage("install");
    let wanted = [
        "usr/include/dmafile.h".to_string(),
        format!("{lib}/libdmafile.a"),
        format!("{lib}/libdmafile.so"),
        format!("{lib}/libdmafile.so.0"),
        format!("{lib}/libdmafile.so.{VERSION}"),
        format!("{lib}/pkgconfig/dmafile.pc"),
    ];
    assert_eq!(installed, wanted);
    let pc = kit.path("stage").join(&wanted[5]);
    let pc = std::fs::read_to_string(pc).unwrap();
    assert!(pc.contains("libdir=/usr/lib/x86_64-linux-gnu\n"), "{pc}");
    assert!(stage("uninstall").is_empty());
}

#[test]
fn the_header_compiles_without_warnings_as_c_and_cpp() {
    let Some(kit) = kit() else { return };
    let header = kit.path("usr/include/dmafile.h");
    for (compiler, language, standards) in [
        ("cc", "c", ["c99", "c11", "gnu17"]),
        ("c++", "c++", ["c++11", "c++17", "c++20"]),
    ] {
        for standard in standards {
            let mut command = Command::new(compiler);
            command
                .args(WARNINGS)
                .args(["-Wconversion", "-fsyntax-only", "-x", language])
                .arg(format!("-std={standard}"))
                .arg(&header);
            done(command);
        }
    }
}

#[test]
fn loaded_bytes_equal_the_file() {
    let Some(kit) = kit() else { return };
    let digest = sha256sum(&noise());
    let mut own = Command::new("sha256sum");
    own.arg(&kit.file);
    assert_eq!(words(&done(own))[0], digest);
    for method in ["auto", "uring", "threads", "bounce"] {
        for kind in ["memfd", "anon"] {
            let mut cat = kit.program("exercise");
            cat.arg("cat").arg(&kit.file).args([method, kind]);
            assert_eq!(sha256sum(&done(cat).stdout), digest, "{method} {kind}");
        }
    }
    // The report and the digest of the library.
    evict(&kit.file);
    let mut load = kit.program("load");
    load.arg(&kit.file)
        .arg("--verify")
        .arg(format!("sha256={digest}"))
        .arg("--report");
    let says = text(&done(load).stdout);
    assert!(says.contains(&format!("bytes {LEN}\n")), "{says}");
    assert!(says.contains(&format!("sum {}\n", kit.sum)), "{says}");
    assert!(says.contains(&format!("\"digest\":\"{digest}\"")), "{says}");
    let mut load = kit.program("load++");
    load.arg(&kit.file);
    let says = text(&done(load).stdout);
    let wanted = format!("bytes {LEN}\nmoved {LEN}\nsum {}\n", kit.sum);
    assert_eq!(says, wanted);
}

#[test]
fn failures_have_a_message() {
    let Some(kit) = kit() else { return };
    for (program, name) in [("load", "load"), ("load++", "load++")] {
        let output = kit.program(program).arg("/no/such/file").output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let wanted = format!(
            "{name}: cannot open: /no/such/file: No such file or directory (ENOENT); check the path\n"
        );
        assert_eq!(text(&output.stderr), wanted);
    }
    let digest = format!("sha256={}", "0".repeat(64));
    let mut load = kit.program("load");
    load.arg(&kit.file).args(["--verify", &digest]);
    let output = load.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("wrong digest"));
}

#[test]
fn every_check_of_the_c_program_passes() {
    let Some(kit) = kit() else { return };
    for method in ["auto", "uring", "threads"] {
        let mut all = kit.program("exercise");
        all.arg("all").arg(&kit.file).arg(method);
        done(all);
    }
}

#[test]
fn a_stream_delivers_the_bytes_of_the_file() {
    let Some(kit) = kit() else { return };
    for warm in [false, true] {
        if !warm {
            evict(&kit.file);
        }
        let mut cat = kit.program("stream");
        cat.arg("cat").arg(&kit.file);
        assert_eq!(sha256sum(&done(cat).stdout), sha256sum(&noise()));
    }
    let mut checks = kit.program("stream");
    checks.arg("checks").arg(&kit.file);
    done(checks);
    if valgrind() {
        let mut checks = kit.checked("stream");
        checks.arg("checks").arg(&kit.file);
        done(checks);
    }
}

/// With a double of the driver, which reports what the program has not released at its end.
#[test]
fn a_device_load_releases_everything() {
    let Some(kit) = kit() else { return };
    let folder = kit.path("double");
    std::fs::create_dir_all(&folder).unwrap();
    let mut build = Command::new("cc");
    build
        .args(["-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"])
        .arg(Path::new(HERE).join("../../tests/double/driver.c"))
        .arg("-o")
        .arg(folder.join("libcuda.so.1"));
    done(build);
    let report = kit.path("left");
    let _ = std::fs::remove_file(&report);
    let mut device = Command::new(kit.path("stream"));
    let libraries = [kit.path("usr/lib"), folder];
    device
        .arg("device")
        .arg(&kit.file)
        .arg("cuda:1")
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
        .env("DOUBLE_REPORT", &report);
    done(device);
    let left = std::fs::read_to_string(report).unwrap();
    let nothing = "{\"registered\": 0, \"memory\": 0, \"events\": 0, \"streams\": 0, \
                   \"contexts\": 0, \"complaints\": 0,";
    assert!(left.starts_with(nothing), "{left}");
}

/// Runs record.c with a new file and checks the recording.
fn recorded(kit: &Kit, mut record: Command) {
    let path = kit.path("recording");
    for name in ["recording", "recording.1"] {
        let _ = std::fs::remove_file(kit.path(name));
    }
    done({
        record.arg(&path);
        record
    });
    let recording = dmafile_record::Recording::open(&path).unwrap();
    assert!(recording.is_complete());
    let frame = |number: u64| vec![number as u8 + 1; 100_000];
    assert_eq!(recording.records().len(), 21);
    for record in recording.records() {
        let bytes = recording.read(record).unwrap();
        match record.number {
            20 => assert_eq!(bytes, b"memory of the caller"),
            number => assert!(bytes == frame(number), "{number}"),
        }
        assert_eq!(record.timestamp, -1000 * record.number.cast_signed());
        assert_eq!(record.tag, record.number << 40);
    }
}

#[test]
fn a_c_program_records() {
    let Some(kit) = kit() else { return };
    recorded(kit, kit.program("record"));
    if valgrind() {
        recorded(kit, kit.checked("record"));
    }
}

#[test]
fn a_c_program_takes_memory_that_another_process_holds() {
    let Some(kit) = kit() else { return };
    let folder = socket("take");
    std::fs::create_dir(&folder).unwrap();
    let at = folder.join("socket");
    let digest = sha256sum(&noise());
    let holder = dmafile_hold::Hold::of([&kit.file])
        .name("noise")
        .socket(&at);
    let holder = holder.start().unwrap();
    let take = |mut take: Command, more: &[&str]| {
        take.arg("noise").arg("--socket").arg(&at).args(more);
        done(take).stdout
    };
    assert_eq!(sha256sum(&take(kit.program("take"), &["--cat"])), digest);
    let line = format!("noise bytes {LEN} sum {}\n", kit.sum);
    assert_eq!(text(&take(kit.program("take"), &["--wait", "60000"])), line);
    if valgrind() {
        assert_eq!(sha256sum(&take(kit.checked("take"), &["--cat"])), digest);
    }
    drop(holder);
    let mut late = kit.program("take");
    let late = late.arg("noise").arg("--socket").arg(&at).output().unwrap();
    assert_eq!(late.status.code(), Some(1));
    assert!(
        text(&late.stderr).starts_with("take: cannot take: "),
        "{late:?}"
    );
    assert!(text(&late.stderr).contains("(ENOENT)"), "{late:?}");
    std::fs::remove_dir(&folder).unwrap();
}

#[test]
fn c_programs_hold_and_share_memory() {
    let Some(kit) = kit() else { return };
    let folder = socket("shared");
    std::fs::create_dir(&folder).unwrap();
    let digest = sha256sum(&noise());
    let share = |mut take: Command| {
        take.arg("--shared").arg(&kit.file).arg("--cat");
        take.arg("--socket")
            .arg(folder.join("a"))
            .args(["--wait", "60000"]);
        sha256sum(&done(take).stdout)
    };
    assert_eq!(share(kit.program("take")), digest);
    let own = dmafile_hold::Shared::of([&kit.file]).folder(folder.join("a"));
    let own = own.run().unwrap();
    assert_eq!(share(kit.program("take")), digest);
    let exercise = |mut hold: Command, name: &str| {
        hold.arg(&kit.file).arg(folder.join(name));
        done(hold);
    };
    exercise(kit.program("hold"), "b");
    if valgrind() {
        assert_eq!(share(kit.checked("take")), digest);
        exercise(kit.checked("hold"), "c");
    }
    drop(own);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// An empty folder of this name.
fn folder(kit: &Kit, name: &str) -> PathBuf {
    let folder = kit.path(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    folder
}

#[test]
fn a_c_program_saves() {
    let Some(kit) = kit() else { return };
    let mut save = kit.program("save-checks");
    save.arg(folder(kit, "saves"));
    done(save);
    if valgrind() {
        let mut save = kit.checked("save-checks");
        save.arg(folder(kit, "saves"));
        done(save);
    }
}

/// In a user and mount namespace, in which every user can mount a file system of 1 MiB.
#[test]
fn a_full_disk_leaves_the_old_file() {
    let Some(kit) = kit() else { return };
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-ec"])
            .arg(format!("mount -t tmpfs -o size=1m none \"$1\"; {script}"))
            .args(["sh".as_ref(), folder(kit, "full").as_os_str()])
            .arg(kit.path("save-checks"))
            .env("LD_LIBRARY_PATH", kit.path("usr/lib"));
        command
    };
    if !inside("true").status().is_ok_and(|status| status.success()) {
        return skip("no mount namespace can be made");
    }
    done(inside("exec \"$2\" --full \"$1\""));
}

#[test]
fn the_example_saves_and_loads() {
    let Some(kit) = kit() else { return };
    let folder = folder(kit, "example");
    let to = folder.join("to");
    let run = |arguments: &str| {
        let mut shell = Command::new("sh");
        shell
            .arg("-ec")
            .arg(format!("\"$SAVE\" {arguments} 3<>\"$NOISE\" 4<>\"$0\""))
            .arg(file!())
            .current_dir(HERE.trim_end_matches("crates/capi"))
            .env("SAVE", kit.path("save"))
            .env("NOISE", &kit.file)
            .env("TO", &to)
            .env("FOLDER", &folder)
            .env("LD_LIBRARY_PATH", kit.path("usr/lib"));
        shell
    };
    let says = text(&done(run("\"$TO\" 'a header'")).stdout);
    assert_eq!(says, format!("{} bytes are on the disk\n", LEN + 8));
    let mut expected = b"a header".to_vec();
    expected.extend(noise());
    assert!(std::fs::read(&to).unwrap() == expected);
    std::fs::remove_file(&to).unwrap();
    done(run("--snapshot \"$FOLDER\""));
    assert!(std::fs::read(folder.join("weights.1.dmafile")).unwrap() == noise());
    let says = text(&done(run("--load \"$FOLDER\"")).stdout);
    assert!(
        says.starts_with(&format!("weights: {LEN} bytes, fd ")),
        "{says}"
    );
    assert!(says.contains("\ncache: "), "{says}");
    let output = run("/no/such/place x").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("there is no such folder (ENOENT)"));
}

/// A path for a socket. Such paths must be short, and that of the build folder may be long.
fn socket(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("dmafile-{}-{name}", std::process::id()))
}

/// Runs `load --receive`, calls `send` when it waits, and returns what it prints then.
fn received(mut receiver: Command, socket: &Path, send: impl FnOnce()) -> String {
    let mut child = receiver
        .arg("--receive")
        .arg(socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut says = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    says.read_line(&mut line).unwrap();
    assert!(line.starts_with("waiting at "), "{line}");
    send();
    let mut rest = String::new();
    says.read_to_string(&mut rest).unwrap();
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}: {rest}");
    rest
}

#[test]
fn a_buffer_is_sent_to_another_process() {
    let Some(kit) = kit() else { return };
    let sum = format!("bytes {LEN}\n");
    let socket = socket("plain");
    let from_c = received(kit.program("load"), &socket, || {
        let mut load = kit.program("load");
        load.arg(&kit.file).arg("--send").arg(&socket);
        done(load);
    });
    assert!(from_c.contains(&sum) && from_c.contains(&format!("sum {}\n", kit.sum)));
    let from_rust = received(kit.program("load"), &socket, || {
        let loaded = dmafile::Load::new(&kit.file).offset(77).run().unwrap();
        let stream = UnixStream::connect(&socket).unwrap();
        loaded.buffer.send(&stream).unwrap();
    });
    let left: u64 = noise()[77..].iter().map(|&byte| u64::from(byte)).sum();
    assert!(from_rust.contains(&format!("sum {left}\n")), "{from_rust}");
}

/// Including io_uring, which valgrind supports. It refuses cachestat with a warning, and the engine then
/// learns by sample reads what is cached.
#[test]
fn valgrind_finds_no_error() {
    let Some(kit) = kit() else { return };
    if !valgrind() {
        return;
    }
    for method in ["auto", "uring", "threads"] {
        let mut all = kit.checked("exercise");
        all.arg("all").arg(&kit.file).arg(method);
        done(all);
        for kind in ["memfd", "anon"] {
            evict(&kit.file);
            let mut load = kit.checked("load");
            load.arg(&kit.file)
                .args(["--to", kind, "--method", method, "--verify", "blake3"]);
            let says = text(&done(load).stdout);
            assert!(says.contains(&format!("sum {}\n", kit.sum)), "{says}");
        }
    }
    let mut load = kit.checked("load++");
    load.arg(&kit.file);
    done(load);
    let status = kit
        .checked("load++")
        .arg("/no/such/file")
        .stderr(Stdio::null())
        .status();
    assert_eq!(status.unwrap().code(), Some(1));
    let socket = socket("valgrind");
    received(kit.checked("load"), &socket, || {
        let mut load = kit.checked("load");
        load.arg(&kit.file).arg("--send").arg(&socket);
        done(load);
    });
}

/// Proves that the checks above can fail.
#[test]
fn valgrind_detects_a_leak_and_a_bad_access() {
    let Some(kit) = kit() else { return };
    if !valgrind() {
        return;
    }
    let flags = kit.pkg_config(&["--cflags", "--libs"]);
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    for (name, mistake) in [
        ("leak", "(void)buffer"),
        (
            "late",
            "dmafile_buffer_free(buffer); return (int)dmafile_buffer_len(buffer) & 1",
        ),
    ] {
        let source = kit.path(&format!("{name}.c"));
        let code = format!(
            "#include <dmafile.h>\nint main(int argc, char **argv)\n{{\n\
             struct dmafile_buffer *buffer;\n\
             if (argc < 2 || dmafile_load(argv[1], 0, &buffer) < 0) return 1;\n\
             {mistake};\nbuffer = 0;\nreturn 0;\n}}\n"
        );
        std::fs::write(&source, code).unwrap();
        kit.compile("cc", source.to_str().unwrap(), name, &flags);
        let output = kit.checked(name).arg(&kit.file).output().unwrap();
        assert_eq!(output.status.code(), Some(9), "{}", text(&output.stderr));
    }
}

#[test]
fn the_static_library_can_be_linked() {
    let Some(kit) = kit() else { return };
    let library = kit.path("usr/lib/libdmafile.a");
    let flags = kit.pkg_config(&["--cflags"]);
    let system = kit.pkg_config(&["--static", "--libs-only-l"]);
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(["-std=c99", library.to_str().unwrap()]);
    let system = system.iter().map(String::as_str);
    flags.extend(system.filter(|flag| *flag != "-ldmafile"));
    kit.compile("cc", "examples/load.c", "load-static", &flags);
    let mut load = Command::new(kit.path("load-static"));
    load.arg(&kit.file);
    let says = text(&done(load).stdout);
    assert!(says.contains(&format!("sum {}\n", kit.sum)), "{says}");
}

/// Two tensors and a scalar in the safetensors format: a length, JSON, bytes.
fn model(path: &Path) {
    let header = concat!(
        r#"{"__metadata__":{"made by":"hand"},"#,
        r#""a.weight":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"#,
        r#""b.bias":{"dtype":"I16","shape":[2],"data_offsets":[6,10]},"#,
        r#""c":{"dtype":"F32","shape":[],"data_offsets":[10,14]}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(1..=14);
    std::fs::write(path, file).unwrap();
}

#[test]
fn a_c_program_reads_the_tensors_of_a_model() {
    let Some(kit) = kit() else { return };
    let path = kit.path("tiny.safetensors");
    model(&path);
    let wanted = "a.weight U8 2 3 = 01 02 03 04 05 06\n\
                  b.bias I16 2 = 07 08 09 0a\n\
                  c F32 = 0b 0c 0d 0e\n\
                  only a.weight U8 2 3 = 01 02 03 04 05 06\n";
    let mut exercise = kit.program("exercise");
    exercise.arg("model").arg(&path);
    assert_eq!(text(&done(exercise).stdout), wanted);
    let mut load = kit.program("load++");
    load.arg(&path).args(["*.weight", "c"]);
    let says = text(&done(load).stdout);
    assert!(says.starts_with("a.weight U8 [2, 3] sum 21\n"), "{says}");
    assert!(says.ends_with("c F32 [] sum 50\n"), "{says}");
    if valgrind() {
        let mut exercise = kit.checked("exercise");
        exercise.arg("model").arg(&path);
        assert_eq!(text(&done(exercise).stdout), wanted);
    }
}
