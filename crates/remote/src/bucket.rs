//! Buckets of object stores.
//!
//! `object_store` knows their credentials and signs requests; it gets the answers of this crate's client, except those
//! to requests for bytes: their bodies go where they belong.

use crate::http::{AnswerHead, Client, ClientRequest, HttpAnswer, WaitCheck};
use crate::origin::{Condition, ObjectOrigin};
use crate::place::{Dialect, message_without_secrets};
use crate::retry::own;
use crate::upload::MultipartStore;
use ::http::header::{HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use dmafile::internal::Verb;
use dmafile::{CancelToken, Error, Result};
use http_body_util::BodyExt;
use object_store::aws::{
    AmazonS3Builder, AmazonS3ConfigKey, AwsAuthorizer, AwsCredentialProvider, Checksum,
};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpService,
};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, ClientOptions, GetOptions, GetRange, ListResult, ObjectStore,
    ObjectStoreExt, PutMode, PutOptions, RetryConfig, StaticCredentialProvider, UpdateVersion,
};
use rustix::io::Errno;
use serde::Deserialize;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};
use url::Url;

/// A bucket, or what corresponds to one.
#[derive(Clone)]
pub(crate) struct StoreBucket {
    store: Arc<dyn ObjectStore>,
    multipart: MultipartStore,
    lists: Arc<dyn PaginatedListStore>,
    client: Arc<Client>,
    stop: BucketStop,
    dialect: Dialect,
    name: String,
    signer: Option<Signer>,
}

/// Which object a save may replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveCondition {
    /// None: there must not be one.
    Absent,
    /// The one with this ETag.
    Version(String),
}

impl SaveCondition {
    fn field(&self) -> (HeaderName, &str) {
        match self {
            Self::Absent => (IF_NONE_MATCH, "*"),
            Self::Version(etag) => (IF_MATCH, etag),
        }
    }
}

/// A store, as both of what it is.
struct AnyStore {
    object: Arc<dyn ObjectStore>,
    multipart: MultipartStore,
    lists: Arc<dyn PaginatedListStore>,
}

impl AnyStore {
    fn of<S>(store: S) -> Self
    where
        S: ObjectStore + object_store::multipart::MultipartStore + PaginatedListStore,
    {
        let store = Arc::new(store);
        let (object, lists) = (Arc::clone(&store), Arc::clone(&store));
        Self {
            object,
            multipart: store,
            lists,
        }
    }
}

/// What ends the requests of an operation.
#[derive(Clone, Debug)]
struct BucketStop {
    cancel: CancelToken,
    verb: Verb,
    /// When what tidies up saw first that the operation was cancelled.
    since: Arc<OnceLock<Instant>>,
}

impl BucketStop {
    fn of(cancel: CancelToken, verb: Verb) -> Self {
        Self {
            cancel,
            verb,
            since: Arc::default(),
        }
    }

    fn is_over(&self) -> bool {
        self.cancel.is_cancelled()
            && (!TIDIES.get() || self.since.get_or_init(Instant::now).elapsed() >= GRACE)
    }

    fn error(&self) -> Error {
        Error::cancelled(self.verb, "")
    }

    fn check(&self) -> io::Result<()> {
        if self.is_over() {
            return Err(self.error().into());
        }
        Ok(())
    }

    /// Runs a future until the operation is cancelled.
    fn run<T>(
        &self,
        future: impl Future<Output = object_store::Result<T>>,
        refused: impl FnOnce(&object_store::Error) -> Error,
    ) -> Result<T> {
        match run_until(future, || self.is_over()) {
            Some(done) => done.map_err(|error| refused(&error)),
            None => Err(self.error()),
        }
    }
}

/// What signs requests for S3 that `object_store` does not make.
#[derive(Clone)]
struct Signer {
    credentials: AwsCredentialProvider,
    region: String,
}

impl Signer {
    /// Signs a request once more, if it was.
    fn sign(&self, parts: ::http::request::Parts) -> io::Result<::http::request::Parts> {
        let mut request = HttpRequest::from_parts(parts, HttpRequestBody::empty());
        if request.headers_mut().remove("authorization").is_some() {
            let signed = run(async {
                let credential = self.credentials.get_credential().await?;
                AwsAuthorizer::new(&credential, "s3", &self.region)
                    .try_authorize(&mut request, None)
            });
            signed.map_err(io::Error::other)?;
        }
        Ok(request.into_parts().0)
    }
}

