//! The programs and maps of a recording in the kernel (bpf/record.bpf.c), and their names in bpffs.
//!
//! What is begun appears by one rename, and only the holder of a lock on the file system begins or ends: so the folder
//! [`NEW`] is always a leftover of a process that was killed.

use super::btf::Btf;
use super::denied;
use super::frames::Frames;
use super::kcore::Kcore;
use super::pages::Kernel;
use super::recording::{
    Burst, Functions, PinRecording, PinRecords, RecordPins, RecordedBy, RecordedFolio,
};
use aya::maps::{Array, Map, MapData, MapError};
use aya::pin::PinError;
use aya::programs::ProgramInfo;
use aya::programs::links::FdLink;
use aya::programs::{FEntry, FExit, ProgramError};
use aya::{BtfError, EbpfError, EbpfLoader, VerifierLogLevel};
use dmafile::internal::{Verb, can_hash};
use dmafile::{Error, Result};
use dmafile_sys::map::page_size;
use dmafile_sys::{Errno, errno, host, process};
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::time::SystemTime;

/// The mount of the file system that keeps programs and maps.
const MOUNT: &str = "/sys/fs/bpf";
/// Its type in statfs(2). Names there have no dot.
const BPF_FS_MAGIC: rustix::fs::FsWord = 0xcafe_4a11;
const FOLDER: &str = "/sys/fs/bpf/dmafile-pins";
const NEW: &str = "/sys/fs/bpf/dmafile-pins-new";

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/record.bpf.o"));

/// Entries of a block (BLOCK_ENTRIES), one for each page of a region.
const ENTRIES: usize = 64;
/// Words of a block: its users, its region, and the entries.
const BLOCK: usize = 2 + ENTRIES;
/// Words of a burst, of which the last 16 are the stack.
const BURST: usize = 12 + 16;
/// Words of the numbers that the programs count (struct counts).
const COUNTS: usize = 8;
const WORD: u64 = 8;
/// Bursts are fewer, because what a task pins at one time shares one.
const BLOCKS_PER_BURST: u64 = 4;

/// A program, and the kernel's function at whose entry or exit it runs.
#[derive(Clone, Copy)]
struct Hook {
    program: &'static str,
    function: &'static str,
    side: Side,
    when: When,
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Entry,
    Exit,
}

