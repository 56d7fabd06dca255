//! A source whose page cache is sampled.

use super::Source;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// An open source whose page cache is sampled by non-blocking reads. Pages that a miss brought into
/// the page cache are dropped when the load ends, however it ends.
pub(crate) struct Sampled(pub(crate) Arc<Source>);

/// How long a disk may take to read single pages; an error is delayed by at most this much.
const SINGLE_READ: Duration = Duration::from_millis(20);

impl Deref for Sampled {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.0
    }
}

impl Drop for Sampled {
    fn drop(&mut self) {
        if self.0.has_misses() {
            // The load has ended early, and these reads may still be in flight.
            std::thread::sleep(SINGLE_READ);
            self.0.forget_misses();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_sample_reads_are_dropped_if_a_load_ends_early() {
        const LEN: u64 = 4 << 20;
        let dir = crate::source::folder_on_disk();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; LEN as usize]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let source = Arc::new(Source::open(&path).unwrap());
        if source.resident(0, LEN) != Ok(0) {
            eprintln!("SKIP: this file system keeps files in memory, or no cachestat");
            return;
        }
        let sampled = Sampled(Arc::clone(&source));
        sampled.no_readahead();
        assert!(!sampled.peek(0, LEN - 1));
        // Unlike the sample reads, these reads wait for the disk.
        for at in [0, LEN - 1] {
            let (fd, at) = source.buffered(at).unwrap();
            crate::sys::file::pread_all(fd, &mut [0], at).unwrap();
        }
        assert_ne!(source.resident(0, LEN), Ok(0), "no pages came in");
        drop(sampled);
        assert_eq!(source.resident(0, LEN), Ok(0));
    }
}
