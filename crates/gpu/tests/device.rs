//! Loads into the memory of a device, with a double of its driver that checks every call, or with a real
//! driver.

mod double;

use dmafile::{CancelToken, ErrorKind, Load, PinDevice, Result, Ring};
use dmafile_gpu::{Device, DeviceMemory, OtherStream, Place, ToDevice};
use dmafile_testkit::{bytes_digest, cold, dir, file_digest, noise};
use double::{Double, Left, Numbered, both, both_doubles, calls};
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

/// Small, so that small files use each slot of the ring often.
const BLOCK: u64 = 16 << 10;
const RING: Ring = ring(4, BLOCK);
const LEN: usize = 700_001;

const fn ring(slots: u32, slot: u64) -> Ring {
    Ring::new(slots as u64 * slot, slots)
}

/// Loads all of a file into memory of a device.
fn to_device(device: Device, load: Load, len: u64) -> Result<Arc<DeviceMemory>> {
    let memory = Arc::new(device.allocate(len)?);
    let mut sink = ToDevice::new(device, [Place::new(0, len, &memory, 0)])?;
    load.block(BLOCK).run_through(RING, &mut sink)?;
    Ok(memory)
}

fn back(device: Device, memory: &DeviceMemory) -> Vec<u8> {
    let mut bytes = vec![0xee; memory.len() as usize];
    device.copy_back(memory, 0, &mut bytes).unwrap();
    bytes
}

/// A cold file of LEN bytes, and its folder.
fn file() -> (TempDir, PathBuf) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    (dir, path)
}

/// Loads a file through a sink, to its end.
fn load(mut sink: ToDevice, path: &Path) {
    Load::new(path)
        .block(BLOCK)
        .run_through(RING, &mut sink)
        .unwrap();
}

/// Loads a file of LEN bytes through a sink, and compares the digest of the device memory.
fn fills(sink: ToDevice, path: &Path, device: Device, memory: &DeviceMemory) {
    load(sink, path);
    assert_eq!(
        bytes_digest(&back(device, memory)),
        file_digest(path, 0, LEN as u64)
    );
}

#[test]
fn device_memory_has_the_digest_of_the_file() {
    let dir = dir();
    for (double, numbered) in both() {
        for (len, number) in [(1, 0), (4096, 1), (LEN, 0)] {
            let device = numbered(number);
            let path = cold(dir.path(), len);
            let memory = to_device(device, Load::new(&path), len as u64).unwrap();
            let digest = file_digest(&path, 0, len as u64);
            assert_eq!(
                bytes_digest(&back(device, &memory)),
                digest,
                "{device}, {len}"
            );
            drop(memory);
            assert_eq!(double.left(), Left::default());
        }
        assert!(
            double::is_real() || double.most_registered() <= RING.bytes,
            "more than the ring was registered"
        );
    }
}

/// Adjacent ranges of the file, in any order in device memory.
#[test]
fn only_the_given_places_are_filled() {
    let double = Double::cuda();
    let device = double.device(0);
    let (_dir, path) = file();
    let whole = std::fs::read(&path).unwrap();
    let memory = Arc::new(device.allocate(400_000).unwrap());
    let other = Arc::new(device.allocate(10).unwrap());
    // Adjacent ranges, a gap of one byte, a range that spans many slots, and one byte at the end.
    let ranges = [
        (5, 100),
        (105, 50),
        (156, 1000),
        (70_000, 300_001),
        (699_990, 10),
        (700_000, 1),
    ];
    let offsets = [399_000, 0, 512, 2048, 0, 399_999];
    let places = ranges.iter().zip(offsets).map(|(&(at, bytes), offset)| {
        let memory = if at == 699_990 { &other } else { &memory };
        Place::new(at, bytes, memory, offset)
    });
    let places: Vec<_> = places.collect();
    let sink = ToDevice::new(device, places).unwrap();
    load(sink, &path);
    let got = back(device, &memory);
    for ((at, bytes), offset) in ranges.into_iter().zip(offsets) {
        let (at, bytes) = (at as usize, bytes as usize);
        match at {
            699_990 => assert!(back(device, &other) == whole[at..at + bytes]),
            _ => assert!(
                got[offset as usize..][..bytes] == whole[at..at + bytes],
                "{at}"
            ),
        }
    }
    drop((memory, other));
    assert_eq!(double.left(), Left::default());
    if double::is_real() {
        return;
    }
    // No more copies than slots and places require.
    let slots = (LEN as u64).div_ceil(BLOCK);
    assert!(
        double.copies() <= slots + ranges.len() as u64,
        "{}",
        double.copies()
    );
}