/// When a program is attached.
#[derive(Clone, Copy)]
enum When {
    /// The function must exist.
    Always,
    /// If there is the function.
    Exists,
    /// If there is the function, and it does not call this one: the compiler has put its code into it.
    Unless(&'static str),
}
use Side::{Entry, Exit};
use When::{Always, Exists, Unless};

const fn hook(program: &'static str, function: &'static str, side: Side, when: When) -> Hook {
    Hook {
        program,
        function,
        side,
        when,
    }
}

/// Since Linux 6.11.
const GRABS: [Hook; 2] = [
    hook("grab_fast", "try_grab_folio_fast", Exit, Always),
    hook("grab_slow", GRAB, Exit, Always),
];
/// Before.
const OLD_GRABS: [Hook; 2] = [
    hook("grab_fast", GRAB, Exit, Always),
    hook("grab_page", "try_grab_page", Exit, Always),
];
const OTHERS: [Hook; 8] = [
    // Before its end, because programs are attached from the last to the first.
    hook("memfd_begin", MEMFD, Entry, Unless(GRAB)),
    hook("memfd", MEMFD, Exit, Exists),
    hook("add_pin", "folio_add_pin", Entry, Exists),
    hook("add_pins", "folio_add_pins", Exit, Unless(GRAB)),
    hook("put_page", "unpin_user_page", Entry, Unless(PUT)),
    hook("put_folio", "unpin_folio", Entry, Unless(PUT)),
    hook("put_pins", "unpin_user_folio", Entry, Unless(PUT)),
    hook("put", PUT, Entry, Always),
];
const GRAB: &str = "try_grab_folio";
const PUT: &str = "gup_put_folio";
const MEMFD: &str = "memfd_pin_folios";
/// Functions that unpin many pages. That they call `PUT` for each is how their unpins are seen.
const PUT_MANY: [&str; 4] = [
    "unpin_user_pages",
    "unpin_user_pages_dirty_lock",
    "unpin_user_page_range_dirty_lock",
    "unpin_folios",
];

/// What went wrong.
#[derive(Debug)]
enum Failed {
    Os(Errno),
    /// The kernel has no such function that programs can be attached to.
    Function(&'static str),
    /// It attaches programs to no function.
    Tracing,
    /// It attaches them, but does not run them.
    Paused,
    /// It hides the addresses of its functions.
    Hidden,
    /// Others than root may write to the file system of programs.
    Shared,
    /// What the loader or the kernel's verifier says.
    Refused(String),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Os(errno(&error))
    }
}

macro_rules! failures {
    ($($kind:ty),*) => {
        $(impl From<$kind> for Failed {
            fn from(error: $kind) -> Self {
                Self::of(&error)
            }
        })*
    };
}
failures!(EbpfError, ProgramError, MapError, PinError, BtfError);

impl Failed {
    /// The errno at the end of a chain of causes, or its text.
    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut text = error.to_string();
        let mut next = Some(error);
        while let Some(one) = next {
            match one.downcast_ref::<io::Error>().map(errno) {
                // The verifier explains these.
                None | Some(Errno::INVAL | Errno::ACCESS) => {}
                Some(errno) => return Self::Os(errno),
            }
            next = one.source();
            if let Some(one) = next {
                text = format!("{text}: {one}");
            }
        }
        // Of what the verifier writes, the end says why.
        let lines = text.lines().map(str::trim);
        let lines: Vec<_> = lines
            .filter(|line| !line.is_empty() && !line.starts_with("processed "))
            .collect();
        Self::Refused(match lines[..] {
            [first, .., last] => format!("{first} ... {last}"),
            _ => lines.concat(),
        })
    }

    /// The failure to attach a program.
    fn to_attach(function: &'static str, error: &ProgramError) -> Self {
        /// The kernel's own ENOTSUPP, which has no name in user space.
        const NOTSUPP: i32 = 524;
        match Self::of(error) {
            Self::Os(Errno::NOENT | Errno::BUSY) => Self::Function(function),
            Self::Os(errno)
                if matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV)
                    || errno.raw_os_error() == NOTSUPP =>
            {
                Self::Tracing
            }
            other => other,
        }
    }

    fn explain(self, what: &'static str) -> Error {
        let errno = match self {
            Self::Os(errno) => errno,
            Self::Function(function) => {
                return Error::os(what, Errno::OPNOTSUPP)
                    .at(function)
                    .with_why("this kernel has no such function that programs can be attached to")
                    .with_remedy("");
            }
            Self::Tracing => {
                return Error::os(what, Errno::OPNOTSUPP)
                    .at("BPF")
                    .with_why("this kernel attaches no programs to its functions (CONFIG_FUNCTION_TRACER)")
                    .with_remedy("");
            }
            Self::Paused => {
                return Error::os(what, Errno::OPNOTSUPP)
                    .at("kernel.ftrace_enabled")
                    .with_why("it is 0, so that the kernel runs no programs at its functions")
                    .with_remedy("set it: sysctl kernel.ftrace_enabled=1");
            }
            Self::Hidden => {
                return Error::os(what, Errno::PERM)
                    .at("/proc/kallsyms")
                    .with_why("the kernel hides the addresses of its functions")
                    .with_remedy("allow CAP_SYSLOG, or: sysctl kernel.kptr_restrict=1");
            }
            Self::Shared => {
                return Error::os(what, Errno::PERM)
                    .at(MOUNT)
                    .with_why("others than root may write there")
                    .with_remedy("close it to them: chmod 700 /sys/fs/bpf");
            }
            Self::Refused(why) => return Error::new(what, why).at("BPF"),
        };
        let error = Error::os(what, errno).at(MOUNT);
        match errno {
            Errno::EXIST => error
                .with_why("they are recorded already")
                .with_remedy("show them: dmafile pins; or stop it: dmafile pins --record --stop"),
            Errno::AGAIN => error
                .with_why("another dmafile begins or ends a recording")
                .with_remedy("wait until it has"),
            Errno::PERM | Errno::ACCESS => {
                denied(error, " (with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN)")
            }
            Errno::NOENT => error
                .with_why("bpffs is not mounted")
                .with_remedy("mount it: mount -t bpf -o mode=700 bpf /sys/fs/bpf"),
            Errno::NOMEM => error.with_remedy("give it less memory: --memory"),
            _ => error,
        }
    }
}

