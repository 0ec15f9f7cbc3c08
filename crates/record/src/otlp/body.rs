//! Records as the JSON of OTLP: an `ExportLogsServiceRequest`, whose 64-bit numbers are strings.

use serde::{Deserialize, Serialize};

use crate::entry::RecordKind;
use crate::layout::{StoredDecision, records};
use crate::store::{BlockOrigin, signed};

const SCOPE: &str = "tidegate.decisions";
const EVENT: &str = "tidegate.decision";

/// `SEVERITY_NUMBER_INFO`: a denial is the purpose of a limit, not an error.
const SEVERITY: u8 = 9;

/// Sender of the records.
pub(super) struct Resource {
    region: String,
    node: String,
    sample_rate: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'b> {
    resource_logs: [ResourceLogs<'b>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceLogs<'b> {
    resource: Attributes<'b>,
    scope_logs: [ScopeLogs<'b>; 1],
}

#[derive(Serialize)]
struct Attributes<'b> {
    attributes: Vec<Attribute<'b>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ScopeLogs<'b> {
    scope: Scope,
    log_records: Vec<LogRecord<'b>>,
}

#[derive(Serialize)]
struct Scope {
    name: &'static str,
    version: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LogRecord<'b> {
    time_unix_nano: String,
    observed_time_unix_nano: String,
    severity_number: u8,
    severity_text: &'static str,
    event_name: &'static str,
    body: Value<'b>,
    attributes: Vec<Attribute<'b>>,
}

#[derive(Serialize)]
struct Attribute<'b> {
    key: &'b str,
    value: Value<'b>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
enum Value<'b> {
    #[serde(rename = "stringValue")]
    Text(&'b str),
    #[serde(rename = "stringValue")]
    Sentence(String),
    #[serde(rename = "intValue")]
    Number(String),
    #[serde(rename = "doubleValue")]
    Share(f64),
    #[serde(rename = "kvlistValue")]
    Object { values: Vec<Attribute<'b>> },
}

impl Resource {
    pub(super) fn new(writer: &BlockOrigin) -> Self {
        Self { region: writer.region.clone(), node: writer.node.clone(), sample_rate: writer.sample_rate }
    }

    /// The records of a batch as a request.
    pub(super) fn body(&self, batch: &[u8]) -> Vec<u8> {
        let log_records = records(batch).map(|written| self.log_record(&written)).collect();
        let scope = Scope { name: SCOPE, version: env!("CARGO_PKG_VERSION") };
        let request = Request {
            resource_logs: [ResourceLogs {
                resource: Attributes { attributes: self.attributes() },
                scope_logs: [ScopeLogs { scope, log_records }],
            }],
        };
        // Serialization cannot fail: every map key is text.
        serde_json::to_vec(&request).unwrap_or_default()
    }

    fn attributes(&self) -> Vec<Attribute<'_>> {
        let mut attributes = vec![
            text("service.name", "tidegate"),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("host.name", &self.node),
        ];
        if !self.region.is_empty() {
            attributes.push(text("tidegate.region", &self.region));
        }
        attributes
    }

    fn log_record<'b>(&self, written: &StoredDecision<'b>) -> LogRecord<'b> {
        let nanoseconds = u128::from(written.entry.at_ms) * 1_000_000;
        LogRecord {
            time_unix_nano: nanoseconds.to_string(),
            observed_time_unix_nano: nanoseconds.to_string(),
            severity_number: SEVERITY,
            severity_text: "INFO",
            event_name: EVENT,
            body: Value::Sentence(format!(
                "{} {} by {}",
                written.entry.key,
                written.entry.verdict.as_str(),
                written.entry.rule
            )),
            attributes: self.decision(written),
        }
    }

    /// By the names that the other ways to read the log have.
    fn decision<'b>(&self, written: &StoredDecision<'b>) -> Vec<Attribute<'b>> {
        let entry = &written.entry;
        let is_sample = entry.verdict.kind() == RecordKind::Sample;
        let dimensions = written.dimensions().map(|(name, value)| text(name, value)).collect();
        let mut attributes = vec![
            text("tidegate.tenant", entry.tenant),
            text("tidegate.surface", entry.surface),
            text("tidegate.key", entry.key),
            number("tidegate.cost", entry.cost),
            text("tidegate.verdict", entry.verdict.as_str()),
            text("tidegate.rule", entry.rule),
            number("tidegate.rule_version", entry.rule_version),
            text("tidegate.set_version", entry.set_version),
            number("tidegate.limit.amount", entry.limit.amount.into()),
            number("tidegate.limit.burst", entry.limit.burst.into()),
            number("tidegate.limit.period_ms", entry.limit.period_ms),
            number("tidegate.remaining", entry.remaining.into()),
            number("tidegate.level", entry.level().into()),
            text("tidegate.source", entry.source),
            text("tidegate.reason", entry.reason),
            Attribute {
                key: "tidegate.sample_rate",
                value: Value::Share(if is_sample { self.sample_rate } else { 1.0 }),
            },
            Attribute { key: "tidegate.dimensions", value: Value::Object { values: dimensions } },
        ];
        if !entry.replaced_by.is_empty() {
            attributes.push(text("tidegate.replaced_by", entry.replaced_by));
        }
        if let Some(ms) = entry.until_ms {
            attributes.push(number("tidegate.until_ms", ms));
        }
        if let Some(ms) = entry.retry_ms {
            attributes.push(number("tidegate.retry_ms", ms));
        }
        attributes
    }
}

fn text<'b>(key: &'b str, value: &'b str) -> Attribute<'b> {
    Attribute { key, value: Value::Text(value) }
}

/// Returns a number attribute. OTLP numbers are signed, so larger values become the maximum.
fn number(key: &str, value: u64) -> Attribute<'_> {
    Attribute { key, value: Value::Number(signed(value).to_string()) }
}

/// Returns the number of records that a collector rejected; 0 if the response is not understood.
pub(super) fn rejected(answer: &str) -> u64 {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        partial_success: Option<Partial>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Partial {
        rejected_log_records: Option<Count>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Count {
        Text(String),
        Number(u64),
    }
    let answer: Option<Answer> = serde_json::from_str(answer).ok();
    match answer.and_then(|answer| answer.partial_success?.rejected_log_records) {
        Some(Count::Number(count)) => count,
        Some(Count::Text(count)) => count.parse().unwrap_or(0),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_record_count_is_parsed() {
        for (answer, count) in [
            ("{}", 0),
            ("", 0),
            ("not JSON", 0),
            (r#"{"partialSuccess":{}}"#, 0),
            (r#"{"partialSuccess":{"rejectedLogRecords":"3","errorMessage":"too old"}}"#, 3),
            (r#"{"partialSuccess":{"rejectedLogRecords":4}}"#, 4),
        ] {
            assert_eq!(rejected(answer), count, "{answer}");
        }
    }
}
