#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate_server::fuzzing::rule_rows(bytes));
