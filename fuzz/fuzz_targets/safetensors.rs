//! safetensors headers are read like the safetensors crate reads them, or refused.
#![no_main]

use dmafile::format::Format;
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

fuzz_target!(|file: &[u8]| {
    compare(file);
    // Most changes of a file make its first 8 bytes wrong, after which nothing else is read.
    if let Some(end) = file.iter().rposition(|&byte| byte == b'}')
        && let Some(length) = (end + 1).checked_sub(8)
    {
        let mut file = file.to_vec();
        file[..8].copy_from_slice(&(length as u64).to_le_bytes());
        compare(&file);
    }
});

fn compare(file: &[u8]) {
    let Some(table) = dmafile_fuzz::table(file, Format::Safetensors) else {
        return;
    };
    let (header, theirs) = match SafeTensors::read_metadata(file) {
        Ok(read) => read,
        // The crate limits the depth of unknown fields; dmafile skips them without recursion.
        Err(error) if error.to_string().contains("recursion limit") => return,
        Err(error) => panic!("the safetensors crate refuses it: {error}"),
    };
    assert_eq!(table.data, 8 + header as u64);
    assert_eq!(table.tensors.len(), theirs.tensors().len());
    for tensor in &table.tensors {
        let info = theirs.info(&tensor.name).expect("the same name");
        assert_eq!(info.dtype.to_string(), tensor.dtype.name());
        assert!(
            info.shape
                .iter()
                .map(|&dim| dim as u64)
                .eq(tensor.shape.iter().copied())
        );
        assert_eq!(info.data_offsets.0 as u64, tensor.offset - table.data);
        assert_eq!(
            info.data_offsets.1 as u64,
            tensor.offset - table.data + tensor.bytes
        );
    }
    let texts = theirs.metadata().as_ref().map_or(0, |texts| texts.len());
    assert_eq!(table.metadata.len(), texts);
}
