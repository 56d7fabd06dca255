//! Whatever a server does, a load has the right bytes, or ends with one sentence and nothing else.

use dmafile::{Error, Kind, Load, Loaded, RemoteObject};
use dmafile_remote::{OpenOptions, Remote};
use dmafile_testkit::server::{Fault, Server};
use dmafile_testkit::{buffer_digest, bytes_digest, noise};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SIZE: usize = (5 << 20) + 4321;
const BLOCK: u64 = 1 << 20;

fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn RemoteObject>, Error> {
    Remote::new(options.clone()).open(url)
}

fn load(url: &str, options: &OpenOptions) -> Result<Loaded, Error> {
    let object = open(url, options)?;
    Load::of_object(object).block(BLOCK).queue_depth(4).run()
}

fn served() -> (Server, String, Vec<u8>) {
    let server = Server::plain();
    let bytes = noise(SIZE, 7);
    let url = server.put("/model.bin", bytes.clone());
    (server, url, bytes)
}

fn assert_loaded(loaded: Result<Loaded, Error>, bytes: &[u8], what: &str) {
    let loaded = loaded.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(buffer_digest(&loaded.buffer), bytes_digest(bytes), "{what}");
}

/// A refusal is one line that names the object, has this errno, and holds no secret.
fn assert_refused(loaded: Result<Loaded, Error>, errno: i32, words: &str, what: &str) {
    let error = loaded.err().unwrap_or_else(|| panic!("{what} is loaded"));
    let text = error.to_string();
    assert_eq!(error.raw_os_error(), Some(errno), "{what}: {text}");
    assert!(text.contains(words), "{what}: {text}");
    assert!(
        text.contains("/model.bin") && !text.contains('\n'),
        "{what}: {text}"
    );
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn every_size_arrives_as_it_is() {
    let server = Server::plain();
    let first = 256 << 10;
    for size in [1, 511, first - 1, first, first + 1, SIZE] {
        let bytes = noise(size, size as u64);
        let url = server.put("/model.bin", bytes.clone());
        assert_loaded(
            load(&url, &OpenOptions::default()),
            &bytes,
            &format!("{size} bytes"),
        );
    }
    let url = server.put("/model.bin", Vec::new());
    assert_refused(
        load(&url, &OpenOptions::default()),
        libc::ENODATA,
        "is empty",
        "empty",
    );
}

#[test]
fn ranges_go_into_every_kind_of_memory() {
    let (server, url, bytes) = served();
    for kind in ["anon", "memfd"] {
        for (offset, length) in [(0, 1), (777, 3 << 20), (SIZE as u64 - 1, 1)] {
            let object = open(&url, &OpenOptions::default()).unwrap();
            let kind: Kind = kind.parse().unwrap();
            let load = Load::of_object(object)
                .to(kind)
                .offset(offset)
                .length(length);
            let loaded = load.block(BLOCK).run().unwrap();
            let part = &bytes[offset as usize..(offset + length) as usize];
            assert_eq!(buffer_digest(&loaded.buffer), bytes_digest(part));
        }
    }
    drop(server);
}

#[test]
fn what_passes_is_tried_again_from_the_byte_that_was_reached() {
    let (server, url, bytes) = served();
    let status = |status, fields: &str| Fault::Status(status, fields.to_string());
    for fault in [
        Fault::Reset(0),
        Fault::Reset(1),
        Fault::Reset(100_000),
        Fault::Reset(u64::MAX),
        Fault::Short(1),
        Fault::Short(BLOCK),
        Fault::Long,
        status(500, ""),
        status(503, "Retry-After: 0\r\n"),
        status(429, "Retry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\n"),
        status(408, ""),
        Fault::Slow(Duration::from_millis(20)),
    ] {
        // Every second request, the first one among them.
        let what = format!("{fault:?}");
        server.decide(move |asked| match asked.number % 2 {
            0 => fault.clone(),
            _ => Fault::None,
        });
        assert_loaded(load(&url, &OpenOptions::default()), &bytes, &what);
    }
    // Bytes that had arrived are not asked for again. (A reset can take some away that are still on their way.)
    server.decide(|asked| match asked.range() {
        Some((0, _)) => Fault::None,
        Some((first, last)) if first % BLOCK == 0 && last - first >= 400_000 => {
            Fault::Short(last + 1 - first - 400_000)
        }
        _ => Fault::None,
    });
    server.asked();
    assert_loaded(load(&url, &OpenOptions::default()), &bytes, "cut");
    let again = server.asked().into_iter().filter_map(|asked| asked.range());
    let again: Vec<_> = again
        .filter(|range| range.0 % BLOCK != 0 && range.0 != 256 << 10)
        .collect();
    assert!(!again.is_empty());
    assert!(
        again.iter().all(|range| range.0 % BLOCK > 100_000),
        "{again:?}"
    );
}

#[test]
fn a_server_that_closes_after_so_many_bytes_is_no_fault() {
    let (server, url, bytes) = served();
    server.decide(|asked| match asked.range() {
        Some((first, last)) if last - first > 300_000 => Fault::Short(last - first - 300_000),
        _ => Fault::None,
    });
    assert_loaded(load(&url, &OpenOptions::default()), &bytes, "all are cut");
}

#[test]
fn what_does_not_pass_ends_the_load_with_one_sentence() {
    let (server, url, _) = served();
    let status = |status| Fault::Status(status, String::new());
    let evil = "https://user:hunter2@evil.invalid/model.bin?token=hunter2";
    for (fault, errno, words) in [
        (Fault::WrongRange, libc::EPROTO, "the answer has bytes"),
        (Fault::WrongLength, libc::EPROTO, "bytes instead of"),
        (Fault::ChangedTag, libc::ESTALE, "was replaced"),
        (Fault::Replaced, libc::ESTALE, "was replaced"),
        (Fault::Gzip, libc::EPROTO, "encoded (gzip)"),
        (Fault::Chunked, libc::EPROTO, "how long it is"),
        (
            Fault::LongHead(17 << 10),
            libc::EPROTO,
            "the head has more than",
        ),
        (Fault::Whole, libc::EPROTO, "does not support ranges"),
        (Fault::Garbage, libc::EPROTO, "not HTTP"),
        (status(404), libc::ENOENT, "no such object"),
        (status(403), libc::EACCES, "does not allow it (status 403)"),
        (status(418), libc::EPROTO, "status 418"),
        (
            Fault::Redirect(url.clone()),
            libc::EPROTO,
            "redirected more than",
        ),
        (
            Fault::Redirect("ftp://host/model.bin".to_string()),
            libc::EPROTO,
            "to ftp",
        ),
    ] {
        for from in [0, 1, 3] {
            // A wrong version is only one if another was seen before.
            if from == 0 && matches!(fault, Fault::ChangedTag | Fault::Replaced) {
                continue;
            }
            let what = format!("{fault:?} from request {from}");
            let fault = fault.clone();
            server.decide(move |asked| {
                if asked.number >= from {
                    fault.clone()
                } else {
                    Fault::None
                }
            });
            let secret = url.replace("http://", "http://me:hunter2@") + "?signature=hunter2";
            let loaded = load(&secret, &OpenOptions::default());
            assert_refused(loaded, errno, words, &what);
        }
    }
    server.decide(move |_| Fault::Redirect(evil.to_string()));
    let error = load(&url, &OpenOptions::default()).unwrap_err().to_string();
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn a_load_that_keeps_failing_ends() {
    let (server, url, _) = served();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    server.decide(move |asked| {
        counted.fetch_add(1, Ordering::Relaxed);
        if asked.number == 0 {
            Fault::None
        } else {
            Fault::Status(503, "Retry-After: 0\r\n".to_string())
        }
    });
    let begin = Instant::now();
    let loaded = load(&url, &OpenOptions::default());
    assert_refused(loaded, libc::EIO, "status 503", "a store that is down");
    assert!(count.load(Ordering::Relaxed) < 40, "{count:?} requests");
    assert!(begin.elapsed() < Duration::from_secs(300));
    server.decide(|_| Fault::Status(503, "Retry-After: 86400\r\n".to_string()));
    let loaded = load(&url, &OpenOptions::default());
    assert_refused(
        loaded,
        libc::EIO,
        "asks to wait 86400 seconds",
        "a store that asks to wait",
    );
}

#[test]
fn a_server_that_restarts_is_waited_for() {
    let (server, url, bytes) = served();
    // All connections are lost, each of them more than once.
    server.decide(|asked| match asked.number {
        5..45 => Fault::Reset(0),
        _ => Fault::None,
    });
    let object = open(&url, &OpenOptions::default()).unwrap();
    let loaded = Load::of_object(object)
        .block(BLOCK / 4)
        .queue_depth(16)
        .run();
    assert_loaded(loaded, &bytes, "a server that restarts");
    assert!(server.asked().len() > 45);
    // It was there: part of an answer has arrived, of the very first one.
    server.decide(|asked| match asked.number {
        0..5 => Fault::Reset(10),
        _ => Fault::None,
    });
    let loaded = load(&url, &OpenOptions::default());
    assert_loaded(loaded, &bytes, "a server that restarts at once");
}

#[test]
fn secrets_are_sent_to_their_own_server_only() {
    let (server, url, bytes) = served();
    let other = Server::plain();
    let elsewhere = other.put("/model.bin", bytes.clone());
    server.decide(move |_| Fault::Redirect(format!("{elsewhere}?signature=1")));
    let secret = url.replace("http://", "http://me:hunter2@");
    assert_loaded(load(&secret, &OpenOptions::default()), &bytes, "redirected");
    let asked = server.asked();
    assert_eq!(asked.len(), 1, "where it was found is remembered");
    assert!(
        asked
            .iter()
            .all(|asked| asked.field("authorization").is_some())
    );
    let asked = other.asked();
    assert!(asked.len() > 1);
    assert!(
        asked
            .iter()
            .all(|asked| asked.field("authorization").is_none()),
        "{asked:?}"
    );
    // A signed place that does not work any more is asked for again.
    let expired = Arc::new(Mutex::new(false));
    let set = Arc::clone(&expired);
    other.decide(move |asked| {
        let mut expired = set.lock().unwrap();
        if asked.number == 3 && !*expired {
            *expired = true;
            return Fault::Status(403, String::new());
        }
        Fault::None
    });
    assert_loaded(load(&secret, &OpenOptions::default()), &bytes, "expired");
    assert!(*expired.lock().unwrap());
}

#[test]
fn conditions_pin_the_version() {
    let (server, url, bytes) = served();
    assert_loaded(load(&url, &OpenOptions::default()), &bytes, "pinned");
    let asked = server.asked();
    assert_eq!(asked[0].field("if-match"), None);
    assert!(
        asked[1..]
            .iter()
            .all(|asked| asked.field("if-match").is_some())
    );
    let url = server.put_tagged("/model.bin", bytes.clone(), "");
    let loaded = load(&url, &OpenOptions::default());
    assert_refused(loaded, libc::EOPNOTSUPP, "names no version", "no ETag");
    let options = OpenOptions {
        unpinned: true,
        ..OpenOptions::default()
    };
    assert_loaded(load(&url, &options), &bytes, "unpinned");
    // One request cannot mix.
    let small = server.put_tagged("/model.bin", bytes[..1000].to_vec(), "");
    assert_loaded(
        load(&small, &OpenOptions::default()),
        &bytes[..1000],
        "small",
    );
}

#[test]
fn tls_with_a_valid_certificate_only() {
    let bytes = noise(SIZE, 9);
    let (server, ca) = Server::with_tls("localhost");
    let url = server.put("/model.bin", bytes.clone());
    let options = OpenOptions {
        certificates: Some(ca.path().to_path_buf()),
        ..OpenOptions::default()
    };
    assert_loaded(load(&url, &options), &bytes, "tls");
    for fault in [Fault::Reset(100_000), Fault::Short(100), Fault::Long] {
        let what = format!("{fault:?} with TLS");
        server.decide(move |asked| {
            if asked.number % 2 == 0 {
                fault.clone()
            } else {
                Fault::None
            }
        });
        assert_loaded(load(&url, &options), &bytes, &what);
    }
    let loaded = load(&url, &OpenOptions::default());
    assert_refused(
        loaded,
        libc::EPROTO,
        "certificate is not valid",
        "an unknown authority",
    );
    let (other, ca) = Server::with_tls("other.example");
    let url = other.put("/model.bin", bytes);
    let options = OpenOptions {
        certificates: Some(ca.path().to_path_buf()),
        ..OpenOptions::default()
    };
    let loaded = load(&url, &options);
    assert_refused(
        loaded,
        libc::EPROTO,
        "certificate is not valid",
        "a certificate of another host",
    );
    assert!(other.asked().is_empty());
    // Not from TLS to none.
    let plain = Server::plain();
    let (server, ca) = Server::with_tls("localhost");
    let url = server.put("/model.bin", vec![1]);
    let to = plain.put("/model.bin", vec![1]);
    server.decide(move |_| Fault::Redirect(to.clone()));
    let options = OpenOptions {
        certificates: Some(ca.path().to_path_buf()),
        ..OpenOptions::default()
    };
    assert_refused(
        load(&url, &options),
        libc::EPROTO,
        "redirected from https to http",
        "no TLS",
    );
    assert!(plain.asked().is_empty());
}

#[test]
fn a_silent_server_does_not_delay_a_cancellation() {
    let (server, url, _) = served();
    server.decide(|asked| {
        if asked.number < 2 {
            Fault::None
        } else {
            Fault::Silent(1000)
        }
    });
    let object = open(&url, &OpenOptions::default()).unwrap();
    let token = dmafile::CancelToken::new();
    let load = Load::of_object(object).block(BLOCK).cancel(token.clone());
    let error = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load.run().unwrap_err());
        std::thread::sleep(Duration::from_millis(500));
        assert!(!loading.is_finished());
        token.cancel();
        loading.join().unwrap()
    });
    assert_eq!(error.kind(), dmafile::ErrorKind::Cancelled, "{error}");
}

