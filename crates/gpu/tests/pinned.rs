//! Memory that is pinned for a device, with a double of its driver or a real one: exactly the needed pages are
//! pinned, and only as long as the memory exists.

mod double;

use dmafile::{Allocation, Buffer, Kind, Load, MemoryKind, Model, Pages};
use dmafile_gpu::{Device, parse_kind};
use dmafile_testkit::{buffer_digest, cold, dir, file_digest, noise, sparse};
use double::{Double, Left, both, both_doubles};
use std::os::unix::net::UnixStream;

const LEN: usize = 9_000_001;
const PAGE: u64 = 4096;

fn load(path: &std::path::Path, kind: Kind) -> Load {
    Load::new(path).to(kind).pages(Pages::Base)
}

#[test]
fn a_load_into_pinned_memory_pins_exactly_its_pages_once() {
    for (double, device) in both() {
        exactly_its_pages(&double, device(0));
    }
}

fn exactly_its_pages(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let kind = Kind::from(device);
    for (offset, len) in [(0, LEN as u64), (5000, 1_000_000), (4096, 1)] {
        for allocation in [Allocation::Auto, Allocation::Ahead, Allocation::InRead] {
            let load = load(&path, kind.clone()).offset(offset).length(len);
            let loaded = load.allocation(allocation).run().unwrap();
            let buffer = loaded.buffer;
            assert_eq!(loaded.report.kind, kind.memory());
            assert_eq!(*buffer.kind(), MemoryKind::Memfd);
            assert_eq!(buffer.pinned(), Some(device.to_string()));
            assert_eq!(buffer_digest(&buffer), file_digest(&path, offset, len));
            if double::is_real() {
                continue;
            }
            let pages = (buffer.offset() + len).div_ceil(PAGE) - buffer.offset() / PAGE;
            assert_eq!(
                double.most_registered(),
                pages * PAGE,
                "{len}, {allocation}"
            );
            assert_eq!(double.left().registered, 1);
            drop(buffer);
            assert_eq!(double.left(), Left::default());
            double.most_registered();
        }
    }
}

#[test]
fn pinned_memory_is_named_after_its_device() {
    for (word, device) in [
        ("cuda-host", Device::cuda(0)),
        ("cuda-host:1", Device::cuda(1)),
        ("hip-host", Device::hip(0)),
        ("hip-host:1", Device::hip(1)),
    ] {
        let kind = parse_kind(word).unwrap();
        assert!(
            matches!(&kind, Kind::Pinned(named) if named.name() == device.to_string()),
            "{word}"
        );
        assert_eq!(kind.to_string(), word);
        let memory: MemoryKind = word.parse().unwrap();
        assert_eq!(memory, kind.memory());
    }
}

/// Bytes of memory that a memfd has.
fn allocated(buffer: &Buffer) -> u64 {
    let stat = rustix::fs::fstat(buffer.as_fd().unwrap()).unwrap();
    stat.st_blocks as u64 * 512
}

/// The memory is one range for the driver, so nothing of it can be left out.
#[test]
fn holes_and_gaps_between_tensors_are_pinned_and_counted() {
    let double = Double::cuda();
    let dir = dir();
    let len = 64 << 20;
    let path = sparse(dir.path(), len, &[(0, 100_000), (len - 3_000_000, len - 5)]);
    let to = |kind: Kind| Load::new(&path).to(kind);
    let pinned = || Kind::from(double.device(0));
    let buffer = to(pinned()).run().unwrap().buffer;
    assert_eq!(buffer_digest(&buffer), file_digest(&path, 0, len));
    assert!(double::is_real() || double.most_registered() == len);
    assert_eq!(allocated(&buffer), len);
    drop(buffer);
    assert!(allocated(&to(Kind::Memfd).run().unwrap().buffer) < len / 2);

    let model = dir.path().join("model.safetensors");
    let tensors = dmafile_testkit::models::tensors("a", 9, 1_000_000);
    dmafile_testkit::models::safetensors(&model, &tensors);
    let model = Model::open(&model).unwrap();
    let chosen = ["a.0.w".parse().unwrap(), "a.8.w".parse().unwrap()];
    let load = model.load_tensors(&chosen).unwrap().to(pinned());
    if !double::is_real() {
        double.most_registered();
    }
    let buffer = load.run().unwrap().buffer;
    for number in [0, 8] {
        let tensor = model.tensor(&tensors[number].0).unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        let access = buffer.access().unwrap();
        access.read_at(tensor.at, &mut bytes).unwrap();
        assert!(bytes == tensors[number].3, "{}", tensor.name);
    }
    assert!(double::is_real() || double.most_registered() == buffer.len().next_multiple_of(PAGE));
    assert!(allocated(&buffer) >= buffer.len());
    drop(buffer);

    // More than this machine has.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    if let Err(error) = file.set_len(8 << 40) {
        return eprintln!("SKIP: cannot make a file of 8 TiB: {error}");
    }
    assert!(to(Kind::Memfd).plan().is_ok());
    let error = to(pinned()).plan().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}");
    assert!(
        error.to_string().starts_with("not enough memory: "),
        "{error}"
    );
    assert_eq!(double.left(), Left::default());
}

