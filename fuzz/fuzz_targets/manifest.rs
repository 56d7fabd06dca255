//! A snapshot's manifest, and names of files in its folder.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| dmafile_record::fuzz_manifest(input));
