//! Whatever a peer requests, the holder answers in order and within its limits. Part of the engine in a build for fuzzing.

use super::{Answer, Around, FileWatch, InFlight, LONGEST_ANSWER, NextStep, Op, Peer, PeerRequest};
use crate::fuzz_descriptors as descriptors;
use crate::identity::FileIdentity;
use crate::set::{Member, Set};
use dmafile_sys::{Errno, socket};
use rustix::fs::SealFlags;
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Numbers of files in a hold: so many that a peer needs several requests to take all of them, and to list them.
const FILES: [usize; 2] = [24, 150];
const OWNER: u32 = 1000;

struct Fixture {
    set: Set,
    watch: FileWatch,
    now: Instant,
}

thread_local! {
    static FIXTURES: RefCell<[Fixture; 2]> = RefCell::new(FILES.map(fixture));
}

fn fixture(files: usize) -> Fixture {
    let path = PathBuf::from("/dev/null");
    let identity = FileIdentity::at(&path).expect("it is there");
    let sealed = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let member = |number: usize| {
        // Some have more descriptors, like files in several dma-bufs, one of them more than an answer with others.
        let descriptors = match number {
            20 => 40,
            number => 1 + usize::from(number.is_multiple_of(7)),
        };
        // A memfd is opened again for each peer, which takes time.
        let fd = match number {
            0..8 => descriptors::memory(b"x", 1, sealed),
            _ => descriptors::make(&b'n').expect("a descriptor"),
        };
        let dup = || dmafile_sys::file::dup(fd.as_fd()).expect("a descriptor");
        Member {
            fds: (0..descriptors).map(|_| dup()).collect(),
            info: serde_json::from_value(serde_json::json!({
                "name": format!("file-{number}"), "file": path, "kind": "memfd", "pages": "base", "bytes": 1,
                "offset": 0, "sealed": true, "identity": identity, "digest": null, "changed": false,
                "descriptors": descriptors,
            }))
            .expect("a description"),
        }
    };
    let set = Set {
        name: "x".to_string(),
        members: (0..files).map(member).collect(),
        since: 7,
    };
    // A file system that has not answered for long: no answer waits for it.
    let mut watch = FileWatch::start(&set, None).expect("a thread");
    let begin = Instant::now();
    watch.look(0..1, begin);
    let now = begin + Duration::from_secs(3600);
    Fixture { set, watch, now }
}

/// Serves a peer that sends each line as a message. If the first one is `large`, the hold has more files than a list; if
/// the next one is `other`, the peer belongs to another user than the holder.
pub fn holder(input: &[u8]) {
    FIXTURES.with_borrow_mut(|[small, large]| match input.strip_prefix(b"large\n") {
        Some(input) => serve(large, input),
        None => serve(small, input),
    });
}

fn serve(fixture: &mut Fixture, input: &[u8]) {
    let (input, user) = match input.strip_prefix(b"other\n") {
        Some(input) => (input, OWNER + 1),
        None => (input, OWNER),
    };
    let (ours, theirs) = socket::pair().expect("two sockets");
    let who = socket::Credentials {
        pid: std::process::id(),
        uid: user,
        gid: user,
    };
    let mut peer = Peer::new(ours, who, fixture.now);
    let mut client = Client::default();
    for message in input.split(|&byte| byte == b'\n').take(200) {
        let sent = socket::send(theirs.as_fd(), message, &[], false);
        assert_eq!(sent, Ok(()), "room for one request");
        let mut around = Around {
            set: &fixture.set,
            watch: &mut fixture.watch,
            flight: InFlight::of(&[], OWNER, 4096),
            owner: OWNER,
            takers: &[(1, 1); 5],
            unknown: 3,
            returned: Vec::new(),
        };
        let step = peer.step(&mut around, true, fixture.now);
        client.hear(&theirs, message, &fixture.set, user, step);
        if matches!(step, NextStep::Drop | NextStep::Release) {
            return;
        }
    }
}

/// What a peer knows.
#[derive(Default)]
struct Client {
    /// Requests that did not ask for further files.
    requests: u32,
    /// The last request, and the number of files received for it.
    got: Option<(Op, usize)>,
    has_all: bool,
}

impl Client {
    /// Checks what came for a message, after which the holder did this.
    fn hear(&mut self, socket: &OwnedFd, message: &[u8], set: &Set, user: u32, step: NextStep) {
        let Some((answer, fds)) = receive(socket.as_fd()) else {
            // The end of the connection, or everything was taken.
            let returned =
                PeerRequest::parse(message).is_ok_and(|request| request.op == Op::Return);
            let is_end = message.is_empty() || self.has_all || returned;
            assert!(
                step == NextStep::Drop && is_end,
                "{step:?} after {:?}",
                self.got
            );
            return;
        };
        assert!(
            !self.has_all && receive(socket.as_fd()).is_none(),
            "one answer for one request"
        );
        if let Some(refusal) = answer.error {
            assert_eq!(step, NextStep::Drop);
            assert!(refusal.errno > 0 && !refusal.why.is_empty());
            assert!(answer.files.is_empty() && fds.is_empty());
            return;
        }
        let files = set.members.len();
        let request = PeerRequest::parse(message).expect("only requests are answered");
        let goes_on = request.from > 0;
        assert!(!goes_on || self.got == Some((request.op, request.from)));
        self.requests += u32::from(!goes_on || request.from >= files);
        assert!(self.requests <= 64);
        assert!(
            request.name.as_deref() == Some("x")
                || (request.op, &request.name) == (Op::List, &None)
        );
        if request.op == Op::Release {
            assert_eq!(
                (step, user, answer.files.len(), fds.len()),
                (NextStep::Release, OWNER, 0, 0)
            );
            return;
        }
        let end = request.from + answer.files.len();
        let members = &set.members[request.from..end];
        let takes = request.op == Op::Take;
        assert!(!answer.files.is_empty() || request.from == files);
        for (file, member) in answer.files.iter().zip(members) {
            assert_eq!(
                (&file.name, file.descriptors),
                (&member.info.name, member.fds.len())
            );
        }
        let descriptors = members.iter().map(|member| member.fds.len()).sum::<usize>();
        assert_eq!(fds.len(), if takes { descriptors } else { 0 });
        assert!(fds.len() <= 16 || answer.files.len() == 1);
        assert_eq!((answer.total, answer.takers, answer.since), (files, 5, 7));
        self.has_all = takes && end == files;
        assert_eq!(
            step,
            if self.has_all {
                NextStep::Took
            } else {
                NextStep::Stay
            }
        );
        self.got = Some((request.op, end));
    }
}

/// The next answer, if there is one.
fn receive(socket: BorrowedFd<'_>) -> Option<(Answer, Vec<OwnedFd>)> {
    let mut bytes = vec![0; LONGEST_ANSWER + 1];
    match socket::receive_up_to(socket, &mut bytes, false) {
        Ok((got, fds)) => {
            assert!((1..=LONGEST_ANSWER).contains(&got));
            let answer = Answer::parse(&bytes[..got]).expect("an answer");
            Some((answer, fds))
        }
        Err(Errno::AGAIN) => None,
        Err(errno) => panic!("{errno:?}"),
    }
}
