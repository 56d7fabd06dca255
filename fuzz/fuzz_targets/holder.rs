//! Requests, as a holder answers them.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| dmafile_hold::fuzz::holder(input));
