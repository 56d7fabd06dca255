//! Finds the files that a model consists of.

use crate::error::{Error, Result, Verb};
use crate::format::{Format, MAX_HEADER, Table, Value, quoted};
use crate::model::Model;
use crate::source::{RemoteObject, Source};
use crate::sync;
use crate::sys::{Errno, errno, file};
use rustix::fs::FileType;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The suffix of an index of shards.
const INDEX: &str = ".safetensors.index.json";
const SAFETENSORS: &str = ".safetensors";
const GGUF: &str = ".gguf";

/// The files of a model, and the conditions that they must meet.
pub(super) struct ShardFiles {
    pub files: Vec<PathBuf>,
    /// Tensors, and the files that contain them according to the index.
    placed: BTreeMap<String, String>,
    index: PathBuf,
    /// For each file, tensors in it that do not count.
    superseded: Vec<BTreeSet<String>>,
}

/// The parts of `model-00001-of-00003.gguf`.
struct Split<'p> {
    stem: &'p str,
    number: u32,
    count: u32,
}

/// Returns `true` for the name of a hidden file, which belongs to no model: for example the `._NAME` that
/// macOS puts next to each NAME on disks of other systems.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

/// True if a path stands for more than one file.
pub(super) fn is_collection(path: &Path) -> bool {
    path.is_dir() || names_collection(path)
}

/// True if the name of a file alone says that it stands for more than one: an index, or the first of a split GGUF.
pub fn names_collection(path: &Path) -> bool {
    name_of(path).is_some_and(|name| {
        name.ends_with(INDEX) || Split::of(name, GGUF).is_some_and(|split| split.number == 1)
    })
}

/// Where the files of a model are, if not in a folder of this machine: a prefix in an object store, for example.
pub trait ModelFolder: Sync {
    /// Its name in messages, without secrets.
    fn name(&self) -> String;

    /// The names of the objects in it, without those in folders below.
    ///
    /// # Errors
    /// They are those of opening the model.
    fn names(&self) -> Result<Vec<String>>;

    /// Opens the object with this name. Called from several threads.
    ///
    /// # Errors
    /// They are those of opening the model; ENOENT if there is no such object.
    fn open(&self, name: &str) -> Result<Arc<dyn RemoteObject>>;
}

/// A folder of either kind.
enum ShardFolder<'f> {
    Here,
    Remote(&'f dyn ModelFolder),
}

impl ShardFolder<'_> {
    /// The names and paths of what is in it, sorted, without what is hidden.
    fn entries(&self, folder: &Path) -> Result<Vec<(String, PathBuf)>> {
        let failed =
            |error| Error::os("cannot open", errno(error)).at(folder.display().to_string());
        let mut entries = Vec::new();
        let mut add = |path: PathBuf| {
            let name = path.file_name().unwrap_or_default();
            if !is_hidden(name) {
                // File names need not be UTF-8.
                entries.push((name.to_string_lossy().into_owned(), path));
            }
        };
        match self {
            Self::Here => {
                for entry in fs::read_dir(folder).map_err(failed)? {
                    add(entry.map_err(failed)?.path());
                }
            }
            Self::Remote(remote) => {
                let names = remote.names()?;
                names.iter().for_each(|name| add(folder.join(name)));
            }
        }
        entries.sort();
        Ok(entries)
    }

    /// Whether there may be such a file. Of objects, only opening tells.
    fn may_have(&self, path: &Path) -> bool {
        match self {
            Self::Here => path.exists(),
            Self::Remote(_) => true,
        }
    }

    /// The text of an index; longer ones than the limit are cut after it.
    fn text(&self, path: &Path) -> Result<Vec<u8>> {
        let place = path.display().to_string();
        match self {
            Self::Here => index_text(path, &place),
            Self::Remote(remote) => {
                let object = remote.open(name_of(path).unwrap_or_default())?;
                let source = Source::of_objects(path, vec![object])?;
                let mut text = vec![0; source.size().min(MAX_HEADER + 1) as usize];
                source.read_at(0, &mut text)?;
                Ok(text)
            }
        }
    }
}

/// Finds the files of a model.
pub(super) fn find(path: &Path) -> Result<ShardFiles> {
    if path.is_dir() {
        return in_folder(path, &ShardFolder::Here);
    }
    by_name(path, &ShardFolder::Here)
}

/// The same in a folder that is not on this machine: what a name in it stands for, or the only model in it.
pub(super) fn find_remote(folder: &dyn ModelFolder, name: Option<&str>) -> Result<ShardFiles> {
    let place = PathBuf::from(folder.name());
    match name {
        None => in_folder(&place, &ShardFolder::Remote(folder)),
        Some(name) => by_name(&place.join(name), &ShardFolder::Remote(folder)),
    }
}

/// How many objects are opened at the same time.
const OPENERS: usize = 8;

