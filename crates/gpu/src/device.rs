//! GPUs, and host memory that is pinned for them.

use dmafile::{Error, Kind, Message, Opt, PinDevice, Pinned, Result};
use dmafile_sys::Errno;
use dmafile_sys::driver::{
    ALREADY_REGISTERED, Api, Context, DeviceMemory, Driver, Failure, NOT_SUPPORTED, OUT_OF_MEMORY,
    Registered,
};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A GPU: `cuda:N` with NVIDIA's driver, `hip:N` with AMD's. N counts from 0 the devices that
/// CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES leaves visible to this process.
///
/// The drivers' libraries (`libcuda.so.1`, `libamdhip64.so`) are opened on first use; they are not needed
/// before that. Tested on an NVIDIA H100; for AMD's driver only with a test double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    api: Api,
    number: u32,
}

impl Device {
    /// Returns `true` if the driver is NVIDIA's rather than AMD's.
    pub fn is_cuda(self) -> bool {
        self.api == Api::Cuda
    }

    /// `cuda:NUMBER`.
    pub fn cuda(number: u32) -> Self {
        Self {
            api: Api::Cuda,
            number,
        }
    }

    /// `hip:NUMBER`.
    pub fn hip(number: u32) -> Self {
        Self {
            api: Api::Hip,
            number,
        }
    }

    /// The number N of the device.
    pub fn number(self) -> u32 {
        self.number
    }

    /// The device that a word for host memory names, such as `cuda-host`; None for any other text.
    pub(crate) fn of_host_word(text: &str) -> Option<Self> {
        let (api, number) = text.split_once("-host")?;
        match number {
            "" => api.parse(),
            number => format!("{api}{number}").parse(),
        }
        .ok()
        .filter(|_| !api.contains(':'))
    }

    /// Checks that the device can be used. This opens its driver, but creates nothing.
    ///
    /// # Errors
    /// ENODEV if the device cannot be used.
    pub fn check(self) -> Result<()> {
        let found = Driver::open(self.api).and_then(|driver| driver.find(self.number));
        found.map_err(|failure| self.failed("cannot use the device", failure))
    }

    /// The device's primary context, which the whole process shares.
    pub(crate) fn context(self) -> Result<Arc<Context>> {
        let context = Context::retain(self.api, self.number);
        context.map_err(|failure| self.failed("cannot use the device", failure))
    }

    /// Allocates memory on the device.
    ///
    /// # Errors
    /// ENOMEM if the device is out of memory; ENODEV if it cannot be used; EINVAL for 0 bytes.
    pub fn allocate(self, bytes: u64) -> Result<DeviceMemory> {
        if bytes == 0 {
            return Err(
                Error::os("cannot allocate memory of a device", Errno::INVAL)
                    .at(self.to_string())
                    .with_why("0 bytes were requested"),
            );
        }
        let memory = DeviceMemory::new(&self.context()?, bytes);
        memory.map_err(|failure| {
            let error = self.failed("cannot allocate memory of the device", failure);
            error.at(format!("{self}, {bytes} bytes"))
        })
    }

    /// Copies bytes from the device's memory to the host, starting at byte `at` of `memory`.
    ///
    /// # Errors
    /// EINVAL if the range exceeds the memory; otherwise the driver's error.
    pub fn copy_back(self, memory: &DeviceMemory, at: u64, into: &mut [u8]) -> Result<()> {
        let end = at.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > memory.len()) {
            return Err(Error::os("cannot copy from the device", Errno::INVAL)
                .at(format!("{self}, byte {at}"))
                .with_why("the range is outside the memory"));
        }
        let copied = memory.copy_out(&*self.context()?, at, into);
        copied.map_err(|failure| self.failed("cannot copy from the device", failure))
    }

    /// All devices of the same driver.
    ///
    /// # Errors
    /// ENODEV if there is no driver.
    pub fn all(self) -> Result<Vec<Self>> {
        let count = Driver::open(self.api).and_then(Driver::devices);
        let count = count.map_err(|failure| self.failed("cannot use the device", failure))?;
        let all = (0..count).map(|number| Self { number, ..self });
        Ok(all.collect())
    }

    /// Returns true if the driver can pin memory that is mapped read-only; AMD's cannot. None if it does not say.
    pub fn pins_read_only(self) -> Option<bool> {
        const READ_ONLY_HOST_REGISTER_SUPPORTED: i32 = 113;
        match self.api {
            Api::Cuda => Some(self.attribute(READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0),
            Api::Hip => Some(false),
        }
    }

    /// The device's PCI address, in the format of `/sys/bus/pci/devices`.
    pub fn pci_address(self) -> Option<String> {
        const BUS: i32 = 33;
        const DEVICE: i32 = 34;
        const DOMAIN: i32 = 50;
        let ask = |number| self.attribute(number);
        let (domain, bus, device) = (ask(DOMAIN)?, ask(BUS)?, ask(DEVICE)?);
        Some(format!("{domain:04x}:{bus:02x}:{device:02x}.0"))
    }

    fn attribute(self, number: i32) -> Option<i32> {
        let driver = Driver::open(self.api).ok()?;
        driver.attribute(self.number, number)
    }

    /// Converts a failed call of the driver to an error.
    pub(crate) fn failed(self, what: impl Into<Message>, failure: Failure) -> Error {
        let Failure { call, code, text } = failure;
        let errno = match (call, code) {
            (_, NOT_SUPPORTED) => Errno::OPNOTSUPP,
            ("", _) | (_, 3 | 4 | 100 | 101) => Errno::NODEV,
            (_, 1) => Errno::INVAL,
            (_, OUT_OF_MEMORY) => Errno::NOMEM,
            (_, ALREADY_REGISTERED) => Errno::BUSY,
            _ => Errno::IO,
        };
        let why = match call {
            "" => text,
            call => format!("{call} failed: {text}, error {code}"),
        };
        let error = Error::os(what, errno).with_why(why).at(self.to_string());
        match errno {
            Errno::NODEV => error.with_remedy(format!(
                "install the driver of the device, and see what `dmafile doctor` says about {}",
                self.api
            )),
            Errno::IO => error.with_remedy("see the kernel log for what the device did"),
            _ => error.with_remedy(""),
        }
    }
}

