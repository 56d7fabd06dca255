//! Which files make up a model.

use crate::error::{Error, Result};
use crate::format::{Format, MAX_HEADER, Table, Value};
use crate::sys::Errno;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The end of the name of an index of shards.
const INDEX: &str = ".safetensors.index.json";

/// The files of a model, and what must be true of them.
pub(super) struct Found {
    pub files: Vec<PathBuf>,
    /// Tensors and the names of the files that an index says they are in.
    placed: BTreeMap<String, String>,
}

/// The parts of `model-00001-of-00003.gguf`.
struct Split<'p> {
    stem: &'p str,
    number: u32,
    count: u32,
}

/// Whether a path stands for more than the file it names: a folder, an index, or the first file of
/// a split GGUF.
pub fn is_collection(path: &Path) -> bool {
    path.is_dir()
        || name_of(path).is_some_and(|name| {
            name.ends_with(INDEX) || Split::of(name).is_some_and(|split| split.number == 1)
        })
}

/// Finds the files of a model.
pub(super) fn find(path: &Path) -> Result<Found> {
    let plain = |files| Found {
        files,
        placed: BTreeMap::new(),
    };
    if path.is_dir() {
        return in_folder(path);
    }
    let Some(name) = name_of(path) else {
        return Ok(plain(vec![path.to_path_buf()]));
    };
    if name.ends_with(INDEX) {
        return by_index(path);
    }
    match Split::of(name) {
        Some(split) if split.number == 1 => Ok(plain(split.files(path))),
        _ => Ok(plain(vec![path.to_path_buf()])),
    }
}

/// The model of a folder: by its index, or all of its safetensors files, or its one GGUF model.
fn in_folder(folder: &Path) -> Result<Found> {
    let place = || folder.display().to_string();
    let entries = fs::read_dir(folder).map_err(|error| {
        let errno = Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO));
        Error::os("cannot open", errno).at(place())
    })?;
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    let ending =
        |end: &str| -> Vec<&String> { names.iter().filter(|name| name.ends_with(end)).collect() };
    let several = |what: &str, names: &[&String]| {
        let names: Vec<_> = names.iter().take(4).map(|name| name.as_str()).collect();
        Error::new("cannot load", format!("is a directory with several {what}"))
            .with_errno(Errno::INVAL)
            .at(place())
            .remedy(format!("name one of them: {}", names.join(", ")))
    };
    let indexes = ending(INDEX);
    match &indexes[..] {
        [] => {}
        [index] => return by_index(&folder.join(index)),
        _ => return Err(several("models", &indexes)),
    }
    let tensors = ending(".safetensors");
    if !tensors.is_empty() {
        // The one that libraries look for; a folder may hold a copy in another shape beside it.
        let whole: Vec<_> = tensors
            .iter()
            .filter(|name| **name == "model.safetensors")
            .collect();
        let files = if whole.is_empty() {
            tensors.iter().collect()
        } else {
            whole
        };
        return Ok(Found {
            files: files.iter().map(|name| folder.join(name)).collect(),
            placed: BTreeMap::new(),
        });
    }
    let ggufs = ending(".gguf");
    let first: Vec<&String> = ggufs
        .into_iter()
        .filter(|name| Split::of(name).is_none_or(|split| split.number == 1))
        .collect();
    match &first[..] {
        [] => Err(
            Error::new("cannot load", "is a directory without a model in it")
                .with_errno(Errno::ISDIR)
                .at(place())
                .remedy("name a file in it"),
        ),
        [one] => find(&folder.join(one)),
        _ => Err(several("GGUF models", &first)),
    }
}

/// The index that `transformers` and others write beside shards.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn by_index(path: &Path) -> Result<Found> {
    let unsound = |why: String| {
        Error::new("not a sound index of shards", why)
            .with_errno(Errno::BADMSG)
            .at(path.display().to_string())
    };
    let failed = |error: std::io::Error| {
        let errno = Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO));
        Error::os("cannot open", errno).at(path.display().to_string())
    };
    let mut text = Vec::new();
    let file = fs::File::open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(unsound("it is not a regular file".to_string()));
    }
    file.take(MAX_HEADER + 1)
        .read_to_end(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_HEADER {
        return Err(unsound(format!("it is longer than {MAX_HEADER} bytes")));
    }
    let index: Index = serde_json::from_slice(&text).map_err(|error| unsound(error.to_string()))?;
    let mut names: Vec<&String> = index.weight_map.values().collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(unsound("it names no file".to_string()));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut files = Vec::new();
    for name in names {
        // Whoever wrote the index has no say over files elsewhere.
        if Path::new(name)
            .file_name()
            .is_none_or(|own| own != name.as_str())
        {
            return Err(unsound(format!("{name:?} is no plain file name")));
        }
        files.push(folder.join(name));
    }
    Ok(Found {
        files,
        placed: index.weight_map,
    })
}

impl Found {
    /// Checks that the files are those of one model, and all of them.
    pub(super) fn check(&self, path: &Path, tables: &[Table]) -> Result<()> {
        let unsound = |place: &Path, why: String| {
            Err(Error::new("not a sound model", why)
                .with_errno(Errno::BADMSG)
                .at(place.display().to_string())
                .remedy("fetch all of its files again"))
        };
        let number = |table: &Table, key: &str| match table.metadata.get(key) {
            Some(Value::Unsigned(value)) => Some(*value),
            Some(Value::Signed(value)) => u64::try_from(*value).ok(),
            _ => None,
        };
        let count = self.files.len() as u64;
        for (no, (file, table)) in self.files.iter().zip(tables).enumerate() {
            let told = (number(table, "split.count"), number(table, "split.no"));
            if table.format == Format::Gguf && count > 1 && told != (Some(count), Some(no as u64)) {
                let why = format!(
                    "its header does not say that it is number {} of {count} (split.no, \
                     split.count)",
                    no + 1
                );
                return unsound(file, why);
            }
        }
        if self.placed.is_empty() {
            return Ok(());
        }
        let mut names = BTreeMap::new();
        for (file, table) in self.files.iter().zip(tables) {
            let name = name_of(file).unwrap_or_default();
            for tensor in &table.tensors {
                names.insert(tensor.name.as_str(), name);
            }
        }
        for (tensor, file) in &self.placed {
            if names.get(tensor.as_str()) != Some(&file.as_str()) {
                return unsound(path, format!("{file} has no tensor {tensor:?}"));
            }
        }
        Ok(())
    }
}

impl<'p> Split<'p> {
    /// As llama.cpp names them, counting from 1.
    fn of(name: &'p str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let five = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            five.then(|| text.parse::<u32>().ok())?
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self {
            stem,
            number,
            count,
        })
    }

    /// The paths of all of them.
    fn files(&self, path: &Path) -> Vec<PathBuf> {
        (1..=self.count)
            .map(|no| {
                path.with_file_name(format!("{}-{no:05}-of-{:05}.gguf", self.stem, self.count))
            })
            .collect()
    }
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}
