//! Loads from object stores, hubs and web servers, straight into memory that devices can share.
//!
//! [`Remote`] turns a URL into a [`RemoteObject`], or a folder of them into a
//! [`Model`]. A load receives each part where it belongs, over several connections, while later memory is
//! being allocated.
//!
//! ```no_run
//! use dmafile::Load;
//! use dmafile_remote::Remote;
//!
//! let remote = Remote::default();
//! let object = remote.open("https://host/model.safetensors")?;
//! let loaded = Load::of_object(object).run()?;
//! let model = remote.open_model("hf://Qwen/Qwen3-0.6B")?;
//! let loaded = model.load().run()?;
//! # Ok::<(), dmafile::Error>(())
//! ```
//!
//! | URL | what it names |
//! |---|---|
//! | `https://HOST/PATH`, `http://HOST/PATH` | a file on a web server that supports ranges |
//! | `hf://OWNER/NAME[@REVISION][/FILE]` | a model of the Hugging Face Hub, or a file of it |
//! | `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY` | an object; with a slash at the end, a folder |
//!
//! Credentials come from the environment, as other programs use them. An object that is replaced during a load is never
//! mixed: every request names the version that the first one saw (`If-Match`). What fails on the way is tried again from
//! the byte that was reached.

#![forbid(unsafe_code)]

mod answer;
mod bucket;
mod cache;
mod doctor;
mod http;
mod hub;
mod object;
mod origin;
mod place;
mod retry;
mod snapshot;
mod upload;

use bucket::StoreBucket;
use dmafile::internal::{Verb, can_hash, names_collection, without_secrets};
use dmafile::{CancelToken, Error, Model, ModelFolder, ModelObject, RemoteObject, Result};
use http::{Client, basic};
use hub::Hub;
use object::HttpObject;
use origin::{ObjectOrigin, Web};
use place::{Dialect, UrlPlace};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

pub use bucket::SaveCondition;
pub use cache::{CacheOptions, CacheSlot, CacheWrite, Cached, FetchedFile};
pub use dmafile::internal::is_url;
pub use upload::{SaveOptions, SavedObject};

/// How URLs are opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Loads an object that has neither an ETag nor a time of its last change, so that a load may mix two versions of
    /// it.
    pub unpinned: bool,
    /// A file with the certificates of authorities that count, in place of the system's.
    pub certificates: Option<PathBuf>,
    /// Where what has been fetched is kept ([`Remote::reserve`]).
    pub cache: Option<CacheOptions>,
    /// Only the cache is asked.
    pub offline: bool,
    /// Called before waiting for another process that fetches the same.
    pub waiting: Option<fn()>,
    /// Cancels opening.
    pub cancel: CancelToken,
}

/// The endings of files with weights, which are large.
const WEIGHTS: [&str; 13] = [
    ".safetensors",
    ".gguf",
    ".ggml",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".onnx_data",
    ".msgpack",
    ".h5",
    ".tflite",
    ".npz",
];

/// True for what is no small file next to a model's weights.
fn is_weights(name: &str) -> bool {
    name.starts_with('.') || WEIGHTS.iter().any(|ending| name.ends_with(ending))
}

/// Opens URLs. What it opens shares connections, and a revision of a model of the hub is the same commit each time.
#[derive(Debug, Default)]
pub struct Remote {
    options: OpenOptions,
    client: OnceLock<Arc<Client>>,
    /// For S3, whose certificates may be others (`AWS_CA_BUNDLE`).
    client_of_s3: OnceLock<Arc<Client>>,
    /// Models of the hub, by repository and revision.
    hubs: Mutex<BTreeMap<(String, String), Arc<Hub>>>,
    /// The locks of caches that are held, by their paths.
    locks: Mutex<Vec<(PathBuf, Weak<OwnedFd>)>>,
}

impl Remote {
    /// With these options.
    pub fn new(options: OpenOptions) -> Self {
        Self {
            options,
            ..Self::default()
        }
    }

    /// Opens an object.
    ///
    /// # Errors
    /// Kind `Usage` for what is no URL; ENOENT if the object does not exist, EACCES if it may not be read, ENODATA if it
    /// is empty, EISDIR for a folder, EPROTO for a server whose answers cannot be used, EOPNOTSUPP for one that names no
    /// version of it, ETIMEDOUT and others if it cannot be reached.
    pub fn open(&self, url: &str) -> Result<Arc<dyn RemoteObject>> {
        let place = UrlPlace::parse(url)?;
        if place.is_folder() {
            let folder = Error::new(Verb::Load, "names a folder");
            return Err(folder
                .with_errno(Errno::ISDIR)
                .at(without_secrets(url))
                .with_remedy("name an object in it, or open it as a model"));
        }
        let (folder, name) = self.folder(&place)?;
        folder.open(&name)
    }