/// What the programs must know about this kernel and machine (their constants).
struct Setup {
    first_page: u64,
    page_shift: u32,
    head_mask: u64,
    compound: u32,
    last_page: u64,
    memfd_pins: u32,
    page_grabbed: u32,
    page_result: u32,
    foll_pin: u32,
    foll_recorded: u32,
    regions: u32,
    blocks: u32,
    bursts: u32,
    hooks: Vec<Hook>,
}

impl Setup {
    fn of(what: &RecordPins) -> Result<Self> {
        let kernel = Kernel::open().map_err(|error| {
            // It reads the same tables as `pages()`, and names that.
            let errno = error
                .raw_os_error()
                .map_or(Errno::IO, Errno::from_raw_os_error);
            Error::os(BEGIN, errno)
                .at(error.place())
                .with_why(error.why().clone())
                .with_remedy(error.remedy().clone())
        })?;
        let table = kernel.page_table()?;
        let code = Code::read(kernel.core()).map_err(|failed| failed.explain(BEGIN))?;
        let types = Btf::read()?;
        // Macros up to Linux 6.2, and therefore not in the kernel's types.
        let flag = |name, of_macro| types.constant(name).unwrap_or(of_macro) as u32;
        let (pin, longterm) = (flag("FOLL_PIN", 0x4_0000), flag("FOLL_LONGTERM", 0x1_0000));
        let all = host::kilobytes("/proc/meminfo", "MemTotal").unwrap_or(0);
        let memory = what.memory.unwrap_or((all >> 10).clamp(4 << 20, 256 << 20));
        let regions = table.frames.div_ceil(ENTRIES as u64);
        let share = WORD * (BLOCKS_PER_BURST * BLOCK as u64 + BURST as u64);
        let fits = |number: u64| {
            u32::try_from(number).map_err(|_| Failed::Os(Errno::OVERFLOW).explain(BEGIN))
        };
        let page_bool = types.returns_bool("try_grab_page") == Some(true);
        Ok(Self {
            first_page: table.first,
            page_shift: table.shift,
            head_mask: table.head,
            compound: table.compound,
            last_page: table.first + (table.frames << table.shift),
            memfd_pins: u32::from(code.calls(MEMFD, GRAB) == Some(false)),
            page_grabbed: page_bool.into(),
            page_result: if page_bool { 0xff } else { !0 },
            foll_pin: pin,
            foll_recorded: if what.short { pin } else { longterm },
            regions: fits(regions)?,
            // Number 0 is none, and more blocks than regions are of no use.
            blocks: fits((memory / share * BLOCKS_PER_BURST).clamp(16, regions + 1))?,
            bursts: fits((memory / share).clamp(16, 1 << 20))?,
            hooks: code.hooks().map_err(|failed| failed.explain(BEGIN))?,
        })
    }
}

const BEGIN: &str = "cannot record pins";

