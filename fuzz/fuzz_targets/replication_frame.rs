#![no_main]

use tidegate_replication::wire::{Frame, PREFIX_BYTES};

// Any input is decoded or refused, and a decoded frame survives encoding and decoding.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(frame) = Frame::decode(bytes) {
        assert_eq!(Frame::decode(&frame.encode()[PREFIX_BYTES..]), Ok(frame));
    }
});
