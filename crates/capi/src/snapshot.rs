//! `struct dmafile_snapshot`: several sources in a folder, which become valid together.

use crate::border::{self, Failure, Result, exclusive, shared};
use crate::buffer::{c_string, empty};
use crate::load::path;
use crate::options::{self, watched};
use crate::save::{DMAFILE_SAVE_IN_PLACE, DMAFILE_SAVE_NO_SYNC, duplicate, give_report, no_report};
use crate::{Buffer, Options, SaveOptions};
use dmafile::{Load, Opt, Origin, Save, Verify};
use dmafile_record::{LoadedSnapshot, Snapshot as Saving, SnapshotLoad};
use libc::{c_char, c_int};
use std::collections::BTreeMap;
use std::ffi::CString;

/// A source of a snapshot to save: a range of what a descriptor refers to.
#[repr(C)]
pub struct Source {
    /// Its name: 1 to 64 bytes of UTF-8, unique in the snapshot, not starting with a dot, without slash,
    /// comma, equals sign and control characters.
    pub name: *const c_char,
    /// A memfd, a dma-buf, a regular file, a block device or a pipe.
    pub fd: c_int,
    /// Offset of the first byte within `fd`; 0 for a pipe.
    pub offset: u64,
    /// Number of bytes; 0: up to the end.
    pub bytes: u64,
}

/// A snapshot in memory: one buffer per source. Opaque.
///
/// Functions that take it `const` may be called by several threads at once; the others require exclusive
/// access. Any thread may use and free it.
pub struct Snapshot {
    sources: Vec<(CString, Option<Box<Buffer>>)>,
    report: CString,
}

/// Saves `count` sources, 1 to 256, into the existing folder at `path`. All of them become valid together,
/// when every byte is on the disk. If the save ends early, the previous snapshot is still complete. The file
/// system needs room for both.
///
/// `options` apply to each source; NULL means all defaults. `verify` selects the digests that a load
/// compares, "xxh3" by default, without "=HEX"; `progress` counts the bytes of all sources;
/// DMAFILE_SAVE_IN_PLACE is refused. `report` is as in dmafile_save.
///
/// Returns the number of bytes saved; or a negative errno as dmafile_save, and -EINVAL for an invalid or
/// duplicate name; -EBUSY while another snapshot is being saved to the folder; -ENOENT, -ENOTDIR if there is
/// no such folder; -EBADMSG, -EOPNOTSUPP if its manifest cannot be read by this version.
///
/// Thread-safe. The memory should not change during the save: concurrent writes make its digest wrong.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_save(
    sources: *const Source,
    count: usize,
    path: *const c_char,
    options: *const SaveOptions,
    report: *mut *mut c_char,
) -> i64 {
    border::number(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { no_report(report) };
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires `count` sources.
        let sources = unsafe { border::array(sources, count, "sources")? };
        // SAFETY: the header requires null or a string.
        let mut saving = Saving::new(unsafe { self::path(path)? }).names(&border::Header);
        let mut lengths = BTreeMap::new();
        for source in sources {
            // SAFETY: the header requires a string.
            let name = unsafe { border::required(source.name, "sources.name")? };
            let fd = duplicate(source.fd, "sources.fd")?;
            saving = saving.add(name, Origin::fd(fd, source.offset));
            if source.bytes != 0 {
                lengths.insert(name.to_string(), source.bytes);
            }
        }
        // SAFETY: the header requires strings, a token and a callback that stay valid until we return.
        let saving = unsafe { apply(&options, saving, lengths)? };
        let done = saving.run()?;
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { give_report(report, serde_json::to_string(&done)) };
        Ok(done.bytes.cast_signed())
    })
}

/// Applies options of the caller.
///
/// # Safety
/// As for those of a save.
unsafe fn apply(
    options: &SaveOptions,
    mut saving: Saving,
    lengths: BTreeMap<String, u64>,
) -> Result<Saving> {
    let refuse = |what: &str, why: &str| Err(Failure::new(libc::EINVAL, what, why));
    if options.flags & DMAFILE_SAVE_IN_PLACE != 0 {
        return refuse("options.flags", "a snapshot is not written in place");
    }
    // SAFETY: as this function requires.
    let values = unsafe { options.values()? }.without(&[Opt::Verify, Opt::Sync]);
    // SAFETY: as this function requires.
    let verify: Option<Verify> = unsafe { options::word(options.verify, "options.verify")? };
    if let Some(verify) = verify {
        if verify.expected.is_some() {
            let why = "a snapshot has a digest for each source: leave =HEX out";
            return refuse("options.verify", why);
        }
        saving = saving.verify(verify.algorithm);
    }
    values
        .save(Save::new(Origin::File("".into()), ""))
        .check()?;
    // SAFETY: as this function requires.
    let saving = unsafe { watched!(saving, options) };
    let saving = saving.sync(options.flags & DMAFILE_SAVE_NO_SYNC == 0);
    Ok(saving.each(move |name, save| {
        let save = values.save(save);
        match lengths.get(name) {
            Some(length) => save.length(*length),
            None => save,
        }
    }))
}