/// The uploads of a bucket that have not become objects.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Uploads {
    #[serde(default)]
    upload: Vec<OneUpload>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OneUpload {
    key: String,
    upload_id: String,
    initiated: DateTime<Utc>,
}

/// An object in it.
pub(crate) struct Key {
    bucket: StoreBucket,
    path: Path,
}

impl StoreBucket {
    /// With the settings and credentials of the environment.
    pub(crate) fn open(
        client: &Arc<Client>,
        dialect: Dialect,
        bucket: &str,
        cancel: CancelToken,
    ) -> Result<Self> {
        let retries = RetryConfig {
            max_retries: 3,
            retry_timeout: Duration::from_secs(20),
            ..RetryConfig::default()
        };
        let stop = BucketStop::of(cancel, Verb::Load);
        Self::with(client, dialect, bucket, retries, stop)
    }

    /// The same for saving, where no part is to be sent in vain.
    pub(crate) fn open_to_save(
        client: &Arc<Client>,
        dialect: Dialect,
        bucket: &str,
        cancel: CancelToken,
    ) -> Result<Self> {
        let retries = RetryConfig {
            max_retries: 9,
            retry_timeout: Duration::from_secs(300),
            ..RetryConfig::default()
        };
        let stop = BucketStop::of(cancel, Verb::Save);
        Self::with(client, dialect, bucket, retries, stop)
    }

    fn with(
        client: &Arc<Client>,
        dialect: Dialect,
        bucket: &str,
        retries: RetryConfig,
        stop: BucketStop,
    ) -> Result<Self> {
        let connector = Connector {
            client: Arc::clone(client),
            stop: stop.clone(),
        };
        let mut signer = None;
        let store: object_store::Result<AnyStore> = match dialect {
            Dialect::S3 => {
                let mut builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_http_connector(connector)
                    .with_retry(retries);
                let value = |builder: &AmazonS3Builder, key| builder.get_config_value(&key);
                // Not all stores that speak as S3 does know the other way.
                builder = builder.with_disable_bulk_delete(true);
                if value(&builder, AmazonS3ConfigKey::Checksum).is_none() {
                    // The store compares what it gets, and keeps it for loads to compare.
                    builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
                }
                let endpoint = value(&builder, AmazonS3ConfigKey::Endpoint);
                if endpoint.is_none_or(|endpoint| endpoint.starts_with("https:")) {
                    // TLS protects the bytes, and that checksum.
                    builder = builder.with_unsigned_payload(true);
                }
                let region = value(&builder, AmazonS3ConfigKey::Region);
                builder.build().map(|store| {
                    signer = Some(Signer {
                        credentials: Arc::clone(store.credentials()),
                        region: region.unwrap_or_else(|| "us-east-1".to_string()),
                    });
                    AnyStore::of(store)
                })
            }
            Dialect::Gcs => {
                let mut builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(bucket)
                    .with_http_connector(connector)
                    .with_retry(retries);
                let skips = builder.get_config_value(&GoogleConfigKey::SkipSignature);
                if skips.is_some_and(|skips| is_yes(&skips)) {
                    // Requests that write would ask for a token nonetheless.
                    let none = GcpCredential {
                        bearer: String::new(),
                    };
                    let none = StaticCredentialProvider::new(none);
                    builder = builder.with_credentials(Arc::new(none));
                }
                builder.build().map(AnyStore::of)
            }
            Dialect::Azure => MicrosoftAzureBuilder::from_env()
                .with_container_name(bucket)
                .with_http_connector(connector)
                .with_retry(retries)
                .build()
                .map(AnyStore::of),
        };
        let name = format!("{}://{bucket}", dialect.scheme());
        let store = store.map_err(|error| {
            let error = refused("cannot fetch", &error, dialect).at(&name);
            error.with_remedy(dialect.remedy())
        })?;
        Ok(Self {
            store: store.object,
            multipart: store.multipart,
            lists: store.lists,
            client: Arc::clone(client),
            stop,
            dialect,
            name,
            signer,
        })
    }

