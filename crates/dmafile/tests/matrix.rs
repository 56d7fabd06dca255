//! Every kind of memory, method and I/O mode loads the same bytes that sha256sum reads, at sizes around
//! blocks and chunks, with ranges and holes, and zeros around them.

use dmafile::{Buffer, Io, Kind, Load, Method, Pages};
use dmafile_testkit::{buffer_digest, cached, cold, dir, dirty_memfd, evict, file_digest, sparse};
use rustix::fs::MemfdFlags;
use std::path::Path;

const METHODS: [Method; 4] = [Method::Auto, Method::Uring, Method::Threads, Method::Bounce];
const KINDS: [&str; 3] = ["anon", "memfd", "fd"];
/// Small, so that small files fill many blocks and chunks.
const BLOCK: u64 = 64 << 10;
const CHUNK: u64 = 1 << 20;

/// Combinations that are not supported and must be refused.
fn impossible(method: Method, io: Io) -> bool {
    method == Method::Bounce && io == Io::Buffered
}

fn make(kind: &str, room: u64) -> Kind {
    match kind {
        // Larger than needed and full of ones: the bytes after the file must become zero.
        "fd" => Kind::fd(dirty_memfd(room + 5000)),
        word => word.parse().unwrap(),
    }
}

fn load(path: &Path, kind: Kind, method: Method, io: Io) -> Load {
    Load::new(path)
        .to(kind)
        .method(method)
        .io(io)
        .block(BLOCK)
        .chunk(CHUNK)
}

/// Asserts that everything in the descriptor outside the buffer is zero.
fn assert_zero_around(buffer: &Buffer) {
    let Some(fd) = buffer.as_fd() else { return };
    let size = rustix::fs::fstat(fd).unwrap().st_size as u64;
    let zero = |from: u64, to: u64| {
        let mut bytes = vec![1; (to - from) as usize];
        let got = rustix::io::pread(fd, &mut bytes, from).unwrap();
        assert_eq!(got as u64, to - from);
        assert!(
            bytes.iter().all(|&byte| byte == 0),
            "{from}..{to} is not zero"
        );
    };
    zero(0, buffer.offset());
    zero(buffer.offset() + buffer.len(), size);
}

fn check(load: Load, path: &Path, offset: u64, len: u64, what: &str) {
    let loaded = load.run().unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(loaded.buffer.len(), len, "{what}");
    assert_eq!(loaded.report.bytes, len, "{what}");
    assert_eq!(
        buffer_digest(&loaded.buffer),
        file_digest(path, offset, len),
        "{what}"
    );
    assert_zero_around(&loaded.buffer);
}

