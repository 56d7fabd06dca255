//! The library raises the limit on open files of its process only if it must. A program of its own, because the limit
//! is one for all threads.

#[path = "common/models.rs"]
mod models;

use dmafile::{Load, Model};

fn soft_limit() -> u64 {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes a value of this type.
    assert_eq!(
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) },
        0
    );
    limits.rlim_cur
}

fn limit(soft: u64) {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes and reads a value of this type.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits), 0);
        limits.rlim_cur = soft;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits), 0);
    }
}

#[test]
fn the_limit_is_raised_for_more_files_than_it_allows() {
    let dir = tempfile::tempdir().unwrap();
    let shards: Vec<_> = (0..90)
        .map(|number| models::tensors(&format!("shard{number}"), 1, 1000))
        .collect();
    let index = models::sharded(dir.path(), &shards);
    let first = dir.path().join("model-00001-of-00090.safetensors");
    limit(100);
    Load::new(&first).run().unwrap();
    Model::open(&first).unwrap();
    assert_eq!(soft_limit(), 100, "one file needs no more");
    let model = Model::open(&index).unwrap();
    assert!(soft_limit() > 100);
    let loaded = model.load().run().unwrap();
    let tensor = model.tensor("shard89.0.w").unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    let access = loaded.buffer.access().unwrap();
    access.read_at(tensor.at, &mut bytes).unwrap();
    assert_eq!(bytes, shards[89][0].3);
}