    /// The names of the objects directly below a prefix, which ends with a slash or is empty, with their ETags.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<(String, String)>> {
        let place = || format!("{}/{prefix}", self.name);
        let path = parse(prefix).map_err(|error| error.at(place()))?;
        let mut listed = ListResult {
            common_prefixes: Vec::new(),
            objects: Vec::new(),
            extensions: Default::default(),
        };
        let (mut page_token, mut keys) = (None, 0);
        loop {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token,
                ..PaginatedListOptions::default()
            };
            LISTED.set(None);
            let own = Some(prefix).filter(|prefix| !prefix.is_empty());
            let page = self.lists.list_paginated(own, options);
            let page = self.stop.run(page, |error| self.not_listed(error));
            let page = page.map_err(|error| error.at(place()))?;
            listed.objects.extend(page.result.objects);
            listed.common_prefixes.extend(page.result.common_prefixes);
            page_token = page.page_token.filter(|token| !token.is_empty());
            if page_token.is_none() {
                break;
            }
            // A server that never comes to an end must not go on with nothing, either.
            let now = listed.objects.len() + listed.common_prefixes.len();
            keys = now.max(keys + LEAST_KEYS);
            if keys >= MOST_KEYS {
                let why = format!("there are more than {MOST_KEYS} objects in this folder");
                return Err(Error::new("cannot fetch", why)
                    .with_errno(Errno::FBIG)
                    .at(place())
                    .with_remedy("use a folder with fewer of them"));
            }
        }
        if listed.objects.is_empty() && listed.common_prefixes.is_empty() {
            let why = "there are no objects in this folder";
            return Err(Error::new("cannot fetch", why)
                .with_errno(Errno::NOENT)
                .at(place()));
        }
        let mut names = Vec::new();
        for object in listed.objects {
            // Consoles mark a folder by an empty object whose key is the prefix.
            let is_mark = object.location == path;
            if let Some(name) = object.location.filename().filter(|_| !is_mark) {
                names.push((name.to_string(), object.e_tag.unwrap_or_default()));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Why a folder could not be listed: `object_store` does not say which status it got.
    fn not_listed(&self, error: &object_store::Error) -> Error {
        let (why, errno) = match LISTED.take() {
            Some(status @ (401 | 403)) => (
                format!("the store does not allow to list it (status {status})"),
                Errno::ACCESS,
            ),
            Some(404) => (
                "there is no such bucket (status 404)".to_string(),
                Errno::NOENT,
            ),
            _ => return refused("cannot fetch", error, self.dialect),
        };
        Error::new("cannot fetch", why).with_errno(errno)
    }

    pub(crate) fn key(&self, key: &str) -> Result<Key> {
        Ok(Key {
            bucket: self.clone(),
            path: self.path(key)?,
        })
    }

    pub(crate) fn path(&self, key: &str) -> Result<Path> {
        parse(key).map_err(|error| error.at(self.name_of(key)))
    }

    /// Runs a part of a save.
    fn saved<T>(
        &self,
        path: &Path,
        future: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let refused = |error: &_| refused("cannot save", error, self.dialect);
        let saved = self.stop.run(future, refused);
        saved.map_err(|error| error.at(self.name_of(path.as_ref())))
    }

    /// Runs what tidies up: even after the save was cancelled, but then not for long.
    fn tidied<T>(
        &self,
        path: &Path,
        future: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let refused = |error: &_| refused("cannot remove", error, self.dialect);
        TIDIES.set(true);
        let tidied = self.stop.run(future, refused);
        TIDIES.set(false);
        tidied.map_err(|error| error.at(self.name_of(path.as_ref())))
    }

    /// Says which condition does not hold, if that is the error.
    fn explained(&self, path: &Path, error: Error, condition: Option<&SaveCondition>) -> Error {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        let (why, errno) = match (condition, errno) {
            (Some(SaveCondition::Absent), Some(Errno::EXIST | Errno::STALE)) => {
                ("there is such an object", Errno::EXIST)
            }
            (Some(SaveCondition::Version(_)), Some(Errno::EXIST | Errno::STALE)) => {
                ("the object has another ETag", Errno::STALE)
            }
            _ => return error,
        };
        Error::new("cannot save", why)
            .with_errno(errno)
            .at(self.name_of(path.as_ref()))
            .with_remedy("look at it: if an answer of the store was lost, it may be this one")
    }

    /// Saves an object in one request; returns its version.
    pub(crate) fn put(
        &self,
        path: &Path,
        bytes: Bytes,
        condition: Option<&SaveCondition>,
    ) -> Result<Option<String>> {
        if self.dialect == Dialect::Gcs && matches!(condition, Some(SaveCondition::Version(_))) {
            return Err(self.no_condition(path, "this store has no condition for ETags"));
        }
        let mode = match condition {
            None => PutMode::Overwrite,
            Some(SaveCondition::Absent) => PutMode::Create,
            Some(SaveCondition::Version(etag)) => PutMode::Update(UpdateVersion {
                e_tag: Some(etag.clone()),
                version: None,
            }),
        };
        let put = self.store.put_opts(path, bytes.into(), mode.into());
        let put = self.saved(path, put);
        Ok(put
            .map_err(|error| self.explained(path, error, condition))?
            .e_tag)
    }

    /// Reads a small object; returns its bytes and the version that [`StoreBucket::replace`] demands.
    pub(crate) fn read(&self, path: &Path) -> Result<Option<(Vec<u8>, String)>> {
        let read = self.saved(path, async {
            let got = match self.store.get(path).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                got => got?,
            };
            let version = match self.dialect {
                Dialect::Gcs => got.meta.version.clone(),
                Dialect::S3 | Dialect::Azure => got.meta.e_tag.clone(),
            };
            Ok(Some((got.bytes().await?, version)))
        });
        let Some((bytes, version)) = read? else {
            return Ok(None);
        };
        let why = "this store names no version of it";
        let version = version.ok_or_else(|| self.no_condition(path, why))?;
        Ok(Some((bytes.into(), version)))
    }

    /// Saves a small object in place of the one of this version, or where there is none.
    pub(crate) fn replace(
        &self,
        path: &Path,
        bytes: Vec<u8>,
        instead_of: Option<&str>,
    ) -> Result<()> {
        let version = instead_of.map(str::to_string);
        let mode = match version {
            None => PutMode::Create,
            // Each store demands the one that it knows.
            Some(_) => PutMode::Update(UpdateVersion {
                e_tag: version.clone(),
                version,
            }),
        };
        // Public objects of Google's store would be an hour old for some readers.
        let attributes = [(Attribute::CacheControl, "no-store")];
        let options = PutOptions {
            mode,
            attributes: Attributes::from_iter(attributes),
            ..PutOptions::default()
        };
        let put = self.store.put_opts(path, bytes.into(), options);
        self.saved(path, put).map(drop)
    }

    /// Removes an object, if there is one, even if the save was cancelled.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        match self.tidied(path, self.store.delete(path)) {
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => Ok(()),
            removed => removed,
        }
    }

    /// Begins an upload of several parts; returns its name.
    pub(crate) fn begin(&self, path: &Path, condition: Option<&SaveCondition>) -> Result<String> {
        if condition.is_some() && self.dialect != Dialect::S3 {
            let why = "this store has no conditions for objects in several parts";
            return Err(self.no_condition(path, why));
        }
        self.saved(path, self.multipart.create_multipart(path))
    }

    fn no_condition(&self, path: &Path, why: &'static str) -> Error {
        Error::new("cannot save", why)
            .with_errno(Errno::OPNOTSUPP)
            .at(self.name_of(path.as_ref()))
    }

    pub(crate) fn put_part(
        &self,
        path: &Path,
        id: &str,
        index: usize,
        bytes: Bytes,
    ) -> Result<PartId> {
        let id = id.to_string();
        self.saved(
            path,
            self.multipart.put_part(path, &id, index, bytes.into()),
        )
    }

    /// Makes the parts an object; returns its version.
    pub(crate) fn complete(
        &self,
        path: &Path,
        id: &str,
        parts: Vec<PartId>,
        condition: Option<&SaveCondition>,
    ) -> Result<Option<String>> {
        let id = id.to_string();
        CONDITION.set(condition.cloned());
        let done = self.saved(path, self.multipart.complete_multipart(path, &id, parts));
        CONDITION.set(None);
        Ok(done
            .map_err(|error| self.explained(path, error, condition))?
            .e_tag)
    }

    /// Removes what saves have left behind that ended a day ago or earlier, in a crash for example: those of objects that
    /// begin with `prefix`, and that `is_own` returns true for. Other stores than S3 do that by themselves.
    pub(crate) fn clear_leftovers(&self, prefix: &str, is_own: impl Fn(&str) -> bool) {
        let Some(signer) = &self.signer else { return };
        // Nothing depends on it, and it may not be allowed.
        let Ok(left) = self.uploads(signer, prefix) else {
            return;
        };
        let old = DateTime::<Utc>::from(SystemTime::now() - LEFT_BEHIND);
        for upload in left.upload {
            if is_own(&upload.key)
                && upload.initiated < old
                && let Ok(path) = self.path(&upload.key)
            {
                self.abort(&path, &upload.upload_id);
            }
        }
    }

    fn uploads(&self, signer: &Signer, prefix: &str) -> io::Result<Uploads> {
        // The address of the bucket.
        ASKED.set(Signing::Armed);
        let _ = run(self.store.list_with_delimiter(None));
        let Signing::Signed(mut parts) = ASKED.take() else {
            return Err(io::Error::other("nothing was asked for"));
        };
        let mut url = Url::parse(&parts.uri.to_string()).map_err(io::Error::other)?;
        url.query_pairs_mut()
            .clear()
            .append_pair("prefix", prefix)
            .append_pair("uploads", "");
        // A signature has spaces in this form.
        let query = url.query().unwrap_or_default().replace('+', "%20");
        url.set_query(Some(&query));
        parts.uri = url.as_str().parse().map_err(io::Error::other)?;
        let parts = signer.sign(*parts)?;
        let check = || self.stop.check();
        let answer = send(&self.client, &parts, &[], &check)?;
        let (head, text) = answer.text(&self.client, &check)?;
        if head.status != 200 {
            return Err(io::Error::other(format!("status {}", head.status)));
        }
        let text = String::from_utf8_lossy(&text);
        quick_xml::de::from_str(&text).map_err(io::Error::other)
    }

    /// Gives the parts of an upload up.
    pub(crate) fn abort(&self, path: &Path, id: &str) {
        let id = id.to_string();
        // It failed already, and that error counts.
        let _ = self.tidied(path, self.multipart.abort_multipart(path, &id));
    }

    /// The name of a key in messages.
    pub(crate) fn name_of(&self, key: &str) -> String {
        format!("{}/{key}", self.name)
    }
}

