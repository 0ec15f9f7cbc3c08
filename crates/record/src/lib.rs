//! The decision log: every denial and a sample of what passed, with the counter, the limit and the rule's version.
//!
//! Whoever decides writes an [`Entry`] into a [`Recorder`]: bounded memory, one part for each thread, no allocation. A
//! [`Log`] takes it from there on a thread of its own and keeps it in `SQLite`, and an [`Archive`] answers questions about
//! it: [`Archive::why`] and [`Archive::replay`]. [`Summary::heavy`] tells who has been near a limit for a while.
//!
//! [`Otlp`] names a collector that everything is sent to as well.
//!
//! What does not fit is not written, samples before denials, and counted: [`Recorder::counts`].

mod archive;
mod block;
mod entry;
#[cfg(feature = "parquet")]
mod export;
mod heavy;
mod layout;
mod log;
mod moment;
mod otlp;
mod recorder;
mod store;

pub use archive::{Archive, RECORDS_MAX, Why};
pub use entry::{
    DIMENSIONS_BYTES_MAX, Entry, KEY_BYTES_MAX, Key, Kind, NAME_BYTES_MAX, Record, Terms, Verdict,
};
#[cfg(feature = "parquet")]
pub use export::ExportError;
pub use heavy::{HEAVY_MAX, Heavy, HeavyKeys, MINUTES_MAX, MINUTES_MIN};
pub use log::{Log, Settings, Summary};
pub use moment::{moment, timestamp};
pub use otlp::{Deliveries, Delivery, Otlp};
pub use recorder::{Counts, Recorder};
pub use store::LogError;
