//! The drivers of GPUs: `libcuda.so.1` and `libamdhip64.so`, opened on first use. Both have the same table
//! of functions, with different names.
//!
//! For the duration of each call that needs it, the context of the device is made the thread's current one.
//! Objects of a driver are released when they are dropped, but not in a fork of the process that created
//! them: they belong to that process.

use super::map::{self, Region};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

/// Which vendor's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Cuda,
    Hip,
}

impl Api {
    /// Possible names of its library. The first one that exists is used.
    fn libraries(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["libcuda.so.1"],
            Self::Hip => &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Hip => "hip",
        })
    }
}

/// A driver call that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Name of the function; empty if it failed before any call.
    pub call: &'static str,
    /// The driver's error code, or the one that it would return; or 0.
    pub code: i32,
    /// The error in words.
    pub text: String,
}

pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_READY: i32 = 600;
pub const ALREADY_REGISTERED: i32 = 712;
const NOT_REGISTERED: i32 = 713;
pub const NOT_SUPPORTED: i32 = 801;

/// A handle of the driver.
type Handle = *mut c_void;

/// Declares the table of functions, and how each is found and called.
macro_rules! table {
    ($($name:ident = $cuda:literal, $hip:literal ($($arg:ident: $type:ty),*);)+) => {
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)+
        }

        impl Table {
            fn find(library: &Library, api: Api) -> Result<Self, Failure> {
                Ok(Self {
                    $($name: {
                        let name = match api {
                            Api::Cuda => $cuda,
                            Api::Hip => $hip,
                        };
                        // SAFETY: the function has this type in the driver's header (checked by
                        // tests/double/prototypes.c and prototypes_hip.c), and the library is never closed.
                        let found = unsafe { library.get(name) };
                        *found.map_err(|error| missing(reason(&error)))?
                    },)+
                })
            }
        }

        impl Driver {
            $(
                #[allow(dead_code, reason = "used by tests without a driver")]
                /// # Safety
                /// The arguments must be what the driver requires: handles that it has returned and
                /// that have not been destroyed, and memory that it may write its results to.
                unsafe fn $name(&self, $($arg: $type),*) -> Result<(), Failure> {
                    // SAFETY: the caller guarantees it.
                    let code = unsafe { (self.table.$name)($($arg),*) };
                    self.judge(match self.api { Api::Cuda => $cuda, Api::Hip => $hip }, code)
                }
            )+
        }
    };
}

