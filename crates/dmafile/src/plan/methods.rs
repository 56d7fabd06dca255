//! The methods that can work, in the order in which they are tried: one table for loads and saves.

use super::Attempt;
use crate::error::{Error, Result, Verb};
use crate::facts::Host;
use crate::message::{Message, Opt, message};
use crate::options::{Io, Method};
use crate::reasons::{About, Reasons};

const URING_REGISTERED: Attempt = Attempt::new(Method::Uring, true, true);
pub(crate) const URING: Attempt = Attempt::new(Method::Uring, true, false);
const THREADS: Attempt = Attempt::new(Method::Threads, true, false);
/// From memory that is mapped once for the disk.
const PREMAP: Attempt = Attempt::new(Method::Premap, true, true);
/// Bytes are copied to or from blocks: those of a ring are registered, those of a pool of threads are not.
const BOUNCE_REGISTERED: Attempt = Attempt::new(Method::Bounce, true, true);
const BOUNCE: Attempt = Attempt::new(Method::Bounce, true, false);
/// The only one for objects.
pub(crate) const FETCH: Attempt = Attempt::new(Method::Fetch, false, false);
/// Works with every file.
pub(crate) const BUFFERED: Attempt = Attempt::new(Method::Threads, false, false);

/// What the memory is, as far as it matters for the order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryFacts {
    /// It is of dmafile.ko.
    pub module: bool,
    /// It will be of a heap that reads a whole file while it allocates.
    pub heap: bool,
    /// The kernel copies between it and the file.
    pub copies: bool,
    /// It is a dma-buf.
    pub dma_buf: bool,
    /// Mapping it for the disk in advance pays.
    pub premaps: bool,
    /// It consists of several parts.
    pub parts: bool,
    /// The disk can access its bytes by their addresses.
    pub by_address: bool,
    /// Most of the bytes are in the page cache, and may come from there.
    pub cached: bool,
}

/// The methods in order of preference. The only place that prefers.
pub(crate) fn order(verb: Verb, (asked, io): (Method, Io), memory: MemoryFacts) -> Vec<Attempt> {
    let MemoryFacts {
        by_address, cached, ..
    } = memory;
    // A call moves everything with one I/O mode: the better one for most of the bytes first.
    let call = |method| {
        let buffered = Attempt::new(method, false, false);
        let direct = Attempt::new(method, true, false);
        if cached {
            vec![buffered]
        } else {
            vec![direct, buffered]
        }
    };
    let blocks = || vec![BOUNCE_REGISTERED, BOUNCE, BUFFERED];
    let addresses = || vec![URING_REGISTERED, URING, THREADS, BUFFERED];
    let premap = |pays: bool| pays.then_some(PREMAP).into_iter().collect::<Vec<_>>();
    match (asked, verb) {
        (Method::Auto, Verb::Load) if memory.module => {
            [call(Method::Module), vec![BUFFERED]].concat()
        }
        (Method::Auto, Verb::Load) if memory.copies => [
            premap(memory.dma_buf && !cached),
            call(Method::CopyFileRange),
            vec![BUFFERED],
        ]
        .concat(),
        // The others are for a buffer that could not be created that way.
        (Method::Auto, Verb::Load) if memory.heap => {
            [call(Method::HeapRead), vec![PREMAP], blocks()].concat()
        }
        (Method::Auto, Verb::Load) if by_address => [premap(memory.premaps), addresses()].concat(),
        (Method::Auto, Verb::Load) => [premap(memory.premaps), blocks()].concat(),
        (Method::Auto, _) if memory.module => [call(Method::Module), blocks()].concat(),
        (Method::Auto, _) if memory.dma_buf => {
            let mut all = vec![PREMAP];
            if memory.copies {
                all.extend(call(Method::CopyFileRange));
            }
            if by_address {
                all.extend([URING_REGISTERED, URING]);
            }
            [all, blocks()].concat()
        }
        (Method::Auto, _) if memory.parts && by_address => {
            [vec![URING, THREADS], blocks()].concat()
        }
        (Method::Auto, _) if by_address => addresses(),
        (Method::Auto, _) => blocks(),
        (Method::Premap, _) => vec![PREMAP],
        (Method::Uring, _) => {
            let buffered = Attempt::new(Method::Uring, false, false);
            vec![URING_REGISTERED, URING, buffered]
        }
        (Method::Threads, _) => vec![THREADS, BUFFERED],
        // Refused: blocks are of no use then.
        (Method::Bounce, Verb::Load) if io == Io::Buffered => {
            vec![Attempt::new(Method::Bounce, false, false)]
        }
        (Method::Bounce, _) => blocks(),
        (Method::Fetch, _) => vec![FETCH],
        (Method::Module | Method::CopyFileRange | Method::HeapRead, _) => call(asked),
    }
}

