//! `dmafile load` of a model's files, each into separate memory, for a COMMAND that opens them by a path.

use crate::args::{LoadArgs, open_model};
use crate::command::{self, Named, Others, Shape};
use crate::load::{interrupted, one};
use crate::output::{Output, write_wanted_json};
use crate::remote::{self, CacheSlot, Fetched};
use crate::{Failure, Launcher, text};
use dmafile::internal::{is_hidden, one_line};
use dmafile::{CancelToken, Load, Opt, Report, Shard};
use serde::Serialize;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The JSON object of several loads.
#[derive(Serialize)]
struct Reports {
    files: Vec<FileReport>,
}

#[derive(Serialize)]
struct FileReport {
    file: String,
    #[serde(flatten)]
    report: Report,
}

pub(crate) fn load(
    args: &LoadArgs,
    slot: Option<CacheSlot>,
    out: Output,
    token: &CancelToken,
    launcher: &Launcher,
) -> Result<u8, Failure> {
    let options = &args.options;
    let url = remote::url(options.file());
    let model = open_model(options.file())?;
    let shards = model.shards();
    refuse(args, shards.len())?;
    let (shape, mut fetched) = match url {
        Some(url) => remote_shape(url, &shards, slot.as_ref(), token)?,
        None => (shape(options.file(), options.name(), &shards)?, Vec::new()),
    };
    // Checked before a load that would be useless.
    command::names(shards.iter().filter_map(|shard| shard.file.file_name()))?;
    // Checks that there is room for all of them, before the first one is loaded.
    options.tune(model.load(), &args.tuning).plan()?;
    let objects = model.objects();
    // Objects are loaded from there; the descriptors of files are not needed any more.
    let model = Some(model).filter(|_| url.is_some());
    let (mut named, mut files) = (Vec::new(), Vec::new());
    for (number, shard) in shards.into_iter().enumerate() {
        out.detail(|| text::file_head(&shard.file))?;
        let load = match &model {
            Some(model) => model.load_shard(number)?,
            None => Load::new(&shard.file),
        };
        let mut load = options.tune(load, &args.tuning);
        if let Some(verify) = options.given.texts(Opt::Verify).next() {
            load = load.set(Opt::Verify, verify);
        } else if let Some(digest) = remote::digest_for(&slot) {
            load = load.verify(digest);
        }
        let loaded = one(args, load.exact_size(true), out, token)?;
        if let Some((object, _)) = objects.get(number) {
            let digest = loaded.report.verify.first();
            let at = loaded.report.offset;
            fetched.push(Fetched::of(object, &loaded.buffer, at, digest));
        }
        files.push(FileReport {
            file: shard.file.to_string_lossy().into_owned(),
            report: loaded.report,
        });
        named.push(Named {
            name: command::name_of(&shard.file),
            buffer: loaded.buffer,
        });
    }
    write_wanted_json(&args.output.json, &Reports { files })?;
    if let Some(slot) = slot {
        remote::keep(&slot, fetched, Some(launcher))?;
    }
    if token.is_cancelled() {
        Err(interrupted())
    } else {
        let command = &args.command;
        Err(command::hand_over_by_path(launcher, command, named, shape)?)
    }
}

/// Refuses options that apply to a single file.
fn refuse(args: &LoadArgs, files: usize) -> Result<(), Failure> {
    let verify = args.options.given.texts(Opt::Verify).next();
    let expected = verify.is_some_and(|verify| verify.contains('='));
    let refused = [
        (
            args.output.trace.is_some(),
            "--trace works for one file only",
        ),
        (
            files > 1 && expected,
            "--verify ALGO=HEX works for one file only, but there are several",
        ),
        (
            files > 1 && args.options.to().starts_with("fd:"),
            "--to fd:N takes one file only, but there are several",
        ),
    ];
    match refused.into_iter().find(|reason| reason.0) {
        Some((_, why)) => Err(Failure::usage(why)),
        None => Ok(()),
    }
}

/// The model as its URL names it, with the small files next to its weights, which are loaded, too.
fn remote_shape(
    url: &str,
    shards: &[Shard],
    slot: Option<&CacheSlot>,
    token: &CancelToken,
) -> Result<(Shape, Vec<Fetched>), Failure> {
    let (mut files, mut fetched) = (Vec::new(), Vec::new());
    for (name, buffer, own) in remote::load_others(url, slot, token)? {
        let name = name.into();
        files.push(Named { name, buffer });
        fetched.push(own);
    }
    let path = url.split(['?', '#']).next().unwrap_or(url);
    let is_file = |shard: &Shard| shard.file.file_name() == Path::new(path).file_name();
    let is_index = path.ends_with(".json");
    let name = command::name_of(Path::new(path.trim_end_matches('/')));
    let others = Others {
        links: Vec::new(),
        files,
    };
    let shape = if is_index || shards.iter().any(is_file) {
        Shape::Within { name, others }
    } else {
        Shape::Folder { name, others }
    };
    Ok((shape, fetched))
}

/// The model as its path names it, with everything next to its weights that is not hidden.
fn shape(path: &Path, name: OsString, shards: &[Shard]) -> Result<Shape, Failure> {
    let folder = if path.is_dir() {
        path
    } else {
        path.parent()
            .filter(|at| *at != Path::new(""))
            .unwrap_or(Path::new("."))
    };
    let links = others(folder, shards).map_err(|error| {
        let place = one_line(&folder.to_string_lossy());
        Failure::os("cannot list", &place, &error, "")
    })?;
    let others = Others {
        links,
        files: Vec::new(),
    };
    Ok(if path.is_dir() {
        Shape::Folder { name, others }
    } else {
        Shape::Within { name, others }
    })
}

fn others(folder: &Path, shards: &[Shard]) -> std::io::Result<Vec<PathBuf>> {
    let weights: Vec<_> = shards.iter().map(|shard| shard.file.file_name()).collect();
    let mut others = Vec::new();
    for entry in fs::read_dir(folder.canonicalize()?)? {
        let entry = entry?;
        let name = entry.file_name();
        if !is_hidden(&name) && !weights.contains(&Some(&name)) {
            others.push(entry.path());
        }
    }
    Ok(others)
}
