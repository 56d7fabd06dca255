//! The mark of a holder's folder of links.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| dmafile_hold::fuzz::mark(input));
