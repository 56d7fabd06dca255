//! A model: one or more files that contain named tensors.

mod digests;
mod pattern;
mod shards;

use crate::buffer::Buffer;
use crate::error::{Error, Result, Verb};
use crate::format::{Dtype, Entry, Format, MAX_HEADER, Table, Value, quoted};
use crate::load::Load;
use crate::message::{Opt, message};
use crate::options::Kind;
use crate::request::Selection;
use crate::source::{RemoteObject, Shard, Source};
use crate::sys::Errno;
use crate::sys::file;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use digests::Digests;
pub use pattern::Pattern;
pub use shards::{ModelFolder, is_hidden, names_collection};

/// Size in bytes below which [`Model::read_part`] is faster than a load, which must be planned first.
pub const SMALL_READ: u64 = 256 << 10;

/// An object of a model, and its tensors that do not count ([`Model::superseded`]).
pub type ModelObject = (Arc<dyn RemoteObject>, Vec<String>);

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Tensor {
    /// Its name, unique in the model.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Sizes of its dimensions, the slowest-varying first (C order); empty for a scalar.
    pub shape: Vec<u64>,
    /// Index of its file in [`Model::shards`].
    pub shard: usize,
    /// Offset of its first byte in that file.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Offset of its first byte within the requested bytes of a buffer from [`Model::load`] or
    /// [`Model::load_tensors`].
    pub at: u64,
}

/// The validated headers of a model. Its files stay open, so that later loads read the files that the headers
/// describe.
///
/// ```no_run
/// use dmafile::{Kind, Model};
///
/// let model = Model::open("model/")?;
/// let loaded = model.load_tensors(&["*.layers.0.*".parse()?])?.to(Kind::Anon).run()?;
/// let bytes = loaded.buffer.as_slice().expect("private memory");
/// for tensor in model.tensors() {
///     println!("{} {} {:?} at {}", tensor.name, tensor.dtype, tensor.shape, tensor.at);
/// }
/// # Ok::<(), dmafile::Error>(())
/// ```
pub struct Model {
    source: Arc<Source>,
    format: Format,
    metadata: BTreeMap<String, Value>,
    has_metadata: bool,
    tensors: Vec<Tensor>,
    by_name: BTreeMap<String, usize>,
    superseded: Vec<(usize, String)>,
}

