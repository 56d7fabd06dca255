//! GGUF headers are valid or refused.
#![no_main]

use dmafile::format::Format;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    if file.starts_with(b"GGUF") {
        dmafile_fuzz::table(file, Format::Gguf);
    }
});