/// Loads the snapshot in the folder at `path`: one buffer per source, each checked against its size and
/// digest. If another snapshot replaces this one during the load, either the old or the new one is loaded,
/// completely.
///
/// `options` apply to each source; NULL means all defaults. `verify`, `offset` and `length` are refused,
/// `progress` counts the bytes of all sources, and an "fd:N" can receive only one source.
///
/// Returns 0 and stores the snapshot in `*snapshot`; free it with dmafile_snapshot_free. On failure stores
/// NULL and returns a negative errno as dmafile_load; and -ENOENT if the folder has no snapshot, -EBADMSG for
/// a damaged file or manifest, -EOPNOTSUPP for a manifest of another version.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_load(
    path: *const c_char,
    options: *const Options,
    snapshot: *mut *mut Snapshot,
) -> c_int {
    border::status(|| {
        // SAFETY: the header requires null or a place for a pointer.
        unsafe { empty(snapshot, "snapshot")? };
        // SAFETY: the header requires null or options.
        let options = unsafe { options::copy(options)? };
        // SAFETY: the header requires null or a string.
        let load = SnapshotLoad::new(unsafe { self::path(path)? }).names(&border::Header);
        if !options.verify.is_null() {
            let why = "a snapshot has its digests in its manifest; leave it NULL";
            return Err(Failure::new(libc::EINVAL, "options.verify", why));
        }
        // SAFETY: the header requires strings that stay valid until we return.
        let values = unsafe { options.values()? };
        values.load(Load::new("")).check()?;
        let load = load.each(move |_, load| values.load(load));
        // SAFETY: the header requires a token and a callback that stay valid until we return.
        let made = Snapshot::of(unsafe { watched!(load, options) }.run()?)?;
        // SAFETY: it is not null, so it is a place for a pointer.
        unsafe { snapshot.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

impl Snapshot {
    fn of(loaded: LoadedSnapshot) -> Result<Self> {
        let report = serde_json::to_string(&loaded.report).expect("a report is plain data");
        let reports = loaded.report.sources.iter().map(|one| one.report.as_ref());
        let sources = loaded.sources.into_iter().zip(reports);
        let sources = sources.map(|(source, report)| {
            let buffer = Buffer::of_source(source.buffer, report)?;
            Ok((c_string(source.name)?, Some(Box::new(buffer))))
        });
        Ok(Self {
            sources: sources.collect::<Result<_>>()?,
            report: c_string(report)?,
        })
    }

    fn source(&self, index: usize) -> Result<&(CString, Option<Box<Buffer>>)> {
        let count = self.sources.len();
        self.sources.get(index).ok_or_else(|| {
            let why = format!("it has {count} sources, but no source {index}");
            Failure::new(libc::ERANGE, "the snapshot", &why)
        })
    }
}

/// The number of sources in a snapshot; 0 with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_count(snapshot: *const Snapshot) -> usize {
    border::value(|| {
        // SAFETY: the header requires null or a snapshot that is alive.
        Ok(unsafe { shared(snapshot, "snapshot")? }.sources.len())
    })
}

/// The name of the source with the given number, from 0 to dmafile_snapshot_count - 1, in the order in which
/// they were saved. It belongs to the snapshot.
///
/// NULL with errno ERANGE for any other number, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_name(
    snapshot: *const Snapshot,
    index: usize,
) -> *const c_char {
    border::pointer(|| {
        // SAFETY: the header requires null or a snapshot that is alive.
        let snapshot = unsafe { shared(snapshot, "snapshot")? };
        Ok(snapshot.source(index)?.0.as_ptr())
    })
}

/// The buffer of a source. It belongs to the snapshot. For an empty source it is an empty memfd, whatever
/// kind of memory the options name.
///
/// NULL with errno ERANGE for any other number, ENODATA if it was taken, EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_buffer(
    snapshot: *const Snapshot,
    index: usize,
) -> *const Buffer {
    border::pointer(|| {
        // SAFETY: the header requires null or a snapshot that is alive.
        let snapshot = unsafe { shared(snapshot, "snapshot")? };
        let (_, buffer) = snapshot.source(index)?;
        let buffer = buffer.as_deref().ok_or_else(|| taken(index))?;
        Ok(std::ptr::from_ref(buffer))
    })
}

/// Takes the buffer of a source out of the snapshot: the caller then owns it, and frees it with
/// dmafile_buffer_free. It outlives the snapshot. A pointer from dmafile_snapshot_buffer stays valid.
///
/// NULL with errno as dmafile_snapshot_buffer. No other thread may be using the snapshot.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_take(
    snapshot: *mut Snapshot,
    index: usize,
) -> *mut Buffer {
    let buffer = border::pointer(|| {
        // SAFETY: the header requires null or a snapshot that is alive, and used by no other thread.
        let snapshot = unsafe { exclusive(snapshot, "snapshot")? };
        snapshot.source(index)?;
        let buffer = snapshot.sources[index].1.take();
        let buffer = buffer.ok_or_else(|| taken(index))?;
        Ok(Box::into_raw(buffer).cast_const())
    });
    buffer.cast_mut()
}

fn taken(index: usize) -> Failure {
    let why = format!("the buffer of source {index} was taken");
    Failure::new(libc::ENODATA, "the snapshot", &why)
}

/// The report of the load as one JSON object: what `dmafile load --json` prints for the folder. It belongs to
/// the snapshot; NULL with errno EINVAL for NULL.
///
/// Thread-safe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_report_json(snapshot: *const Snapshot) -> *const c_char {
    border::pointer(|| {
        // SAFETY: the header requires null or a snapshot that is alive.
        Ok(unsafe { shared(snapshot, "snapshot")? }.report.as_ptr())
    })
}

/// Frees a snapshot, and the buffers that were not taken out of it; NULL is a no-op. No other thread may be
/// using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmafile_snapshot_free(snapshot: *mut Snapshot) {
    // SAFETY: the header requires null or what `dmafile_snapshot_load` returned, freed once.
    unsafe { border::free(snapshot) };
}