#[test]
fn connections_are_used_again_and_closed_at_the_end() {
    let (server, url, bytes) = served();
    let object = open(&url, &OpenOptions::default()).unwrap();
    let load = Load::of_object(Arc::clone(&object))
        .block(64 << 10)
        .queue_depth(3);
    assert_loaded(load.run(), &bytes, "kept");
    assert!(server.connections() <= 4, "{}", server.connections());
    assert!(server.asked().len() > 70);
    // The object is still open.
    for _ in 0..200 {
        if server.open() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} connections are left", server.open());
}

#[test]
fn what_is_no_url_or_cannot_be_reached_is_refused() {
    for (url, words) in [
        ("http://", "not valid"),
        ("http://[::1", "not valid"),
        ("http://host:99999/", "not valid"),
    ] {
        let error = open(url, &OpenOptions::default()).err().unwrap();
        assert_eq!(error.kind(), dmafile::ErrorKind::Usage, "{url}: {error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert!(dmafile_remote::is_url("HTTPS://host/x") && dmafile_remote::is_url("http://host"));
    assert!(!dmafile_remote::is_url("http:/x") && !dmafile_remote::is_url("./https://x"));
}

/// Any faults in any order: right bytes, or one line. As many schedules as SCHEDULES says, from SEED on.
#[test]
fn random_faults_give_right_bytes_or_one_line() {
    let number = |name: &str, usual: u64| {
        let value = std::env::var(name).ok();
        value.map_or(usual, |value| value.parse().unwrap())
    };
    let (first, count) = (
        number("SEED", u64::from(std::process::id())),
        number("SCHEDULES", 60),
    );
    let server = Server::plain();
    let other = Server::plain();
    let bytes = noise(SIZE, 11);
    let url = server.put("/model.bin", bytes.clone());
    let place = other.put("/model.bin", bytes.clone());
    let wanted = bytes_digest(&bytes);
    let (mut good, mut refused) = (0, 0);
    for seed in first..first + count {
        let place = place.clone();
        // How often something happens differs, too.
        let often = [2, 4, 10, 30][(seed % 4) as usize];
        server.decide(move |asked| {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (asked.number as u64 + 1);
            let mut next = |most: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % most
            };
            next(2);
            if next(often) > 0 {
                return Fault::None;
            }
            match next(60) {
                0..20 => Fault::Reset(next(BLOCK + 2)),
                20..35 => Fault::Short(next(BLOCK + 2)),
                35..45 => Fault::Status(
                    [500, 502, 503, 504, 429, 408][next(6) as usize],
                    "Retry-After: 0\r\n".to_string(),
                ),
                45..48 => Fault::Long,
                48..50 => Fault::Redirect(place.clone()),
                50 => Fault::WrongRange,
                51 => Fault::WrongLength,
                52 => Fault::ChangedTag,
                53 => Fault::Replaced,
                54 => Fault::Gzip,
                55 => Fault::Chunked,
                56 => Fault::LongHead(17 << 10),
                57 => Fault::Garbage,
                58 => Fault::Whole,
                _ => Fault::Status(403, String::new()),
            }
        });
        match load(&url, &OpenOptions::default()) {
            Ok(loaded) => {
                good += 1;
                assert_eq!(buffer_digest(&loaded.buffer), wanted, "SEED={seed}");
            }
            Err(error) => {
                refused += 1;
                let text = error.to_string();
                assert!(
                    text.contains("/model.bin: ") && !text.contains('\n'),
                    "SEED={seed}: {text}"
                );
            }
        }
    }
    println!("{good} of {count} schedules ended well, {refused} in a refusal; SEED={first}");
    assert!(
        count < 50 || (good > 0 && refused > 0),
        "{good} and {refused}"
    );
}

#[test]
fn an_answer_that_nobody_asked_for_is_not_taken_for_the_next() {
    let server = Server::plain();
    let bytes = noise((256 << 10) + 100_000, 17);
    let url = server.put("/model.bin", bytes.clone());
    server.decide(|_| Fault::Twice);
    let object = open(&url, &OpenOptions::default()).unwrap();
    let load = Load::of_object(object).block(16 << 10).queue_depth(1);
    assert_loaded(load.run(), &bytes, "each answer twice");
}

/// Passes bytes on in pieces that end inside records of TLS, with pauses longer than a socket's timeout.
fn relay(to: &str) -> u16 {
    let port: u16 = to.rsplit(':').next().unwrap().parse().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
            for (mut from, mut to, slow) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap(), false),
                (far, near, true),
            ] {
                std::thread::spawn(move || {
                    let mut piece = vec![0; 150_001];
                    while let Ok(got @ 1..) = from.read(&mut piece) {
                        for part in piece[..got].chunks(100_003) {
                            if to.write_all(part).is_err() {
                                return;
                            }
                            if slow && part.len() > 50_000 {
                                std::thread::sleep(Duration::from_millis(250));
                            }
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    own
}

#[test]
fn a_record_of_tls_that_arrives_slowly_is_waited_for() {
    let bytes = noise(2 << 20, 13);
    let (server, ca) = Server::with_tls("localhost");
    server.put("/model.bin", bytes.clone());
    let port = relay(&server.url(""));
    let options = OpenOptions {
        certificates: Some(ca.path().to_path_buf()),
        ..OpenOptions::default()
    };
    let url = format!("https://localhost:{port}/model.bin");
    assert_loaded(load(&url, &options), &bytes, "slow TLS");
    // Nothing had to be asked for again: the first request, and one for each block.
    assert_eq!(server.asked().len(), 3);
}