impl PinDevice for Device {
    fn name(&self) -> String {
        self.to_string()
    }

    fn memory(&self) -> String {
        match self.number {
            0 => format!("{}-host", self.api),
            number => format!("{}-host:{number}", self.api),
        }
    }

    fn describe(&self) -> Result<String> {
        let ask = || {
            let driver = Driver::open(self.api)?;
            let version = driver.version_number()?;
            let version = match self.api {
                Api::Cuda => format!("{}.{}", version / 1000, version % 1000 / 10),
                Api::Hip => version.to_string(),
            };
            Ok(format!("{}, driver {version}", driver.name(self.number)?))
        };
        ask().map_err(|failure| self.failed("cannot use the device", failure))
    }

    fn pin(&self, start: *const u8, bytes: u64, writable: bool) -> Result<Box<dyn Pinned>> {
        Ok(Box::new(PinnedMemory::new(*self, start, bytes, writable)?))
    }
}

impl From<Device> for Kind {
    /// A memfd that is pinned for the device.
    fn from(device: Device) -> Self {
        Self::Pinned(device.into())
    }
}

impl From<Device> for Arc<dyn PinDevice> {
    fn from(device: Device) -> Self {
        Arc::new(device)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.api, self.number)
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Parses `cuda`, `cuda:N`, `hip` or `hip:N`. Without a number it is the first device.
    fn from_str(text: &str) -> Result<Self> {
        let (api, number) = text.split_once(':').unwrap_or((text, "0"));
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let number = number.parse().ok().filter(|_| digits);
        match (api, number) {
            ("cuda", Some(number)) => Ok(Self::cuda(number)),
            ("hip", Some(number)) => Ok(Self::hip(number)),
            _ => {
                let why = format!("'{text}' is neither cuda:N nor hip:N");
                Err(Error::usage(Opt::Device, why))
            }
        }
    }
}

/// Memory of this process that is pinned for devices. Dropping this unpins it.
pub(crate) struct PinnedMemory {
    registered: Registered,
    device: Device,
}

impl PinnedMemory {
    /// Pins `bytes` bytes from `start`. They must stay mapped there until this is dropped.
    pub(crate) fn new(
        device: Device,
        start: *const u8,
        bytes: u64,
        writable: bool,
    ) -> Result<Self> {
        let context = device.context()?;
        let registered = Registered::new(&context, start, bytes, !writable);
        let registered = registered.map_err(|failure| {
            let code = failure.code;
            let error = device.failed("cannot pin memory for the device", failure);
            let error = error.at(format!("{device}, {bytes} bytes"));
            match code {
                NOT_SUPPORTED if !writable => error.with_remedy(
                    "it cannot pin memory that is mapped read-only: leave it unsealed",
                ),
                OUT_OF_MEMORY => error.with_remedy("raise the limit on locked memory: ulimit -l"),
                _ => error,
            }
        })?;
        Ok(Self { registered, device })
    }

    /// Leaves the memory pinned and mapped until the process ends: a device may still use it.
    pub(crate) fn keep(self) {
        self.registered.keep();
    }
}

impl Pinned for PinnedMemory {
    fn device(&self) -> String {
        self.device.to_string()
    }

    fn end(self: Box<Self>) -> Result<()> {
        let ended = self.registered.end();
        ended.map_err(|failure| self.device.failed("cannot unpin memory", failure))
    }
}