#[test]
fn a_place_outside_of_the_memory_is_refused() {
    let double = Double::cuda();
    let device = double.device(0);
    let (_dir, path) = file();
    let memory = Arc::new(device.allocate(100).unwrap());
    for (bytes, offset) in [(101, 0), (1, 100), (2, u64::MAX)] {
        let mut sink = ToDevice::new(device, [Place::new(0, bytes, &memory, offset)]).unwrap();
        let load = Load::new(&path).block(BLOCK);
        let error = load.run_through(RING, &mut sink).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    }
    assert!(device.copy_back(&memory, 1, &mut [0; 100]).is_err());
    drop(memory);
    assert_eq!(double.left(), Left::default());
}

/// What remains if a call that releases something fails, once. None for other calls.
fn remains(call: &str) -> Option<Left> {
    let nothing = Left::default();
    match call {
        // This one is tried again; the other one leaves a context on the stack of the thread.
        "cuMemHostUnregister" | "cuCtxPopCurrent_v2" => Some(nothing),
        "cuMemFree_v2" => Some(Left {
            memory: 1,
            ..nothing
        }),
        "cuEventDestroy_v2" => Some(Left {
            events: 1,
            ..nothing
        }),
        "cuStreamDestroy_v2" => Some(Left {
            streams: 1,
            ..nothing
        }),
        "cuDevicePrimaryCtxRelease_v2" => Some(Left {
            contexts: 1,
            ..nothing
        }),
        _ => None,
    }
}

#[test]
fn each_failing_driver_call_is_one_message_and_leaks_nothing() {
    for (double, device) in both_doubles() {
        each_call_fails(&double, device(0));
    }
}

