//! One connection: a blocking socket, with TLS or without.

use super::head::{AnswerHead, BodyLength, bad};
use dmafile::ReadBuf;
use rustls::{ClientConfig, ClientConnection};
use rustls_pki_types::ServerName;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a wait looks whether its result is still needed.
const TICK: Duration = Duration::from_millis(100);
/// After this time without a byte the peer counts as gone.
const SILENCE: Duration = Duration::from_secs(30);
/// Received at once from a connection with TLS: many records.
const CIPHERED: usize = 128 << 10;
/// The largest part of a body that is decrypted before progress is told.
const PART: usize = 256 << 10;
/// The longest body that is read into memory of its own.
const MOST_TEXT: u64 = 16 << 20;

/// Fails when what is waited for is not needed any more.
pub(crate) type WaitCheck<'a> = &'a dyn Fn() -> io::Result<()>;

pub(crate) struct Connection {
    stream: Transport,
    /// Received beyond a head, and not used yet.
    early: Vec<u8>,
    used: usize,
}

enum Transport {
    Plain(TcpStream),
    Tls(Box<ClientConnection>, BufReader<TcpStream>),
}

/// The time at which a wait began.
struct Patience(Instant);

impl Patience {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Looks whether a call that returned this error is to be repeated.
    fn wait(&self, error: io::Error, check: WaitCheck<'_>) -> io::Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut if self.0.elapsed() < SILENCE => check(),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let seconds = SILENCE.as_secs();
                let why = format!("nothing has arrived for {seconds} seconds");
                Err(io::Error::new(ErrorKind::TimedOut, why))
            }
            _ => Err(error),
        }
    }
}

/// Reads or writes until it does not have to wait.
fn patiently<T>(check: WaitCheck<'_>, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let patience = Patience::new();
    loop {
        match call() {
            Ok(done) => return Ok(done),
            Err(error) => patience.wait(error, check)?,
        }
    }
}