    /// Opens a model: the only one in a folder, or the one that an index, the first file of a split GGUF, or another file
    /// stands for.
    ///
    /// # Errors
    /// As [`Remote::open`] and [`Model::open`].
    pub fn open_model(&self, url: &str) -> Result<Model> {
        let place = UrlPlace::parse(url)?;
        let (folder, name) = self.folder(&place)?;
        let name = Some(&*name).filter(|_| !place.is_folder());
        Model::open_remote(&folder, name)
    }

    /// Opens a folder, whose objects are asked for once; None if the URL names something else.
    ///
    /// # Errors
    /// Kind `Usage` for what is no URL; ENOENT for a model that does not exist.
    pub fn open_folder(&self, url: &str) -> Result<Option<RemoteFolder>> {
        let place = UrlPlace::parse(url)?;
        let folder = place.is_folder().then(|| self.folder(&place));
        Ok(folder.transpose()?.map(|(folder, _)| folder))
    }

    /// Opens all that a URL stands for: an object, or those of a model.
    ///
    /// # Errors
    /// As [`Remote::open_model`].
    pub fn open_all(&self, url: &str) -> Result<Vec<ModelObject>> {
        if is_collection(url) {
            return Ok(self.open_model(url)?.objects());
        }
        Ok(vec![(self.open(url)?, Vec::new())])
    }

    /// Opens the small files next to a model's weights, such as its configuration and its tokenizer, and returns them
    /// with their names; none for a file of a web server.
    ///
    /// # Errors
    /// As [`Remote::open`].
    pub fn open_others(&self, url: &str) -> Result<Vec<(String, Arc<dyn RemoteObject>)>> {
        self.folder(&UrlPlace::parse(url)?)?.0.others()
    }

    /// Opens all that a URL stands for, with the small files next to a model's weights.
    fn open_whole(&self, url: &str) -> Result<Vec<Arc<dyn RemoteObject>>> {
        if !is_collection(url) {
            return Ok(vec![self.open(url)?]);
        }
        let place = UrlPlace::parse(url)?;
        let (folder, name) = self.folder(&place)?;
        let name = Some(&*name).filter(|_| !place.is_folder());
        let weights = Model::open_remote(&folder, name)?.objects().into_iter();
        let others = folder.others()?.into_iter().map(|other| other.1);
        Ok(weights.map(|one| one.0).chain(others).collect())
    }

    /// What asks stores of this kind.
    fn client(&self, dialect: Dialect) -> &Arc<Client> {
        if dialect != Dialect::S3 {
            return self.other_client();
        }
        self.client_of_s3.get_or_init(|| {
            let bundle = std::env::var_os("AWS_CA_BUNDLE").filter(|file| !file.is_empty());
            let own = self.options.certificates.clone();
            Arc::new(Client::from_env(own.or(bundle.map(PathBuf::from))))
        })
    }

    fn other_client(&self) -> &Arc<Client> {
        self.client
            .get_or_init(|| Arc::new(Client::from_env(self.options.certificates.clone())))
    }

    /// The folder that a place is or is in, and its name there.
    fn folder(&self, place: &UrlPlace) -> Result<(RemoteFolder, String)> {
        can_hash(Verb::Load)?;
        let client = match place {
            UrlPlace::Bucket { dialect, .. } => self.client(*dialect),
            _ => self.other_client(),
        };
        let split = |path: &str| match path.rsplit_once('/') {
            Some((before, name)) => (format!("{before}/"), name.to_string()),
            None => (String::new(), path.to_string()),
        };
        let kind = match place {
            UrlPlace::Web(parsed) => {
                let authorization = basic(parsed);
                let mut url = parsed.clone();
                url.set_fragment(None);
                // They are sent in a field.
                let _ = url.set_username("").and_then(|()| url.set_password(None));
                FolderKind::Web(url, authorization)
            }
            UrlPlace::Hub {
                repository,
                revision,
                ..
            } => FolderKind::Hub(self.hub(client, repository, revision)?),
            UrlPlace::Bucket {
                dialect, bucket, ..
            } => {
                let cancel = self.options.cancel.clone();
                FolderKind::Bucket(StoreBucket::open(client, *dialect, bucket, cancel)?)
            }
        };
        let (prefix, name) = split(place.path());
        let folder = RemoteFolder {
            options: self.options.clone(),
            client: Arc::clone(client),
            kind,
            prefix,
            listed: OnceLock::new(),
        };
        Ok((folder, name))
    }

