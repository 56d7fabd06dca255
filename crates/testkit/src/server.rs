//! A web server for tests: it serves objects by ranges, and fails on demand.

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What a server does with one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Fault {
    #[default]
    None,
    /// It closes the connection after so many bytes of the body; 0 is before the head.
    Reset(u64),
    /// It answers with this status and these fields, without the object.
    Status(u16, String),
    /// The body has so many bytes less than announced, then the connection ends.
    Short(u64),
    /// After the body come more bytes than announced.
    Long,
    /// After the answer comes the same once more, in the same piece.
    Twice,
    /// The range is moved by one byte.
    WrongRange,
    /// The range is right, but of other bytes than it says: the length differs.
    WrongLength,
    /// The object has another ETag, and does not look at conditions.
    ChangedTag,
    /// The object is replaced: another ETag, other bytes, and 412 for the old one.
    Replaced,
    Gzip,
    Chunked,
    /// A head that ends after so many bytes.
    LongHead(usize),
    /// Bytes of the body come one by one, with this pause.
    Slow(Duration),
    /// Nothing comes after so many bytes of the body.
    Silent(u64),
    /// It is redirected to this URL.
    Redirect(String),
    /// It ignores the range.
    Whole,
    /// It is no HTTP.
    Garbage,
    /// What is asked for is saved, but the connection ends before the answer.
    Lost,
}

#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub target: String,
    pub fields: BTreeMap<String, String>,
    pub body: Vec<u8>,
    /// Its number, from 0.
    pub number: usize,
}

impl Asked {
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The first and the last byte asked for.
    pub fn range(&self) -> Option<(u64, u64)> {
        let (first, last) = self
            .field("range")?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// The bytes of an object, and its ETag.
type Object = (Arc<Vec<u8>>, String);
/// A multipart upload of S3: the path, and the parts by number.
#[derive(Clone, Debug, Default)]
pub struct Upload {
    pub path: String,
    pub parts: BTreeMap<u64, Vec<u8>>,
    /// As S3 writes it.
    pub initiated: String,
}

impl Upload {
    /// One without parts, begun at this time.
    pub fn begun(path: &str, initiated: &str) -> Self {
        Self {
            path: path.to_string(),
            initiated: initiated.to_string(),
            ..Self::default()
        }
    }
}

type Decide = Arc<dyn Fn(&Asked) -> Fault + Send + Sync>;

struct Inner {
    objects: Mutex<BTreeMap<String, Object>>,
    uploads: Mutex<BTreeMap<String, Upload>>,
    /// More fields of each answer about an object.
    fields: Mutex<BTreeMap<String, String>>,
    decide: Mutex<Decide>,
    asked: Mutex<Vec<Asked>>,
    number: AtomicUsize,
    open: AtomicUsize,
    connections: AtomicUsize,
    ended: AtomicBool,
    /// It has generations of objects, as Google's store does.
    counts: AtomicBool,
    tls: Option<Arc<ServerConfig>>,
}

/// A running server.
pub struct Server {
    inner: Arc<Inner>,
    port: u16,
    host: &'static str,
}

impl Server {
    /// A server without TLS.
    pub fn plain() -> Self {
        Self::start(None, "127.0.0.1")
    }

    /// A server with TLS, whose certificate is for `name`; the file has the authority's.
    pub fn with_tls(name: &str) -> (Self, tempfile::NamedTempFile) {
        let signed = rcgen::generate_simple_self_signed(vec![name.to_string()]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(signed.cert.pem().as_bytes()).unwrap();
        let key = rustls_pki_types::PrivateKeyDer::Pkcs8(signed.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![signed.cert.der().clone()], key)
            .unwrap();
        (Self::start(Some(Arc::new(config)), "localhost"), file)
    }

    fn start(tls: Option<Arc<ServerConfig>>, host: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let inner = Arc::new(Inner {
            objects: Mutex::default(),
            uploads: Mutex::default(),
            fields: Mutex::default(),
            decide: Mutex::new(Arc::new(|_| Fault::None)),
            asked: Mutex::default(),
            number: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            counts: AtomicBool::new(false),
            tls,
        });
        let serving = Arc::clone(&inner);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if serving.ended.load(Ordering::Relaxed) {
                    break;
                }
                let inner = Arc::clone(&serving);
                std::thread::spawn(move || inner.connection(stream));
            }
        });
        Self { inner, port, host }
    }