impl Model {
    /// Opens a model: a safetensors or GGUF file, a `*.safetensors.index.json`, the first file of a split GGUF
    /// (`…-00001-of-0000N.gguf`), or a folder with one of these, in which hidden files do not count. Only headers
    /// are read. If several files have a tensor, the index says which one counts.
    ///
    /// Each file has two descriptors for as long as the model exists. If that is more than the soft limit of this
    /// process allows (RLIMIT_NOFILE), the limit is raised to the hard one; if that is not enough either, each file
    /// has one, and no direct I/O.
    ///
    /// # Errors
    /// EBADMSG for files that are not a valid model or do not belong together, with the file and the reason;
    /// EISDIR for a folder without a model; EINVAL for one with several; otherwise as [`Load::run`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = shards::find(path)?;
        Self::read(Source::open_all(path, &found.files)?, &found)
    }

    /// Opens the files of one model, in this order. Errors that do not concern a single file name the first.
    ///
    /// # Errors
    /// As [`Model::open`]; EINVAL if there are no files.
    pub fn open_files(files: &[PathBuf]) -> Result<Self> {
        let Some(first) = files.first() else {
            let why = "the list of files is empty";
            return Err(Error::new(Verb::Load, why).with_errno(Errno::INVAL));
        };
        let found = shards::ShardFiles::plain(files.to_vec());
        Self::read(Source::open_all(first, files)?, &found)
    }

    /// Opens a model in a folder that is not on this machine: the only one, as [`Model::open`] does, or the one that
    /// `name` stands for.
    ///
    /// # Errors
    /// As [`Model::open`]; those of the folder and of readers.
    pub fn open_remote(folder: &dyn ModelFolder, name: Option<&str>) -> Result<Self> {
        let found = shards::find_remote(folder, name)?;
        let objects = shards::open_all(folder, &found)?;
        let path = match name {
            None => PathBuf::from(folder.name()),
            Some(name) => Path::new(&folder.name()).join(name),
        };
        Self::read(Source::of_objects(&path, objects)?, &found)
    }

    /// Opens the objects of one model, in this order; `path` names the model in errors.
    ///
    /// # Errors
    /// As [`Model::open_files`]; those of readers.
    pub fn open_objects(
        path: impl AsRef<Path>,
        objects: Vec<Arc<dyn RemoteObject>>,
    ) -> Result<Self> {
        let path = path.as_ref();
        if objects.is_empty() {
            let why = "the list of objects is empty";
            return Err(Error::new(Verb::Load, why).with_errno(Errno::INVAL));
        }
        let names = objects.iter().map(|object| PathBuf::from(object.name()));
        let found = shards::ShardFiles::plain(names.collect());
        Self::read(Source::of_objects(path, objects)?, &found)
    }

    /// A model whose files are in memory, each completely in a separate memfd: the name and the buffer of each
    /// file, in the order of the model's files, and its tensors that do not count ([`Model::superseded`]). `path`
    /// names the model in errors.
    ///
    /// # Errors
    /// EOPNOTSUPP for a buffer that is not a whole file: private memory, dma-bufs, hugetlb pages, a part of a
    /// file; otherwise as [`Model::open`].
    pub fn of_buffers<'b>(
        path: impl AsRef<Path>,
        files: impl IntoIterator<Item = (&'b Path, &'b Buffer, &'b [String])>,
    ) -> Result<Self> {
        let (mut open, mut superseded) = (Vec::new(), Vec::new());
        for (name, buffer, without) in files {
            let place = || name.display().to_string();
            let failed = |errno| Error::os("cannot read a model", errno).at(place());
            let whole = |fd: &BorrowedFd<'_>| {
                let size = file::stat(*fd).map_or(0, |stat| stat.size);
                buffer.dma_bufs().is_empty() && (buffer.offset(), buffer.len()) == (0, size)
            };
            let Some(fd) = buffer.as_fd().filter(whole) else {
                return Err(failed(Errno::OPNOTSUPP)
                    .with_why("its memory is not a file of exactly these bytes")
                    .with_remedy(message!["load it ", Opt::To.set(Kind::Memfd)]));
            };
            let dup = file::dup(fd).map_err(failed)?;
            open.push((name.to_path_buf(), dup));
            superseded.push(without.iter().cloned().collect());
        }
        let files = open.iter().map(|(path, _)| path.clone()).collect();
        let found = shards::ShardFiles::without(files, superseded);
        if open.is_empty() {
            let place = path.as_ref().display().to_string();
            return Err(Error::os("cannot read a model", Errno::NODATA).at(place));
        }
        Self::read(Source::of_all(path.as_ref(), open)?, &found)
    }

    /// Reads the headers of its files.
    fn read(source: Source, found: &shards::ShardFiles) -> Result<Self> {
        let source = Arc::new(source);
        let mut model: Option<Self> = None;
        let mut headers = 0;
        for (shard, (file, start, size)) in source.files().enumerate() {
            let unsound = |why: String| {
                Error::new("not a valid model", why)
                    .with_errno(Errno::BADMSG)
                    .at(file.display().to_string())
                    .with_remedy("download all of its files again")
            };
            let mut reader = HeaderReader::new(&source, start, size);
            let table = Table::read(&mut reader, size)
                .map_err(|error| error.at(file.display().to_string()))?;
            headers += table.data;
            if headers > MAX_HEADER {
                let why = format!("all headers together have more than {MAX_HEADER} bytes");
                return Err(unsound(why));
            }
            found.check_split(shard, &table).map_err(unsound)?;
            // The first file describes the whole model.
            let (format, metadata) = (table.format, table.metadata);
            let has_metadata = table.has_metadata;
            let model = model.get_or_insert_with(|| Self {
                source: Arc::clone(&source),
                format,
                metadata,
                has_metadata,
                tensors: Vec::new(),
                by_name: BTreeMap::new(),
                superseded: Vec::new(),
            });
            if format != model.format {
                return Err(unsound(format!(
                    "it is {format}, but the first file is {}",
                    model.format
                )));
            }
            let tensors = table.tensors.into_iter();
            let (tensors, old): (Vec<_>, Vec<_>) =
                tensors.partition(|tensor| found.counts(shard, &tensor.name));
            model.add(tensors, shard, start).map_err(unsound)?;
            let old = old.into_iter().map(|tensor| (shard, tensor.name));
            model.superseded.extend(old);
        }
        let model = model.expect("there is at least one file");
        found.check_places(&model)?;
        Ok(model)
    }

    /// Adds the tensors of a file.
    fn add(&mut self, entries: Vec<Entry>, shard: usize, start: u64) -> Result<(), String> {
        for entry in entries {
            let index = self.tensors.len();
            if self.by_name.insert(entry.name.clone(), index).is_some() {
                let name = quoted(&entry.name);
                return Err(format!("an earlier file also has a tensor {name}"));
            }
            self.tensors.push(Tensor {
                name: entry.name,
                dtype: entry.dtype,
                shape: entry.shape,
                shard,
                offset: entry.offset,
                bytes: entry.bytes,
                at: start + entry.offset,
            });
        }
        Ok(())
    }

    /// Returns `true` if a path stands for several files: a folder, an index, or the first file of a split GGUF.
    pub fn is_collection(path: impl AsRef<Path>) -> bool {
        shards::is_collection(path.as_ref())
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// The format of its files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Its files, in the order in which they are laid out in a buffer.
    pub fn shards(&self) -> Vec<Shard> {
        Shard::all(&self.source)
    }

    /// Its objects, in the same order; none if it consists of files.
    pub fn objects(&self) -> Vec<ModelObject> {
        let objects = self.source.objects().into_iter().enumerate();
        let superseded = |number| self.superseded(number).map(str::to_string).collect();
        objects
            .map(|(number, object)| (object, superseded(number)))
            .collect()
    }

    /// Its tensors, in the order of their bytes in a buffer.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensors of a file, by its index in [`Model::shards`], that do not count: the index names another file
    /// for them.
    pub fn superseded(&self, shard: usize) -> impl Iterator<Item = &str> {
        let all = self.superseded.iter();
        all.filter(move |old| old.0 == shard).map(|old| &*old.1)
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The rest of the first file's header.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// Returns `true` if that header has metadata, which may be empty; it is optional in safetensors files.
    pub fn has_metadata(&self) -> bool {
        self.has_metadata
    }

    /// What `dmafile show --json` prints: everything in the headers, with these of its tensors. It refers to what
    /// the model has, so that writing it takes no memory.
    #[doc(hidden)]
    pub fn description<'m>(&'m self, tensors: &'m [&'m Tensor]) -> impl Serialize + 'm {
        Description {
            file: self.path(),
            format: self.format,
            metadata: &self.metadata,
            shards: self.shards(),
            tensors,
        }
    }

    /// The tensors that match at least one pattern, in the order of the files.
    ///
    /// # Errors
    /// ENOENT for a pattern that matches none.
    pub fn matching(&self, patterns: &[Pattern]) -> Result<Vec<&Tensor>> {
        let mut chosen = BTreeSet::new();
        for pattern in patterns {
            let mut any = false;
            // A plain name is looked up instead of being compared with all names.
            if let Some(&index) = pattern.exact().and_then(|name| self.by_name.get(name)) {
                chosen.insert(index);
                any = true;
            } else {
                for (index, tensor) in self.tensors.iter().enumerate() {
                    if pattern.matches(&tensor.name) {
                        chosen.insert(index);
                        any = true;
                    }
                }
            }
            if !any {
                return Err(
                    Error::new("no such tensor", format!("nothing matches {pattern}"))
                        .with_errno(Errno::NOENT)
                        .at(self.path().display().to_string())
                        .with_remedy("list them with dmafile show"),
                );
            }
        }
        let mut chosen: Vec<_> = chosen.into_iter().collect();
        chosen.sort_unstable();
        Ok(chosen
            .into_iter()
            .map(|index| &self.tensors[index])
            .collect())
    }

    /// Loads all files into one buffer, headers included, with their reads in flight together. Each file is
    /// copied as it is to [`Shard::at`]. Between files there are zeros, which take no memory except on huge
    /// pages and in dma-bufs.
    pub fn load(&self) -> Load {
        Load::of(Arc::clone(&self.source), Selection::Requested)
    }

    /// Loads one of its files, by its index in [`Model::shards`], into a separate buffer: as it is, header included.
    ///
    /// # Errors
    /// EINVAL if there is no such file.
    pub fn load_shard(&self, shard: usize) -> Result<Load> {
        let Some(Shard { at, bytes, .. }) = self.shards().into_iter().nth(shard) else {
            let why = format!("it has no file {shard}");
            return Err(Error::new(Verb::Load, why)
                .with_errno(Errno::INVAL)
                .at(self.path().display().to_string()));
        };
        Ok(Load::of(
            Arc::clone(&self.source),
            Selection::Part(at, bytes),
        ))
    }

    /// Loads only the tensors that match at least one pattern, at the same offsets as with [`Model::load`].
    /// Anything else is not read and takes no memory, except for small gaps, in dma-bufs, and in an `fd:N`
    /// that is not empty (which is zeroed). It is either zero or what the file has there.
    ///
    /// # Errors
    /// As [`Model::matching`]; ENODATA if all matching tensors are empty.
    pub fn load_tensors(&self, patterns: &[Pattern]) -> Result<Load> {
        let chosen = self.matching(patterns)?;
        let full = chosen.iter().filter(|tensor| tensor.bytes > 0);
        let ranges: Vec<_> = full
            .map(|tensor| (tensor.at, tensor.at + tensor.bytes))
            .collect();
        if ranges.is_empty() {
            return Err(Error::new(Verb::Load, "the selected tensors have no bytes")
                .with_errno(Errno::NODATA)
                .at(self.path().display().to_string()));
        }
        Ok(Load::of(Arc::clone(&self.source), Selection::Only(ranges)))
    }

    /// Loads `len` bytes at `offset` of one tensor, into a separate buffer.
    ///
    /// # Errors
    /// EINVAL outside the tensor, ENODATA for 0 bytes.
    pub fn load_part(&self, tensor: &Tensor, offset: u64, len: u64) -> Result<Load> {
        let start = self.inside(tensor, offset, len)?;
        if len == 0 {
            return Err(self.refuse(tensor, "it has no bytes", Errno::NODATA));
        }
        Ok(Load::of(
            Arc::clone(&self.source),
            Selection::Part(start, len),
        ))
    }

    /// Reads `into.len()` bytes at `offset` of one tensor through the page cache, immediately and without a
    /// plan. Up to about [`SMALL_READ`] bytes this is faster than a load.
    ///
    /// # Errors
    /// EINVAL outside the tensor; EIO if the file was truncated; any error of the read.
    pub fn read_part(&self, tensor: &Tensor, offset: u64, into: &mut [u8]) -> Result<()> {
        let start = self.inside(tensor, offset, into.len() as u64)?;
        if into.is_empty() {
            return Ok(());
        }
        self.source.read_at(start, into).map_err(|error| {
            let place = format!("{}, tensor {}", error.place(), quoted(&tensor.name));
            error.at(place)
        })
    }

    /// Where a part of a tensor starts within the bytes of the source.
    fn inside(&self, tensor: &Tensor, offset: u64, len: u64) -> Result<u64> {
        let start = tensor.at.checked_add(offset);
        match (start, offset.checked_add(len)) {
            (Some(start), Some(end)) if end <= tensor.bytes => Ok(start),
            _ => Err(self.refuse(tensor, "the range is outside the tensor", Errno::INVAL)),
        }
    }

    fn refuse(&self, tensor: &Tensor, why: &str, errno: Errno) -> Error {
        let place = format!("{}, tensor {}", self.path().display(), quoted(&tensor.name));
        Error::new(Verb::Load, why).with_errno(errno).at(place)
    }

    /// Loads one tensor into a separate buffer.
    ///
    /// # Errors
    /// ENODATA for an empty tensor.
    pub fn load_tensor(&self, tensor: &Tensor) -> Result<Load> {
        self.load_part(tensor, 0, tensor.bytes)
    }
}