/// What a method needs of file, memory and kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Direct I/O with the file.
    DirectFile,
    /// io_uring, with the file.
    Uring,
    /// Bytes that the disk can access by their addresses.
    Addresses,
    /// Pages that can be registered.
    RegistrablePages,
    /// Memory that can be mapped for the disk once.
    Premapping,
    /// A dma-buf of dmafile.ko.
    ModuleMemory,
    /// A heap that reads a whole file while it allocates.
    ReadingHeap,
    /// A kernel that copies between such memory and files.
    CopyingKernel,
    /// A reason to pass through blocks.
    Blocks,
    /// An object instead of a file.
    Object,
}

impl Attempt {
    /// What it needs, in the order in which that is checked.
    fn needs(self) -> impl Iterator<Item = Need> {
        let uring = self.registered || self.method == Method::Uring;
        let own: &[Need] = match self.method {
            Method::Uring if self.registered => &[Need::Addresses, Need::RegistrablePages],
            Method::Uring | Method::Threads => &[Need::Addresses],
            Method::Premap => &[Need::Premapping],
            Method::Bounce => &[Need::Blocks],
            Method::Module => &[Need::ModuleMemory],
            Method::HeapRead => &[Need::ReadingHeap],
            Method::CopyFileRange => &[Need::CopyingKernel],
            Method::Fetch => &[Need::Object],
            Method::Auto => &[],
        };
        self.direct
            .then_some(Need::DirectFile)
            .into_iter()
            .chain(uring.then_some(Need::Uring))
            .chain(own.iter().copied())
    }
}

/// A method, and why it is left out.
pub(crate) type LeftOut = (Attempt, Message);

/// Keeps the methods whose needs `met` does not find unmet, and whose I/O mode is allowed; returns the others with
/// the reason.
pub(crate) fn keep(
    order: Vec<Attempt>,
    io: Io,
    met: impl Fn(Need, Attempt) -> Result<(), Message>,
) -> (Vec<Attempt>, Vec<LeftOut>) {
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    for attempt in order {
        if matches!(
            (io, attempt.direct),
            (Io::Direct, false) | (Io::Buffered, true)
        ) {
            continue;
        }
        match attempt.needs().try_for_each(|need| met(need, attempt)) {
            Ok(()) => kept.push(attempt),
            Err(why) => left_out.push((attempt, why)),
        }
    }
    (kept, left_out)
}

/// The error if no method is left. `ends` names the memory, as "to memfd" does.
pub(crate) fn none_left(
    verb: Verb,
    asked: Method,
    left_out: &[LeftOut],
    ends: &str,
    host: &Host,
) -> Error {
    let (attempt, why) = left_out.first().cloned().unwrap_or_else(|| {
        let why = message!["no method supports this I/O mode (", Opt::Io, ")"];
        (Attempt::new(asked, false, false), why)
    });
    let first = match attempt.method {
        Method::Uring if host.uring_refused.is_some() => format!("{}, or ", host.uring_remedy()),
        _ => String::new(),
    };
    let (what, explain) = match verb {
        Verb::Load => ("cannot load like this", "dmafile explain"),
        _ => ("cannot save like this", "dmafile save --explain"),
    };
    Error::new(what, why)
        .at(format!("{attempt} {ends}"))
        .with_errno(rustix::io::Errno::OPNOTSUPP)
        .with_remedy(message![
            first,
            "leave ",
            Opt::Method,
            " and ",
            Opt::Io,
            format!(" to auto, or see `{explain}`"),
        ])
}

