//! dmafile.ko as this process finds it: its node, features and limits; or why it cannot be used.

use crate::error::{Error, Result, Verb};
use crate::message::{Opt, message};
use crate::sys::module::NODE;
use crate::sys::{self, Errno, map};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What the module reports about itself. Sizes are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModuleFacts {
    /// Its features (DMAFILE_FEATURE_*).
    pub features: u64,
    /// The largest buffer that it creates.
    pub max_buffer: u64,
    /// Default maximum size of a chunk.
    pub chunk: u64,
    /// Largest chunk that may be requested.
    pub max_chunk: u64,
    /// Maximum number of chunks in flight.
    pub depth: u32,
    /// Alignment of direct I/O, for files that do not need a larger one.
    pub align: u64,
}

/// Opens the node and queries the module.
pub(crate) fn open() -> Result<(OwnedFd, ModuleFacts)> {
    let node = sys::module::open().map_err(cannot_open)?;
    let info = sys::module::info(node.as_fd()).map_err(|errno| {
        Error::os("cannot use dmafile.ko", errno)
            .with_why(format!(
                "{NODE} belongs to another driver, or to an older dmafile.ko"
            ))
            .with_remedy("make -C kernel install, then remove that module and modprobe dmafile")
    })?;
    if sys::module::FEATURES & !info.features != 0 {
        let why = format!(
            "it is too old: it has the features {:#x}, but {:#x} are needed",
            info.features,
            sys::module::FEATURES
        );
        return Err(Error::new("cannot use dmafile.ko", why)
            .with_errno(Errno::PROTONOSUPPORT)
            .at(NODE)
            .with_remedy("make -C kernel install, then modprobe -r dmafile and modprobe dmafile"));
    }
    let found = ModuleFacts {
        features: info.features,
        max_buffer: info.max_buffer,
        chunk: info.gather,
        max_chunk: info.max_gather,
        depth: info.depth,
        align: u64::from(info.align).max(map::page_size()),
    };
    Ok((node, found))
}

/// Why the node cannot be opened, and what would help.
fn cannot_open(errno: Errno) -> Error {
    let error = Error::os("cannot use dmafile.ko", errno);
    match errno {
        Errno::NOENT | Errno::NXIO | Errno::NODEV => {
            error.with_why(format!("there is no {NODE}")).with_remedy(
                "modprobe dmafile, after make -C kernel install (in a container, both on its host)",
            )
        }
        Errno::ACCESS | Errno::PERM => error
            .with_why(format!("{NODE} cannot be opened"))
            .with_remedy(format!(
                "join its group: usermod -aG \"$(stat -c %G {NODE})\" USER, or a udev rule"
            )),
        _ => error.with_why(format!("{NODE} cannot be opened")),
    }
}

/// Allocates a dma-buf of at least `bytes`.
pub(crate) fn allocate(bytes: u64) -> Result<(OwnedFd, ModuleFacts)> {
    let (node, module) = open()?;
    let fd = sys::module::allocate(node.as_fd(), bytes)
        .map_err(|errno| cannot_allocate(errno, &module))?;
    Ok((fd, module))
}

/// The module behind an existing dma-buf; None if another exporter created it.
pub(crate) fn behind(dma_buf: BorrowedFd<'_>) -> Option<ModuleFacts> {
    let (node, module) = open().ok()?;
    sys::module::is_its_own(node.as_fd(), dma_buf).then_some(module)
}

/// The error for a buffer of a size that it does not create.
pub(crate) fn cannot_allocate(errno: Errno, module: &ModuleFacts) -> Error {
    let error = super::cannot_allocate(errno);
    match errno {
        Errno::FBIG => error
            .with_why(format!(
                "dmafile.ko makes up to {} bytes",
                module.max_buffer
            ))
            .with_remedy(message![
                "raise /sys/module/dmafile/parameters/max_buffer_mb, or load a range (",
                Opt::Offset,
                ", ",
                Opt::Length,
                ")"
            ]),
        _ => error,
    }
}

impl ModuleFacts {
    /// Its features, in words.
    pub(crate) fn abilities(&self) -> String {
        let names = sys::module::FEATURE_NAMES.iter();
        let has = names.filter(|(bit, _)| self.features & bit != 0);
        has.map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
    }
}

/// How it moved the bytes of a load or a save: briefly, and in more words.
pub(crate) fn modes(verb: Verb, mode: u32) -> Option<(String, String)> {
    let whys = match verb {
        Verb::Load => [
            "the disk wrote into the buffer's pages",
            "direct reads into a bounce page, and a copy",
            "copied from the page cache",
        ],
        _ => [
            "the disk read from the buffer's pages",
            "a copy, and direct writes from there",
            "copied to the page cache",
        ],
    };
    let words = [
        (sys::module::DIRECT, "direct"),
        (sys::module::BOUNCED, "bounced"),
        (sys::module::BUFFERED, "buffered"),
    ];
    let all = words.iter().zip(whys);
    let had = all.filter(|((bit, _), _)| mode & bit != 0);
    let (words, whys): (Vec<_>, Vec<_>) = had.map(|((_, word), why)| (*word, why)).unzip();
    (!words.is_empty()).then(|| (words.join("+"), whys.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_at_open_has_a_remedy() {
        let text = cannot_open(Errno::NOENT).to_string();
        assert!(
            text.contains("there is no /dev/dmafile (ENOENT); modprobe dmafile"),
            "{text}"
        );
        let text = cannot_open(Errno::ACCESS).to_string();
        assert!(
            text.contains("cannot be opened (EACCES); join its group"),
            "{text}"
        );
    }

    #[test]
    fn modes_are_described_in_words() {
        assert_eq!(modes(Verb::Load, 0), None);
        let (word, why) = modes(Verb::Load, sys::module::DIRECT | sys::module::BOUNCED).unwrap();
        assert_eq!(word, "direct+bounced");
        assert!(why.contains("; "), "{why}");
        let (word, why) = modes(Verb::Save, sys::module::BUFFERED).unwrap();
        assert_eq!((&*word, &*why), ("buffered", "copied to the page cache"));
    }
}