/// Opens the objects of a model.
pub(super) fn open_all(
    folder: &dyn ModelFolder,
    found: &ShardFiles,
) -> Result<Vec<Arc<dyn RemoteObject>>> {
    let names: Vec<&str> = found
        .files
        .iter()
        .filter_map(|file| name_of(file))
        .collect();
    let next = AtomicUsize::new(0);
    let open = || {
        let mut own = Vec::new();
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            own.push((*name, folder.open(name)?));
        }
        Ok(own)
    };
    let opened = std::thread::scope(|scope| {
        let others: Vec<_> = (1..names.len().min(OPENERS))
            .map_while(|_| std::thread::Builder::new().spawn_scoped(scope, open).ok())
            .collect();
        let own: Result<Vec<_>> = open();
        let others = others.into_iter().map(sync::join);
        others.chain([own]).collect::<Result<Vec<_>>>()
    })?;
    let mut opened: BTreeMap<&str, _> = opened.into_iter().flatten().collect();
    Ok(names
        .iter()
        .filter_map(|name| opened.remove(name))
        .collect())
}

fn by_name(path: &Path, folder: &ShardFolder<'_>) -> Result<ShardFiles> {
    let Some(name) = name_of(path) else {
        return Ok(ShardFiles::plain(vec![path.to_path_buf()]));
    };
    if name.ends_with(INDEX) {
        return by_index(path, folder);
    }
    match Split::of(name, GGUF) {
        Some(split) if split.number == 1 => Ok(ShardFiles::plain(split.files(path, folder))),
        _ => Ok(ShardFiles::plain(vec![path.to_path_buf()])),
    }
}

/// The model of a folder: its index, or all of its safetensors files, or its only GGUF model.
fn in_folder(path: &Path, folder: &ShardFolder<'_>) -> Result<ShardFiles> {
    let place = || path.display().to_string();
    let entries = folder.entries(path)?;
    let ending = |end: &str| -> Vec<&(String, PathBuf)> {
        let ends = |(name, _): &&(String, PathBuf)| name.ends_with(end);
        entries.iter().filter(ends).collect()
    };
    let several = |what: &str, entries: &[&(String, PathBuf)]| {
        let names: Vec<_> = entries
            .iter()
            .take(4)
            .map(|entry| quoted(&entry.0))
            .collect();
        Error::new(Verb::Load, format!("is a directory with several {what}"))
            .with_errno(Errno::INVAL)
            .at(place())
            .with_remedy(format!("name one of them: {}", names.join(", ")))
    };
    let indexes = ending(INDEX);
    match &indexes[..] {
        [] => {}
        [index] => return by_index(&index.1, folder),
        _ => return Err(several("models", &indexes)),
    }
    let tensors = ending(SAFETENSORS);
    // The name that libraries look for; a folder may also contain the same model in another
    // format.
    if let Some(whole) = tensors.iter().find(|(name, _)| name == "model.safetensors") {
        return Ok(ShardFiles::plain(vec![whole.1.clone()]));
    }
    if !tensors.is_empty() {
        for (name, path) in &tensors {
            whole_split(name, path, &tensors)?;
        }
        let files = tensors.iter().map(|(_, path)| path.clone());
        return Ok(ShardFiles::plain(files.collect()));
    }
    let firsts: Vec<_> = ending(GGUF)
        .into_iter()
        .filter(|(name, _)| Split::of(name, GGUF).is_none_or(|split| split.number == 1))
        .collect();
    match &firsts[..] {
        [] => Err(
            Error::new(Verb::Load, "is a directory without a model in it")
                .with_errno(Errno::ISDIR)
                .at(place())
                .with_remedy("name a file in it"),
        ),
        [one] => by_name(&one.1, folder),
        _ => Err(several("GGUF models", &firsts)),
    }
}

/// If a name says that the file is one of several, all of them must exist.
fn whole_split(name: &str, path: &Path, there: &[&(String, PathBuf)]) -> Result<()> {
    let Some(split) = Split::of(name, SAFETENSORS) else {
        return Ok(());
    };
    let others = there
        .iter()
        .filter_map(|(name, _)| Split::of(name, SAFETENSORS));
    let same = others.filter(|other| (other.stem, other.count) == (split.stem, split.count));
    match same.count() as u32 {
        count if count == split.count => Ok(()),
        count => Err(Error::new(
            "not a valid model",
            format!(
                "only {count} of the {} files that its name implies are there",
                split.count
            ),
        )
        .with_errno(Errno::NOENT)
        .at(path.display().to_string())
        .with_remedy("download the others, or name one file")),
    }
}

/// The index that `transformers` and others write next to shards.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn unsound(place: &str, why: String) -> Error {
    Error::new("not a valid index of shards", why)
        .with_errno(Errno::BADMSG)
        .at(place)
}