/// A model as JSON.
#[derive(Serialize)]
struct Description<'m> {
    #[serde(serialize_with = "crate::error::lossy")]
    file: &'m Path,
    format: Format,
    metadata: &'m BTreeMap<String, Value>,
    shards: Vec<Shard>,
    tensors: &'m [&'m Tensor],
}

/// Reads a file or an object from its start, as far as its header goes.
struct HeaderReader<'a> {
    source: &'a Source,
    start: u64,
    size: u64,
    at: u64,
}

/// How much is read at once: of an object, most headers in one request.
const FILE_BLOCK: usize = 8 << 10;
const OBJECT_BLOCK: usize = 1 << 20;

impl<'a> HeaderReader<'a> {
    /// Of the file at `start` of a source, which has `size` bytes.
    fn new(source: &'a Source, start: u64, size: u64) -> BufReader<Self> {
        let block = if source.is_objects() {
            OBJECT_BLOCK
        } else {
            FILE_BLOCK
        };
        let reader = Self {
            source,
            start,
            size,
            at: 0,
        };
        BufReader::with_capacity(block, reader)
    }
}

impl Read for HeaderReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let got = match self.source.buffered(self.start) {
            Ok((fd, _)) => crate::sys::file::read_at(fd, into, self.at)?,
            Err(_) => {
                let got = (into.len() as u64).min(self.size - self.at) as usize;
                self.source
                    .read_at(self.start + self.at, &mut into[..got])?;
                got
            }
        };
        self.at += got as u64;
        Ok(got)
    }
}
