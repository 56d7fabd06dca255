#![allow(dead_code, reason = "each test program uses a part of it")]
//! The double of GPU drivers (tests/double/driver.c), built once and opened before the engine opens a driver:
//! dlopen(3) returns a library that is already loaded under the same name. With DMAFILE_GPU=real, tests use
//! the driver of this machine, and those that need the double are skipped.

use dmafile_gpu::Device;
use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The double of one driver, or a real driver, for one test at a time.
pub struct Double {
    library: Option<&'static Library>,
    hip: bool,
    _alone: MutexGuard<'static, ()>,
}

/// What a process has not released, and the complaint of the double about its calls.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Left {
    pub registered: u64,
    pub memory: u64,
    pub events: u64,
    pub streams: u64,
    pub contexts: u64,
    pub complaint: String,
}

static CUDA: LazyLock<Library> = LazyLock::new(|| open("libcuda.so.1", &[]));
static HIP: LazyLock<Library> = LazyLock::new(|| open("libamdhip64.so.7", &["-DHIP".to_string()]));
static ALONE: Mutex<()> = Mutex::new(());

/// Returns `true` if the driver is that of this machine.
pub fn is_real() -> bool {
    std::env::var("DMAFILE_GPU").is_ok_and(|which| which == "real")
}

/// A folder with a library of this name, built from the double.
pub fn built(name: &str, flags: &[String]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/double/driver.c");
    let place = tempfile::tempdir_in(dmafile_testkit::target()).unwrap();
    // Kept, because a process may have it open; `cargo clean` removes it.
    let place = place.keep();
    let out = Command::new("cc")
        .args(["-O2", "-shared", "-fPIC", "-pthread"])
        .args(flags)
        .arg(format!("-Wl,-soname,{name}"))
        .arg(source)
        .arg("-o")
        .arg(place.join(name))
        .status();
    assert!(out.expect("cc is part of build-essential").success());
    place
}

/// Both names of all functions that the engine calls.
pub fn calls() -> Vec<(String, String)> {
    let table = include_str!("../../../sys/src/driver.rs").lines();
    let names = table.filter_map(|line| line.split_once(" = \"cu"));
    names
        .map(|(_, line)| {
            let mut names = line.split('"');
            let cuda = format!("cu{}", names.next().unwrap());
            (cuda, names.nth(1).unwrap().to_string())
        })
        .collect()
}

/// A device of one driver.
pub type Numbered = fn(u32) -> Device;

/// The double of each driver, one after the other, and its devices; or the real driver.
pub fn both() -> impl Iterator<Item = (Double, Numbered)> {
    let all: &[Numbered] = if is_real() {
        &[real_device]
    } else {
        &[Device::cuda, Device::hip]
    };
    all.iter().enumerate().map(|(number, device)| match number {
        0 => (Double::cuda(), *device),
        _ => (Double::hip(), *device),
    })
}

/// The same for a test that makes calls fail or counts them: nothing with a real driver.
pub fn both_doubles() -> impl Iterator<Item = (Double, Numbered)> {
    let skipped = skipped();
    both().filter(move |_| !skipped)
}

fn skipped() -> bool {
    if is_real() {
        eprintln!("SKIP: the driver is real, and this test needs the double");
    }
    is_real()
}

/// A device of the real driver, of either vendor; always the same one on a machine with one GPU.
fn real_device(number: u32) -> Device {
    let all = Device::cuda(0).all().or_else(|_| Device::hip(0).all());
    let all = all.expect("DMAFILE_GPU=real needs a driver");
    all[(number as usize).min(all.len() - 1)]
}

fn open(name: &str, flags: &[String]) -> Library {
    let folder = built(name, flags);
    // SAFETY: its only initialisers are those of the double.
    let library = unsafe { Library::new(folder.join(name)) }.unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    library
}

/// Runs all tests of this program as with a real driver: a double with one GPU that no test controls.
pub fn run_as_real() {
    if is_real() {
        return;
    }
    run_again("libcuda.so.1", &["-DVISIBLE=1".to_string()], |run| {
        run.env("DMAFILE_GPU", "real")
            .env_remove("DMAFILE_SCHEDULES");
    });
}

/// Runs this program again, with a double that the engine opens, not the tests.
pub fn run_again(name: &str, flags: &[String], prepare: impl FnOnce(&mut Command)) {
    let folder = built(name, flags);
    let mut run = Command::new(std::env::current_exe().unwrap());
    prepare(run.env("LD_LIBRARY_PATH", &folder));
    let ended = run.status().unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    assert!(ended.success(), "{name}");
}

