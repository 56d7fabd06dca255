//! `dmafile show`

use crate::Failure;
use crate::args::ShowArgs;
use crate::output::{write_json, write_stdout};
use crate::text::columns;
use dmafile::format::Value;
use dmafile::{Model, Tensor, one_line};
use indicatif::BinaryBytes;
use serde_json::json;
use std::fmt::Write;
use tabwriter::Alignment;

pub(crate) fn run(args: &ShowArgs) -> Result<u8, Failure> {
    let model = Model::open(&args.file)?;
    let tensors: Vec<&Tensor> = match &args.tensor[..] {
        [] => model.tensors().iter().collect(),
        chosen => model.matching(chosen)?,
    };
    if args.json {
        return write_json(&json!({
            "file": model.path().to_string_lossy(),
            "format": model.format(),
            "shards": model.shards(),
            "metadata": model.metadata(),
            "tensors": tensors,
        }));
    }
    write_stdout(text(&model, &tensors).as_bytes())
}

fn text(model: &Model, tensors: &[&Tensor]) -> String {
    let mut text = String::new();
    let bytes: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    let shards = model.shards();
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "{}: {}, {} tensors, {} in {}",
        one_line(&model.path().to_string_lossy()),
        model.format(),
        tensors.len(),
        BinaryBytes(bytes),
        match shards.len() {
            1 => "1 file".to_string(),
            several => format!("{several} files"),
        },
    );
    for (name, value) in model.metadata() {
        let _ = writeln!(text, "  {} = {}", one_line(name), brief(value));
    }
    let sizes = tensors.iter().map(|tensor| tensor.bytes.to_string().len());
    let digits = sizes.max().unwrap_or(0);
    let mut table = String::new();
    for tensor in tensors {
        let _ = write!(
            table,
            "{}\t{}\t{}\t{:>digits$} bytes at {}",
            one_line(&tensor.name),
            tensor.dtype,
            shape(&tensor.shape),
            tensor.bytes,
            tensor.offset,
        );
        if shards.len() > 1 {
            let file = shards[tensor.shard].file.file_name().unwrap_or_default();
            let _ = write!(table, " of {}", one_line(&file.to_string_lossy()));
        }
        table.push('\n');
    }
    text + &columns(&table, Alignment::Left)
}

fn shape(dimensions: &[u64]) -> String {
    let dimensions: Vec<_> = dimensions.iter().map(u64::to_string).collect();
    format!("[{}]", dimensions.join(", "))
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
