//! HTTP/1.1 over blocking sockets: only what loads and saves need, so that bytes are received where they belong.
//!
//! One request at a time on each connection, no pipelining and no HTTP/2: one connection per thread is faster for large
//! bodies, and stores speak 1.1.

mod connection;
mod head;
mod proxy;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
pub(crate) use connection::{Connection, WaitCheck, is_gone};
use dmafile::internal::{Verb, can_hash};
pub(crate) use head::{AnswerHead, BodyLength};
use percent_encoding::percent_decode_str;
use proxy::Proxies;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use url::Url;

/// How long all attempts to connect may take together, and one of several.
const CONNECT: Duration = Duration::from_secs(10);
const CONNECT_ONE: Duration = Duration::from_secs(3);

/// A request. Fields that say how the body is delimited are added when it is sent.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequest<'a> {
    pub method: &'a str,
    pub url: &'a Url,
    pub fields: Vec<(&'a str, String)>,
    pub body: &'a [u8],
}

/// A head, and the connection on which the body follows.
pub(crate) struct HttpAnswer {
    pub head: AnswerHead,
    pub connection: Connection,
    /// The entity tag of the first answer that had one, before redirections to other servers; `X-Linked-Etag` is the
    /// hub's for what is elsewhere.
    pub first_tag: Option<String>,
    at: Endpoint,
}

impl HttpAnswer {
    /// Receives a short body, and keeps the connection.
    pub(crate) fn text(
        mut self,
        client: &Client,
        check: WaitCheck<'_>,
    ) -> io::Result<(AnswerHead, Vec<u8>)> {
        let length = self.head.body()?;
        let text = self.connection.receive_text(length, check)?;
        if length != BodyLength::UntilClosed {
            client.keep(self.at, &self.head, self.connection);
        }
        Ok((self.head, text))
    }

    /// Keeps the connection, after the whole body has been received.
    pub(crate) fn keep(self, client: &Client) {
        client.keep(self.at, &self.head, self.connection);
    }
}

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Endpoint {
    tls: bool,
    host: String,
    port: u16,
}

impl Endpoint {
    fn of(url: &Url) -> io::Result<Self> {
        let invalid = |why: &str| io::Error::new(ErrorKind::InvalidInput, why.to_string());
        let tls = match url.scheme() {
            "https" => true,
            "http" => false,
            _ => return Err(invalid("only http and https are supported")),
        };
        let host = url.host_str().filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| invalid("it names no host"))?;
        let port = url.port_or_known_default().unwrap_or(443);
        Ok(Self {
            tls,
            host: host.trim_matches(['[', ']']).to_string(),
            port,
        })
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

/// What the requests of a process share: settings, and connections that are open.
pub(crate) struct Client {
    proxies: Proxies,
    /// More certificates than the system's, or in place of them.
    certificates: Option<PathBuf>,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
    idle: Mutex<BTreeMap<Endpoint, Vec<Connection>>>,
    /// Connections are spread over all addresses of a host.
    turn: AtomicUsize,
    /// Readers that are open; connections are kept for them.
    pub readers: AtomicUsize,
}

impl Client {
    /// With the proxies and certificates that the environment names.
    pub(crate) fn from_env(certificates: Option<PathBuf>) -> Self {
        Self {
            proxies: Proxies::from_env(),
            certificates,
            tls: OnceLock::new(),
            idle: Mutex::default(),
            turn: AtomicUsize::new(0),
            readers: AtomicUsize::new(0),
        }
    }

