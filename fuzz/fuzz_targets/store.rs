//! What the service manager keeps for a holder.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| dmafile_hold::fuzz::store(input));