impl Connection {
    /// Connects to an address.
    pub(crate) fn open(address: SocketAddr, patience: Duration) -> io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, patience)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        Ok(Self {
            stream: Transport::Plain(socket),
            early: Vec::new(),
            used: 0,
        })
    }

    /// Begins TLS, with a server of this name.
    pub(crate) fn begin_tls(
        self,
        config: &Arc<ClientConfig>,
        name: ServerName<'static>,
        check: WaitCheck<'_>,
    ) -> io::Result<Self> {
        let Transport::Plain(mut socket) = self.stream else {
            unreachable!("it has begun once");
        };
        if !self.early.is_empty() {
            return Err(bad("the proxy sent more than its answer"));
        }
        let tls = ClientConnection::new(Arc::clone(config), name);
        let mut tls = tls.map_err(io::Error::other)?;
        while tls.is_handshaking() {
            while tls.wants_write() {
                patiently(check, || tls.write_tls(&mut socket))?;
            }
            if tls.wants_read() {
                if patiently(check, || tls.read_tls(&mut socket))? == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                if let Err(error) = tls.process_new_packets() {
                    // The alert says why.
                    let _ = tls.write_tls(&mut socket);
                    return Err(refused(&error));
                }
            }
        }
        let socket = BufReader::with_capacity(CIPHERED, socket);
        Ok(Self {
            stream: Transport::Tls(Box::new(tls), socket),
            ..self
        })
    }

    /// True if nothing has arrived since the last answer: neither its end nor bytes that nobody asked for.
    pub(crate) fn is_idle(&mut self) -> bool {
        if self.used < self.early.len() {
            return false;
        }
        let nonblocking = |socket: &TcpStream, set| socket.set_nonblocking(set).is_ok();
        match &mut self.stream {
            Transport::Plain(socket) => {
                let is_set = nonblocking(socket, true);
                let peeked = socket.peek(&mut [0]);
                let is_idle = peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
                is_set && nonblocking(socket, false) && is_idle
            }
            Transport::Tls(tls, socket) => {
                let is_set = nonblocking(socket.get_ref(), true);
                // Tickets for the next session may come at any time.
                let is_idle = loop {
                    match tls.process_new_packets() {
                        Ok(state) if state.plaintext_bytes_to_read() == 0 => {}
                        Ok(_) | Err(_) => break false,
                    }
                    match tls.read_tls(socket) {
                        Ok(0) => break false,
                        Ok(_) => {}
                        Err(error) => break error.kind() == ErrorKind::WouldBlock,
                    }
                };
                is_set && nonblocking(socket.get_ref(), false) && is_idle
            }
        }
    }

    /// Sends all of these bytes.
    pub(crate) fn send(&mut self, mut bytes: &[u8], check: WaitCheck<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = match &mut self.stream {
                Transport::Plain(socket) => patiently(check, || socket.write(bytes))?,
                Transport::Tls(tls, socket) => {
                    let taken = tls.writer().write(bytes)?;
                    while tls.wants_write() {
                        patiently(check, || tls.write_tls(socket.get_mut()))?;
                    }
                    taken
                }
            };
            if sent == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Receives at most `into.len()` bytes, 0 at the end of the connection.
    fn receive(&mut self, into: &mut [u8], check: WaitCheck<'_>) -> io::Result<usize> {
        if self.used < self.early.len() {
            let mut rest = &self.early[self.used..];
            let got = rest.read(into)?;
            self.used += got;
            return Ok(got);
        }
        match &mut self.stream {
            Transport::Plain(socket) => patiently(check, || socket.read(into)),
            Transport::Tls(tls, socket) => patiently(check, || decrypt(tls, socket, into)),
        }
    }

    /// Receives the head of an answer; those that only announce another one are skipped. An error of kind
    /// `ConnectionAborted` if the peer has closed before the first byte, as it may do with an idle connection.
    pub(crate) fn receive_head(&mut self, check: WaitCheck<'_>) -> io::Result<AnswerHead> {
        let mut bytes = self.early.split_off(self.used);
        self.early.clear();
        self.used = 0;
        loop {
            if let Some((head, length)) = AnswerHead::parse(&bytes)? {
                bytes.drain(..length);
                if (100..200).contains(&head.status) && head.status != 101 {
                    continue;
                }
                self.early = bytes;
                return Ok(head);
            }
            let old = bytes.len();
            bytes.resize(old + 4096, 0);
            let got = self.receive(&mut bytes[old..], check);
            let got = match got {
                Err(error) if old == 0 && is_gone(&error) => {
                    return Err(io::Error::new(ErrorKind::ConnectionAborted, error));
                }
                got => got?,
            };
            bytes.truncate(old + got);
            if got == 0 {
                let kind = match old {
                    0 => ErrorKind::ConnectionAborted,
                    _ => ErrorKind::UnexpectedEof,
                };
                return Err(kind.into());
            }
        }
    }

    /// Receives `length` bytes of a body where they belong.
    pub(crate) fn receive_into(&mut self, into: &mut ReadBuf<'_>, length: u64) -> io::Result<()> {
        let mut left = length;
        while left > 0 {
            left -= self.receive_some(into, left)?;
        }
        Ok(())
    }

    /// Receives what has arrived of a body where it belongs, at most `left` bytes and at least one. In one call as far as
    /// possible: after each one the kernel tells the sender how much room there is.
    pub(crate) fn receive_some(&mut self, into: &mut ReadBuf<'_>, left: u64) -> io::Result<u64> {
        let most = usize::try_from(left).unwrap_or(usize::MAX);
        if self.used < self.early.len() {
            let rest = &self.early[self.used..];
            let most = rest.len().min(most);
            into.copy(&rest[..most])?;
            self.used += most;
            return Ok(most as u64);
        }
        let patience = Patience::new();
        loop {
            let got = match &mut self.stream {
                Transport::Plain(socket) => into.receive(socket.as_fd(), left),
                Transport::Tls(tls, socket) => into
                    .fill(most.min(PART), |memory| decrypt(tls, socket, memory))
                    .map(|got| got as u64),
            };
            match got {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => return Ok(got),
                Err(error) => patience.wait(error, &|| into.check())?,
            }
        }
    }

    /// Receives a short body into memory of its own.
    pub(crate) fn receive_text(
        &mut self,
        length: BodyLength,
        check: WaitCheck<'_>,
    ) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        match length {
            BodyLength::Bytes(bytes) => self.append(&mut text, bytes, check)?,
            BodyLength::UntilClosed => {
                let mut part = vec![0; 64 << 10];
                loop {
                    let got = self.receive(&mut part, check)?;
                    text.extend(&part[..got]);
                    if text.len() as u64 > MOST_TEXT {
                        return Err(too_long());
                    }
                    if got == 0 {
                        break;
                    }
                }
            }
            BodyLength::Chunked => loop {
                let size = self.chunk_size(check)?;
                if size == 0 {
                    // Fields may follow, up to an empty line.
                    while !self.line(check)?.is_empty() {}
                    break;
                }
                self.append(&mut text, size, check)?;
                if !self.line(check)?.is_empty() {
                    return Err(bad("a chunk is longer than it says"));
                }
            },
        }
        Ok(text)
    }

    fn append(&mut self, text: &mut Vec<u8>, bytes: u64, check: WaitCheck<'_>) -> io::Result<()> {
        let old = text.len();
        if old as u64 + bytes > MOST_TEXT {
            return Err(too_long());
        }
        text.resize(old + bytes as usize, 0);
        let mut at = old;
        while at < text.len() {
            match self.receive(&mut text[at..], check)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                got => at += got,
            }
        }
        Ok(())
    }

    fn chunk_size(&mut self, check: WaitCheck<'_>) -> io::Result<u64> {
        let line = self.line(check)?;
        let digits = line.split(|&byte| byte == b';').next().unwrap_or_default();
        let digits = std::str::from_utf8(digits).unwrap_or_default().trim();
        let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u64::from_str_radix(digits, 16) {
            Ok(size) if is_hex => Ok(size),
            _ => Err(bad("the size of a chunk is not a number")),
        }
    }

    /// A line of a chunked body, without its end.
    fn line(&mut self, check: WaitCheck<'_>) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            let mut byte = [0];
            if self.receive(&mut byte, check)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            match byte[0] {
                b'\n' => {
                    line.pop_if(|last| *last == b'\r');
                    return Ok(line);
                }
                _ if line.len() > 4096 => return Err(bad("a line of a chunk is too long")),
                other => line.push(other),
            }
        }
    }
}