impl Dialect {
    pub(crate) fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gcs => "gs",
            Self::Azure => "az",
        }
    }

    /// The variables that say which of several stores has a bucket.
    pub(crate) fn places(self) -> [&'static str; 3] {
        match self {
            Self::S3 => ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
            Self::Gcs => [
                "GOOGLE_BASE_URL",
                "GOOGLE_ENDPOINT_URL",
                "GOOGLE_SERVICE_ENDPOINT",
            ],
            Self::Azure => [
                "AZURE_STORAGE_ACCOUNT_NAME",
                "AZURE_STORAGE_ENDPOINT",
                "AZURE_STORAGE_USE_EMULATOR",
            ],
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::S3 if set("AWS_PROFILE") && !set("AWS_ACCESS_KEY_ID") => {
                "profiles are not read: eval \"$(aws configure export-credentials --format env)\""
            }
            Self::S3 => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Gcs => {
                "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Azure => {
                "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a \
                 public container"
            }
        }
    }
}

fn set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// What `object_store` takes for a yes.
fn is_yes(value: &str) -> bool {
    ["1", "true", "on", "yes", "y"].contains(&&*value.to_ascii_lowercase())
}

fn parse(key: &str) -> Result<Path> {
    let unusable = |why: String| Error::usage("URL", format!("its key cannot be used: {why}"));
    // It would be removed, which names another object.
    if key.starts_with('/') {
        return Err(unusable("it begins with a slash".to_string()));
    }
    Path::parse(key).map_err(|error| unusable(error.to_string()))
}