fn each_call_fails(double: &Double, device: Device) {
    const PLACED: usize = 140_000;
    let dir = dir();
    let path = dir.path().join("file");
    let bytes = noise(150_000, 1);
    std::fs::write(&path, &bytes).unwrap();
    // The device waits for another stream, and there are bytes without a place.
    let load = || {
        let memory = Arc::new(device.allocate(PLACED as u64)?);
        let places = [Place::new(0, PLACED as u64, &memory, 0)];
        // SAFETY: the default stream.
        let after = unsafe { OtherStream::new(0) };
        let mut sink = ToDevice::new(device, places)?.after(after);
        let load = Load::new(&path).block(BLOCK);
        load.run_through(RING, &mut sink)?;
        let mut got = vec![0; PLACED];
        device.copy_back(&memory, 0, &mut got)?;
        assert!(got == bytes[..PLACED]);
        Ok(())
    };
    let describe = || {
        device.all()?;
        device.describe().map(drop)
    };
    let calls = calls();
    assert_eq!(calls.len(), 26);
    for (call, _) in &calls {
        let run: &dyn Fn() -> Result<()> = match call.as_str() {
            // It is called only once in a process, and the other one only after a failure.
            "cuInit" | "cuGetErrorString" => continue,
            "cuDeviceGetAttribute" => {
                // AMD's driver is not asked.
                if device.is_cuda() {
                    double.fail(call, 1, 999);
                    assert_eq!(device.pins_read_only(), None);
                }
                assert_eq!(device.pins_read_only(), Some(device.is_cuda()));
                continue;
            }
            "cuDriverGetVersion" | "cuDeviceGetCount" | "cuDeviceGetName" => &describe,
            _ => &load,
        };
        for nth in 1.. {
            double.reset();
            double.set(20, true);
            double.fail(call, nth, 999);
            let ended = run();
            let (left, what) = (double.left(), format!("{call}, call {nth}"));
            assert_eq!(left.complaint, "", "{what}");
            if double.calls() < nth {
                assert!(ended.is_ok(), "{what}: {ended:?}");
                assert_eq!(left, Left::default(), "{what}");
                assert!(nth > 1, "{call} is never called");
                break;
            }
            match (ended, remains(call)) {
                (ended, Some(remains)) => {
                    assert!(ended.is_ok(), "{what}: {ended:?}");
                    assert_eq!(left, remains, "{what}");
                }
                (Err(error), None) => {
                    let text = error.to_string();
                    let name = double.name(call);
                    let says = format!("{name} failed: a failure of the double, error 999 (EIO)");
                    assert!(text.contains(&says), "{what}: {text}");
                    assert_eq!(text.lines().count(), 1);
                    assert_eq!(left, Left::default(), "{what}");
                }
                // Without a current context, a drop can release nothing, and reports nothing.
                (Ok(()), None) if call == "cuCtxPushCurrent_v2" => {
                    assert!(
                        left.memory + left.events + left.streams <= 1,
                        "{what}: {left:?}"
                    );
                    assert_eq!((left.registered, left.contexts), (0, 0), "{what}");
                }
                (Ok(()), None) => panic!("{what}: its failure is not noticed"),
            }
        }
    }
    double.reset();
    double.fail("cuMemAlloc_v2", 1, 998);
    let error = load().unwrap_err().to_string();
    let name = double.name("cuMemAlloc_v2");
    let says = format!("{name} failed: an unknown error, error 998 (EIO)");
    assert!(error.contains(&says), "{error}");
    assert_eq!(double.left(), Left::default());
}

/// The double checks a source when it is copied, also if nothing can wait for that.
#[test]
fn a_ring_that_the_device_may_be_reading_stays_mapped() {
    for (double, device) in both_doubles() {
        ring_stays_mapped(&double, device(0));
    }
}

fn ring_stays_mapped(double: &Double, device: Device) {
    let (_dir, path) = file();
    double.set(5000, true);
    let memory = Arc::new(device.allocate(LEN as u64).unwrap());
    // Copies are in flight when the second place is found to be wrong.
    let places = [(0, 0), (BLOCK + 1, u64::MAX)];
    let places = places.map(|(at, offset)| Place::new(at, BLOCK + 1, &memory, offset));
    let mut sink = ToDevice::new(device, places).unwrap();
    double.fail("cuStreamSynchronize", -1, 999);
    let load = Load::new(&path).block(BLOCK);
    let error = load.run_through(RING, &mut sink).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    assert_eq!(double.calls(), 2);
    double.fail("", 0, 0);
    // With the stream, which the double waits for.
    drop(sink);
    assert_eq!(
        (double.left().registered, double.left().complaint.as_str()),
        (1, "")
    );
    let other = to_device(device, Load::new(&path), LEN as u64).unwrap();
    assert_eq!(
        bytes_digest(&back(device, &other)),
        file_digest(&path, 0, LEN as u64)
    );
    drop((memory, other));
    let left = Left {
        registered: 1,
        ..Left::default()
    };
    assert_eq!(double.left(), left);
    double.reset();
}