    /// Sends a request and receives the head of its answer, on a connection that is open or on a new one.
    pub(crate) fn send(
        &self,
        request: &ClientRequest<'_>,
        check: WaitCheck<'_>,
    ) -> io::Result<HttpAnswer> {
        let at = Endpoint::of(request.url)?;
        let proxy = self.proxies.of(request.url);
        let head = encode(request, proxy.filter(|_| !at.tls));
        loop {
            let kept = self.take_idle(&at);
            let was_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.connect(&at, proxy, check)?,
            };
            let sent = connection.send(&head, check);
            let sent = sent.and_then(|()| connection.send(request.body, check));
            let answered = match sent {
                Ok(()) => connection.receive_head(check),
                // A server that does not want the body may say why before it closes the connection.
                Err(error) if !was_kept && is_gone(&error) => {
                    connection.receive_head(check).map_err(|_| error)
                }
                Err(error) => Err(error),
            };
            match answered {
                Ok(head) => {
                    return Ok(HttpAnswer {
                        head,
                        connection,
                        first_tag: None,
                        at,
                    });
                }
                // The server has closed it before it saw the request, or sends more than it announced.
                Err(error)
                    if was_kept && (is_gone(&error) || error.kind() == ErrorKind::InvalidData) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take_idle(&self, at: &Endpoint) -> Option<Connection> {
        let mut idle = self.idle();
        let all = idle.get_mut(at)?;
        while let Some(mut connection) = all.pop() {
            if connection.is_idle() {
                return Some(connection);
            }
        }
        None
    }

    fn keep(&self, at: Endpoint, head: &AnswerHead, connection: Connection) {
        if head.keeps {
            self.idle().entry(at).or_default().push(connection);
        }
    }

    /// Closes all connections that are not in use.
    pub(crate) fn close(&self) {
        self.idle().clear();
    }

    fn idle(&self) -> MutexGuard<'_, BTreeMap<Endpoint, Vec<Connection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(
        &self,
        at: &Endpoint,
        proxy: Option<&Url>,
        check: WaitCheck<'_>,
    ) -> io::Result<Connection> {
        check()?;
        let first = match proxy {
            None => at.clone(),
            Some(proxy) => Endpoint::of(proxy)?,
        };
        let mut connection = self.reach(&first, check)?;
        if first.tls && proxy.is_some() {
            connection = self.begin_tls(connection, &first, check)?;
        }
        if at.tls {
            if let Some(proxy) = proxy {
                proxy::tunnel(&mut connection, proxy, &at.host, at.port, check)?;
            }
            connection = self.begin_tls(connection, at, check)?;
        }
        Ok(connection)
    }

    /// Connects to one of the addresses of a host.
    fn reach(&self, at: &Endpoint, check: WaitCheck<'_>) -> io::Result<Connection> {
        let found = (at.host.as_str(), at.port).to_socket_addrs();
        let found: Vec<SocketAddr> = found.map_err(|error| named(error, at))?.collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let addresses = spread(&found, turn);
        let begin = Instant::now();
        let mut last = io::Error::new(ErrorKind::NotFound, "it has no address");
        for (number, address) in addresses.iter().enumerate() {
            check()?;
            let left = CONNECT.saturating_sub(begin.elapsed());
            let is_last = number + 1 == addresses.len();
            let patience = if is_last { left } else { left.min(CONNECT_ONE) };
            if patience.is_zero() {
                break;
            }
            match Connection::open(*address, patience) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(named(last, at))
    }

    fn begin_tls(
        &self,
        connection: Connection,
        at: &Endpoint,
        check: WaitCheck<'_>,
    ) -> io::Result<Connection> {
        let config = self.tls.get_or_init(|| self.configure());
        let config = config
            .as_ref()
            .map_err(|why| io::Error::other(why.clone()))?;
        let name = ServerName::try_from(at.host.clone());
        let name = name.map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
        let begun = connection.begin_tls(config, name, check);
        begun.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", at.host)))
    }

    /// How many certificates of authorities there are.
    ///
    /// # Errors
    /// Why there are none.
    pub(crate) fn certificates(&self) -> Result<usize, String> {
        self.roots().map(|roots| roots.len())
    }

    fn roots(&self) -> Result<RootCertStore, String> {
        can_hash(Verb::Load).map_err(|error| error.to_string())?;
        let mut roots = RootCertStore::empty();
        match &self.certificates {
            Some(file) => {
                let all = CertificateDer::pem_file_iter(file);
                let all = all.and_then(Iterator::collect::<Result<Vec<_>, _>>);
                let all = all.map_err(|error| format!("{}: {error}", file.display()))?;
                roots.add_parsable_certificates(all);
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        if roots.is_empty() {
            return Err(match &self.certificates {
                Some(file) => format!("{} has no certificates", file.display()),
                None => "this system has no certificates of authorities: install the package \
                         ca-certificates, or set SSL_CERT_FILE"
                    .to_string(),
            });
        }
        Ok(roots)
    }

    fn configure(&self) -> Result<Arc<ClientConfig>, String> {
        let roots = self.roots()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(config))
    }
}

/// The addresses in the order in which they are tried: from the turn on, the two families alternating.
fn spread(found: &[SocketAddr], turn: usize) -> Vec<SocketAddr> {
    let family = |v6: bool| -> Vec<SocketAddr> {
        let mut own: Vec<_> = found
            .iter()
            .filter(|one| one.is_ipv6() == v6)
            .copied()
            .collect();
        let length = own.len().max(1);
        own.rotate_left(turn % length);
        own
    };
    // The system's choice of the family comes first.
    let first_is_v6 = found.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second) = (family(first_is_v6), family(!first_is_v6));
    let mut all = Vec::new();
    for number in 0..first.len().max(second.len()) {
        all.extend(first.get(number));
        all.extend(second.get(number));
    }
    all
}

fn named(error: io::Error, at: &Endpoint) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("cannot connect to {}:{}: {error}", at.host, at.port),
    )
}

/// The head of a request. A `proxy` without a tunnel needs the whole URL, and its password.
fn encode(request: &ClientRequest<'_>, proxy: Option<&Url>) -> Vec<u8> {
    let url = request.url;
    let mut target = String::new();
    if proxy.is_some() {
        target = format!("{}://{}", url.scheme(), authority(url));
    }
    target.push_str(url.path());
    if let Some(query) = url.query() {
        target.push('?');
        target.push_str(query);
    }
    let mut text = format!(
        "{} {target} HTTP/1.1\r\nHost: {}\r\n",
        request.method,
        authority(url)
    );
    let mut field = |name: &str, value: &str| {
        // What ends a line would begin another field.
        let value: String = value.chars().filter(|char| !char.is_control()).collect();
        text.push_str(&format!("{name}: {value}\r\n"));
    };
    field("User-Agent", concat!("dmafile/", env!("CARGO_PKG_VERSION")));
    field("Accept-Encoding", "identity");
    for (name, value) in &request.fields {
        field(name, value);
    }
    if let Some(basic) = proxy.and_then(basic) {
        field("Proxy-Authorization", &basic);
    }
    if !request.body.is_empty() || matches!(request.method, "PUT" | "POST") {
        field("Content-Length", &request.body.len().to_string());
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// Host and port, as in the field `Host`.
fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_string(),
    }
}

/// The value of an authorization field, if a URL has a user.
pub(crate) fn basic(url: &Url) -> Option<String> {
    let text = |text| percent_decode_str(text).decode_utf8_lossy();
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    let both = format!(
        "{}:{}",
        text(url.username()),
        text(url.password().unwrap_or(""))
    );
    Some(format!("Basic {}", BASE64_STANDARD.encode(both)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_no_line_that_was_not_meant() {
        let url = Url::parse("http://host:81/a%20b?c=d").unwrap();
        let request = ClientRequest {
            method: "GET",
            url: &url,
            fields: vec![("If-Match", "\"x\"\r\nEvil: 1".to_string())],
            body: &[],
        };
        let text = String::from_utf8(encode(&request, None)).unwrap();
        assert!(
            text.starts_with("GET /a%20b?c=d HTTP/1.1\r\nHost: host:81\r\n"),
            "{text}"
        );
        assert!(text.contains("\r\nIf-Match: \"x\"Evil: 1\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n"));
        let proxy = Url::parse("http://u%40:p%20w@proxy:3128").unwrap();
        let text = String::from_utf8(encode(&request, Some(&proxy))).unwrap();
        assert!(
            text.starts_with("GET http://host:81/a%20b?c=d HTTP/1.1\r\n"),
            "{text}"
        );
        let expected = BASE64_STANDARD.encode("u@:p w");
        assert!(
            text.contains(&format!("\r\nProxy-Authorization: Basic {expected}\r\n")),
            "{text}"
        );
    }

    #[test]
    fn connections_are_spread_over_addresses_and_families() {
        let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
        let found = ["1.0.0.1:1", "1.0.0.2:1", "1.0.0.3:1", "[::1]:1"].map(parse);
        assert_eq!(
            spread(&found, 0),
            ["1.0.0.1:1", "[::1]:1", "1.0.0.2:1", "1.0.0.3:1"].map(parse)
        );
        assert_eq!(
            spread(&found, 4),
            ["1.0.0.2:1", "[::1]:1", "1.0.0.3:1", "1.0.0.1:1"].map(parse)
        );
        assert_eq!(spread(&[], 3), []);
    }
}