    /// What a revision of a model is: asked for once, so that all files are of one commit.
    fn hub(&self, client: &Client, repository: &str, revision: &str) -> Result<Arc<Hub>> {
        let name = (repository.to_string(), revision.to_string());
        let mut known = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = known.get(&name) {
            return Ok(Arc::clone(hub));
        }
        let check = || self.check();
        let hub = Arc::new(Hub::open(client, repository, revision, &check)?);
        known.insert(name, Arc::clone(&hub));
        Ok(hub)
    }

    fn check(&self) -> io::Result<()> {
        if self.options.cancel.is_cancelled() {
            return Err(Error::cancelled(Verb::Load, "").into());
        }
        Ok(())
    }
}

/// Returns `true` if a URL stands for more than one object: a folder, an index, or the first file of a split GGUF.
pub fn is_collection(url: &str) -> bool {
    let Ok(place) = UrlPlace::parse(url) else {
        return false;
    };
    place.is_folder() || names_collection(Path::new(place.path()))
}

/// Where objects are, next to each other.
pub struct RemoteFolder {
    options: OpenOptions,
    client: Arc<Client>,
    kind: FolderKind,
    /// Empty, or with a slash at the end.
    prefix: String,
    /// What is in it, with the versions that a store tells.
    listed: OnceLock<Vec<(String, String)>>,
}

enum FolderKind {
    /// One object: nobody says what is next to it.
    Web(url::Url, Option<String>),
    Hub(Arc<Hub>),
    Bucket(StoreBucket),
}

impl RemoteFolder {
    /// Opens the small files in it; none on a web server.
    fn others(&self) -> Result<Vec<(String, Arc<dyn RemoteObject>)>> {
        if matches!(self.kind, FolderKind::Web(..)) {
            return Ok(Vec::new());
        }
        let names = self.names()?;
        let small = names.iter().filter(|name| !is_weights(name));
        let open = |name: &String| match self.open(name) {
            Ok(object) => Some(Ok((name.clone(), object))),
            // There are marks in some folders.
            Err(error) if error.raw_os_error() == Some(Errno::NODATA.raw_os_error()) => None,
            Err(error) => Some(Err(error)),
        };
        small.filter_map(open).collect()
    }

    fn listed(&self) -> Result<&Vec<(String, String)>> {
        if let Some(known) = self.listed.get() {
            return Ok(known);
        }
        let listed = match &self.kind {
            FolderKind::Web(..) => {
                let why = "a web server does not say what is in a folder";
                return Err(Error::new(Verb::Load, why)
                    .with_errno(Errno::OPNOTSUPP)
                    .at(self.name())
                    .with_remedy("name a file, or the index of a model"));
            }
            FolderKind::Hub(hub) => {
                let own = hub
                    .names
                    .iter()
                    .filter_map(|name| name.strip_prefix(&self.prefix));
                own.filter(|name| !name.contains('/'))
                    .map(|name| (name.to_string(), String::new()))
                    .collect()
            }
            FolderKind::Bucket(bucket) => bucket.list(&self.prefix)?,
        };
        Ok(self.listed.get_or_init(|| listed))
    }
}

impl ModelFolder for RemoteFolder {
    fn name(&self) -> String {
        let name = match &self.kind {
            FolderKind::Web(url, _) => {
                without_secrets(url.join(".").as_ref().unwrap_or(url).as_str())
            }
            FolderKind::Hub(hub) => hub.name_of(&self.prefix),
            FolderKind::Bucket(bucket) => bucket.name_of(&self.prefix),
        };
        name.trim_end_matches('/').to_string()
    }

    fn names(&self) -> Result<Vec<String>> {
        let listed = self.listed()?.iter();
        Ok(listed.map(|(name, _)| name.clone()).collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn RemoteObject>> {
        let path = format!("{}{name}", self.prefix);
        let (shown, origin): (String, Box<dyn ObjectOrigin>) = match &self.kind {
            FolderKind::Web(url, authorization) => {
                // Files next to the one that was named have its query, which may be a signature.
                let mut own = url.clone();
                if url.path() != path
                    && let Ok(mut path) = own.path_segments_mut()
                {
                    path.pop().push(name);
                }
                let scheme = own.scheme().to_string();
                let shown = without_secrets(own.as_str());
                (
                    shown,
                    Box::new(Web::new(own, authorization.clone(), &scheme)),
                )
            }
            FolderKind::Hub(hub) => (hub.name_of(&path), Box::new(hub.file(&path))),
            FolderKind::Bucket(bucket) => (bucket.name_of(&path), Box::new(bucket.key(&path)?)),
        };
        let object = HttpObject::open(&self.client, shown, origin, &self.options)?;
        Ok(Arc::new(object))
    }
}

/// What the fuzz targets call.
#[cfg(fuzzing)]
pub mod fuzz {
    pub use crate::answer::fuzz::head;
}