#[test]
fn a_buffer_is_pinned_and_unpinned() {
    for (double, device) in both() {
        pin_and_unpin(&double, device(1));
    }
}

fn pin_and_unpin(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    for kind in [
        Kind::Memfd,
        Kind::Anon,
        Kind::fd(dmafile_testkit::memfd(LEN as u64)),
    ] {
        let mut buffer = load(&path, kind).pages(Pages::Auto).run().unwrap().buffer;
        if buffer.as_ptr().is_none() {
            let error = buffer.pin(&device).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
            continue;
        }
        buffer.pin(&device).unwrap();
        let error = buffer.pin(&device).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
        let error = buffer.seal().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
        buffer.unpin().unwrap();
        buffer.unpin().unwrap();
        assert_eq!(double.left(), Left::default());
        buffer.pin(&device).unwrap();
        assert_eq!(buffer_digest(&buffer), file_digest(&path, 0, LEN as u64));
        drop(buffer);
        assert_eq!(double.left(), Left::default());
    }
}

/// However memory is released, it is unpinned first: the double checks that it is still mapped then.
#[test]
fn memory_is_unpinned_before_it_is_unmapped() {
    for (double, device) in both() {
        unpinned_first(&double, device(0));
    }
}

fn unpinned_first(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let pinned = || load(&path, Kind::from(device)).run().unwrap().buffer;
    drop(pinned());
    assert_eq!(double.left(), Left::default());
    let fd = pinned().into_fd().unwrap();
    assert_eq!(double.left(), Left::default());
    drop(fd);
    let reserved = pinned().into_reserved();
    assert_eq!(double.left(), Left::default());
    drop(reserved);
    // A load that fails at its end has already pinned the memory.
    let wrong = format!("sha256={}", "2".repeat(64));
    let load = load(&path, Kind::from(device)).verify(wrong.parse().unwrap());
    let error = load.allocation(Allocation::Ahead).run().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG));
    assert_eq!(double.left(), Left::default());
}

#[test]
fn a_refused_pin_is_one_message() {
    for (double, device) in both_doubles() {
        pin_is_refused(&double, device(0));
    }
}

fn pin_is_refused(double: &Double, device: Device) {
    let dir = dir();
    let path = dir.path().join("file");
    std::fs::write(&path, noise(100_000, 3)).unwrap();
    let mut buffer = load(&path, Kind::Memfd).run().unwrap().buffer;
    buffer.seal().unwrap();
    // Sealed memory is mapped read-only.
    if device.is_cuda() {
        buffer.pin(&device).unwrap();
    }
    drop(buffer);
    assert_eq!(double.left(), Left::default());
    double.set(0, false);
    let mut buffer = load(&path, Kind::Memfd).run().unwrap().buffer;
    buffer.seal().unwrap();
    let error = buffer.pin(&device).unwrap_err();
    let why = if device.is_cuda() {
        "cuMemHostRegister_v2 failed: operation not supported, error 801"
    } else {
        "HIP cannot register memory that is mapped read-only"
    };
    assert_eq!(
        error.to_string(),
        format!(
            "cannot pin memory for the device: {device}, 102400 bytes: {why} (EOPNOTSUPP); it \
             cannot pin memory that is mapped read-only: leave it unsealed"
        )
    );
    // A write to a copy-on-write mapping allocates a new page, while a device would keep the old one.
    let copy = buffer.copy_on_write().unwrap();
    let error = copy.pin(&device).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    assert!(copy.pinned().is_none());
    for call in [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemHostRegister_v2",
    ] {
        for allocation in [Allocation::Ahead, Allocation::InRead] {
            double.fail(call, 1, 2);
            let load = load(&path, Kind::from(device)).allocation(allocation);
            let error = load.run().unwrap_err();
            let name = double.name(call);
            assert!(error.to_string().contains(&name), "{error}");
            assert_eq!(double.left(), Left::default());
        }
    }
}