pub(super) fn begin(what: &RecordPins) -> Result<u64> {
    can_hash(Verb::Load)?;
    // What is refused at once needs no reading of the kernel's tables.
    let lock = lock().map_err(|failed| failed.explain(BEGIN))?;
    if is_paused() {
        return Err(Failed::Paused.explain(BEGIN));
    }
    let setup = Setup::of(what)?;
    start(&setup, &lock).map_err(|failed| failed.explain(BEGIN))
}

/// True if the kernel calls nothing at its functions, until it is told otherwise.
fn is_paused() -> bool {
    fs::read_to_string("/proc/sys/kernel/ftrace_enabled").is_ok_and(|text| text.trim() == "0")
}

/// False if there was none, or another one than `only`.
pub(super) fn end(only: Option<u64>) -> Result<bool> {
    let all = || {
        let _lock = lock()?;
        // Linux would disable all its tracing, with a warning, when the next program is detached.
        if is_paused()
            && [FOLDER, NEW]
                .iter()
                .any(|folder| Path::new(folder).exists())
        {
            return Err(Failed::Paused);
        }
        remove(NEW)?;
        match fs::symlink_metadata(FOLDER) {
            Ok(data) if only.is_none_or(|only| only == data.ino()) => {}
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        // It disappears at once, whatever happens to this process.
        fs::rename(FOLDER, NEW)?;
        remove(NEW)
    };
    all().map_err(|failed: Failed| failed.explain("cannot stop recording pins"))
}

/// None if there is none, or without root.
pub(super) fn read() -> Result<Option<PinRecords>> {
    let failed = |failed: Failed| failed.explain("cannot read what is recorded");
    match Maps::open() {
        Ok(Some(maps)) => maps.read().map(Some).map_err(failed),
        // No right to see it, or it ends at this moment.
        Ok(None) | Err(Failed::Os(Errno::ACCESS | Errno::PERM | Errno::NOENT)) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Opens the file system. Only root may name anything there, so that what its names lead to is root's, too.
fn mount() -> Result<File, Failed> {
    // Without bpffs, its folder is a part of sysfs.
    let mount = File::open(MOUNT)?;
    if rustix::fs::fstatfs(&mount).map_err(Failed::Os)?.f_type != BPF_FS_MAGIC {
        return Err(Failed::Os(Errno::NOENT));
    }
    let data = mount.metadata()?;
    if data.uid() != 0 || data.mode() & 0o022 != 0 {
        return Err(Failed::Shared);
    }
    Ok(mount)
}

/// Holds the file system for this process; EAGAIN if another one does.
fn lock() -> Result<File, Failed> {
    let mount = mount()?;
    flock(&mount, FlockOperation::NonBlockingLockExclusive).map_err(Failed::Os)?;
    Ok(mount)
}

/// Returns the inode of the folder.
fn start(setup: &Setup, _lock: &File) -> Result<u64, Failed> {
    if fs::symlink_metadata(FOLDER).is_ok() {
        return Err(Failed::Os(Errno::EXIST));
    }
    remove(NEW)?;
    DirBuilder::new().mode(0o700).create(NEW)?;
    let loaded = load(setup);
    if loaded.is_err() {
        // What stays is removed by the next one.
        let _ = remove(NEW);
    }
    loaded?;
    fs::rename(NEW, FOLDER)?;
    Ok(fs::symlink_metadata(FOLDER)?.ino())
}

/// Does the same with the program of a hook, whose type depends on the side.
macro_rules! with_program {
    ($object:expr, $hook:expr, |$program:ident| $body:block) => {{
        let found = $object
            .program_mut($hook.program)
            .expect("the object has it");
        match $hook.side {
            Entry => {
                let $program: &mut FEntry = found.try_into()?;
                $body
            }
            Exit => {
                let $program: &mut FExit = found.try_into()?;
                $body
            }
        }
    }};
}

/// Loads everything into the kernel, with names below the folder `NEW`.
fn load(setup: &Setup) -> Result<(), Failed> {
    let types = aya::Btf::from_sys_fs()?;
    let mut loader = EbpfLoader::new();
    loader
        .btf(Some(&types))
        .verifier_log_level(VerifierLogLevel::STATS)
        .set_global("first_page", &setup.first_page, true)
        .set_global("page_shift", &setup.page_shift, true)
        .set_global("head_mask", &setup.head_mask, true)
        .set_global("compound", &setup.compound, true)
        .set_global("last_page", &setup.last_page, true)
        .set_global("memfd_pins", &setup.memfd_pins, true)
        .set_global("page_grabbed", &setup.page_grabbed, true)
        .set_global("page_result", &setup.page_result, true)
        .set_global("foll_pin", &setup.foll_pin, true)
        .set_global("foll_recorded", &setup.foll_recorded, true)
        .set_global("most_blocks", &setup.blocks, true)
        .set_global("most_bursts", &setup.bursts, true)
        .set_max_entries("regions", setup.regions)
        .set_max_entries("blocks", setup.blocks)
        .set_max_entries("bursts", setup.bursts);
    let mut object = loader.load(OBJECT)?;
    for hook in &setup.hooks {
        // No type of that name.
        let failed = |error| match error {
            ProgramError::Btf(_) => Failed::Function(hook.function),
            error => error.into(),
        };
        let name = Path::new(NEW).join(format!("{CODE}{}", hook.program));
        with_program!(object, hook, |program| {
            program.load(hook.function, &types).map_err(failed)?;
            program.pin(name)?;
        });
    }
    for name in Maps::NAMES {
        let map = object.map(name).expect("the object has it");
        map.pin(Path::new(NEW).join(name))?;
    }
    // Those that unpin first: of what is recorded, no end may be missed.
    for hook in setup.hooks.iter().rev() {
        let failed = |error| Failed::to_attach(hook.function, &error);
        let link: FdLink = with_program!(object, hook, |program| {
            let id = program.attach().map_err(failed)?;
            program.take_link(id)?.into()
        });
        link.pin(Path::new(NEW).join(format!("{LINK}{}", hook.program)))?;
    }
    Ok(())
}

/// The kernel's functions and their machine code.
struct Code<'a> {
    core: &'a Kcore,
    symbols: Functions,
}

impl<'a> Code<'a> {
    fn read(core: &'a Kcore) -> Result<Self, Failed> {
        let symbols = Functions::read();
        if symbols.is_empty() {
            return Err(Failed::Hidden);
        }
        Ok(Self { core, symbols })
    }

    /// The programs of this kernel.
    fn hooks(&self) -> Result<Vec<Hook>, Failed> {
        let has = |function| self.symbols.range(function).is_some();
        let grabs = if has("try_grab_folio_fast") {
            GRABS
        } else {
            OLD_GRABS
        };
        let mut hooks = Vec::new();
        for hook in grabs.into_iter().chain(OTHERS) {
            let wanted = match hook.when {
                Always if !has(hook.function) => return Err(Failed::Function(hook.function)),
                Always => true,
                Exists => has(hook.function),
                Unless(callee) => self.calls(hook.function, callee) == Some(false),
            };
            hooks.extend(wanted.then_some(hook));
        }
        // What is not seen there would be missed without a word.
        let [fast, slow] = grabs.map(|hook| hook.function);
        let seen = PUT_MANY
            .map(|many| (many, PUT))
            .into_iter()
            .chain([("gup_fast_fallback", fast), ("__get_user_pages", slow)]);
        for (caller, callee) in seen {
            if has(caller) && self.calls(caller, callee) != Some(true) {
                return Err(Failed::Function(callee));
            }
        }
        Ok(hooks)
    }

    /// True if a function calls or jumps to another one; None if there is no such function, or its code cannot be read.
    fn calls(&self, caller: &str, callee: &str) -> Option<bool> {
        let range = self.symbols.range(caller)?;
        let to = self.symbols.range(callee)?.start;
        let mut code = vec![0; (range.end - range.start) as usize];
        self.core.read(range.start, &mut code).ok()?;
        Some(calls(&code, range.start, to))
    }
}

/// True if this code at this address has a call of, or a jump to, another address, or what the kernel may put directly
/// before a function to be called in its place (CONFIG_CALL_PADDING).
fn calls(code: &[u8], at: u64, to: u64) -> bool {
    const PADDING: u64 = 16;
    if cfg!(target_arch = "aarch64") {
        // B and BL: the distance in instructions of 4 bytes.
        return code
            .chunks_exact(4)
            .zip((at..).step_by(4))
            .any(|(word, here)| {
                let word = u32::from_ne_bytes(*word.first_chunk().expect("4 bytes"));
                let distance = i64::from((word << 6) as i32 >> 6) * 4;
                let is_branch = word & 0x7c00_0000 == 0x1400_0000;
                is_branch && to.wrapping_sub(here.wrapping_add_signed(distance)) <= PADDING
            });
    }
    // CALL, JMP and Jcc: the distance from the end of the instruction, which may begin anywhere.
    code.windows(5).zip(at..).any(|(bytes, here)| {
        let distance = i32::from_ne_bytes(*bytes.last_chunk().expect("4 bytes"));
        let found = here.wrapping_add(5).wrapping_add_signed(distance.into());
        matches!(bytes[0], 0xe8 | 0xe9 | 0x80..=0x8f) && to.wrapping_sub(found) <= PADDING
    })
}

/// Names of attached programs begin with it.
const LINK: &str = "attached_";
/// Names of programs begin with it.
const CODE: &str = "program_";

/// How often the kernel left programs out, because it was running the same one on that CPU (recursion_misses).
fn missed() -> Result<u64, Failed> {
    let mut missed = 0;
    for entry in fs::read_dir(FOLDER)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(CODE) {
            let program = ProgramInfo::from_pin(entry.path())?.fd()?;
            let fd = program.as_fd().as_raw_fd() as u32;
            let info = process::fdinfo(Path::new("/proc/self"), fd).map_err(Failed::Os)?;
            let of = |line: &str| {
                line.strip_prefix("recursion_misses:")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            };
            missed += info.lines().find_map(of).unwrap_or(0);
        }
    }
    Ok(missed)
}

/// Removes a folder with what it names; false if there is none.
fn remove(folder: &str) -> Result<bool, Failed> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name());
    }
    // Programs first, which use the maps.
    names.sort_by_key(|name| !name.to_string_lossy().starts_with(LINK));
    for name in names {
        fs::remove_file(Path::new(folder).join(name))?;
    }
    fs::remove_dir(folder)?;
    Ok(true)
}

