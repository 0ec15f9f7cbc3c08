//! Export of the log as a Parquet file, for analysis with other tools.

use std::fmt;
use std::io::Write;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

use crate::archive::Archive;
use crate::entry::DecisionRecord;
use crate::store::{LogError, signed};

/// The columns. Dimensions are an object of names and values.
const SCHEMA: &str = "message decision {
    REQUIRED INT64 at (TIMESTAMP(MILLIS, true));
    REQUIRED BYTE_ARRAY tenant (STRING);
    REQUIRED BYTE_ARRAY surface (STRING);
    REQUIRED BYTE_ARRAY key (STRING);
    REQUIRED INT64 cost (INTEGER(64, false));
    REQUIRED BYTE_ARRAY verdict (STRING);
    REQUIRED BYTE_ARRAY rule (STRING);
    REQUIRED INT64 rule_version (INTEGER(64, false));
    REQUIRED BYTE_ARRAY set_version (STRING);
    REQUIRED BYTE_ARRAY replaced_by (STRING);
    REQUIRED INT64 amount;
    REQUIRED INT64 burst;
    REQUIRED INT64 period_ms;
    REQUIRED INT64 remaining;
    REQUIRED INT64 level;
    OPTIONAL INT64 retry_ms;
    REQUIRED BYTE_ARRAY source (STRING);
    REQUIRED BYTE_ARRAY reason (STRING);
    OPTIONAL INT64 until (TIMESTAMP(MILLIS, true));
    REQUIRED BYTE_ARRAY region (STRING);
    REQUIRED BYTE_ARRAY node (STRING);
    REQUIRED DOUBLE sample_rate;
    REQUIRED BYTE_ARRAY dimensions (JSON);
}";

/// Records that are written together. Higher: smaller files; more memory while one is written.
const ROW_GROUP_RECORDS: usize = 50_000;

/// The reason why an export failed or is incomplete.
#[derive(Debug)]
pub enum ExportError {
    /// The log failed.
    Log(LogError),
    /// The file could not be written.
    File(ParquetError),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log(error) => error.fmt(f),
            Self::File(error) => write!(f, "export: {error}"),
        }
    }
}

impl std::error::Error for ExportError {}

impl From<LogError> for ExportError {
    fn from(error: LogError) -> Self {
        Self::Log(error)
    }
}

impl From<ParquetError> for ExportError {
    fn from(error: ParquetError) -> Self {
        Self::File(error)
    }
}

impl Archive {
    /// Writes the records from one moment to another as Parquet, in the order of their times: those
    /// of one tenant, or of all; how many there were.
    pub async fn export(
        &mut self,
        tenant: Option<&str>,
        (from_ms, to_ms): (u64, u64),
        out: impl Write + Send,
    ) -> Result<usize, ExportError> {
        let schema = Arc::new(parse_message_type(SCHEMA)?);
        let properties = WriterProperties::builder().set_compression(Compression::LZ4_RAW).build();
        let mut file = SerializedFileWriter::new(out, schema, Arc::new(properties))?;
        let (mut group, mut count, mut written) = (Vec::new(), 0, Ok(()));
        let each = |record: DecisionRecord| {
            if tenant.is_none_or(|tenant| record.tenant == tenant) {
                count += 1;
                group.push(record);
            }
            if group.len() == ROW_GROUP_RECORDS {
                written = write_group(&mut file, &group);
                group.clear();
            }
            written.is_ok()
        };
        self.replay(from_ms, to_ms, each).await?;
        written?;
        if !group.is_empty() {
            write_group(&mut file, &group)?;
        }
        file.close()?;
        Ok(count)
    }
}

fn write_group<W: Write + Send>(
    file: &mut SerializedFileWriter<W>,
    records: &[DecisionRecord],
) -> Result<(), ParquetError> {
    let mut columns = Columns { group: file.next_row_group()?, records };
    columns.numbers(|record| signed(record.at_ms))?;
    columns.texts(|record| &record.tenant)?;
    columns.texts(|record| &record.surface)?;
    columns.texts(|record| &record.key)?;
    columns.numbers(|record| record.cost.cast_signed())?;
    columns.texts(|record| record.verdict.as_str())?;
    columns.texts(|record| &record.rule)?;
    columns.numbers(|record| record.rule_version.cast_signed())?;
    columns.texts(|record| &record.set_version)?;
    columns.texts(|record| &record.replaced_by)?;
    columns.numbers(|record| i64::from(record.limit.amount))?;
    columns.numbers(|record| i64::from(record.limit.burst))?;
    columns.numbers(|record| signed(record.limit.period_ms))?;
    columns.numbers(|record| i64::from(record.remaining))?;
    columns.numbers(|record| i64::from(record.level))?;
    columns.some_numbers(|record| record.retry_ms.map(signed))?;
    columns.texts(|record| &record.source)?;
    columns.texts(|record| &record.reason)?;
    columns.some_numbers(|record| record.until_ms.map(signed))?;
    columns.texts(|record| &record.region)?;
    columns.texts(|record| &record.node)?;
    columns.shares(|record| record.sample_rate)?;
    columns.bytes(dimensions)?;
    columns.group.close()?;
    Ok(())
}

/// The columns of a row group, written one after the other in the order of the schema.
struct Columns<'c, W: Write + Send> {
    group: SerializedRowGroupWriter<'c, W>,
    records: &'c [DecisionRecord],
}

impl<W: Write + Send> Columns<'_, W> {
    fn write<T: parquet::data_type::DataType>(
        &mut self,
        values: &[T::T],
        present: Option<&[i16]>,
    ) -> Result<(), ParquetError> {
        let column = self.group.next_column()?;
        let mut column =
            column.ok_or_else(|| ParquetError::General("more columns than the schema".to_owned()))?;
        column.typed::<T>().write_batch(values, present, None)?;
        column.close()
    }

    fn numbers(&mut self, of: impl Fn(&DecisionRecord) -> i64) -> Result<(), ParquetError> {
        let values: Vec<i64> = self.records.iter().map(of).collect();
        self.write::<Int64Type>(&values, None)
    }

    fn some_numbers(&mut self, of: impl Fn(&DecisionRecord) -> Option<i64>) -> Result<(), ParquetError> {
        let values: Vec<i64> = self.records.iter().filter_map(&of).collect();
        let present: Vec<i16> = self.records.iter().map(|record| i16::from(of(record).is_some())).collect();
        self.write::<Int64Type>(&values, Some(&present))
    }

    fn shares(&mut self, of: impl Fn(&DecisionRecord) -> f64) -> Result<(), ParquetError> {
        let values: Vec<f64> = self.records.iter().map(of).collect();
        self.write::<DoubleType>(&values, None)
    }

    fn texts(&mut self, of: impl Fn(&DecisionRecord) -> &str) -> Result<(), ParquetError> {
        self.bytes(|record| of(record).as_bytes().to_vec())
    }

    fn bytes(&mut self, of: impl Fn(&DecisionRecord) -> Vec<u8>) -> Result<(), ParquetError> {
        let values: Vec<ByteArray> = self.records.iter().map(|record| ByteArray::from(of(record))).collect();
        self.write::<ByteArrayType>(&values, None)
    }
}

fn dimensions(record: &DecisionRecord) -> Vec<u8> {
    let object: serde_json::Map<_, _> =
        record.dimensions.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect();
    serde_json::Value::Object(object).to_string().into_bytes()
}