#[test]
fn every_method_kind_and_mode_loads_every_size() {
    let dir = dir();
    let chunk = CHUNK as usize;
    let sizes = [
        1,
        511,
        513,
        4095,
        4096,
        4097,
        chunk - 1,
        chunk,
        chunk + 1,
        3 * chunk + 777,
    ];
    for size in sizes {
        let path = cold(dir.path(), size);
        for kind in KINDS {
            for method in METHODS {
                for &io in Io::ALL {
                    let what = format!("{size} bytes to {kind} by {method} {io}");
                    let load = load(&path, make(kind, size as u64), method, io);
                    if impossible(method, io) {
                        let error = load.run().unwrap_err();
                        assert_eq!(error.raw_os_error(), Some(95), "{what}: {error}");
                    } else {
                        check(load, &path, 0, size as u64, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn every_method_kind_and_mode_loads_every_range() {
    let dir = dir();
    let size = 2 * CHUNK + 4099;
    let path = cold(dir.path(), size as usize);
    let ranges = [
        (0, 1),
        (1, 1),
        (511, 2),
        (512, 512),
        (777, CHUNK),
        (4096, 4096),
        (4095, 8194),
        (BLOCK - 1, BLOCK + 2),
        (CHUNK - 513, 1026),
        (size - 1, 1),
        (size - 4100, 4099),
        (12345, size - 12345),
    ];
    for (offset, len) in ranges {
        for kind in KINDS {
            for method in METHODS {
                for io in [Io::Auto, Io::Direct] {
                    let what = format!("{len} bytes from {offset} to {kind} by {method} {io}");
                    // Existing memory starts with the first byte: unless the offset is aligned,
                    // direct reads need bounce buffers.
                    let bounces = matches!(method, Method::Auto | Method::Bounce);
                    let refused = io == Io::Direct && kind == "fd" && offset % 512 != 0 && !bounces;
                    let load = load(&path, make(kind, len), method, io)
                        .offset(offset)
                        .length(len);
                    if refused || impossible(method, io) {
                        load.run().expect_err(&what);
                    } else {
                        check(load, &path, offset, len, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn only_the_given_part_of_a_memfd_is_filled() {
    const AROUND: u8 = 0xa5;
    let dir = dir();
    let size = CHUNK + 4099;
    let path = cold(dir.path(), size as usize);
    let file = std::fs::read(&path).unwrap();
    let room = 2 * CHUNK;
    let parts = [
        (0, 0, 1),
        (0, 4096, 8192),
        (0, 1, size),
        (777, 777, 5000),
        (511, 5000, 2 * BLOCK + 1),
        (4096, CHUNK, CHUNK),
        (size - 1, room - 1, 1),
    ];
    for (offset, at, len) in parts {
        for method in METHODS {
            for io in [Io::Auto, Io::Direct] {
                let what = format!("{len} bytes from {offset} to byte {at} by {method} {io}");
                evict(&path);
                let memory = vec![AROUND; room as usize];
                let fd = rustix::fs::memfd_create("part", MemfdFlags::CLOEXEC).unwrap();
                rustix::io::pwrite(&fd, &memory, 0).unwrap();
                let kept = fd.try_clone().unwrap();
                let load = load(&path, Kind::fd_at(fd, at), method, io);
                let loaded = load.offset(offset).length(len).run();
                let congruent = offset % 512 == at % 512;
                let bounces = matches!(method, Method::Auto | Method::Bounce);
                if impossible(method, io) || (io == Io::Direct && !congruent && !bounces) {
                    loaded.expect_err(&what);
                    continue;
                }
                let buffer = loaded
                    .unwrap_or_else(|error| panic!("{what}: {error}"))
                    .buffer;
                // Checked before the comparison, which reads the file.
                if io == Io::Direct {
                    assert_eq!(cached(&path), 0, "{what}");
                }
                assert_eq!((buffer.offset(), buffer.len()), (at, len), "{what}");
                assert_eq!(
                    buffer_digest(&buffer),
                    file_digest(&path, offset, len),
                    "{what}"
                );
                let mut want = memory;
                want[at as usize..][..len as usize]
                    .copy_from_slice(&file[offset as usize..][..len as usize]);
                let mut got = vec![0; room as usize];
                rustix::io::pread(&kept, &mut got, 0).unwrap();
                assert!(got == want, "{what}: bytes around it have changed");
            }
        }
    }
    let fd = dirty_memfd(5000);
    let error = load(&path, Kind::fd_at(fd, 4000), Method::Auto, Io::Auto)
        .length(1001)
        .run()
        .unwrap_err()
        .to_string();
    let why = "1001 bytes do not fit into the rest of 5000 from byte 4000 on (EINVAL)";
    assert!(error.contains(why), "{error}");
}

#[test]
fn holes_are_zero_at_every_position() {
    let dir = dir();
    let len = 4 * CHUNK + 1000;
    let mib = 1 << 20;
    let layouts: [&[(u64, u64)]; 6] = [
        &[],
        &[(0, 5000)],
        &[(len - 700, len)],
        &[(mib, 2 * mib)],
        &[(0, 4096), (2 * mib, 2 * mib + 4096), (len - 1, len)],
        &[(100 << 10, 300 << 10), (301 << 10, 302 << 10)],
    ];
    for (index, data) in layouts.iter().enumerate() {
        let sub = dir.path().join(index.to_string());
        std::fs::create_dir(&sub).unwrap();
        let path = sparse(&sub, len, data);
        for kind in KINDS {
            for method in METHODS {
                for pages in [Pages::Base, Pages::Auto] {
                    if kind == "fd" && pages == Pages::Base {
                        continue;
                    }
                    let what = format!("layout {index} to {kind} by {method} on {pages}");
                    let load = load(&path, make(kind, len), method, Io::Auto).pages(pages);
                    check(load, &path, 0, len, &what);
                }
            }
        }
    }
}

#[test]
fn holes_need_no_memory_and_no_reads() {
    let dir = dir();
    let len = 64 << 20;
    let path = sparse(dir.path(), len, &[(32 << 20, 33 << 20)]);
    let loaded = Load::new(&path).pages(Pages::Base).run().unwrap();
    assert_eq!(loaded.report.bytes_hole, len - (1 << 20));
    assert_eq!(loaded.report.bytes_direct, 1 << 20);
    let stat = rustix::fs::fstat(loaded.buffer.as_fd().unwrap()).unwrap();
    assert_eq!(stat.st_size as u64, len);
    let allocated = stat.st_blocks as u64 * 512;
    assert!(
        allocated < 2 << 20,
        "{allocated} bytes are allocated for one MiB of data"
    );
}

#[test]
fn unusual_blocks_depths_and_chunks_load_the_bytes() {
    let dir = dir();
    let size = 5 * CHUNK + 333;
    let path = cold(dir.path(), size as usize);
    let digest = file_digest(&path, 0, size);
    for block in [4096, 4608, 1 << 20, 64 << 20] {
        for depth in [1, 3, 64, 4096] {
            for chunk in [block, block + 1, 1 << 40] {
                for kind in ["anon", "memfd"] {
                    for method in [Method::Uring, Method::Threads, Method::Bounce] {
                        let load = Load::new(&path).to(make(kind, 0)).method(method);
                        let load = load.block(block).queue_depth(depth).chunk(chunk);
                        let loaded = load.io(Io::Direct).run().unwrap();
                        let what = format!("{kind} by {method}: {block} x {depth}, {chunk}");
                        assert_eq!(buffer_digest(&loaded.buffer), digest, "{what}");
                    }
                }
            }
        }
    }
}
