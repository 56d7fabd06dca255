//! A system without `/proc` and `/sys`: an initramfs, or a sandbox that does not mount them.

mod common;

use common::{Dir, METHODS, MIB, end, is_root, own_mounts, sha256, skip, start};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

const LEN: u64 = 3 * MIB + 77;

/// Runs a test in a thread whose commands find nothing in `/proc` and `/sys`.
fn bare(test: impl FnOnce(&Dir) + Send) {
    if !is_root() {
        return skip("needs root for a mount namespace");
    }
    let dir = Dir::new();
    dir.file("file", LEN);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            own_mounts().unwrap();
            for at in [c"/proc", c"/sys"] {
                let none = std::ptr::null();
                // SAFETY: all strings are constants.
                let mounted =
                    unsafe { libc::mount(none, at.as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()) };
                common::done(mounted).unwrap();
            }
            test(&dir);
        });
    });
}

/// Not by [`Dir::dmafile`], whose path is in `/proc`.
fn dmafile(dir: &Dir, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmafile"));
    command
        .args(args.split_whitespace())
        .current_dir(dir.path(""))
        .stdin(Stdio::null());
    command
}

#[test]
fn files_are_loaded_and_saved() {
    bare(|dir| {
        let digest = sha256(&dir.path("file"), 0, LEN);
        let run = |args: &str| end(&mut dmafile(dir, args)).ok();
        for method in METHODS {
            run(&format!(
                "load file --quiet --method {method} --verify sha256={digest}"
            ));
        }
        run(&format!(
            "load file --quiet --to anon --verify sha256={digest}"
        ));
        // A new file, and one that is replaced, with its attributes.
        fs::write(dir.path("old"), "old").unwrap();
        fs::set_permissions(dir.path("old"), Permissions::from_mode(0o640)).unwrap();
        for name in ["new", "old"] {
            run(&format!("save --quiet file {name}"));
            assert_eq!(sha256(&dir.path(name), 0, LEN), digest);
        }
        let mode = fs::metadata(dir.path("old")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        run("explain file");
        let mut command = dmafile(dir, "load file --quiet --");
        command.args(["sh", "-c", "sha256sum <&$DMAFILE_FD"]);
        assert!(end(&mut command).ok().stdout.starts_with(&digest));
    });
}

#[test]
fn files_are_held_and_taken() {
    bare(|dir| {
        let digest = sha256(&dir.path("file"), 0, LEN);
        fs::create_dir(dir.path("run")).unwrap();
        fs::set_permissions(dir.path("run"), Permissions::from_mode(0o700)).unwrap();
        let mut holder = start(&mut dmafile(dir, "hold file --name m --socket run/socket"));
        holder.until_written("\n");
        let mut command = dmafile(dir, "take m --socket run/socket --");
        command.args(["sh", "-c", "sha256sum <&$DMAFILE_FD"]);
        assert!(end(&mut command).ok().stdout.starts_with(&digest));
        end(&mut dmafile(dir, "release m --socket run/socket")).ok();
        holder.end().ok();
    });
}

#[test]
fn what_needs_proc_says_so() {
    bare(|dir| {
        let line = |args: &str| end(&mut dmafile(dir, args)).line(1).to_string();
        let path = line("load file --quiet -- cat {}");
        fs::create_dir(dir.path("run")).unwrap();
        fs::set_permissions(dir.path("run"), Permissions::from_mode(0o700)).unwrap();
        let folder = line("hold file --name m --socket run/socket --folder links");
        for line in [path, folder, line("pins")] {
            assert!(line.contains("/proc"), "{line}");
        }
        let doctor = end(&mut dmafile(dir, "doctor file")).ok().stdout;
        let told = "unknown: /proc and /sys are not mounted";
        assert!(doctor.contains(told), "{doctor}");
        assert!(!doctor.contains("no seccomp filter"), "{doctor}");
        assert!(!dir.path("links").exists());
    });
}
