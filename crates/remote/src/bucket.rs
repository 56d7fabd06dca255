//! Buckets of object stores.
//!
//! `object_store` knows their credentials and signs requests; it gets the answers of this crate's client, except those
//! to requests for bytes: their bodies go where they belong.

use crate::http::{AnswerHead, Client, ClientRequest, HttpAnswer, WaitCheck};
use crate::origin::{Condition, ObjectOrigin};
use crate::place::Dialect;
use crate::retry::own;
use ::http::HeaderValue;
use bytes::Bytes;
use dmafile::{Error, Result};
use http_body_util::BodyExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsAuthorizer, AwsCredentialProvider};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpService,
};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, GetRange, ObjectStore, RetryConfig};
use rustix::io::Errno;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// A bucket, or what corresponds to one.
#[derive(Clone)]
pub(crate) struct StoreBucket {
    store: Arc<dyn ObjectStore>,
    dialect: Dialect,
    name: String,
    signer: Option<Signer>,
}

/// What signs requests for S3 that `object_store` does not make.
#[derive(Clone)]
struct Signer {
    credentials: AwsCredentialProvider,
    region: String,
}

/// An object in it.
pub(crate) struct Key {
    bucket: StoreBucket,
    path: Path,
}

impl StoreBucket {
    /// With the settings and credentials of the environment.
    pub(crate) fn open(client: &Arc<Client>, dialect: Dialect, bucket: &str) -> Result<Self> {
        let connector = Connector(Arc::clone(client));
        let retries = RetryConfig {
            max_retries: 3,
            retry_timeout: Duration::from_secs(20),
            ..RetryConfig::default()
        };
        let mut signer = None;
        let store: object_store::Result<Arc<dyn ObjectStore>> = match dialect {
            Dialect::S3 => {
                let builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_http_connector(connector)
                    .with_retry(retries);
                let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
                builder.build().map(|store| {
                    signer = Some(Signer {
                        credentials: Arc::clone(store.credentials()),
                        region: region.unwrap_or_else(|| "us-east-1".to_string()),
                    });
                    Arc::new(store) as _
                })
            }
            Dialect::Gcs => GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(bucket)
                .with_http_connector(connector)
                .with_retry(retries)
                .build()
                .map(|store| Arc::new(store) as _),
            Dialect::Azure => MicrosoftAzureBuilder::from_env()
                .with_container_name(bucket)
                .with_http_connector(connector)
                .with_retry(retries)
                .build()
                .map(|store| Arc::new(store) as _),
        };
        let name = format!("{}://{bucket}", dialect.scheme());
        let store = store.map_err(|error| refused(&error, dialect).at(&name))?;
        Ok(Self {
            store,
            dialect,
            name,
            signer,
        })
    }

    /// The names of the objects directly below a prefix, which ends with a slash or is empty, with their ETags.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<(String, String)>> {
        let place = || format!("{}/{prefix}", self.name);
        let path = parse(prefix).map_err(|error| error.at(place()))?;
        let listed = run(async {
            let all = self.store.list_with_delimiter(Some(&path)).await?;
            Ok::<_, object_store::Error>(all.objects)
        });
        let listed = listed.map_err(|error| refused(&error, self.dialect).at(place()))?;
        let mut names = Vec::new();
        for object in listed {
            if let Some(name) = object.location.filename() {
                names.push((name.to_string(), object.e_tag.unwrap_or_default()));
            }
        }
        names.sort();
        Ok(names)
    }

    pub(crate) fn key(&self, key: &str) -> Result<Key> {
        let path = parse(key).map_err(|error| error.at(format!("{}/{key}", self.name)))?;
        Ok(Key {
            bucket: self.clone(),
            path,
        })
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

fn parse(key: &str) -> Result<Path> {
    Path::parse(key)
        .map_err(|error| Error::usage("URL", format!("its key cannot be used: {error}")))
}

/// An error of `object_store`. Their texts may be several lines.
fn refused(error: &object_store::Error, dialect: Dialect) -> Error {
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
    let why = crate::place::without_secrets(&why.replace(['\n', '\r'], " "));
    let errno = match error {
        E::NotFound { .. } => Errno::NOENT,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Errno::ACCESS,
        E::InvalidPath { .. } => Errno::INVAL,
        _ => Errno::IO,
    };
    Error::new("cannot fetch", why)
        .with_errno(errno)
        .with_remedy(dialect.remedy())
}

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
                let error = refused(&error, self.bucket.dialect);
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
                Err(error) => refused(&error, self.bucket.dialect),
            };
            return Err(error.at(self.bucket.name_of(self.path.as_ref())).into());
        };
        // Without this field S3 does not say.
        let mut request = HttpRequest::from_parts(*parts, HttpRequestBody::empty());
        let mode = HeaderValue::from_static("ENABLED");
        request.headers_mut().insert("x-amz-checksum-mode", mode);
        if request.headers_mut().remove("authorization").is_some() {
            let signed = run(async {
                let credential = signer.credentials.get_credential().await?;
                AwsAuthorizer::new(&credential, "s3", &signer.region)
                    .try_authorize(&mut request, None)
            });
            signed.map_err(io::Error::other)?;
        }
        let (parts, _) = request.into_parts();
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
}

/// Runs a future of `object_store` on this thread.
fn run<T>(future: impl Future<Output = T>) -> T {
    // Without I/O of its own it has neither threads nor descriptors.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("it needs nothing").block_on(future)
}

#[derive(Clone, Debug)]
struct Connector(Arc<Client>);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let is_asked = parts.headers.contains_key("range") || parts.method == "HEAD";
        if is_asked && matches!(ASKED.take(), Signing::Armed) {
            ASKED.set(Signing::Signed(Box::new(parts)));
            return Err(HttpError::new(
                HttpErrorKind::Unknown,
                io::Error::other("it is sent later"),
            ));
        }
        let body = body.collect().await?.to_bytes();
        let check = || Ok(());
        let text =
            send(&self.0, &parts, &body, &check).and_then(|answer| answer.text(&self.0, &check));
        let (head, text) = text.map_err(|error| HttpError::new(kind(&error), error))?;
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
        io::ErrorKind::TimedOut => HttpErrorKind::Timeout,
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => HttpErrorKind::Connect,
        io::ErrorKind::InvalidData => HttpErrorKind::Decode,
        _ => HttpErrorKind::Interrupted,
    }
}
