//! Checks that must hold for the header of any file.

use dmafile::format::{Format, Table};
use std::collections::HashSet;

/// Reads the bytes as a file; returns the table if they are a file of this format.
pub fn table(file: &[u8], format: Format) -> Option<Table> {
    let size = file.len() as u64;
    let table = match Table::read(&mut &file[..], size) {
        Ok(table) => table,
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("EBADMSG"), "{text:?}");
            assert!(
                text.len() < 600 && !text.contains(char::is_control),
                "{text:?}"
            );
            return None;
        }
    };
    if table.format != format {
        return None;
    }
    let mut names = HashSet::new();
    let mut end = table.data;
    for tensor in &table.tensors {
        assert!(names.insert(&tensor.name));
        assert!(tensor.offset >= end);
        end = tensor.offset + tensor.bytes;
        let elements = tensor.shape.iter().product();
        assert_eq!(tensor.dtype.bytes(elements), Some(tensor.bytes));
        // Strides of this shape do not overflow, even with a dimension of 0.
        let full: u64 = tensor.shape.iter().map(|&dim| dim.max(1)).product();
        assert!(i64::try_from(full).is_ok());
    }
    assert!(end <= size);
    Some(table)
}