fn too_long() -> io::Error {
    bad(format!("it has more than {MOST_TEXT} bytes"))
}

/// Errors that say that the peer is gone.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::UnexpectedEof
    )
}

/// A handshake or a record that is refused; nothing makes it better.
fn refused(error: &rustls::Error) -> io::Error {
    let why = match error {
        rustls::Error::InvalidCertificate(why) => format!("the certificate is not valid: {why}"),
        other => other.to_string(),
    };
    io::Error::new(ErrorKind::PermissionDenied, why)
}

/// Takes what has been decrypted, and decrypts what has been received for as long as there is room; 0 at the end of the
/// connection. An error of kind `WouldBlock` if not even one record has arrived before the socket's timeout.
fn decrypt(
    tls: &mut ClientConnection,
    socket: &mut BufReader<TcpStream>,
    into: &mut [u8],
) -> io::Result<usize> {
    let mut done = 0;
    let mut ended = false;
    while done < into.len() {
        match tls.reader().read(&mut into[done..]) {
            Ok(0) => break,
            Ok(got) => {
                done += got;
                continue;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if ended || (done > 0 && socket.buffer().is_empty()) {
            break;
        }
        ended = tls.read_tls(socket)? == 0;
        tls.process_new_packets().map_err(|error| refused(&error))?;
        if ended && done == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(done)
}
