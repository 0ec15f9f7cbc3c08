//! The decision log: every denial and a sample of the allowed requests, with the meter, the limit
//! and the rule's version.
//!
//! A thread that decides writes a [`DecisionEntry`] into a [`Recorder`]: bounded memory, one buffer
//! per thread, no allocation. A [`Log`] drains the buffers on its own thread and stores the records
//! in `SQLite`. An [`Archive`] queries them: [`Archive::why`] and [`Archive::replay`].
//! [`Summary::heavy`] returns the heavy keys.
//!
//! [`Otlp`] names a collector that also receives every record.
//!
//! Records that do not fit are dropped, samples before denials, and counted: [`Recorder::counts`].

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
    RecordKey, RecordKind, RecordVerdict, SHED_SOURCE,
};
#[cfg(feature = "parquet")]
pub use export::ExportError;
pub use heavy::{HEAVY_MAX, HeavyKey, HeavyKeys, MINUTES_MAX, MINUTES_MIN, RecordCounts};
pub use log::{FLUSH_EVERY, Log, LogSettings, Summary};
pub use moment::{moment, timestamp};
pub use otlp::{Deliveries, Delivery, Otlp};
pub use recorder::{Counts, Recorder};
pub use store::LogError;
use tidegate_private_files as private_files;