/// The maps of the recording that goes on.
struct Maps {
    blocks: Array<MapData, [u64; BLOCK]>,
    bursts: Array<MapData, [u64; BURST]>,
    counts: Array<MapData, [u64; COUNTS]>,
    most_blocks: u64,
    /// Bytes of all.
    memory: u64,
    began: SystemTime,
}

impl Maps {
    const NAMES: [&str; 4] = ["regions", "blocks", "bursts", "counted"];

    fn open() -> Result<Option<Self>, Failed> {
        let data = match mount() {
            Ok(_) => fs::symlink_metadata(FOLDER)?,
            // Nothing is recorded there.
            Err(Failed::Shared) => return Ok(None),
            Err(error) => return Err(error),
        };
        let open = |name| MapData::from_pin(Path::new(FOLDER).join(name));
        let [regions, blocks, bursts, counts] = Self::NAMES.map(open);
        let (regions, blocks, bursts) = (regions?, blocks?, bursts?);
        let most = |map: &MapData| map.info().map(|info| u64::from(info.max_entries()));
        let most_blocks = most(&blocks)?;
        // The kernel rounds the 4 bytes of a region.
        let memory =
            WORD * (most(&regions)? + most_blocks * BLOCK as u64 + most(&bursts)? * BURST as u64);
        Ok(Some(Self {
            blocks: Map::Array(blocks).try_into()?,
            bursts: Map::Array(bursts).try_into()?,
            counts: Map::Array(counts?).try_into()?,
            most_blocks,
            memory,
            began: data.modified()?,
        }))
    }

