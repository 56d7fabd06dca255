//! The head of an answer of a web server.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dmafile_remote::fuzz::head(bytes));