/// The permissions of the mapping that contains an address.
fn mapped(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        let inside = (number(start)..number(end)).contains(&address);
        inside.then(|| rest[..4].to_string())
    })
}

#[test]
fn unpinning_is_tried_twice() {
    for (double, device) in both_doubles() {
        unpinned_twice(&double, device(0));
    }
}

fn unpinned_twice(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    for call in ["cuMemHostUnregister", "cuCtxPushCurrent_v2"] {
        let pinned = || {
            double.fail("", 0, 0);
            let load = load(&path, Kind::from(device));
            let buffer = load.run().unwrap().buffer;
            double.fail(call, 1, 999);
            buffer
        };
        pinned().unpin().unwrap();
        assert_eq!(
            (double.calls(), double.left()),
            (2, Left::default()),
            "{call}"
        );
        drop(pinned());
        assert_eq!(
            (double.calls(), double.left()),
            (2, Left::default()),
            "{call}"
        );
    }
}

/// The driver would use other memory at the same addresses as if it were this one.
#[test]
fn memory_that_cannot_be_unpinned_stays_mapped() {
    for (double, device) in both_doubles() {
        stays_mapped(&double, device(0));
    }
}

fn stays_mapped(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let kept = Left {
        registered: 1,
        ..Left::default()
    };
    type Drop = fn(Buffer);
    let ways: [Drop; 5] = [
        drop,
        |buffer| drop(buffer.into_fd().unwrap()),
        |buffer| drop(buffer.into_reserved()),
        |buffer| {
            let error = buffer.unpin().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
            buffer.unpin().unwrap();
        },
        |mut buffer| {
            buffer.unpin().unwrap_err();
            // That would map the memory again.
            let error = buffer.seal().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
        },
    ];
    for call in ["cuMemHostUnregister", "cuCtxPushCurrent_v2"] {
        for (number, way) in ways.iter().enumerate() {
            let load = load(&path, Kind::from(device));
            let buffer = load.run().unwrap().buffer;
            let address = buffer.as_ptr().unwrap().addr();
            double.fail(call, -1, 999);
            way(buffer);
            double.fail("", 0, 0);
            assert_eq!(double.left(), kept, "{call}, {number}");
            for address in [address, address + LEN - 1] {
                let mapped = mapped(address);
                assert_eq!(mapped.as_deref(), Some("rw-s"), "{call}, {number}");
            }
            double.reset();
        }
    }
    // Other code has unregistered it.
    let load = load(&path, Kind::from(device));
    let buffer = load.run().unwrap().buffer;
    let address = buffer.as_ptr().unwrap().addr();
    double.fail("cuMemHostUnregister", -1, 713);
    assert!(buffer.unpin().is_err());
    drop(buffer);
    assert_eq!(mapped(address), None);
    double.reset();
}

/// Both processes have the same memory, and each one has its own pins.
#[test]
fn each_process_pins_shared_memory_itself() {
    for (double, device) in both() {
        each_pins_itself(&double, device(0));
    }
}

fn each_pins_itself(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let buffer = load(&path, Kind::from(device)).run().unwrap().buffer;
    let (ours, theirs) = UnixStream::pair().unwrap();
    buffer.send(&ours).unwrap();
    let received = Buffer::receive(&theirs).unwrap();
    received.pin(&device).unwrap();
    assert!(double::is_real() || double.left().registered == 2);
    drop(buffer);
    assert_eq!(buffer_digest(&received), file_digest(&path, 0, LEN as u64));
    drop(received);
    assert_eq!(double.left(), Left::default());
}

#[test]
fn these_tests_run_with_a_real_driver() {
    double::run_as_real();
}