/// Logs why methods are left out.
pub(crate) fn log_left_out<'a>(left_out: impl IntoIterator<Item = &'a LeftOut>, log: &Reasons) {
    for (attempt, why) in left_out {
        log.add(About::Not, attempt, why.clone());
    }
}

/// Checks that io_uring can read and write a file of this file system here.
pub(crate) fn uring_works(host: &Host, file_system: &str, align_told: bool) -> Result<(), Message> {
    if let Some(errno) = &host.uring_refused {
        return Err(format!("io_uring is refused ({errno})").into());
    }
    // For a FUSE file with FOPEN_DIRECT_IO, io_uring continues a short read by itself, but at the wrong
    // offset: fuse_direct_IO does not advance ki_pos (seen with Linux 6.18). The result would be wrong
    // bytes without an error, through a stacked file system, too. Such a file system is trusted only if the
    // real file beneath it reports its alignment, which FUSE never does.
    let stacked = file_system == "overlayfs" || file_system.starts_with("0x");
    let what = match file_system {
        "fuse" => "a FUSE file",
        _ if stacked && !align_told => "a file that may be on FUSE",
        _ => return Ok(()),
    };
    Err(format!("io_uring may repeat bytes of {what} after a short read").into())
}

/// How a method moves bytes. `alone`: it is the only thread that does. `once`: bytes of the origin pass only once.
pub(crate) fn describe(
    verb: Verb,
    (attempt, asked): (Attempt, Method),
    (alone, once): (bool, bool),
) -> String {
    let (load, save) = match (attempt.method, attempt.direct, attempt.registered) {
        (Method::Uring, true, true) => (
            "the disk writes into registered buffers, no copy",
            "the disk reads from registered memory, no copy",
        ),
        (Method::Uring, true, false) => (
            "the disk writes into the buffer, no copy",
            "the disk reads from the memory, no copy",
        ),
        (Method::Uring, false, _) => (
            "io_uring's workers copy from the page cache",
            "io_uring's workers copy to the page cache",
        ),
        (Method::Threads, true, _) => (
            "a pool of direct preads, no copy",
            "a pool of direct pwrites, no copy",
        ),
        (Method::Threads, false, _) if alone => (
            "one pread after another, copied from the page cache",
            "one pwrite after another, copied to the page cache",
        ),
        (Method::Threads, false, _) => (
            "a pool of preads, copied from the page cache",
            "a pool of pwrites, copied to the page cache",
        ),
        (Method::Premap, ..) => (
            "the disk writes into memory that is mapped for it once, no copy",
            "the disk reads from memory that is mapped once for it, no copy",
        ),
        (Method::Bounce, _, true) => (
            "the disk writes into a registered ring, one copy from there",
            if once {
                "read into a registered ring, from which the disk reads"
            } else {
                "one copy to a registered ring, from which the disk reads"
            },
        ),
        (Method::Bounce, ..) => (
            "a pool of direct preads, one copy from there",
            if once {
                "read into a ring, and a pool of direct pwrites from there"
            } else {
                "one copy to a ring, and a pool of direct pwrites from there"
            },
        ),
        (Method::Module | Method::CopyFileRange, true, _) => (
            "the disk writes into the buffer's own pages, in one call",
            "the kernel lets the disk read from the memory's own pages",
        ),
        (Method::HeapRead, true, _) => ("the heap lets the disk write into the buffer's pages", ""),
        (Method::Module | Method::HeapRead | Method::CopyFileRange, false, _) => (
            "the kernel copies from the page cache into the buffer's own pages",
            "the kernel copies to the page cache",
        ),
        (Method::Fetch, ..) => (
            "parts are received where they belong, one connection each",
            "",
        ),
        (Method::Auto, ..) => ("", ""),
    };
    let how = if verb == Verb::Load { load } else { save };
    match asked {
        Method::Auto => format!("the first method that works here: {how}"),
        _ => format!("requested: {how}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All combinations of what the memory is.
    fn memories() -> impl Iterator<Item = MemoryFacts> {
        (0..256_u32).map(|bits| {
            let bit = |n: u32| bits >> n & 1 == 1;
            MemoryFacts {
                module: bit(0),
                heap: bit(1),
                copies: bit(2),
                dma_buf: bit(3),
                premaps: bit(4),
                parts: bit(5),
                by_address: bit(6),
                cached: bit(7),
            }
        })
    }

    /// Whatever is not met, what remains is met; and every method that is left out has the reason of its first
    /// unmet need.
    #[test]
    fn only_methods_whose_needs_are_met_are_kept() {
        const NEEDS: [Need; 10] = [
            Need::DirectFile,
            Need::Uring,
            Need::Addresses,
            Need::RegistrablePages,
            Need::Premapping,
            Need::ModuleMemory,
            Need::ReadingHeap,
            Need::CopyingKernel,
            Need::Blocks,
            Need::Object,
        ];
        for memory in memories() {
            for verb in [Verb::Load, Verb::Save] {
                for &method in Method::ALL {
                    let all = order(verb, (method, Io::Auto), memory);
                    assert!(!all.is_empty());
                    let mut once = all.clone();
                    once.dedup();
                    assert_eq!(once, all, "{verb:?} {method} {memory:?}");
                    for unmet in NEEDS {
                        let met = |need: Need, _| {
                            if need == unmet {
                                Err(Message::from(format!("{need:?}")))
                            } else {
                                Ok(())
                            }
                        };
                        let (kept, left_out) = keep(all.clone(), Io::Auto, met);
                        assert_eq!(kept.len() + left_out.len(), all.len());
                        assert!(kept.iter().all(|one| one.needs().all(|need| need != unmet)));
                        for (one, why) in left_out {
                            assert!(one.needs().any(|need| need == unmet));
                            assert_eq!(why.to_string(), format!("{unmet:?}"));
                        }
                    }
                }
            }
        }
    }

    /// The table once more, so that no row is changed by accident.
    #[test]
    fn each_method_needs_what_it_uses() {
        use Need::{
            Addresses, Blocks, CopyingKernel, DirectFile, ModuleMemory, Object, Premapping,
            ReadingHeap, RegistrablePages, Uring,
        };
        let direct = |method| Attempt::new(method, true, false);
        let buffered = |method| Attempt::new(method, false, false);
        let all: [(Attempt, &[Need]); 13] = [
            (
                URING_REGISTERED,
                &[DirectFile, Uring, Addresses, RegistrablePages],
            ),
            (URING, &[DirectFile, Uring, Addresses]),
            (buffered(Method::Uring), &[Uring, Addresses]),
            (THREADS, &[DirectFile, Addresses]),
            (BUFFERED, &[Addresses]),
            (PREMAP, &[DirectFile, Uring, Premapping]),
            (BOUNCE_REGISTERED, &[DirectFile, Uring, Blocks]),
            (BOUNCE, &[DirectFile, Blocks]),
            (direct(Method::Module), &[DirectFile, ModuleMemory]),
            (buffered(Method::Module), &[ModuleMemory]),
            (direct(Method::HeapRead), &[DirectFile, ReadingHeap]),
            (buffered(Method::CopyFileRange), &[CopyingKernel]),
            (FETCH, &[Object]),
        ];
        for (attempt, needs) in all {
            assert_eq!(attempt.needs().collect::<Vec<_>>(), needs, "{attempt}");
        }
    }

    /// If nothing but the page cache works, the bytes go through it.
    #[test]
    fn every_order_that_is_chosen_ends_in_what_always_works() {
        for memory in memories() {
            for verb in [Verb::Load, Verb::Save] {
                let all = order(verb, (Method::Auto, Io::Auto), memory);
                assert_eq!(all.last(), Some(&BUFFERED), "{verb:?} {memory:?}");
            }
        }
    }

    #[test]
    fn only_the_allowed_io_mode_is_kept() {
        let memory = MemoryFacts {
            by_address: true,
            ..MemoryFacts::default()
        };
        for (io, direct) in [(Io::Direct, true), (Io::Buffered, false)] {
            let all = order(Verb::Load, (Method::Auto, io), memory);
            let (kept, left_out) = keep(all, io, |_, _| Ok(()));
            assert!(!kept.is_empty() && left_out.is_empty());
            assert!(kept.iter().all(|one| one.direct == direct));
        }
    }
}
