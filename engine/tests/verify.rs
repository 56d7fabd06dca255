//! A checksum is that of the wanted bytes, computed from the buffer, whatever way they came.

mod common;

use common::{cold, dir, file_digest, sparse, warm};
use dmafile::{Algorithm, Io, Kind, Load, Method, Verify};

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
                for method in [Method::Auto, Method::Threads, Method::Read, Method::Mmap] {
                    for io in [Io::Auto, Io::Buffered] {
                        let to = match kind {
                            "fd" => Kind::fd(common::dirty_memfd(length)),
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
        common::evict(&path);
        let _warm = warm(&path, start, end);
        let loaded = Load::new(&path).verify(sha256()).run().unwrap();
        assert_eq!(loaded.report.io, Io::Auto);
        assert_eq!(loaded.report.verify[0].digest, want);
    }
}

#[test]
fn a_wrong_digest_hands_out_nothing() {
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