table! {
    init = "cuInit", "hipInit" (flags: c_uint);
    version = "cuDriverGetVersion", "hipDriverGetVersion" (version: *mut c_int);
    device_count = "cuDeviceGetCount", "hipGetDeviceCount" (count: *mut c_int);
    device_get = "cuDeviceGet", "hipDeviceGet" (device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName", "hipDeviceGetName" (name: *mut c_char, len: c_int, device: c_int);
    device_attribute = "cuDeviceGetAttribute", "hipDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    context_retain = "cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain" (context: *mut Handle, device: c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2", "hipDevicePrimaryCtxRelease" (device: c_int);
    context_push = "cuCtxPushCurrent_v2", "hipCtxPushCurrent" (context: Handle);
    context_pop = "cuCtxPopCurrent_v2", "hipCtxPopCurrent" (context: *mut Handle);
    mem_alloc = "cuMemAlloc_v2", "hipMalloc" (at: *mut u64, bytes: usize);
    mem_free = "cuMemFree_v2", "hipFree" (at: u64);
    host_register = "cuMemHostRegister_v2", "hipHostRegister" (at: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister", "hipHostUnregister" (at: *mut c_void);
    copy_in = "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync" (to: u64, from: *const c_void, bytes: usize, stream: Handle);
    copy_out = "cuMemcpyDtoH_v2", "hipMemcpyDtoH" (to: *mut c_void, from: u64, bytes: usize);
    stream_create = "cuStreamCreate", "hipStreamCreateWithFlags" (stream: *mut Handle, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2", "hipStreamDestroy" (stream: Handle);
    stream_synchronize = "cuStreamSynchronize", "hipStreamSynchronize" (stream: Handle);
    stream_wait = "cuStreamWaitEvent", "hipStreamWaitEvent" (stream: Handle, event: Handle, flags: c_uint);
    event_create = "cuEventCreate", "hipEventCreateWithFlags" (event: *mut Handle, flags: c_uint);
    event_record = "cuEventRecord", "hipEventRecord" (event: Handle, stream: Handle);
    event_query = "cuEventQuery", "hipEventQuery" (event: Handle);
    event_synchronize = "cuEventSynchronize", "hipEventSynchronize" (event: Handle);
    event_destroy = "cuEventDestroy_v2", "hipEventDestroy" (event: Handle);
    error_string = "cuGetErrorString", "hipDrvGetErrorString" (code: c_int, text: *mut *const c_char);
}

/// A driver, opened once and never closed.
pub struct Driver {
    api: Api,
    table: Table,
    /// The process that opened it.
    process: u32,
}

/// The dynamic linker's message.
fn reason(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

fn missing(text: String) -> Failure {
    Failure {
        call: "",
        code: 0,
        text,
    }
}

impl Driver {
    /// Returns the driver of this machine. The first call opens and initialises it.
    pub fn open(api: Api) -> Result<&'static Self, Failure> {
        static CUDA: OnceLock<Driver> = OnceLock::new();
        static HIP: OnceLock<Driver> = OnceLock::new();
        let place = match api {
            Api::Cuda => &CUDA,
            Api::Hip => &HIP,
        };
        let driver = match place.get() {
            Some(driver) => driver,
            None => {
                let new = Self::load(api)?;
                // SAFETY: it takes no flags.
                unsafe { new.init(0)? };
                // If another thread was faster, its result is used: the library is the same.
                place.get_or_init(|| new)
            }
        };
        if driver.is_foreign() {
            let why = "GPU drivers do not survive fork(): the parent used the GPU before forking";
            return Err(missing(why.to_string()));
        }
        Ok(driver)
    }

    fn load(api: Api) -> Result<Self, Failure> {
        let mut first = None;
        for name in api.libraries() {
            // SAFETY: a driver's library, whose initialisers are meant to run in any program.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    // Not closed even if it cannot be used: it may have left threads behind.
                    let library = ManuallyDrop::new(library);
                    return Ok(Self {
                        api,
                        table: Table::find(&library, api)?,
                        process: std::process::id(),
                    });
                }
                Err(error) => {
                    first.get_or_insert(missing(reason(&error)));
                }
            }
        }
        Err(first.expect("there is a name to try"))
    }

    /// True if this process is a fork of the one that opened the driver.
    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    fn judge(&self, call: &'static str, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: it writes the address of a text that the driver owns and never frees, or null.
        let known =
            unsafe { (self.table.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        let text = if known {
            // SAFETY: as above; a NUL ends the text.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        } else {
            "an unknown error".to_string()
        };
        Err(Failure { call, code, text })
    }

    /// The version, as the driver encodes it: CUDA's 13050 is 13.5.
    pub fn version_number(&self) -> Result<i32, Failure> {
        let mut version = 0;
        // SAFETY: it writes a number.
        unsafe { self.version(&raw mut version)? };
        Ok(version)
    }

    /// Number of devices.
    pub fn devices(&self) -> Result<u32, Failure> {
        let mut count = 0;
        // SAFETY: it writes a number.
        unsafe { self.device_count(&raw mut count)? };
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Checks that there is a device with this number.
    pub fn find(&self, ordinal: u32) -> Result<(), Failure> {
        self.device(ordinal).map(drop)
    }

    fn device(&self, ordinal: u32) -> Result<c_int, Failure> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: it writes a number.
        unsafe { self.device_get(&raw mut device, ordinal)? };
        Ok(device)
    }

    /// The name of a device.
    pub fn name(&self, ordinal: u32) -> Result<String, Failure> {
        let device = self.device(ordinal)?;
        let mut name = [0_u8; 256];
        let room = name.len() as c_int;
        // SAFETY: it writes at most `room` bytes.
        unsafe { self.device_name(name.as_mut_ptr().cast(), room, device)? };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// An attribute of a device, by its number in CUDA. None with AMD's driver, which has other numbers, or if
    /// the driver returns an error.
    pub fn attribute(&self, ordinal: u32, number: i32) -> Option<i32> {
        let device = self
            .device(ordinal)
            .ok()
            .filter(|_| self.api == Api::Cuda)?;
        let mut value = 0;
        // SAFETY: it writes a number.
        unsafe { self.device_attribute(&raw mut value, number, device) }.ok()?;
        Some(value)
    }
}

/// The primary context of a device, which all libraries in this process share.
pub struct Context {
    driver: &'static Driver,
    device: c_int,
    handle: Handle,
}

// SAFETY: a context belongs to the process, and its driver may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn retain(api: Api, ordinal: u32) -> Result<Arc<Self>, Failure> {
        let driver = Driver::open(api)?;
        let device = driver.device(ordinal)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: it writes a handle; the driver has returned this device.
        unsafe { driver.context_retain(&raw mut handle, device)? };
        Ok(Arc::new(Self {
            driver,
            device,
            handle,
        }))
    }

    /// Makes the context the thread's current one, until the result is dropped.
    fn enter(&self) -> Result<Entered<'_>, Failure> {
        if self.driver.is_foreign() {
            return Err(missing(
                "it belongs to the process that forked this one".to_string(),
            ));
        }
        // SAFETY: the handle is destroyed only when this is dropped.
        unsafe { self.driver.context_push(self.handle)? };
        Ok(Entered(self))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.driver.is_foreign() {
            // SAFETY: it was retained once. Everything created in it has an `Arc` of it, so nothing is left.
            let _ = unsafe { self.driver.context_release(self.device) };
        }
    }
}

struct Entered<'c>(&'c Context);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut old = std::ptr::null_mut();
        // SAFETY: it writes the handle of the context that was pushed.
        let _ = unsafe { self.0.driver.context_pop(&raw mut old) };
    }
}