/// An error of `object_store`. Their texts may be several lines.
fn refused(what: &'static str, error: &object_store::Error, dialect: Dialect) -> Error {
    use object_store::Error as E;
    let mut why = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(own) = inner.downcast_ref::<io::Error>().and_then(own) {
            return own.clone();
        }
        let text = inner.to_string();
        if !why.contains(&text) {
            why = format!("{why}: {text}");
        }
        source = inner.source();
    }
    let why = message_without_secrets(&why.replace(['\n', '\r'], " "));
    // Where nothing else has them, the machine's own are asked for.
    if dialect == Dialect::S3 && why.contains("/latest/api/token") {
        return Error::new(what, "there are no credentials for S3")
            .with_errno(Errno::ACCESS)
            .with_remedy(dialect.remedy());
    }
    let errno = match error {
        E::NotFound { .. } => Errno::NOENT,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Errno::ACCESS,
        E::InvalidPath { .. } => Errno::INVAL,
        E::AlreadyExists { .. } => Errno::EXIST,
        E::Precondition { .. } => Errno::STALE,
        E::NotImplemented { .. } | E::NotSupported { .. } => Errno::OPNOTSUPP,
        _ => Errno::IO,
    };
    let concerns_credentials =
        errno == Errno::ACCESS || OWN_CREDENTIALS.iter().any(|own| why.contains(own));
    let error = Error::new(what, why).with_errno(errno);
    if concerns_credentials {
        return error.with_remedy(dialect.remedy());
    }
    error
}

