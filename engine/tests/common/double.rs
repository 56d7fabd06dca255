#![allow(dead_code, reason = "each test program uses a part of it")]
//! The double of GPU drivers (tests/double/driver.c), built once and opened before the engine opens a driver:
//! dlopen(3) returns a library that is already loaded under the same name.

use dmafile::Device;
use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The double of one driver, for one test at a time.
pub struct Double {
    library: &'static Library,
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

/// A folder with a library of this name, built from the double.
pub fn built(name: &str, flags: &[String]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/double/driver.c");
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
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
    let table = include_str!("../../src/sys/driver.rs").lines();
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

/// The double of each driver, one after the other, and its devices.
pub fn both() -> impl Iterator<Item = (Double, Numbered)> {
    let all: [(fn() -> Double, Numbered); 2] =
        [(Double::cuda, Device::cuda), (Double::hip, Device::hip)];
    all.into_iter().map(|(double, device)| (double(), device))
}

fn open(name: &str, flags: &[String]) -> Library {
    let folder = built(name, flags);
    // SAFETY: its only initialisers are those of the double.
    let library = unsafe { Library::new(folder.join(name)) }.unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    library
}

impl Double {
    pub fn cuda() -> Self {
        Self::of(&CUDA, false)
    }

    pub fn hip() -> Self {
        Self::of(&HIP, true)
    }

    fn of(library: &'static LazyLock<Library>, hip: bool) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let double = Self {
            library: LazyLock::force(library),
            hip,
            _alone: alone,
        };
        double.reset();
        double.set(200, true);
        double
    }

    /// The name that its driver has for a function of CUDA's.
    pub fn name(&self, cuda: &str) -> String {
        let named = || calls().into_iter().find(|(name, _)| name == cuda);
        match self.hip {
            true => named().map_or_else(|| cuda.to_string(), |(_, hip)| hip),
            false => cuda.to_string(),
        }
    }

    /// A function of it, by CUDA's name if it is one of the driver's.
    pub fn call<T: Copy>(&self, name: &str) -> T {
        let name = self.name(name);
        // SAFETY: the caller gives the type from the source of the double.
        unsafe { *self.library.get::<T>(name.as_str()).unwrap() }
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
        type Set = unsafe extern "C" fn(c_int, c_int);
        // SAFETY: it takes numbers.
        unsafe { self.call::<Set>("double_set")(delay, read_only.into()) }
    }

    pub fn reset(&self) {
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

    pub fn left(&self) -> Left {
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
