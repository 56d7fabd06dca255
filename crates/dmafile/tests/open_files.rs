//! The library raises the limit on open files of its process only if it must. A program of its own, because the limit
//! is one for all threads.

use dmafile::{Load, Model};
use rustix::process::{Resource, getrlimit, setrlimit};

fn soft_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap()
}

fn limit(soft: u64) {
    let mut limits = getrlimit(Resource::Nofile);
    limits.current = Some(soft);
    setrlimit(Resource::Nofile, limits).unwrap();
}

#[test]
fn the_limit_is_raised_for_more_files_than_it_allows() {
    let dir = tempfile::tempdir().unwrap();
    let shards: Vec<_> = (0..90)
        .map(|number| dmafile_testkit::models::tensors(&format!("shard{number}"), 1, 1000))
        .collect();
    let index = dmafile_testkit::models::sharded(dir.path(), &shards);
    let first = dir.path().join("model-00001-of-00090.safetensors");
    limit(100);
    Load::new(&first).run().unwrap();
    Model::open(&first).unwrap();
    assert_eq!(soft_limit(), 100, "one file needs no more");
    let model = Model::open(&index).unwrap();
    let raised = getrlimit(Resource::Nofile);
    assert_eq!(raised.current, raised.maximum);
    let loaded = model.load().run().unwrap();
    let tensor = model.tensor("shard89.0.w").unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    let access = loaded.buffer.access().unwrap();
    access.read_at(tensor.at, &mut bytes).unwrap();
    assert_eq!(bytes, shards[89][0].3);
}