/// Where machines of Google and Azure have credentials of their own.
const OWN_CREDENTIALS: [&str; 2] = ["/computeMetadata/", "/metadata/identity/"];

impl ObjectOrigin for Key {
    fn store(&self) -> String {
        self.bucket.dialect.scheme().to_string()
    }

    fn ask(
        &self,
        client: &Client,
        (start, end): (u64, u64),
        condition: Condition,
        check: WaitCheck<'_>,
    ) -> io::Result<HttpAnswer> {
        let mut options = GetOptions {
            range: Some(GetRange::Bounded(start..end)),
            ..GetOptions::default()
        };
        match condition {
            Some(("If-Match", etag)) => options.if_match = Some(etag),
            Some((_, date)) => {
                let then = httpdate::parse_http_date(&date).map_err(io::Error::other)?;
                options.if_unmodified_since = Some(then.into());
            }
            None => {}
        }
        ASKED.set(Signing::Armed);
        let got = run(self.bucket.store.get_opts(&self.path, options));
        match (ASKED.take(), got) {
            (Signing::Signed(parts), _) => {
                let answer = send(client, &parts, &[], check)?;
                match answer.head.field("x-amz-bucket-region") {
                    Some(region) if answer.head.status == 301 => {
                        let why = format!("the bucket is in another region, {region}");
                        Err(Error::new("cannot fetch", why)
                            .with_errno(Errno::INVAL)
                            .at(self.bucket.name_of(self.path.as_ref()))
                            .with_remedy(format!("set AWS_REGION={region}"))
                            .into())
                    }
                    _ => Ok(answer),
                }
            }
            (Signing::Nothing | Signing::Armed, Err(error)) => {
                let error = refused("cannot fetch", &error, self.bucket.dialect);
                Err(error.at(self.bucket.name_of(self.path.as_ref())).into())
            }
            (Signing::Nothing | Signing::Armed, Ok(_)) => {
                Err(io::Error::other("nothing was asked for"))
            }
        }
    }

    fn describe(
        &self,
        client: &Client,
        condition: Condition,
        check: WaitCheck<'_>,
    ) -> io::Result<Option<AnswerHead>> {
        let Some(signer) = &self.bucket.signer else {
            return Ok(None);
        };
        let mut options = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        if let Some(("If-Match", etag)) = condition {
            options.if_match = Some(etag);
        }
        ASKED.set(Signing::Armed);
        let got = run(self.bucket.store.get_opts(&self.path, options));
        let Signing::Signed(parts) = ASKED.take() else {
            let error = match got {
                Ok(_) => return Ok(None),
                Err(error) => refused("cannot fetch", &error, self.bucket.dialect),
            };
            return Err(error.at(self.bucket.name_of(self.path.as_ref())).into());
        };
        let mut parts = *parts;
        // Without this field S3 does not say.
        let mode = HeaderValue::from_static("ENABLED");
        parts.headers.insert("x-amz-checksum-mode", mode);
        let parts = signer.sign(parts)?;
        let answer = send(client, &parts, &[], check)?;
        // An answer to HEAD has no body, whatever its fields say.
        Ok(Some(answer.head))
    }

    fn renew(&self) -> bool {
        false
    }
}

/// The request for bytes that this thread is about to make: it is signed here, and sent outside.
#[derive(Default)]
enum Signing {
    #[default]
    Nothing,
    Armed,
    Signed(Box<::http::request::Parts>),
}

thread_local! {
    static ASKED: Cell<Signing> = const { Cell::new(Signing::Nothing) };
    /// The status of the last answer to a request for a list.
    static LISTED: Cell<Option<u16>> = const { Cell::new(None) };
}

