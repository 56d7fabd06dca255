//! `fetch`: the readers of an object receive parts of it where they belong, each on a thread of its own.

use super::{ReadJob, Stop};
use crate::error::{Error, Verb};
use crate::flow::feed::{IoExtent, Queue};
use crate::pump::{MovedExtent, each, run_workers};
use crate::source::{ObjectReader, ReadBuf, failed, too_short};
use std::cell::RefCell;
use std::io;

/// A reader, and the number of its object.
type OpenReader<'a> = Option<(usize, Box<dyn ObjectReader + 'a>)>;

pub(super) fn run(job: &ReadJob<'_>, readers: usize) -> Result<(), Stop> {
    run_workers(job.pass.node, readers, |row| {
        let reader = RefCell::new(None);
        each(&job.pass, Queue::Method, row, |extent| {
            fetch(job, extent, &mut reader.borrow_mut())?;
            // They have been counted as they arrived.
            Ok(MovedExtent {
                bytes: 0,
                direct: false,
                end: None,
            })
        })
    })
}

fn fetch<'a>(
    job: &ReadJob<'a>,
    extent: &IoExtent,
    reader: &mut OpenReader<'a>,
) -> Result<(), Error> {
    let place = |offset| job.source.place(extent.file + offset);
    let Some((number, object)) = job.source.object(extent.file) else {
        return Err(Error::new(Verb::Load, "it is a file, which is not fetched").at(place(0)));
    };
    let open = match reader.take() {
        Some(open) if open.0 == number => open,
        _ => {
            let opened = object.reader();
            (number, opened.map_err(|error| failed(error, || place(0)))?)
        }
    };
    let (_, reader) = reader.insert(open);
    let (_, offset) = job.source.locate(extent.file);
    let part = job.region.part(extent.at, extent.need);
    let done = std::cell::Cell::new(0);
    let added = |bytes| {
        let from = done.replace(done.get() + bytes);
        let arrived = IoExtent {
            file: extent.file + from,
            at: extent.at + from,
            ..*extent
        };
        job.pass.run.meter.moved(&arrived, bytes, false);
    };
    let stopped = || {
        job.pass.run.check(|| place(0))?;
        if job.pass.feed.stopped() {
            // The first error counts.
            return Err(io::Error::other("another reader has failed"));
        }
        Ok(())
    };
    let mut buf = ReadBuf::of(part, job.may_fault, &added, &stopped);
    let read = job.touch(|| reader.read(offset, &mut buf))?;
    read.map_err(|error| failed(error, || place(buf.filled())))?;
    match buf.remaining() {
        0 => Ok(()),
        left => Err(too_short(left, place(buf.filled()))),
    }
}