    fn read(&self) -> Result<PinRecords, Failed> {
        let began = (host::uptime() * 1e9) as u64;
        let [_, _, no_block, no_burst, disturbed, beyond, ..] = self.counts.get(&0, 0)?;
        let (mut folios, mut blocks) = (Vec::new(), 0);
        for number in 1..self.most_blocks as u32 {
            let [users, region, entries @ ..] = self.blocks.get(&number, 0)?;
            // Not in use, or just being taken for something else, which more users than that mark.
            if !(1..1 << 61).contains(&users) {
                continue;
            }
            blocks += 1;
            let found = entries.iter().enumerate().filter(|(_, entry)| **entry != 0);
            folios.extend(found.map(|(at, entry)| RecordedFolio {
                frame: region * ENTRIES as u64 + at as u64,
                bytes: 0,
                pins: entry >> 32,
                burst: *entry as u32,
            }));
        }
        let mut bursts = BTreeMap::new();
        let numbers: BTreeSet<_> = folios.iter().map(|folio| folio.burst).collect();
        for number in numbers {
            let burst = self.burst(number)?;
            // Since the blocks were read, those pins may have gone, and it may be used for others.
            bursts.extend(
                burst
                    .filter(|burst| burst.time < began)
                    .map(|burst| (number, burst)),
            );
        }
        folios.retain(|folio| bursts.contains_key(&folio.burst));
        folios.sort_unstable_by_key(|folio| folio.frame);
        let frames = Frames::open().ok();
        for folio in &mut folios {
            let pages = frames
                .as_ref()
                .and_then(|frames| frames.pages(folio.frame).ok());
            folio.bytes = pages.unwrap_or(1) * page_size();
        }
        let seconds = SystemTime::now().duration_since(self.began);
        Ok(PinRecords {
            recording: PinRecording {
                seconds: seconds.map_or(0.0, |time| time.as_secs_f64()),
                folios: folios.len() as u64,
                bytes: folios.iter().map(|folio| folio.bytes).sum(),
                memory: self.memory,
                used: WORD * (blocks * BLOCK as u64 + bursts.len() as u64 * BURST as u64),
                lost: no_block + no_burst,
                beyond,
                missed: missed()?,
                paused: is_paused(),
                disturbed,
            },
            folios,
            bursts,
        })
    }