/// Memory of this process that is registered with a driver: pinned, and accessible to its devices.
pub struct Registered {
    context: Arc<Context>,
    start: Handle,
    bytes: usize,
    ended: bool,
}

// SAFETY: the address is not dereferenced here; the driver may be called from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers `bytes` bytes from `start`. They must stay mapped there until the result is dropped.
    /// `read_only` is for memory that is mapped read-only: devices can then only read it.
    pub fn new(
        context: &Arc<Context>,
        start: *const u8,
        bytes: u64,
        read_only: bool,
    ) -> Result<Self, Failure> {
        /// The registration applies to all contexts of the driver.
        const PORTABLE: c_uint = 1;
        /// With HIP, this bit means memory that is coherent only between kernels.
        const READ_ONLY: c_uint = 8;
        let flags = PORTABLE | if read_only { READ_ONLY } else { 0 };
        let start = start.cast_mut().cast();
        if read_only && context.driver.api == Api::Hip {
            return Err(Failure {
                call: "",
                code: NOT_SUPPORTED,
                text: "HIP cannot register memory that is mapped read-only".to_string(),
            });
        }
        let _entered = context.enter()?;
        // SAFETY: the driver checks that the pages are mapped, and pins them.
        unsafe { context.driver.host_register(start, bytes as usize, flags)? };
        Ok(Self {
            context: Arc::clone(context),
            start,
            bytes: bytes as usize,
            ended: false,
        })
    }

    /// Unregisters the memory, and returns the driver's error if that fails. The memory then stays
    /// mapped.
    pub fn end(mut self) -> Result<(), Failure> {
        self.unregister()
    }

    /// Leaves the memory registered and mapped until the process ends: a device may still use it.
    pub fn keep(mut self) {
        self.ended = true;
        map::keep(self.start.cast(), self.bytes);
    }

    fn unregister(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.ended, true) || self.context.driver.is_foreign() {
            return Ok(());
        }
        // A failure may be that of an earlier call, so a second attempt may succeed.
        let Err(failure) = self.try_unregister() else {
            return Ok(());
        };
        match self.try_unregister() {
            Ok(()) => Ok(()),
            Err(again) if again.code == NOT_REGISTERED => Err(failure),
            Err(_) => {
                // For the driver, these addresses still stand for the pages that it has pinned. If
                // other memory were mapped there, a device would access the wrong pages.
                map::keep(self.start.cast(), self.bytes);
                Err(failure)
            }
        }
    }

    fn try_unregister(&self) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: it was registered at this address, once.
        unsafe { self.context.driver.host_unregister(self.start) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // A drop cannot return an error; `end` does.
        let _ = self.unregister();
    }
}

/// A stream of a device: a queue of copies that are executed in order.
pub struct CopyStream {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver may be called from any thread.
unsafe impl Send for CopyStream {}

impl CopyStream {
    pub fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        /// The stream does not synchronise with the default stream, which other libraries use.
        const NON_BLOCKING: c_uint = 1;
        let _entered = context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: it writes a handle.
        unsafe {
            context
                .driver
                .stream_create(&raw mut handle, NON_BLOCKING)?
        };
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// Queues a copy from `from` to byte `at` of a device's memory. The source must not change until the
    /// copy has completed.
    pub fn copy(&self, to: &DeviceMemory, at: u64, from: &Region<'_>) -> Result<(), Failure> {
        let end = at.checked_add(from.len());
        assert!(
            end.is_some_and(|end| end <= to.bytes),
            "a copy past the end of a device's memory"
        );
        let _entered = self.context.enter()?;
        // SAFETY: the destination is within the device's memory, as just checked. The source is a region;
        // the caller waits until its copies have completed before it frees the region, or never
        // frees it.
        unsafe {
            self.context.driver.copy_in(
                to.address + at,
                from.start().cast(),
                from.len() as usize,
                self.handle,
            )
        }
    }