#[test]
fn driver_errors_become_errnos() {
    let Some(double) = Double::only() else {
        return;
    };
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let fails = |call: &str, code| {
        double.fail(call, 1, code);
        let error = to_device(Device::cuda(0), Load::new(&path), LEN as u64).unwrap_err();
        assert_eq!(double.left(), Left::default());
        error
    };
    let error = fails("cuMemAlloc_v2", 2);
    assert_eq!(
        error.to_string(),
        "cannot allocate memory of the device: cuda:0, 700001 bytes: cuMemAlloc_v2 failed: out of \
         memory, error 2 (ENOMEM)"
    );
    let error = fails("cuMemHostRegister_v2", 2);
    assert_eq!(
        error.to_string(),
        "cannot pin memory for the device: cuda:0, 65536 bytes: cuMemHostRegister_v2 failed: out of \
         memory, error 2 (ENOMEM); raise the limit on locked memory: ulimit -l"
    );
    let error = to_device(Device::cuda(7), Load::new(&path), 10).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
    let error = Device::cuda(0).allocate(0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    for word in [
        "",
        "cpu",
        "cuda:",
        "cuda:-1",
        "cuda:+1",
        "cuda:x",
        "cuda:99999999999",
    ] {
        let error = word.parse::<Device>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{word}");
    }
}

#[test]
fn digests_progress_and_cancellation_work_for_a_device() {
    for (double, device) in both() {
        digests_and_cancellation(&double, device(1));
    }
}

fn digests_and_cancellation(double: &Double, device: Device) {
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let digest = file_digest(&path, 0, LEN as u64);
    let done = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&done);
    let load = Load::new(&path)
        .verify(format!("sha256={digest}").parse().unwrap())
        .progress(move |progress| seen.store(progress.done, Ordering::Relaxed));
    drop(to_device(device, load, LEN as u64).unwrap());
    assert_eq!(done.load(Ordering::Relaxed), LEN as u64);
    let wrong = format!("sha256={}", "1".repeat(64));
    let load = Load::new(&path).verify(wrong.parse().unwrap());
    let error = to_device(device, load, LEN as u64).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADMSG));
    assert_eq!(double.left(), Left::default());

    let memory = Arc::new(device.allocate(LEN as u64).unwrap());
    let token = CancelToken::new();
    let cancel = token.clone();
    let sink = ToDevice::new(device, [Place::new(0, LEN as u64, &memory, 0)]);
    let mut sink = sink.unwrap().on_copied(move |_| cancel.cancel());
    let load = Load::new(&path).block(BLOCK).cancel(token);
    let error = load.run_through(RING, &mut sink).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    drop((sink, memory));
    assert_eq!(double.left(), Left::default());
}

/// Whichever function of the caller panics, nothing of the load remains.
#[test]
fn a_panic_in_a_callback_leaves_nothing() {
    for (double, device) in both() {
        callbacks_panic(&double, device(0));
    }
}

fn callbacks_panic(double: &Double, device: Device) {
    let (_dir, path) = file();
    for who in ["progress", "told", "places"] {
        let memory = Arc::new(device.allocate(LEN as u64).unwrap());
        let mut place = Some(Place::new(0, LEN as u64 / 2, &memory, 0));
        let next = move |_| match (place.take(), who) {
            (None, "places") => panic!("the caller's own"),
            (place, _) => place,
        };
        let sink = ToDevice::from_fn(device, next);
        let mut sink = sink.unwrap().on_copied(move |_| {
            assert!(who != "told", "the caller's own");
        });
        let load = Load::new(&path).block(BLOCK).progress(move |_| {
            assert!(who != "progress", "the caller's own");
        });
        let run = AssertUnwindSafe(|| load.run_through(RING, &mut sink).map(drop));
        let panic = catch_unwind(run).unwrap_err();
        assert_eq!(
            panic.downcast_ref::<&str>(),
            Some(&"the caller's own"),
            "{who}"
        );
        drop((sink, memory));
        assert_eq!(double.left(), Left::default(), "{who}");
    }
}

