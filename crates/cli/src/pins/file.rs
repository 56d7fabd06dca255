//! `dmafile pins FILE`

use super::{holders, shown, unreadable};
use crate::Failure;
use crate::output::{write_json, write_stdout};
use dmafile::internal::one_line;
use dmafile_pins::{FilePins, of_file};
use indicatif::BinaryBytes;
use std::fmt::Write;
use std::path::Path;

pub(super) fn run(path: &Path, json: bool) -> Result<u8, Failure> {
    let pins = of_file(path)?;
    if json {
        return write_json(&pins);
    }
    write_stdout(text(&pins).as_bytes())
}

fn text(pins: &FilePins) -> String {
    let mut text = String::new();
    let file = one_line(&pins.file.to_string_lossy());
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "{file}: {}, inode {} on {}",
        BinaryBytes(pins.bytes),
        pins.inode,
        pins.device
    );
    for mapper in &pins.mapped {
        let _ = writeln!(
            text,
            "mapped by {} {} (user {}): {}",
            mapper.pid,
            shown(&mapper.name),
            mapper.uid,
            BinaryBytes(mapper.bytes)
        );
    }
    if pins.mapped.is_empty() {
        text.push_str("no visible process has it mapped\n");
    }
    if !pins.holders.is_empty() {
        text.push_str("\nits memory is pinned by\n");
        text += &holders::table(&pins.holders, &[]);
    }
    if !pins.possible.is_empty() {
        text.push_str("\nthe kernel does not say whether these pin any of it\n");
        text += &holders::table(&pins.possible, &[]);
    }
    text.push('\n');
    if let Some(why) = pins.no_udmabuf {
        let _ = writeln!(text, "it cannot be in a udmabuf: {why}");
    }
    text.push_str(
        "not seen: pins whose mapping is gone, and direct I/O; count its pages: \
         dmafile pins --pages FILE\n",
    );
    unreadable(&mut text, pins.unreadable);
    text
}
