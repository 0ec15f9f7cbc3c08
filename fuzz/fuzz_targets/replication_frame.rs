#![no_main]

use tidegate_replication::wire::{Frame, PREFIX_BYTES};

// Whatever a peer sends is read or refused, and what was read is written so that it is read again.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(frame) = Frame::decode(bytes) {
        assert_eq!(Frame::decode(&frame.encode()[PREFIX_BYTES..]), Ok(frame));
    }
});