/// All bytes before the reported offset are in device memory.
#[test]
fn reported_bytes_are_in_device_memory() {
    let double = Double::cuda();
    let device = double.device(0);
    let (_dir, path) = file();
    let whole = std::fs::read(&path).unwrap();
    let memory = Arc::new(device.allocate(LEN as u64).unwrap());
    let (seen, bytes) = (Arc::clone(&memory), whole.clone());
    let last = Arc::new(AtomicU64::new(0));
    let upto = Arc::clone(&last);
    let sink = ToDevice::new(device, [Place::new(0, LEN as u64, &memory, 0)]);
    let mut sink = sink.unwrap().on_copied(move |end| {
        let mut got = vec![0; end as usize];
        device.copy_back(&seen, 0, &mut got).unwrap();
        assert!(got == bytes[..end as usize], "{end}");
        upto.store(end, Ordering::Relaxed);
    });
    Load::new(&path)
        .block(BLOCK)
        .run_through(RING, &mut sink)
        .unwrap();
    assert_eq!(last.load(Ordering::Relaxed), LEN as u64);
    drop((sink, memory));
    assert_eq!(double.left(), Left::default());
}

/// A wait for a stream keeps a CPU busy, unlike one for an event.
#[test]
fn a_sink_that_waits_for_a_place_waits_for_an_event() {
    const BYTES: u64 = 70_000;
    let double = Double::cuda();
    let device = double.device(0);
    let (_dir, path) = file();
    let whole = std::fs::read(&path).unwrap();
    let memory = Arc::new(device.allocate(BYTES).unwrap());
    let (place, mut next) = (Arc::clone(&memory), 0);
    let sink = ToDevice::from_fn(device, move |wait| {
        if !wait {
            return None;
        }
        // The previous place, in the same memory, is full.
        if next > 0 {
            let at = (next - BYTES) as usize;
            assert!(back(device, &place) == whole[at..next as usize]);
        }
        let at = next;
        next += BYTES;
        (next <= LEN as u64).then(|| Place::new(at, BYTES, &place, 0))
    });
    if !double::is_real() {
        double.fail("cuStreamSynchronize", i32::MAX, 999);
    }
    load(sink.unwrap(), &path);
    assert!(double::is_real() || double.calls() == 1, "only at the end");
    drop(memory);
    assert_eq!(double.left(), Left::default());
}

/// The double checks the memory when it copies; by then, only the sink references it.
#[test]
fn the_sink_keeps_device_memory_until_it_is_filled() {
    const BYTES: u64 = 5000;
    let double = Double::cuda();
    double.set(2000, true);
    let device = double.device(0);
    let dir = dir();
    let path = cold(dir.path(), LEN);
    let places = (0..LEN as u64 / BYTES).map(move |number| {
        let memory = Arc::new(device.allocate(BYTES).unwrap());
        Place::new(number * BYTES, BYTES, &memory, 0)
    });
    let sink = ToDevice::new(device, places).unwrap();
    load(sink, &path);
    assert_eq!(double.left(), Left::default());
}

/// For any duration of copies: the double checks whether a slot changes before its copy.
#[test]
fn no_slot_is_reused_before_its_copy_has_ended() {
    let all = std::env::var("DMAFILE_SCHEDULES").map_or(100, |count| count.parse().unwrap());
    // The engine does the same with both; only the names of the functions differ.
    for (number, (double, device)) in both().enumerate() {
        let count = if number == 0 { all } else { all / 10 };
        schedules(&double, device(0), count);
    }
}

