//! The decision log: every denial and a sample of what passed, with the counter, the limit and the rule's version.
//!
//! Whoever decides writes an [`DecisionEntry`] into a [`Recorder`]: bounded memory, one part for each thread, no allocation. A
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

pub use archive::{Archive, RECORDS_MAX, WhyQuery};
pub use entry::{
    DIMENSIONS_BYTES_MAX, DecisionEntry, DecisionRecord, KEY_BYTES_MAX, LimitTerms, NAME_BYTES_MAX,
    RecordKey, RecordKind, RecordVerdict,
};
#[cfg(feature = "parquet")]
pub use export::ExportError;
pub use heavy::{HEAVY_MAX, HeavyKey, HeavyKeys, MINUTES_MAX, MINUTES_MIN};
pub use log::{Log, LogSettings, Summary};
pub use moment::{moment, timestamp};
pub use otlp::{Deliveries, Delivery, Otlp};
pub use recorder::{Counts, Recorder};
pub use store::LogError;
