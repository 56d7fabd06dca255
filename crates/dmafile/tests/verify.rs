//! A digest is that of the requested bytes, computed from the buffer, with every method.

use dmafile::{About, Algorithm, ErrorKind, Io, Kind, Load, Method, Save, Verify};
use dmafile_testkit::{cold, dir, file_digest, sparse, warm};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

fn sha256() -> Verify {
    Verify::compute(Algorithm::Sha256)
}

#[test]
fn digests_equal_those_of_sha256sum() {
    let dir = dir();
    let len = (3 << 20) + 777;
    let dense = cold(dir.path(), len as usize);
    let holes = sparse(
        dir.path(),
        len,
        &[(1 << 20, (1 << 20) + 5000), (len - 9, len)],
    );
    for path in [&dense, &holes] {
        for (offset, length) in [(0, len), (777, len - 777), (4095, 8193), (1 << 20, 4096)] {
            let want = file_digest(path, offset, length);
            for kind in ["anon", "memfd", "fd"] {
                for method in [Method::Auto, Method::Threads] {
                    for io in [Io::Auto, Io::Buffered] {
                        let to = match kind {
                            "fd" => Kind::fd(dmafile_testkit::dirty_memfd(length)),
                            word => word.parse().unwrap(),
                        };
                        let load = Load::new(path).to(to).method(method).io(io).block(64 << 10);
                        let load = load.offset(offset).length(length).verify(sha256());
                        let what = format!("{length} from {offset} to {kind} by {method} {io}");
                        let loaded = load.run().unwrap_or_else(|error| panic!("{what}: {error}"));
                        let verified = &loaded.report.verify[0];
                        assert_eq!(verified.digest, want, "{what}");
                        assert!(!verified.matched);
                    }
                }
            }
        }
    }
}

#[test]
fn a_partly_cached_file_is_hashed_in_order() {
    let dir = dir();
    let len = 20 << 20;
    let path = cold(dir.path(), len);
    let want = file_digest(&path, 0, len as u64);
    for (start, end) in [(0, 5 << 20), (7 << 20, 12 << 20), (15 << 20, 20 << 20)] {
        dmafile_testkit::evict(&path);
        let _warm = warm(&path, start, end);
        let loaded = Load::new(&path).verify(sha256()).run().unwrap();
        assert_eq!(loaded.report.io, Io::Auto);
        assert_eq!(loaded.report.verify[0].digest, want);
    }
}

#[test]
fn a_wrong_digest_is_an_error() {
    let dir = dir();
    let path = cold(dir.path(), 1 << 20);
    let right = file_digest(&path, 0, 1 << 20);
    let expect = |digest: &str| format!("sha256={digest}").parse::<Verify>().unwrap();
    let loaded = Load::new(&path).verify(expect(&right)).run().unwrap();
    assert!(loaded.report.verify[0].matched);
    let wrong = format!(
        "{}{}",
        if right.starts_with('0') { '1' } else { '0' },
        &right[1..]
    );
    let error = Load::new(&path).verify(expect(&wrong)).run().unwrap_err();
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::BADMSG.raw_os_error())
    );
    assert!(error.to_string().contains(&right), "{error}");
}

/// A file in a cache with the layout of `huggingface_hub`, named by `digest`.
fn in_cache(dir: &Path, name: &str, digest: &str, bytes: &[u8]) -> PathBuf {
    let repository = dir.join("models--a--b");
    let snapshot = repository.join("snapshots/0f");
    fs::create_dir_all(repository.join("blobs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(repository.join("blobs").join(digest), bytes).unwrap();
    symlink(format!("../../blobs/{digest}"), snapshot.join(name)).unwrap();
    snapshot.join(name)
}

/// The object name that git gives to this file.
fn git_name(path: &Path) -> Option<String> {
    let mut git = Command::new("git");
    let output = git.args(["hash-object", "--no-filters"]).arg(path).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).unwrap().trim().to_string())
}

#[test]
fn files_of_a_hugging_face_cache_are_compared_with_their_names() {
    let dir = dir();
    let len = (3 << 20) + 777;
    let plain = cold(dir.path(), len);
    let bytes = fs::read(&plain).unwrap();
    let sha256 = file_digest(&plain, 0, len as u64);
    let mut names = vec![(Algorithm::Sha256, sha256)];
    match git_name(&plain) {
        Some(name) => names.push((Algorithm::GitSha1, name)),
        None => eprintln!("SKIP: no git"),
    }
    for (algorithm, digest) in names {
        let path = in_cache(dir.path(), &format!("{algorithm}.bin"), &digest, &bytes);
        let load = || Load::new(&path).verify(Verify::stored());
        for kind in ["anon", "memfd"] {
            let to = load().to(kind.parse().unwrap());
            let verified = &to.run().unwrap().report.verify[0];
            let got = (verified.algorithm, &verified.digest, verified.matched);
            assert_eq!(got, (algorithm, &digest, true));
        }
        assert!(
            load()
                .plan()
                .unwrap()
                .reasons
                .iter()
                .any(|one| one.about == About::Verify)
        );
        // A part of the file has no digest.
        let error = load().length(5000).run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        // One bit, in a byte of the last page.
        let blob = fs::OpenOptions::new().write(true).open(&path).unwrap();
        blob.write_all_at(&[bytes[len - 9] ^ 4], len as u64 - 9)
            .unwrap();
        let error = load().run().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADMSG), "{error}");
        assert!(error.to_string().contains(&digest), "{error}");
    }
}

#[test]
fn files_outside_a_hugging_face_cache_are_refused_with_the_reason() {
    let dir = dir();
    let plain = cold(dir.path(), 1 << 20);
    let bytes = fs::read(&plain).unwrap();
    let unnamed = in_cache(dir.path(), "unnamed", &"A".repeat(64), &bytes);
    // A cache without links, as on file systems that lack them.
    let copied = unnamed.with_file_name("copied");
    fs::write(&copied, &bytes).unwrap();
    for (path, why) in [
        (&plain, "it is not in a Hugging Face cache"),
        (&copied, "it is not in a Hugging Face cache"),
        (&unnamed, "is not a known digest"),
    ] {
        let error = Load::new(path).verify(Verify::stored()).run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(why) && text.contains("verify=sha256=HEX"),
            "{error}"
        );
        assert!(text.contains(&path.display().to_string()), "{error}");
        // Without `store`, nothing is compared.
        assert!(
            !Load::new(path)
                .verify(sha256())
                .run()
                .unwrap()
                .report
                .verify[0]
                .matched
        );
    }
    let to = dir.path().join("to");
    let save = Save::new(plain.to_str().unwrap().parse().unwrap(), &to).verify(Verify::stored());
    assert_eq!(save.run().unwrap_err().kind(), ErrorKind::Usage);
    assert!(!to.exists());
}