    /// Serves these bytes at a path.
    pub fn put(&self, path: &str, bytes: Vec<u8>) -> String {
        let tag = format!("\"{:x}\"", bytes.len() + path.len());
        self.put_tagged(path, bytes, &tag)
    }

    pub fn put_tagged(&self, path: &str, bytes: Vec<u8>, tag: &str) -> String {
        let object = (Arc::new(bytes), tag.to_string());
        self.inner
            .objects
            .lock()
            .unwrap()
            .insert(path.to_string(), object);
        self.url(path)
    }

    /// The object at a path, which may have been saved.
    pub fn object(&self, path: &str) -> Option<Vec<u8>> {
        let objects = self.inner.objects.lock().unwrap();
        objects.get(path).map(|object| object.0.to_vec())
    }

    /// The paths of all objects that begin like this.
    pub fn paths(&self, start: &str) -> Vec<String> {
        let objects = self.inner.objects.lock().unwrap();
        let mut all: Vec<_> = objects.keys().cloned().collect();
        all.retain(|path| path.starts_with(start));
        all.sort();
        all
    }

    /// The multipart uploads that are neither complete nor aborted, by name.
    pub fn uploads(&self) -> MutexGuard<'_, BTreeMap<String, Upload>> {
        self.inner.uploads.lock().unwrap()
    }

    /// From now on objects have generations, as in Google's store.
    pub fn count_generations(&self) {
        self.inner.counts.store(true, Ordering::Relaxed);
    }

    /// Adds these fields, each with CR and LF, to the answers about an object.
    pub fn say(&self, path: &str, fields: &str) {
        let mut all = self.inner.fields.lock().unwrap();
        all.insert(path.to_string(), fields.to_string());
    }

    pub fn url(&self, path: &str) -> String {
        let scheme = if self.inner.tls.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}:{}{path}", self.host, self.port)
    }

    /// Decides what is done with each request from now on.
    pub fn decide(&self, decide: impl Fn(&Asked) -> Fault + Send + Sync + 'static) {
        self.inner.number.store(0, Ordering::Relaxed);
        *self.inner.decide.lock().unwrap() = Arc::new(decide);
    }

    /// The requests since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.inner.asked.lock().unwrap())
    }

    /// The number of connections that are open.
    pub fn open(&self) -> usize {
        self.inner.open.load(Ordering::Relaxed)
    }

    /// The number of connections so far.
    pub fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inner.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Inner {
    fn connection(&self, stream: TcpStream) {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.connections.fetch_add(1, Ordering::Relaxed);
        let raw = stream.try_clone().unwrap();
        // Whatever goes wrong is the client's business.
        let _ = match &self.tls {
            None => self.requests(stream, &raw),
            Some(config) => {
                let tls = ServerConnection::new(Arc::clone(config)).unwrap();
                self.requests(StreamOwned::new(tls, stream), &raw)
            }
        };
        let _ = raw.shutdown(Shutdown::Both);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    fn requests(&self, stream: impl Read + Write, raw: &TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let mut words = line.split_whitespace().map(str::to_string);
            let (method, mut target) = (
                words.next().unwrap_or_default(),
                words.next().unwrap_or_default(),
            );
            if self.counts.load(Ordering::Relaxed) {
                // The client for Google's store writes these letters so, the one for S3 does not.
                for (written, letter) in [("%2F", "/"), ("%2E", "."), ("%2D", "-")] {
                    target = target.replace(written, letter);
                }
            }
            let mut fields = BTreeMap::new();
            loop {
                let mut line = String::new();
                stream.read_line(&mut line)?;
                let Some((name, value)) = line.trim_end().split_once(':') else {
                    break;
                };
                fields.insert(name.to_ascii_lowercase(), value.trim().to_string());
            }
            let number = self.number.fetch_add(1, Ordering::Relaxed);
            let length = fields
                .get("content-length")
                .and_then(|text| text.parse().ok());
            let mut body = vec![0; length.unwrap_or(0)];
            stream.read_exact(&mut body)?;
            let asked = Asked {
                method,
                target,
                fields,
                body,
                number,
            };
            // What has been sent is not kept.
            let noted = Asked {
                body: Vec::new(),
                ..asked.clone()
            };
            self.asked.lock().unwrap().push(noted);
            // It may wait for other requests.
            let decide = Arc::clone(&self.decide.lock().unwrap());
            let fault = decide(&asked);
            if !self.answer(stream.get_mut(), raw, &asked, fault)? {
                return Ok(());
            }
        }
    }

    /// Answers a request; false if the connection ends.
    fn answer(
        &self,
        out: &mut impl Write,
        raw: &TcpStream,
        asked: &Asked,
        fault: Fault,
    ) -> std::io::Result<bool> {
        match &fault {
            Fault::Reset(0) => return reset(raw),
            Fault::Garbage => {
                out.write_all(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")?;
                return Ok(false);
            }
            Fault::Status(status, fields) => {
                let head = format!("HTTP/1.1 {status} X\r\nContent-Length: 3\r\n{fields}\r\nno\n");
                out.write_all(head.as_bytes())?;
                return out.flush().map(|()| true);
            }
            Fault::Redirect(place) => {
                let head =
                    format!("HTTP/1.1 302 X\r\nContent-Length: 0\r\nLocation: {place}\r\n\r\n");
                out.write_all(head.as_bytes())?;
                return out.flush().map(|()| true);
            }
            _ => {}
        }
        if let Some((status, fields, text)) = self.save(asked) {
            if fault == Fault::Lost {
                return reset(raw);
            }
            let length = text.len();
            let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{fields}\r\n");
            out.write_all(head.as_bytes())?;
            out.write_all(text.as_bytes())?;
            return out.flush().map(|()| true);
        }
        let path = asked.target.split('?').next().unwrap_or_default();
        let found = self.objects.lock().unwrap().get(path).cloned();
        let Some((mut bytes, mut tag)) = found else {
            out.write_all(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")?;
            return out.flush().map(|()| true);
        };
        if matches!(fault, Fault::ChangedTag | Fault::Replaced) {
            tag = "\"another\"".to_string();
            bytes = Arc::new(bytes.iter().map(|byte| !byte).collect());
        }
        let size = bytes.len() as u64;
        if asked.field("if-match").is_some_and(|wanted| wanted != tag) && fault != Fault::ChangedTag
        {
            out.write_all(b"HTTP/1.1 412 X\r\nContent-Length: 0\r\n\r\n")?;
            return out.flush().map(|()| true);
        }
        let range = asked.range().filter(|_| fault != Fault::Whole);
        let (first, last) = range.unwrap_or((0, size.saturating_sub(1)));
        let last = last.min(size.saturating_sub(1));
        if first >= size {
            let head = format!(
                "HTTP/1.1 416 X\r\nContent-Length: 0\r\nContent-Range: bytes */{size}\r\n\r\n"
            );
            out.write_all(head.as_bytes())?;
            return out.flush().map(|()| true);
        }
        let body = &bytes[first as usize..=last as usize];
        let status = if range.is_some() { "206" } else { "200" };
        let mut head = format!("HTTP/1.1 {status} X\r\n");
        if let Some(fields) = self.fields.lock().unwrap().get(path) {
            head += fields;
        }
        if !tag.is_empty() {
            head += &format!("ETag: {tag}\r\n");
        }
        if self.counts.load(Ordering::Relaxed) {
            let generation = generation(&tag);
            head += &format!("X-Goog-Generation: {generation}\r\nLast-Modified: {CHANGED}\r\n");
        }
        if range.is_some() {
            let moved = u64::from(fault == Fault::WrongRange);
            head += &format!(
                "Content-Range: bytes {}-{}/{size}\r\n",
                first + moved,
                last + moved
            );
        }
        let length = body.len() as u64;
        match &fault {
            Fault::Chunked => head += "Transfer-Encoding: chunked\r\n",
            Fault::WrongLength => head += &format!("Content-Length: {}\r\n", length - 1),
            _ => head += &format!("Content-Length: {length}\r\n"),
        }
        match &fault {
            Fault::Gzip => head += "Content-Encoding: gzip\r\n",
            Fault::LongHead(bytes) => {
                let rest = bytes.saturating_sub(head.len() + 7);
                head += &format!("X: {}\r\n", "x".repeat(rest));
            }
            _ => {}
        }
        head += "\r\n";
        if fault == Fault::Twice {
            let answer = [head.as_bytes(), body].concat();
            out.write_all(&[&answer[..], &answer[..]].concat())?;
            return out.flush().map(|()| true);
        }
        out.write_all(head.as_bytes())?;
        if asked.method == "HEAD" {
            return out.flush().map(|()| true);
        }
        match fault {
            Fault::Chunked => {
                out.write_all(format!("{:x}\r\n", body.len()).as_bytes())?;
                out.write_all(body)?;
                out.write_all(b"\r\n0\r\n\r\n")?;
            }
            Fault::Reset(after) => {
                out.write_all(&body[..body.len().min(after as usize)])?;
                out.flush()?;
                return reset(raw);
            }
            Fault::Short(less) => {
                out.write_all(&body[..body.len().saturating_sub(less as usize)])?;
                out.flush()?;
                return Ok(false);
            }
            Fault::Silent(after) => {
                out.write_all(&body[..body.len().min(after as usize)])?;
                out.flush()?;
                // Until the client has had enough.
                let _ = raw.set_read_timeout(Some(Duration::from_secs(120)));
                let mut one = [0];
                let _ = (&*raw).read(&mut one);
                return Ok(false);
            }
            Fault::Slow(pause) => {
                for piece in body.chunks(body.len().div_ceil(10).max(1)) {
                    out.write_all(piece)?;
                    out.flush()?;
                    std::thread::sleep(pause);
                }
            }
            Fault::Long => {
                out.write_all(body)?;
                out.write_all(&[0x55; 100])?;
            }
            _ => out.write_all(body)?,
        }
        out.flush()?;
        Ok(true)
    }
}

impl Inner {
    /// What S3 answers to a request that saves: a status, fields and a text. None for other requests.
    fn save(&self, asked: &Asked) -> Option<(u16, String, String)> {
        let (path, query) = asked.target.split_once('?').unwrap_or((&asked.target, ""));
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs
                .find(|pair| pair.0 == name)
                .map(|pair| pair.1.to_string())
        };
        let mut objects = self.objects.lock().unwrap();
        let mut uploads = self.uploads.lock().unwrap();
        let there = objects.get(path).map(|object| object.1.clone());
        let refused = (asked.field("if-none-match") == Some("*") && there.is_some())
            || asked
                .field("if-match")
                .is_some_and(|wanted| there.as_deref() != Some(wanted))
            || asked
                .field("x-goog-if-generation-match")
                .is_some_and(|wanted| wanted != generation(there.as_deref().unwrap_or_default()));
        let is_list = asked.method == "GET" && query.contains("uploads");
        let ends = asked.method == "POST" || (asked.method == "PUT" && value("uploadId").is_none());
        if refused && ends {
            return Some((412, String::new(), String::new()));
        }
        let missing = Some((404, String::new(), String::new()));
        let mut put = |bytes: Vec<u8>| {
            let tag = format!("\"{}\"", crate::bytes_digest(&bytes));
            objects.insert(path.to_string(), (Arc::new(bytes), tag.clone()));
            tag
        };
        match (asked.method.as_str(), value("uploadId")) {
            ("PUT", None) => {
                let tag = put(asked.body.clone());
                let fields = format!("ETag: {tag}\r\nX-Goog-Generation: {}\r\n", generation(&tag));
                Some((200, fields, String::new()))
            }
            ("PUT", Some(id)) => {
                let Some(upload) = uploads.get_mut(&id) else {
                    return missing;
                };
                let number = value("partNumber")?.parse().ok()?;
                upload.parts.insert(number, asked.body.clone());
                Some((200, format!("ETag: \"{number}\"\r\n"), String::new()))
            }
            ("POST", None) => {
                let id = format!("upload-{}", asked.number);
                let upload = Upload {
                    path: path.to_string(),
                    initiated: "2026-11-28T00:00:00.000Z".to_string(),
                    ..Upload::default()
                };
                uploads.insert(id.clone(), upload);
                let text = format!("<X><UploadId>{id}</UploadId></X>");
                Some((200, String::new(), text))
            }
            ("POST", Some(id)) => {
                let Some(upload) = uploads.remove(&id) else {
                    return missing;
                };
                // The parts that the request names, in its order.
                let list = String::from_utf8_lossy(&asked.body).into_owned();
                let numbers = list.split("<PartNumber>").skip(1);
                let numbers =
                    numbers.filter_map(|rest| rest.split('<').next()?.parse::<u64>().ok());
                let parts = numbers.map(|number| upload.parts[&number].clone());
                let tag = put(parts.collect::<Vec<_>>().concat());
                let tag = tag.replace('"', "&quot;");
                Some((200, String::new(), format!("<X><ETag>{tag}</ETag></X>")))
            }
            ("DELETE", id) => {
                match id {
                    Some(id) => drop(uploads.remove(&id)),
                    None => drop(objects.remove(path)),
                }
                Some((204, String::new(), String::new()))
            }
            // A test may have its own listing.
            ("GET", None) if query.contains("list-type=") && !objects.contains_key(path) => {
                let prefix = value("prefix").unwrap_or_default().replace("%2F", "/");
                let prefix = format!("{}/{prefix}", path.trim_end_matches('/'));
                let listed = objects.iter().filter_map(|(path, (bytes, tag))| {
                    let is_in = !path.strip_prefix(&prefix)?.contains('/');
                    let key = path.splitn(3, '/').nth(2)?;
                    let (size, tag) = (bytes.len(), tag.replace('"', "&quot;"));
                    is_in.then(|| {
                        format!(
                            "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{tag}</ETag>\
                             <LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
                        )
                    })
                });
                let listed: String = listed.collect();
                let text = format!("<ListBucketResult>{listed}</ListBucketResult>");
                Some((200, String::new(), text))
            }
            ("GET", None) if is_list => {
                let all = uploads.iter().map(|(id, upload)| {
                    let key = upload.path.splitn(3, '/').nth(2).unwrap_or_default();
                    let initiated = &upload.initiated;
                    format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>{initiated}</Initiated></Upload>")
                });
                let all: String = all.collect();
                Some((
                    200,
                    String::new(),
                    format!("<ListMultipartUploadsResult>{all}</ListMultipartUploadsResult>"),
                ))
            }
            _ => None,
        }
    }
}

/// When all objects were changed last.
const CHANGED: &str = "Sat, 28 Nov 2026 00:00:00 GMT";

/// The generation of an object with this ETag; 0 if there is none.
fn generation(tag: &str) -> String {
    let digits = tag.bytes().take(12);
    digits
        .fold(0, |sum, byte| sum * 31 + u64::from(byte))
        .to_string()
}

/// Closes so that the client sees a reset.
fn reset(raw: &TcpStream) -> std::io::Result<bool> {
    let linger = rustix::net::sockopt::set_socket_linger(raw, Some(Duration::ZERO));
    linger?;
    Ok(false)
}
