//! The drivers of GPUs: `libcuda.so.1` and `libamdhip64.so`, opened when they are asked for. What is called
//! is the same table of functions, under two sets of names.
//!
//! Each call is one with the context of its device, which is the current one of the thread for as long as
//! the call takes. What was made is given back when it is dropped, but for a fork of the process that made
//! it: there it is that process's.

use super::map::Region;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Whose driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Cuda,
    Hip,
}

impl Api {
    /// The names that its library goes by, the first that is there being the one.
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

/// A call that a driver answered with an error.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// Its name; empty where it never came to one.
    pub(crate) call: &'static str,
    /// What the driver said, or 0.
    pub(crate) code: i32,
    /// The same in words.
    pub(crate) text: String,
}

pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ALREADY_REGISTERED: i32 = 712;
pub(crate) const NOT_SUPPORTED: i32 = 801;

/// Handles of the driver.
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
                        // SAFETY: the type is the function's, as the driver's header has it
                        // (tests/double/prototypes.c holds it against that), and the library is
                        // never closed.
                        let found = unsafe { library.get(name) };
                        *found.map_err(|error| missing(reason(&error)))?
                    },)+
                })
            }
        }

        impl Driver {
            $(
                #[allow(dead_code, reason = "the words for an error are asked for without one")]
                /// # Safety
                /// What the driver asks of the arguments: handles that it has given and that are
                /// alive, memory that it may write its answer to.
                unsafe fn $name(&self, $($arg: $type),*) -> Result<(), Failure> {
                    // SAFETY: as the caller promises.
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

/// A driver, opened once and for good.
pub(crate) struct Driver {
    api: Api,
    table: Table,
    /// The process that opened it.
    process: u32,
    _library: Library,
}

/// What the dynamic linker says.
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
    /// The driver of this machine, initialised.
    pub(crate) fn open(api: Api) -> Result<&'static Self, Failure> {
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
                // Another thread may have been faster; the library is the same.
                place.get_or_init(|| new)
            }
        };
        if driver.is_foreign() {
            let why = "no driver of a GPU outlives a fork: use it in a process that has not used it before it was forked";
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
                    return Ok(Self {
                        api,
                        table: Table::find(&library, api)?,
                        process: std::process::id(),
                        _library: library,
                    });
                }
                Err(error) => {
                    first.get_or_insert(missing(reason(&error)));
                }
            }
        }
        Err(first.expect("there is a name to try"))
    }

    /// This is a fork of the process that opened it.
    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    fn judge(&self, call: &'static str, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: it writes the address of a text that it keeps, or null.
        let known =
            unsafe { (self.table.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        let text = match known {
            // SAFETY: as above, ended by a NUL.
            true => unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
            false => "an error that it has no words for".to_string(),
        };
        Err(Failure { call, code, text })
    }

    /// As the driver counts them: 13050 is 13.5.
    pub(crate) fn version_number(&self) -> Result<i32, Failure> {
        let mut version = 0;
        // SAFETY: it writes a number.
        unsafe { self.version(&raw mut version)? };
        Ok(version)
    }

    /// How many devices there are.
    pub(crate) fn devices(&self) -> Result<u32, Failure> {
        let mut count = 0;
        // SAFETY: it writes a number.
        unsafe { self.device_count(&raw mut count)? };
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Whether there is a device of this number.
    pub(crate) fn find(&self, ordinal: u32) -> Result<(), Failure> {
        self.device(ordinal).map(drop)
    }

    fn device(&self, ordinal: u32) -> Result<c_int, Failure> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: it writes a number.
        unsafe { self.device_get(&raw mut device, ordinal)? };
        Ok(device)
    }

    /// What a device is called.
    pub(crate) fn name(&self, ordinal: u32) -> Result<String, Failure> {
        let device = self.device(ordinal)?;
        let mut name = [0_u8; 256];
        let room = name.len() as c_int;
        // SAFETY: it writes as many bytes as there is room for.
        unsafe { self.device_name(name.as_mut_ptr().cast(), room, device)? };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// An attribute of a device, by its number in CUDA; None where the driver counts others.
    pub(crate) fn attribute(&self, ordinal: u32, number: i32) -> Option<i32> {
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

/// The primary context of a device, which is also that of other libraries in this process.
pub(crate) struct Context {
    driver: &'static Driver,
    device: c_int,
    handle: Handle,
}

// SAFETY: a context is of the process, and its driver is called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn retain(api: Api, ordinal: u32) -> Result<Arc<Self>, Failure> {
        let driver = Driver::open(api)?;
        let device = driver.device(ordinal)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: it writes a handle, of a device that it knows.
        unsafe { driver.context_retain(&raw mut handle, device)? };
        Ok(Arc::new(Self {
            driver,
            device,
            handle,
        }))
    }

    /// Makes it the current one of this thread, until what comes back is dropped.
    fn enter(&self) -> Result<Entered<'_>, Failure> {
        if self.driver.is_foreign() {
            return Err(missing(
                "it belongs to the process that forked this one".to_string(),
            ));
        }
        // SAFETY: the handle lives as long as this.
        unsafe { self.driver.context_push(self.handle)? };
        Ok(Entered(self))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.driver.is_foreign() {
            // SAFETY: it was retained once, and nothing is left that was made with it.
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

/// Memory of this process that is registered: pinned, and known to the devices of the driver.
pub(crate) struct Registered {
    context: Arc<Context>,
    start: Handle,
    ended: bool,
}

// SAFETY: an address that is not followed here; the driver is called from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// `bytes` from `start` on, which stay mapped there for as long as what comes back is there; to be
    /// read by devices alone where they are mapped for reading alone.
    pub(crate) fn new(
        context: &Arc<Context>,
        start: *const u8,
        bytes: u64,
        read_only: bool,
    ) -> Result<Self, Failure> {
        /// For all contexts of the driver.
        const PORTABLE: c_uint = 1;
        const READ_ONLY: c_uint = 8;
        let flags = PORTABLE | if read_only { READ_ONLY } else { 0 };
        let start = start.cast_mut().cast();
        let _entered = context.enter()?;
        // SAFETY: the driver pins pages of this process, after a check that they are there.
        unsafe { context.driver.host_register(start, bytes as usize, flags)? };
        Ok(Self {
            context: Arc::clone(context),
            start,
            ended: false,
        })
    }

    /// Unregisters it, and returns the result.
    pub(crate) fn end(mut self) -> Result<(), Failure> {
        self.unregister()
    }

    fn unregister(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.ended, true) || self.context.driver.is_foreign() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: it was registered at this address, and once.
        unsafe { self.context.driver.host_unregister(self.start) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // A drop cannot return an error; `end` does.
        let _ = self.unregister();
    }
}

/// A queue of copies of a device, in order.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver is called from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        /// It does not wait for the default stream of other libraries.
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

    /// Begins to copy from `from` to byte `at` of a device's memory. The source has to stay as it is until
    /// the copy has ended.
    pub(crate) fn copy(
        &self,
        to: &DeviceMemory,
        at: u64,
        from: &Region<'_>,
    ) -> Result<(), Failure> {
        let end = at.checked_add(from.len());
        assert!(
            end.is_some_and(|end| end <= to.bytes),
            "a copy past the end of a device's memory"
        );
        let _entered = self.context.enter()?;
        // SAFETY: the destination lies inside memory of a device, as just checked. What is read are bytes
        // of a region; the caller waits for the end of its copies before it frees the region.
        unsafe {
            self.context.driver.copy_in(
                to.address + at,
                from.start().cast(),
                from.len() as usize,
                self.handle,
            )
        }
    }

    /// What is queued from now on comes after all that another library has queued so far on its `other`.
    pub(crate) fn follow(&self, other: OtherStream, event: &Event) -> Result<(), Failure> {
        let driver = self.context.driver;
        let _entered = self.context.enter()?;
        // SAFETY: the caller of `OtherStream::new` guarantees that stream; the other handles are alive.
        unsafe {
            driver.event_record(event.handle, other.0 as Handle)?;
            driver.stream_wait(self.handle, event.handle, 0)
        }
    }

    /// Waits until nothing is queued.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle lives as long as this.
        unsafe { self.context.driver.stream_synchronize(self.handle) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the handle is not used again.
            let _ = unsafe { self.context.driver.stream_destroy(self.handle) };
        }
    }
}

/// A place in a stream.
pub(crate) struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver is called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        /// A wait for it sleeps; it records no time.
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

    /// It comes when all has ended that is queued so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: both handles are alive.
        unsafe { self.context.driver.event_record(self.handle, stream.handle) }
    }

    /// Whether it has come.
    pub(crate) fn has_come(&self) -> Result<bool, Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle lives as long as this.
        match unsafe { self.context.driver.event_query(self.handle) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code == NOT_READY => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Waits until it has come.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        let _entered = self.context.enter()?;
        // SAFETY: the handle lives as long as this.
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
    /// It is a stream of the device (`CUstream`, `cudaStream_t`, `hipStream_t`) for as long as a load
    /// uses it, or 0.
    pub unsafe fn new(handle: usize) -> Self {
        Self(handle)
    }
}

/// Memory of a device: made here, or by another library.
pub struct DeviceMemory {
    address: u64,
    bytes: u64,
    /// What it is given back to.
    owner: Option<Arc<Context>>,
}

impl DeviceMemory {
    /// Memory that another library has made, and keeps.
    ///
    /// # Safety
    /// All `bytes` from `address` on are memory of the device, which nothing else uses and which stays
    /// while a load writes to it.
    pub unsafe fn borrowed(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            owner: None,
        }
    }

    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Failure> {
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

    /// Where it begins, for calls of the device's libraries: no address of this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes it has.
    #[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Copies bytes back, from byte `at` on.
    pub(crate) fn copy_out(
        &self,
        context: &Context,
        at: u64,
        into: &mut [u8],
    ) -> Result<(), Failure> {
        let end = at.checked_add(into.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a copy past the end of a device's memory"
        );
        let _entered = context.enter()?;
        // SAFETY: the source lies inside the device's memory, as just checked.
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
            // SAFETY: it was allocated here, and is not used again.
            let _ = unsafe { context.driver.mem_free(self.address) };
        }
    }
}