impl Double {
    pub fn cuda() -> Self {
        Self::of(&CUDA, false)
    }

    /// The double, for a test that makes calls fail or counts them. None with a real driver.
    pub fn only() -> Option<Self> {
        (!skipped()).then(Self::cuda)
    }

    pub fn hip() -> Self {
        Self::of(&HIP, true)
    }

    fn of(library: &'static LazyLock<Library>, hip: bool) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let double = Self {
            library: (!is_real()).then(|| LazyLock::force(library)),
            hip,
            _alone: alone,
        };
        double.reset();
        double.set(200, true);
        double
    }

    /// A device of the driver; always the same one on a machine with one GPU.
    pub fn device(&self, number: u32) -> Device {
        match (&self.library, self.hip) {
            (None, _) => real_device(number),
            (_, false) => Device::cuda(number),
            (_, true) => Device::hip(number),
        }
    }

    /// The name that its driver has for a function of CUDA's.
    pub fn name(&self, cuda: &str) -> String {
        let named = || calls().into_iter().find(|(name, _)| name == cuda);
        if self.hip {
            named().map_or_else(|| cuda.to_string(), |(_, hip)| hip)
        } else {
            cuda.to_string()
        }
    }

    /// A function of it, by CUDA's name if it is one of the driver's.
    pub fn call<T: Copy>(&self, name: &str) -> T {
        let name = self.name(name);
        let library = self
            .library
            .expect("a real driver has no functions of the double");
        // SAFETY: the caller gives the type from the source of the double.
        unsafe { *library.get::<T>(name.as_str()).unwrap() }
    }

    /// Makes the `nth` call of a function, by CUDA's name, return `code`, or every call from the `nth` on if it is
    /// negative.
    pub fn fail(&self, name: &str, nth: i32, code: i32) {
        let name = CString::new(self.name(name)).unwrap();
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        // SAFETY: it copies the name.
        unsafe { self.call::<Fail>("double_fail")(name.as_ptr(), nth, code) }
    }

    /// Number of calls of the function that [`Double::fail`] named last.
    pub fn calls(&self) -> i32 {
        // SAFETY: it takes nothing.
        unsafe { self.call::<unsafe extern "C" fn() -> c_int>("double_calls")() }
    }

    /// The device whose memory is at this address.
    pub fn device_of(&self, address: u64) -> i32 {
        // SAFETY: it takes a number.
        unsafe {
            self.call::<unsafe extern "C" fn(usize) -> c_int>("double_device")(address as usize)
        }
    }

    /// The maximum delay of copies, in microseconds, and whether memory that is mapped read-only can be
    /// registered.
    pub fn set(&self, delay: i32, read_only: bool) {
        if self.library.is_none() {
            return;
        }
        type Set = unsafe extern "C" fn(c_int, c_int);
        // SAFETY: it takes numbers.
        unsafe { self.call::<Set>("double_set")(delay, read_only.into()) }
    }

    pub fn reset(&self) {
        if self.library.is_none() {
            return;
        }
        // SAFETY: it takes nothing.
        unsafe { self.call::<unsafe extern "C" fn()>("double_reset")() }
    }

    fn counts(&self) -> ([u64; 8], String) {
        let (mut counts, mut text) = ([0; 8], [0_u8; 256]);
        type Counts = unsafe extern "C" fn(*mut u64, *mut c_char, usize);
        // SAFETY: it writes eight numbers, and a text that fits.
        unsafe {
            let counts_of = self.call::<Counts>("double_counts");
            counts_of(counts.as_mut_ptr(), text.as_mut_ptr().cast(), text.len());
        }
        let end = text.iter().position(|&byte| byte == 0).unwrap();
        (counts, String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// A real driver does not say what is left.
    pub fn left(&self) -> Left {
        if self.library.is_none() {
            return Left::default();
        }
        let ([registered, memory, events, streams, contexts, ..], complaint) = self.counts();
        Left {
            registered,
            memory,
            events,
            streams,
            contexts,
            complaint,
        }
    }

    /// The number of copies.
    pub fn copies(&self) -> u64 {
        self.counts().0[6]
    }

    /// The maximum of registered bytes since the last call.
    pub fn most_registered(&self) -> u64 {
        self.counts().0[7]
    }
}