    /// Makes copies that are queued from now on wait for everything that is already queued on `other`.
    /// `event` is used for that.
    pub fn follow(&self, other: OtherStream, event: &Event) -> Result<(), Failure> {
        let driver = self.context.driver;
        let _entered = self.context.enter()?;
        // SAFETY: the caller of `OtherStream::new` guarantees that `other` is valid; the other handles are.
        unsafe {
            driver.event_record(event.handle, other.0 as Handle)?;
            driver.stream_wait(self.handle, event.handle, 0)
        }
    }

    /// Waits until everything that is queued has completed.
    pub fn wait(&self) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle is destroyed only when this is dropped.
        unsafe { self.context.driver.stream_synchronize(self.handle) }
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the handle is not used again.
            let _ = unsafe { self.context.driver.stream_destroy(self.handle) };
        }
    }
}

/// An event: it is recorded in a stream, and completes when everything queued before it has completed.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        /// Waits for the event sleep instead of spinning, and no time is recorded.
        const BLOCKING_SYNC: c_uint = 1;
        const DISABLE_TIMING: c_uint = 2;
        let _entered = context.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = BLOCKING_SYNC | DISABLE_TIMING;
        // SAFETY: it writes a handle.
        unsafe { context.driver.event_create(&raw mut handle, flags)? };
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// Records the event: it completes when everything that is queued on `stream` now has completed.
    pub fn record(&self, stream: &CopyStream) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: neither handle has been destroyed.
        unsafe { self.context.driver.event_record(self.handle, stream.handle) }
    }

    /// Returns true if the event has completed.
    pub fn has_come(&self) -> Result<bool, Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle is destroyed only when this is dropped.
        match unsafe { self.context.driver.event_query(self.handle) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code == NOT_READY => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Waits until the event has completed.
    pub fn wait(&self) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle is destroyed only when this is dropped.
        unsafe { self.context.driver.event_synchronize(self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the handle is not used again.
            let _ = unsafe { self.context.driver.event_destroy(self.handle) };
        }
    }
}

/// A stream of another library, such as PyTorch's current one; 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherStream(usize);

impl OtherStream {
    /// # Safety
    /// `handle` must be 0, or a stream of the device (`CUstream`, `cudaStream_t`, `hipStream_t`) that is not
    /// destroyed while a load uses it.
    pub unsafe fn new(handle: usize) -> Self {
        Self(handle)
    }
}

/// Memory of a device, allocated here or by another library.
pub struct DeviceMemory {
    address: u64,
    bytes: u64,
    /// The context to free it in; None if another library owns it.
    owner: Option<Arc<Context>>,
}

impl DeviceMemory {
    /// Memory that another library has allocated and still owns.
    ///
    /// # Safety
    /// All `bytes` bytes from `address` must be memory of the device. While a load writes to it, nothing
    /// else may use it, and it must not be freed.
    pub unsafe fn borrowed(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            owner: None,
        }
    }

    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Failure> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: it writes an address.
        unsafe { context.driver.mem_alloc(&raw mut address, bytes as usize)? };
        Ok(Self {
            address,
            bytes,
            owner: Some(Arc::clone(context)),
        })
    }

    /// The device address of the first byte, for calls of the device's libraries; not for the CPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Copies bytes to the host, starting at byte `at`.
    pub fn copy_out(&self, context: &Context, at: u64, into: &mut [u8]) -> Result<(), Failure> {
        let end = at.checked_add(into.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a copy past the end of a device's memory"
        );
        let _entered = context.enter()?;
        // SAFETY: the source is within the device's memory, as just checked.
        unsafe {
            context
                .driver
                .copy_out(into.as_mut_ptr().cast(), self.address + at, into.len())
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("address", &self.address)
            .field("bytes", &self.bytes)
            .finish()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(context) = &self.owner
            && let Ok(_entered) = context.enter()
        {
            // SAFETY: it was allocated here, and is not used any more.
            let _ = unsafe { context.driver.mem_free(self.address) };
        }
    }
}