/// Runs a future of `object_store` on this thread.
fn run<T>(future: impl Future<Output = T>) -> T {
    // Without I/O of its own it has neither threads nor descriptors.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("it needs nothing").block_on(future)
}

/// As [`run`], for as long as it is needed; None if it is not any more.
fn run_until<T>(future: impl Future<Output = T>, over: impl Fn() -> bool) -> Option<T> {
    run(async {
        let mut future = std::pin::pin!(future);
        loop {
            // Pauses between two tries are waited for here; what blocks looks for itself.
            match tokio::time::timeout(TICK, &mut future).await {
                Ok(done) => return Some(done),
                Err(_) if over() => return None,
                Err(_) => {}
            }
        }
    })
}

/// A save that takes longer has to be done again.
const LEFT_BEHIND: Duration = Duration::from_secs(24 * 3600);

/// So long after a save was cancelled what it has sent is removed; the next one removes the rest.
const GRACE: Duration = Duration::from_secs(5);

/// The most keys in a folder, and for how many a page of a list counts at least.
const MOST_KEYS: usize = 100_000;
const LEAST_KEYS: usize = 100;

/// How often a pause looks whether it is still needed.
const TICK: Duration = Duration::from_millis(100);

thread_local! {
    /// What the completion of an upload demands.
    static CONDITION: RefCell<Option<SaveCondition>> = const { RefCell::new(None) };
    /// True for what has to be sent after a save was cancelled, too.
    static TIDIES: Cell<bool> = const { Cell::new(false) };
}

#[derive(Clone, Debug)]
struct Connector {
    client: Arc<Client>,
    stop: BucketStop,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        let is_list = parts
            .uri
            .query()
            .is_some_and(|query| query.contains("list-type="));
        let is_asked = is_list || parts.headers.contains_key("range") || parts.method == "HEAD";
        if is_asked && matches!(ASKED.take(), Signing::Armed) {
            ASKED.set(Signing::Signed(Box::new(parts)));
            return Err(HttpError::new(
                HttpErrorKind::Unknown,
                io::Error::other("it is sent later"),
            ));
        }
        if parts.method == "POST" {
            // It is not signed, and need not be.
            if let Some(condition) = CONDITION.with_borrow(Clone::clone) {
                let (name, value) = condition.field();
                if let Ok(value) = HeaderValue::from_str(value) {
                    parts.headers.insert(name, value);
                }
            }
        }
        let body = body.collect().await?.to_bytes();
        let check = || self.stop.check();
        let client = &self.client;
        let text =
            send(client, &parts, &body, &check).and_then(|answer| answer.text(client, &check));
        let (head, text) = text.map_err(|error| HttpError::new(kind(&error), error))?;
        // Requests for credentials have none.
        if parts
            .uri
            .query()
            .is_some_and(|query| query.contains("delimiter="))
        {
            LISTED.set(Some(head.status));
        }
        let mut response = ::http::Response::builder().status(head.status);
        for (name, value) in head.fields() {
            response = response.header(name, value);
        }
        let response = response.body(Bytes::from(text).into());
        response.map_err(|error| HttpError::new(HttpErrorKind::Decode, error))
    }
}

fn send(
    client: &Client,
    parts: &::http::request::Parts,
    body: &[u8],
    check: WaitCheck<'_>,
) -> io::Result<HttpAnswer> {
    let url = Url::parse(&parts.uri.to_string());
    let url = url.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    // The client has its own.
    let own = ["host", "content-length", "accept-encoding", "user-agent"];
    let fields = parts.headers.iter();
    let fields = fields.filter(|field| !own.contains(&field.0.as_str()));
    let fields = fields.map(|(name, value)| {
        (
            name.as_str(),
            String::from_utf8_lossy(value.as_bytes()).into_owned(),
        )
    });
    let request = ClientRequest {
        method: parts.method.as_str(),
        url: &url,
        fields: fields.collect(),
        body,
    };
    client.send(&request, check)
}

fn kind(error: &io::Error) -> HttpErrorKind {
    match error.kind() {
        _ if own(error).is_some() => HttpErrorKind::Unknown,
        io::ErrorKind::TimedOut => HttpErrorKind::Timeout,
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => HttpErrorKind::Connect,
        io::ErrorKind::InvalidData => HttpErrorKind::Decode,
        _ => HttpErrorKind::Interrupted,
    }
}