    /// None if it is not in use.
    fn burst(&self, number: u32) -> Result<Option<Burst>, Failed> {
        let [
            users,
            task,
            _,
            _,
            _,
            time,
            born,
            cgroup,
            uid,
            depth,
            first,
            second,
            stack @ ..,
        ] = self.bursts.get(&number, 0)?;
        let name = [first.to_ne_bytes(), second.to_ne_bytes()].concat();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok((1..1 << 61).contains(&users).then(|| Burst {
            by: RecordedBy::of(
                (task >> 32) as u32,
                born,
                String::from_utf8_lossy(name).into_owned(),
            ),
            time,
            born,
            cgroup,
            uid: uid as u32,
            stack: stack.into_iter().take(depth as usize).collect(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn calls_and_jumps_are_found_in_machine_code() {
        // nop; call +0x10; jmp -0x20; je +1; ret
        let code = [
            0x90, 0xe8, 0x10, 0, 0, 0, 0xe9, 0xe0, 0xff, 0xff, 0xff, 0x0f, 0x84, 1, 0, 0, 0, 0xc3,
        ];
        for to in [0x1016, 0x0feb, 0x1012, 0x1016 + 16] {
            assert!(calls(&code, 0x1000, to), "{to:#x}");
        }
        assert!(!calls(&code, 0x1000, 0x1016 + 17) && !calls(&code[..5], 0x1000, 0x1016));
    }
}
