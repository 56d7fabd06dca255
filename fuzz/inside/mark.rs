//! The mark of a folder of links is refused, or names only entries of the folder itself. Part of the engine in a build
//! for fuzzing.

use super::Mark;
use std::os::unix::ffi::OsStrExt;

/// Parses the bytes as a mark.
pub fn mark(text: &[u8]) {
    let Some(mark) = Mark::parse(text) else {
        return;
    };
    for (name, target) in &mark.links {
        let (name, target) = (name.as_bytes(), target.as_os_str().as_bytes());
        assert!(!name.is_empty() && !name.contains(&b'/'));
        assert!(!name.contains(&0) && !target.contains(&0));
    }
    mark.is_alive();
    let file = dmafile_sys::memfd::create("mark", false).expect("a memfd");
    mark.write(&file).expect("room for it");
    let again = Mark::read(&file);
    assert_eq!(
        (again.pid, &again.process, &again.at, &again.links),
        (mark.pid, &mark.process, &mark.at, &mark.links)
    );
}