fn schedules(double: &Double, device: Device, count: usize) {
    let dir = dir();
    let len = 150_000;
    let path = dir.path().join("file");
    let bytes = noise(len, 9);
    std::fs::write(&path, &bytes).unwrap();
    let memory = Arc::new(device.allocate(len as u64).unwrap());
    for schedule in 0..count {
        double.set([1, 50, 300][schedule % 3], true);
        let mut sink = ToDevice::new(device, [Place::new(0, len as u64, &memory, 0)]).unwrap();
        let load = Load::new(&path).block(4096);
        let ring = ring(2 + (schedule % 7) as u32, 4096 * (1 + schedule as u64 % 4));
        load.run_through(ring, &mut sink).unwrap();
        assert_eq!(double.left().complaint, "", "schedule {schedule}");
        // A real driver does not notice that a slot has changed, except by the bytes.
        if double::is_real() || schedule % 16 == 0 {
            assert!(back(device, &memory) == bytes, "schedule {schedule}");
        }
    }
    drop(memory);
    assert_eq!(double.left(), Left::default());
}

#[test]
fn threads_load_into_two_devices_concurrently() {
    for (double, device) in both() {
        four_threads(&double, device);
    }
}

fn four_threads(double: &Double, numbered: Numbered) {
    let dir = dir();
    let paths = [cold(dir.path(), LEN), cold(dir.path(), LEN + 17)];
    let load = |number: u32| {
        let path: &Path = &paths[number as usize / 2 % 2];
        let len = std::fs::metadata(path).unwrap().len();
        let device = numbered(number % 2);
        for _ in 0..3 {
            let memory = to_device(device, Load::new(path), len).unwrap();
            if !double::is_real() {
                assert_eq!(double.device_of(memory.address()), number as i32 % 2);
            }
            assert_eq!(
                bytes_digest(&back(device, &memory)),
                file_digest(path, 0, len)
            );
        }
    };
    std::thread::scope(|scope| {
        for number in 0..4 {
            let load = &load;
            scope.spawn(move || load(number));
        }
    });
    assert_eq!(double.left(), Left::default());
}

/// The double notices if anything happens in the context of the wrong device.
#[test]
fn a_call_in_the_context_of_another_device_is_a_complaint() {
    let Some(double) = Double::only() else {
        return;
    };
    let (_dir, path) = file();
    let memory = Arc::new(Device::cuda(0).allocate(LEN as u64).unwrap());
    let places = [Place::new(0, LEN as u64, &memory, 0)];
    let sink = ToDevice::new(Device::cuda(1), places).unwrap();
    load(sink, &path);
    let complaint = double.left().complaint;
    assert_eq!(complaint, "a call in the context of another device");
    drop(memory);
    double.reset();
}

/// Memory that an allocator reuses may still be the target of copies that were queued before.
#[test]
fn copies_wait_for_work_that_another_library_queued() {
    for (double, device) in both_doubles() {
        copies_wait(&double, device(0));
    }
}

fn copies_wait(double: &Double, device: Device) {
    type Handle = *mut c_void;
    let (_dir, path) = file();
    let memory = Arc::new(device.allocate(LEN as u64).unwrap());
    let (mut context, mut other): (Handle, Handle) = (std::ptr::null_mut(), std::ptr::null_mut());
    let mut old = vec![0xff_u8; LEN.next_multiple_of(4096) + 4096];
    let skip = old.as_ptr().align_offset(4096);
    let old = &mut old[skip..][..LEN.next_multiple_of(4096)];
    // SAFETY: functions of the double, with the values that they returned.
    unsafe {
        double
            .call::<unsafe extern "C" fn(*mut Handle, c_int) -> c_int>("cuDevicePrimaryCtxRetain")(
            &raw mut context,
            0,
        );
        double.call::<unsafe extern "C" fn(Handle) -> c_int>("cuCtxPushCurrent_v2")(context);
        double.call::<unsafe extern "C" fn(*mut Handle, u32) -> c_int>("cuStreamCreate")(
            &raw mut other,
            0,
        );
        let register = double
            .call::<unsafe extern "C" fn(*mut u8, usize, u32) -> c_int>("cuMemHostRegister_v2");
        assert_eq!(register(old.as_mut_ptr(), old.len(), 1), 0);
        // Many slow copies.
        double.set(3000, true);
        let copy = double.call::<unsafe extern "C" fn(u64, *const u8, usize, Handle) -> c_int>(
            "cuMemcpyHtoDAsync_v2",
        );
        for _ in 0..50 {
            assert_eq!(copy(memory.address(), old.as_ptr(), LEN, other), 0);
        }
    }
    // SAFETY: a stream of the double.
    let after = unsafe { OtherStream::new(other as usize) };
    let sink = ToDevice::new(device, [Place::new(0, LEN as u64, &memory, 0)]);
    let sink = sink.unwrap().after(after);
    fills(sink, &path, device, &memory);
    // SAFETY: as above.
    unsafe {
        double.call::<unsafe extern "C" fn(Handle) -> c_int>("cuStreamDestroy_v2")(other);
        double.call::<unsafe extern "C" fn(*mut u8) -> c_int>("cuMemHostUnregister")(
            old.as_mut_ptr(),
        );
        double.call::<unsafe extern "C" fn(*mut Handle) -> c_int>("cuCtxPopCurrent_v2")(
            &raw mut context,
        );
        double.call::<unsafe extern "C" fn(c_int) -> c_int>("cuDevicePrimaryCtxRelease_v2")(0);
    }
    drop(memory);
    assert_eq!(double.left(), Left::default());
}

