//! Answers of a holder, as a process that takes its files receives them.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| dmafile_hold::fuzz::taker(input));
