//! A cancelled load ends early with an error; progress is reported.

use dmafile::{CancelToken, ErrorKind, Load, Method, Progress};
use dmafile_testkit::{cold, dir};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const METHODS: [Method; 4] = [Method::Auto, Method::Uring, Method::Threads, Method::Bounce];

#[test]
fn a_cancelled_load_is_an_error() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    let token = CancelToken::new();
    token.cancel();
    for method in METHODS {
        let error = Load::new(&path)
            .method(method)
            .cancel(token.clone())
            .run()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{method}: {error}");
    }
}

#[test]
fn progress_ends_with_the_size_of_the_file() {
    let dir = dir();
    let path = cold(dir.path(), 30 << 20);
    for method in METHODS {
        let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
        let log = Arc::clone(&seen);
        let load = Load::new(&path).method(method).block(64 << 10);
        load.progress(move |progress| log.lock().unwrap().push(progress))
            .run()
            .unwrap();
        let seen = seen.lock().unwrap();
        assert!(seen.iter().all(|progress| progress.total == 30 << 20));
        let last = seen.last().expect("at least the last call");
        assert_eq!(last.done, 30 << 20, "{method}");
    }
}

#[test]
fn a_panic_in_a_callback_reaches_the_caller() {
    let dir = dir();
    let path = cold(dir.path(), 64 << 20);
    for method in METHODS {
        for verify in ["", "sha256"] {
            let mut load = Load::new(&path).method(method).block(4 << 10);
            if let Ok(verify) = verify.parse() {
                load = load.verify(verify);
            }
            // With such small blocks, the first call comes in the middle of the load.
            let load = load.progress(|_| panic!("the caller's own"));
            let (ended, end) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(move || {
                let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| load.run()));
                ended.send(caught.is_err()).unwrap();
            });
            let panicked = end.recv_timeout(std::time::Duration::from_secs(60));
            assert!(panicked.expect("it hangs"), "{method} {verify}");
            thread.join().unwrap();
        }
    }
}

#[test]
fn memory_is_excluded_from_forked_children_during_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 64 << 20);
    let left_out = || {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut flags = smaps.lines().filter(|line| line.starts_with("VmFlags:"));
        flags.any(|line| line.split(' ').any(|flag| flag == "dc"))
    };
    let seen = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let log = Arc::clone(&seen);
    let load = Load::new(&path).to(dmafile::Kind::Anon).block(64 << 10);
    let look = move |_| log.store(left_out(), std::sync::atomic::Ordering::Relaxed);
    let loaded = load.progress(look).run().unwrap();
    assert!(seen.load(std::sync::atomic::Ordering::Relaxed));
    let start = loaded.buffer.as_slice().unwrap().as_ptr().addr();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let place = smaps.find(&format!("{start:x}-")).unwrap();
    let flags = smaps[place..]
        .lines()
        .find(|line| line.starts_with("VmFlags:"));
    assert!(!flags.unwrap().contains(" dc"), "{flags:?}");
}

#[test]
fn a_plan_reads_nothing_and_equals_that_of_the_load() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    let plan = Load::new(&path).plan().unwrap();
    assert_eq!(dmafile_testkit::cached(&path), 0);
    let shown: Arc<Mutex<Option<String>>> = Arc::default();
    let log = Arc::clone(&shown);
    let keep = move |plan: &dmafile::Plan| *log.lock().unwrap() = Some(format!("{plan:?}"));
    let loaded = Load::new(&path).on_plan(keep).run().unwrap();
    assert_eq!(
        shown.lock().unwrap().as_ref().unwrap(),
        &format!("{plan:?}")
    );
    assert_eq!(loaded.report.method, plan.first().method);
    for reason in &plan.reasons {
        assert!(loaded.report.reasons.contains(reason), "{reason}");
    }
}

/// With a limit, a load takes at least as long as the limit says: slower is always allowed.
#[test]
fn a_limited_load_takes_its_time_and_can_be_cancelled() {
    let dir = dir();
    let path = cold(dir.path(), (4 << 20) + 5);
    let bytes = std::fs::read(&path).unwrap();
    for method in METHODS {
        let load = || {
            Load::new(&path)
                .to("anon".parse().unwrap())
                .io(dmafile::Io::Direct)
                .method(method)
                .block(256 << 10)
        };
        let begin = Instant::now();
        let loaded = load().limit(8 << 20).run().unwrap();
        assert!(loaded.buffer.as_slice() == Some(&bytes[..]), "{method}");
        // The last block need not be waited for, nor what it is rounded up to.
        let least = Duration::from_secs_f64((3 << 20) as f64 / (8 << 20) as f64);
        assert!(begin.elapsed() >= least, "{method}: {:?}", begin.elapsed());
        let token = CancelToken::new();
        let stop = token.clone();
        let load = load().limit(64 << 10).cancel(token);
        let error = load.progress(move |_| stop.cancel()).run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{method}: {error}");
    }
    let error = Load::new(&path).limit(1).run().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}