/// Peak memory is that of the ring and little more, in addition to the memory of the device, which
/// belongs to this process here.
#[test]
#[ignore = "it writes and loads 4 GiB; make test-all PARTS=gpu runs it"]
fn memory_use_is_that_of_the_ring() {
    const MIB: u64 = 1 << 20;
    const FILE: u64 = 4 << 30;
    const ON_DEVICE: u64 = 256 * MIB;
    if !alone("memory_use_is_that_of_the_ring") {
        return;
    }
    let peak = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let kilobytes = line.trim().trim_end_matches(" kB");
        kilobytes.parse::<u64>().unwrap() << 10
    };
    let Some(double) = Double::only() else {
        return;
    };
    let device = Device::cuda(0);
    double.set(0, true);
    let dir = dir();
    let path = dir.path().join("file");
    let mut file = std::fs::File::create(&path).unwrap();
    let mut block = noise(MIB as usize, 1);
    for number in 0..FILE / MIB {
        block[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all(&block).unwrap();
    }
    dmafile_testkit::evict(&path);
    let memory = Arc::new(device.allocate(ON_DEVICE).unwrap());
    let place = |at| Place::new(at, ON_DEVICE, &memory, 0);
    let places: Vec<_> = (0..FILE).step_by(ON_DEVICE as usize).map(place).collect();
    let last = FILE - ON_DEVICE;
    let ring = Ring::default();
    let before = peak();
    let mut sink = ToDevice::new(device, places).unwrap();
    let report = Load::new(&path).run_through(ring, &mut sink).unwrap();
    let more = peak() - before;
    assert_eq!((report.bytes, report.bytes_hole), (FILE, 0));
    // The device's memory was touched for the first time by the copies.
    let most = ON_DEVICE + ring.bytes + 64 * MIB;
    assert!(more <= most, "{} of {} MiB", more / MIB, most / MIB);
    let mut got = vec![0; MIB as usize];
    for at in (0..ON_DEVICE).step_by(MIB as usize) {
        block[..8].copy_from_slice(&((last + at) / MIB).to_le_bytes());
        device.copy_back(&memory, at, &mut got).unwrap();
        assert!(got == block, "{at}");
    }
    drop((sink, memory));
    assert_eq!(double.left(), Left::default());
}

/// Runs a test of this program in a separate process. Returns true in that process.
fn alone(test: &str) -> bool {
    if std::env::var_os("DMAFILE_ALONE").is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let mut run = std::process::Command::new(own);
    run.args(["--exact", "--include-ignored", test])
        .env("DMAFILE_ALONE", "1");
    assert!(run.status().unwrap().success());
    false
}

