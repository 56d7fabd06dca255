//! Checks what is made of the head of an answer.

use super::{Answered, judge};
use crate::http::AnswerHead;

/// Parses what may be a head. What is taken for an answer to a request is one to exactly that.
pub fn head(bytes: &[u8]) {
    let Ok(Some((head, length))) = AnswerHead::parse(bytes) else {
        return;
    };
    assert!(length <= bytes.len());
    let _ = head.body();
    for (start, end) in [(0, 5), (5, 10), (5, u64::MAX >> 1)] {
        let Answered::Range(length, version) = judge(&head, (start, end), None) else {
            continue;
        };
        assert!(length > 0 && start + length <= end.min(version.size));
        assert!(start + length == end.min(version.size));
        let again = judge(&head, (start, end), Some(&version));
        assert_eq!(again, Answered::Range(length, version));
    }
}
