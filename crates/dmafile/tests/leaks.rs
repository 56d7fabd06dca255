//! However a load ends, it leaks no descriptor, mapping, pin, ring or thread.
//!
//! One test, because it counts for the whole process.

use dmafile::{CancelToken, ErrorKind, Io, Kind, Load, Method, Pages, Verify};
use dmafile_testkit::{cold, dir, memfd};
use std::fs;

/// The resources of this process.
#[derive(Debug, PartialEq)]
struct Held {
    descriptors: Vec<String>,
    /// Mappings without those of the allocator and the thread stacks, which the C library keeps.
    mappings: Vec<String>,
    pinned: u64,
    locked: u64,
    threads: u64,
}

fn held() -> Held {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let number = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut descriptors: Vec<_> = descriptors
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|path| path.display().to_string())
        .filter(|path| !path.ends_with("/fd"))
        .collect();
    descriptors.sort();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let named = |line: &&str| {
        ["memfd", "io_uring", "noise"]
            .iter()
            .any(|name| line.contains(name))
    };
    let mut mappings: Vec<_> = maps.lines().filter(named).map(str::to_string).collect();
    mappings.sort();
    Held {
        descriptors,
        mappings,
        pinned: number("VmPin:"),
        locked: number("VmLck:"),
        threads: number("Threads:"),
    }
}

/// The resources of this process after delayed releases of the kernel: the worker threads of a ring end
/// slightly later than the ring.
fn settled(wanted: &Held) -> Held {
    for _ in 0..6000 {
        let now = held();
        if now == *wanted {
            return now;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    held()
}

/// Resident anonymous memory of this process, in bytes. smaps counts page by page; the number in `status`
/// lacks what each CPU has not added yet, which is much on machines with many CPUs.
fn anonymous() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))
        .unwrap();
    line.split_whitespace()
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}

#[test]
fn no_load_leaks_a_descriptor_mapping_pin_or_thread() {
    let dir = dir();
    let len = 40 << 20;
    let path = cold(dir.path(), len);
    let runs: [(&str, &dyn Fn() -> Load); 9] = [
        ("whole, registered", &|| {
            Load::new(&path).method(Method::Uring).io(Io::Direct)
        }),
        ("whole, anon", &|| Load::new(&path).to(Kind::Anon)),
        ("whole, threads", &|| {
            Load::new(&path).method(Method::Threads).block(1 << 20)
        }),
        ("whole, existing", &|| {
            Load::new(&path).to(Kind::fd(memfd(len as u64)))
        }),
        ("whole, bounce", &|| Load::new(&path).method(Method::Bounce)),
        ("whole, base", &|| {
            Load::new(&path).pages(Pages::Base).block(1 << 20)
        }),
        ("wrong digest", &|| {
            let verify = Verify::expect(dmafile::Algorithm::Crc32c, "00000000");
            Load::new(&path).verify(verify.unwrap())
        }),
        ("past the end", &|| Load::new(&path).offset(len as u64)),
        ("no such kind", &|| Load::new(&path).to(Kind::Udmabuf)),
    ];
    // On first use, the C library and the runtime allocate memory that they keep.
    for (_, load) in &runs {
        drop(load().run());
    }
    let before = held();
    let memory = anonymous();
    for round in 0..3 {
        for (name, load) in &runs {
            drop(load().run());
            assert_eq!(settled(&before), before, "{name}, round {round}");
        }
    }
    for method in [Method::Uring, Method::Threads, Method::Bounce] {
        for after in [0, 1, 3, 10] {
            let token = CancelToken::new();
            let (flag, mut left) = (token.clone(), after);
            let count = std::sync::Mutex::new(move || {
                if left == 0 {
                    flag.cancel();
                }
                left -= 1;
            });
            if after == 0 {
                token.cancel();
            }
            let load = Load::new(&path)
                .method(method)
                .block(64 << 10)
                .cancel(token.clone());
            let load = load.progress(move |_| {
                if let Ok(mut count) = count.try_lock() {
                    count();
                }
            });
            match load.run() {
                Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}"),
                // It may have ended before the token was set.
                Ok(loaded) => assert_eq!(loaded.buffer.len(), len as u64),
            }
            assert_eq!(
                settled(&before),
                before,
                "cancelled {method} after {after} calls"
            );
        }
    }
    let after = anonymous();
    assert!(
        after < memory + (len as u64) / 2,
        "{after} bytes are resident, {memory} before"
    );
}