#[test]
fn a_device_without_a_driver_is_an_error() {
    if !alone("a_device_without_a_driver_is_an_error") {
        return;
    }
    for device in [Device::cuda(0), Device::hip(0)] {
        match device.allocate(1) {
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
                assert!(
                    error
                        .to_string()
                        .contains(": cannot open shared object file: ")
                );
                assert!(
                    error
                        .to_string()
                        .starts_with(&format!("cannot use the device: {device}: "))
                );
            }
            Ok(_) => eprintln!("SKIP: there is a {device} here"),
        }
    }
}

/// As [`alone`], once for each driver, with a double that is opened by the engine, not by the test: the
/// device in that process. `without` is a function that the double does not have, and `fail` one whose first
/// call fails, by CUDA's names.
fn alone_with(test: &str, without: Option<&str>, fail: Option<&str>) -> Option<Device> {
    if let Ok(device) = std::env::var("DMAFILE_ALONE") {
        return Some(device.parse().unwrap());
    }
    let calls = calls();
    for (device, library) in [("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so.7")] {
        let named = |call: &str| {
            let (cuda, hip) = calls.iter().find(|(cuda, _)| cuda == call).unwrap();
            if device == "cuda" { cuda } else { hip }.clone()
        };
        let mut flags = Vec::from_iter((device == "hip").then(|| "-DHIP".to_string()));
        flags.extend(without.map(|call| format!("-D{}=another", named(call))));
        let failing = format!("{}:1:999", fail.map_or("none".to_string(), named));
        double::run_again(library, &flags, |run| {
            run.args(["--exact", test])
                .env("DMAFILE_ALONE", device)
                .env("DOUBLE_FAIL", failing);
        });
    }
    None
}

/// A driver that is closed may have started threads, and forgets what it has counted.
#[test]
fn a_driver_that_cannot_be_initialised_stays_open() {
    let test = "a_driver_that_cannot_be_initialised_stays_open";
    let Some(device) = alone_with(test, None, Some("cuInit")) else {
        return;
    };
    let error = device.check().unwrap_err().to_string();
    let says = "Init failed: a failure of the double, error 999 (EIO)";
    assert!(error.contains(says), "{error}");
    device.check().unwrap();
}

#[test]
fn a_driver_without_one_of_the_functions_stays_open() {
    let test = "a_driver_without_one_of_the_functions_stays_open";
    let Some(device) = alone_with(test, Some("cuEventQuery"), None) else {
        return;
    };
    let error = device.check().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
    assert!(error.to_string().contains("EventQuery"), "{error}");
    let library = if device.is_cuda() {
        "/libcuda.so.1"
    } else {
        "/libamdhip64.so.7"
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains(library), "{maps}");
}

/// A forked child cannot use what its parent created with a driver.
#[test]
fn a_forked_child_cannot_use_the_device() {
    if !alone("a_forked_child_cannot_use_the_device") {
        return;
    }
    for (double, device) in both() {
        fork_and_load(&double, device(0));
    }
}

fn fork_and_load(double: &Double, device: Device) {
    let (_dir, path) = file();
    let memory = Arc::new(device.allocate(LEN as u64).unwrap());
    let mut sink = ToDevice::new(device, [Place::new(0, LEN as u64, &memory, 0)]).unwrap();
    // SAFETY: the other threads are that of the harness, which holds no lock now, and those of the double,
    // which holds its lock across fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let load = Load::new(&path).block(BLOCK);
        let ended = load.run_through(RING, &mut sink);
        let refused = ended.is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV));
        let other = device.allocate(1).is_err();
        drop((sink, memory));
        // SAFETY: ends the child without running any exit handler of the parent.
        unsafe { libc::_exit(if refused && other { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child is refused");
    fills(sink, &path, device, &memory);
    drop(memory);
    assert_eq!(double.left(), Left::default());
}

#[test]
fn these_tests_run_with_a_real_driver() {
    double::run_as_real();
}