fn index_text(path: &Path, place: &str) -> Result<Vec<u8>> {
    // Non-blocking, because it may be a FIFO.
    let fd = file::open(path, false).map_err(|errno| Error::os("cannot open", errno).at(place))?;
    let stat = file::stat(fd.as_fd());
    if !stat.is_ok_and(|stat| stat.kind == FileType::RegularFile) {
        return Err(unsound(place, "it is not a regular file".to_string()));
    }
    let mut text = Vec::new();
    fs::File::from(fd)
        .take(MAX_HEADER + 1)
        .read_to_end(&mut text)
        .map_err(|error| Error::os("cannot read", errno(error)).at(place))?;
    Ok(text)
}

fn by_index(path: &Path, folder: &ShardFolder<'_>) -> Result<ShardFiles> {
    let place = path.display().to_string();
    let unsound = |why| unsound(&place, why);
    let text = folder.text(path)?;
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
    let beside = path.parent().unwrap_or(Path::new(""));
    let mut files = Vec::new();
    for name in names {
        // An index must not refer to files in other folders.
        let plain = Path::new(name)
            .file_name()
            .is_some_and(|own| own == name.as_str());
        if !plain || name.contains(char::is_control) {
            return Err(unsound(format!(
                "{} is not a plain file name",
                quoted(name)
            )));
        }
        files.push(beside.join(name));
    }
    Ok(ShardFiles {
        files,
        placed: index.weight_map,
        index: path.to_path_buf(),
        superseded: Vec::new(),
    })
}

impl ShardFiles {
    pub(super) fn plain(files: Vec<PathBuf>) -> Self {
        Self::without(files, Vec::new())
    }

    /// Files, and for each of them the tensors that do not count.
    pub(super) fn without(files: Vec<PathBuf>, superseded: Vec<BTreeSet<String>>) -> Self {
        Self {
            files,
            placed: BTreeMap::new(),
            index: PathBuf::new(),
            superseded,
        }
    }

    /// Checks that a file that claims to be one of several is the expected one.
    pub(super) fn check_split(&self, number: usize, table: &Table) -> Result<(), String> {
        let told = |key: &str| match table.metadata.get(key) {
            Some(Value::Unsigned(value)) => Some(*value),
            Some(Value::Signed(value)) => u64::try_from(*value).ok(),
            _ => None,
        };
        let (count, no) = (told("split.count"), told("split.no"));
        let files = self.files.len() as u64;
        if table.format != Format::Gguf || (files == 1 && count.unwrap_or(0) <= 1) {
            return Ok(());
        }
        if files > 1 && (count, no) != (Some(files), Some(number as u64)) {
            return Err(format!(
                "its header does not say that it is file {} of {files} (split.no, split.count)",
                number + 1
            ));
        }
        // A split file may be loaded by itself under its own name; under another name it would
        // pass for a whole model.
        let named = name_of(&self.files[number]).and_then(|name| Split::of(name, GGUF));
        match named {
            Some(_) => Ok(()),
            None => Err(format!(
                "it is one of {} files according to its header, but not to its name: the others \
                 cannot be found",
                count.unwrap_or(0)
            )),
        }
    }

    /// True if a tensor of the file with this number is one of the model's: where several files have it, the
    /// index decides, as some hold copies that others have replaced.
    pub(super) fn counts(&self, number: usize, tensor: &str) -> bool {
        let superseded = self.superseded.get(number);
        let placed = self.placed.get(tensor);
        placed.is_none_or(|file| name_of(&self.files[number]) == Some(file))
            && superseded.is_none_or(|names| !names.contains(tensor))
    }

    /// Checks that every tensor is in the file that the index names.
    pub(super) fn check_places(&self, model: &Model) -> Result<()> {
        for (name, file) in &self.placed {
            let tensor = model.tensor(name);
            let found = tensor.and_then(|tensor| name_of(&self.files[tensor.shard]));
            if found != Some(file) {
                let why = format!("{file} has no tensor {}", quoted(name));
                return Err(Error::new("not a valid model", why)
                    .with_errno(Errno::BADMSG)
                    .at(self.index.display().to_string())
                    .with_remedy("download all of its files again"));
            }
        }
        Ok(())
    }
}

impl<'p> Split<'p> {
    /// As llama.cpp and transformers name them, counting from 1.
    fn of(name: &'p str, ending: &str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(ending)?.rsplit_once("-of-")?;
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

    /// The paths of all of them, up to the first that does not exist.
    fn files(&self, path: &Path, folder: &ShardFolder<'_>) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for number in 1..=self.count {
            let name = format!("{}-{number:05}-of-{:05}{GGUF}", self.stem, self.count);
            files.push(path.with_file_name(name));
            // Opening it reports the error.
            if !files.last().is_some_and(|file| folder.may_have(file)) {
                break;
            }
        }
        files
    }
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}
