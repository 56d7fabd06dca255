//! Files larger than 4 GiB: no offset is truncated to 32 bits, and no read exceeds the maximum of one call.

use dmafile::{Kind, Load, Method};
use dmafile_testkit::{descriptor_digest, dir, file_digest, sparse};

const GIB: u64 = 1 << 30;

#[test]
fn bytes_beyond_4_gib_are_loaded_to_their_offsets() {
    let dir = dir();
    let len = 5 * GIB + 12345;
    let data = [
        (0, 4096),
        (2 * GIB - 70_000, 2 * GIB + 70_000),
        (4 * GIB - 4096, 4 * GIB + 8192),
        (len - 100_000, len),
    ];
    let path = sparse(dir.path(), len, &data);
    for method in [Method::Auto, Method::Threads, Method::Bounce] {
        let loaded = Load::new(&path)
            .to(Kind::Memfd)
            .method(method)
            .run()
            .unwrap();
        assert_eq!(loaded.buffer.len(), len);
        for (start, end) in data {
            // With a part of the hole on either side.
            let (start, end) = (start.saturating_sub(5000), (end + 5000).min(len));
            let fd = loaded.buffer.as_fd().unwrap().try_clone_to_owned().unwrap();
            let digest = descriptor_digest(fd, start, end - start);
            let want = file_digest(&path, start, end - start);
            assert_eq!(digest, want, "{start}..{end} by {method}");
        }
    }
    let tail = Load::new(&path)
        .to(Kind::Anon)
        .offset(4 * GIB - 777)
        .length(9000)
        .run()
        .unwrap();
    let digest = dmafile_testkit::buffer_digest(&tail.buffer);
    assert_eq!(digest, file_digest(&path, 4 * GIB - 777, 9000));
}
