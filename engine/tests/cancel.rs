//! A cancelled load ends early, and says so; progress tells how far it is.

mod common;

use common::{cold, dir};
use dmafile::{CancelToken, ErrorKind, Load, Method, Progress};
use std::sync::{Arc, Mutex};

#[test]
fn a_cancelled_load_says_so() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    let token = CancelToken::new();
    token.cancel();
    for method in [
        Method::Auto,
        Method::Threads,
        Method::Read,
        Method::Mmap,
        Method::Sendfile,
    ] {
        let error = Load::new(&path)
            .method(method)
            .cancel(token.clone())
            .run()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{method}: {error}");
    }
}

#[test]
fn progress_grows_to_the_whole() {
    let dir = dir();
    let path = cold(dir.path(), 30 << 20);
    for method in [
        Method::Auto,
        Method::Threads,
        Method::Read,
        Method::Mmap,
        Method::Sendfile,
    ] {
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
fn a_plan_moves_nothing_and_is_what_a_load_does() {
    let dir = dir();
    let path = cold(dir.path(), 8 << 20);
    let plan = Load::new(&path).plan().unwrap();
    assert_eq!(common::cached(&path), 0);
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
