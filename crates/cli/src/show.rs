//! `dmafile show`

use crate::args::{ShowArgs, open_model};
use crate::output::{to_stdout, write_json};
use crate::{Failure, remote};
use dmafile::internal::one_line;
use dmafile::{Model, Opt, Tensor, format::Value};
use indicatif::BinaryBytes;
use std::io::{self, Write};
use unicode_width::UnicodeWidthStr;

/// Cells that are wider do not widen their column.
const WIDEST: usize = 100;

pub(crate) fn run(args: &ShowArgs) -> Result<u8, Failure> {
    remote::configure(&args.urls, [args.file.as_path()], true)?;
    let found = match remote::url(&args.file) {
        Some(url) => remote::find_cached(url)?,
        None => None,
    };
    let model = open_model(found.as_ref().unwrap_or(&args.file))?;
    let tensors: Vec<&Tensor> = match &args.given.parsed(Opt::Tensors)?[..] {
        [] => model.tensors().iter().collect(),
        chosen => model.matching(chosen)?,
    };
    if args.json {
        return write_json(&model.description(&tensors));
    }
    to_stdout(|out| write(out, &model, &tensors))
}

/// Writes line by line: a header has up to 100 MB, and all lines together are several times as long.
fn write(out: &mut dyn Write, model: &Model, tensors: &[&Tensor]) -> io::Result<()> {
    let bytes: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    let shards = model.shards();
    writeln!(
        out,
        "{}: {}, {} tensors, {} in {}",
        one_line(&model.path().to_string_lossy()),
        model.format(),
        tensors.len(),
        BinaryBytes(bytes),
        match shards.len() {
            1 => "1 file".to_string(),
            several => format!("{several} files"),
        },
    )?;
    for (name, value) in model.metadata() {
        writeln!(out, "  {} = {}", one_line(name), brief(value))?;
    }
    let sizes = tensors.iter().map(|tensor| tensor.bytes.to_string().len());
    let digits = sizes.max().unwrap_or(0);
    let mut widths = [0; 3];
    for tensor in tensors {
        for (most, cell) in widths.iter_mut().zip(cells(tensor)) {
            *most = cell.width().min(WIDEST).max(*most);
        }
    }
    for tensor in tensors {
        for (width, cell) in widths.iter().zip(cells(tensor)) {
            let gap = width.saturating_sub(cell.width()) + 2;
            write!(out, "{cell}{:gap$}", "")?;
        }
        let (bytes, offset) = (tensor.bytes, tensor.offset);
        write!(out, "{bytes:>digits$} bytes at {offset}")?;
        if shards.len() > 1 {
            let file = shards[tensor.shard].file.file_name().unwrap_or_default();
            write!(out, " of {}", one_line(&file.to_string_lossy()))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The name, the type and the shape.
fn cells(tensor: &Tensor) -> [String; 3] {
    let shape: Vec<_> = tensor.shape.iter().map(u64::to_string).collect();
    [
        one_line(&tensor.name),
        tensor.dtype.to_string(),
        one_line(&format!("[{}]", shape.join(", "))),
    ]
}

/// A value on one line: long texts are truncated, lists are counted.
fn brief(value: &Value) -> String {
    const MOST: usize = 60;
    let several = |count: usize, what: &str| format!("[{count} {what}]");
    match value {
        Value::Bool(value) => value.to_string(),
        Value::Unsigned(value) => value.to_string(),
        Value::Signed(value) => value.to_string(),
        Value::Float(value) => value.to_string(),
        Value::Text(text) => {
            let line = one_line(text);
            match line.char_indices().nth(MOST) {
                Some((cut, _)) => format!("{}… ({} bytes)", &line[..cut], text.len()),
                None => line,
            }
        }
        Value::Bools(list) => several(list.len(), "booleans"),
        Value::Bytes(list) => several(list.len(), "bytes"),
        Value::Unsigneds(list) => several(list.len(), "integers"),
        Value::Signeds(list) => several(list.len(), "integers"),
        Value::Floats(list) => several(list.len(), "numbers"),
        Value::Texts(list) => several(list.len(), "texts"),
        Value::Lists(list) => several(list.len(), "lists"),
        // A kind of value that was added to the engine later.
        other => one_line(&serde_json::to_string(other).unwrap_or_default()),
    }
}
