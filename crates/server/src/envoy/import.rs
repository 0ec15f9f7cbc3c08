//! Imports descriptor files as rules of a store, as far as rules can express them.
//!
//! A limit without a value becomes a rule that counts by the keys on its path. A limit for one
//! value of the same key becomes an override of that rule, because it replaces it for this value.
//! Without such a rule, it becomes a rule for that value alone.

use serde_json::{Map, Value, json};

use super::file::{DescriptorRow, LimitRow, parse};
use super::tree::period;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;

/// The result of an import.
#[derive(Debug, Default, PartialEq)]
pub struct DescriptorImport {
    /// Operations that put the rules and overrides, as the admin listener takes them.
    pub operations: Vec<Value>,
    /// Settings that rules cannot express, each with the reason.
    pub left_out: Vec<String>,
}

/// A descriptor on the way to a limit.
#[derive(Clone, Debug)]
struct Step {
    key: String,
    value: Option<String>,
    /// Whether all values of a pattern are counted together.
    is_shared: bool,
}

impl Step {
    /// Whether each value of this key has its own count.
    fn counts_apart(&self) -> bool {
        self.value.as_ref().is_none_or(|value| value.contains('*')) && !self.is_shared
    }
}

/// Reads a descriptor file, and converts it to rules.
pub fn import_descriptors(text: &str) -> Result<DescriptorImport, Vec<String>> {
    let file = parse(text)?;
    let domain = file.domain.unwrap_or_default();
    let mut importing = DescriptorImporter { domain, imported: DescriptorImport::default() };
    importing.level(file.descriptors.unwrap_or_default(), &[]);
    Ok(importing.imported)
}

struct DescriptorImporter {
    domain: String,
    imported: DescriptorImport,
}

impl DescriptorImporter {
    fn level(&mut self, rows: Vec<DescriptorRow>, above: &[Step]) {
        // The keys that have a rule for all their values, which those for one value are overrides
        // of.
        let usual: Vec<String> = rows
            .iter()
            .filter(|row| row.value.as_deref().unwrap_or_default().is_empty())
            .filter(|row| row.rate_limit.as_ref().is_some_and(|limit| limit.unlimited != Some(true)))
            .filter_map(|row| row.key.clone())
            .collect();
        for row in rows {
            let key = row.key.clone().unwrap_or_default();
            let value = row.value.clone().filter(|value| !value.is_empty());
            let is_shared = row.share_threshold == Some(true);
            let path: Vec<Step> = [above, &[Step { key, value, is_shared }]].concat();
            self.descriptor(&row, &path, &usual);
            self.level(row.descriptors.unwrap_or_default(), &path);
        }
    }

    fn descriptor(&mut self, row: &DescriptorRow, path: &[Step], usual: &[String]) {
        let (Some(last), Some(limit)) = (path.last(), &row.rate_limit) else { return };
        let place = self.name(path);
        let is_override = last.value.is_some() && usual.contains(&last.key);
        self.note(row, limit, &place);
        let mut body = match fields(limit) {
            Ok(fields) => fields,
            Err(UnsupportedLimit::Unlimited) if is_override => self.unlimited(path),
            Err(UnsupportedLimit::Unlimited) => {
                return self.leave_out(&place, "unlimited, and no rule would limit it");
            }
            Err(UnsupportedLimit::Unit(unit)) => {
                return self.leave_out(&place, &format!("{unit:?} is no unit"));
            }
        };
        if row.shadow_mode == Some(true) {
            body.insert("mode".to_owned(), "shadow".into());
        }
        let kind = if is_override {
            if last.is_shared && limit.unlimited != Some(true) {
                self.leave_out(&place, "share_threshold: each value is counted for itself");
            }
            body.insert("rule".to_owned(), self.name(&usual_path(path)).into());
            body.insert("key".to_owned(), patterns(path).into());
            "override"
        } else {
            body.insert("key".to_owned(), keys(path).into());
            let conditions = conditions(path);
            if !conditions.is_empty() {
                body.insert("when".to_owned(), conditions.into());
            }
            "rule"
        };
        self.imported.operations.push(json!({ "do": "put", "kind": kind, "name": place, "body": body }));
    }

    /// Returns the override for an unlimited value: it counts as the rule does, but in shadow mode,
    /// so it denies nothing.
    fn unlimited(&self, path: &[Step]) -> Map<String, Value> {
        let rule = self.name(&usual_path(path));
        let named = |operation: &&Value| operation["kind"] == "rule" && operation["name"] == *rule;
        let known = self.imported.operations.iter().find(named);
        let limit = known.map_or(Value::from(u32::MAX), |operation| operation["body"]["limit"].clone());
        [("limit".to_owned(), limit), ("mode".to_owned(), "shadow".into())].into_iter().collect()
    }

    /// Notes settings that a rule cannot express.
    fn note(&mut self, row: &DescriptorRow, limit: &LimitRow, place: &str) {
        let notes = [
            (row.quota_mode == Some(true), "quota_mode: the rule is enforced"),
            (
                row.metadata.as_ref().is_some_and(super::file::Metadata::charges_always),
                "charge: only allowed requests are charged",
            ),
            (limit.replaces.as_ref().is_some_and(|all| !all.is_empty()), "replaces: both limits apply"),
        ];
        for (_, words) in notes.into_iter().filter(|(applies, _)| *applies) {
            self.leave_out(place, words);
        }
    }

    fn leave_out(&mut self, place: &str, words: &str) {
        self.imported.left_out.push(format!("{place}: {words}"));
    }

    /// Returns the name of a rule: the domain and the descriptors on its path.
    fn name(&self, path: &[Step]) -> String {
        let step = |step: &Step| match &step.value {
            None => step.key.clone(),
            Some(value) => format!("{}={value}", step.key),
        };
        std::iter::once(self.domain.clone()).chain(path.iter().map(step)).collect::<Vec<_>>().join("/")
    }
}

/// The path of the rule for all values of the last key.
fn usual_path(path: &[Step]) -> Vec<Step> {
    let mut path = path.to_vec();
    if let Some(last) = path.last_mut() {
        (last.value, last.is_shared) = (None, false);
    }
    path
}

/// Returns the dimensions that the rule counts by.
fn keys(path: &[Step]) -> Vec<&str> {
    path.iter().filter(|step| step.counts_apart()).map(|step| step.key.as_str()).collect()
}

/// Returns the key of an override: `*` for the keys above, and the value.
fn patterns(path: &[Step]) -> Vec<&str> {
    let above = path.split_last().map(|(_, above)| above).unwrap_or_default();
    let above = above.iter().filter(|step| step.counts_apart()).map(|_| "*");
    above.chain(path.last().and_then(|last| last.value.as_deref())).collect()
}

/// The values that requests must have.
fn conditions(path: &[Step]) -> Map<String, Value> {
    path.iter().filter_map(|step| Some((step.key.clone(), step.value.clone()?.into()))).collect()
}

/// The reason why a rule cannot express a limit.
enum UnsupportedLimit {
    Unlimited,
    Unit(String),
}

/// Converts a limit to fields of a rule.
fn fields(limit: &LimitRow) -> Result<Map<String, Value>, UnsupportedLimit> {
    if limit.unlimited == Some(true) {
        return Err(UnsupportedLimit::Unlimited);
    }
    let written = limit.unit.clone().unwrap_or_default();
    let period = Unit::from_str_name(&written.to_ascii_uppercase())
        .and_then(period)
        .ok_or(UnsupportedLimit::Unit(written))?;
    let amount = limit.requests_per_unit.unwrap_or_default();
    let period = format!("{}s", period.as_secs());
    Ok([("limit".to_owned(), amount.into()), ("period".to_owned(), period.into())].into_iter().collect())
}

#[cfg(test)]
mod tests {
    use tidegate_rules::RuleSet;
    use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};

    use super::*;

    const FILE: &str = "
domain: edge
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 60 }
    descriptors:
      - key: path
        value: /login
        rate_limit: { unit: hour, requests_per_unit: 5 }
        shadow_mode: true
  - key: user
    value: root
    rate_limit: { unlimited: true }
  - key: user
    value: batch-*
    rate_limit: { unit: DAY, requests_per_unit: 9, replaces: [{ name: other }] }
  - key: country
    value: xx
    rate_limit: { unit: second, requests_per_unit: 0 }
  - key: free
    rate_limit: { unlimited: true }
";

    #[test]
    fn descriptors_become_rules_and_overrides_that_compile() {
        let imported = import_descriptors(FILE).expect("a good file");
        let put = |kind: &str, name: &str, body: Value| json!({"do": "put", "kind": kind, "name": name, "body": body});
        assert_eq!(
            imported.operations,
            [
                put("rule", "edge/user", json!({ "limit": 60, "period": "60s", "key": ["user"] })),
                put(
                    "rule",
                    "edge/user/path=/login",
                    json!({ "limit": 5, "period": "3600s", "mode": "shadow",
                        "key": ["user"], "when": { "path": "/login" } })
                ),
                put(
                    "override",
                    "edge/user=root",
                    json!({ "limit": 60, "mode": "shadow", "rule": "edge/user", "key": ["root"] })
                ),
                put(
                    "override",
                    "edge/user=batch-*",
                    json!({ "limit": 9, "period": "86400s", "rule": "edge/user", "key": ["batch-*"] })
                ),
                put(
                    "rule",
                    "edge/country=xx",
                    json!({ "limit": 0, "period": "1s", "key": [], "when": { "country": "xx" } })
                ),
            ]
        );
        assert_eq!(
            imported.left_out,
            [
                "edge/user=batch-*: replaces: both limits apply",
                "edge/free: unlimited, and no rule would limit it"
            ]
        );
        let row = |operation: &Value| RuleRow {
            kind: if operation["kind"] == "rule" { RowKind::Rule } else { RowKind::Override },
            name: operation["name"].as_str().expect("text").to_owned(),
            body: operation["body"].to_string(),
            version: 1,
        };
        let rule_rows =
            RuleRows { rows: imported.operations.iter().map(row).collect(), ..RuleRows::default() };
        let set = RuleSet::compile(&rule_rows, None, 0).expect("a good book");
        assert_eq!((set.rules().len(), set.overrides()), (3, 2));
    }

    #[test]
    fn inexpressible_share_threshold_is_reported() {
        let file = "
domain: edge
descriptors:
  - key: path
    rate_limit: { unit: minute, requests_per_unit: 60 }
  - key: path
    value: /files/*
    share_threshold: true
    rate_limit: { unit: minute, requests_per_unit: 10 }
  - key: path
    value: /free/*
    share_threshold: true
    rate_limit: { unlimited: true }
  - key: path
    value: /apart/*
    rate_limit: { unit: minute, requests_per_unit: 20 }
  - key: team
    value: a-*
    share_threshold: true
    rate_limit: { unit: minute, requests_per_unit: 30 }
";
        let imported = import_descriptors(file).expect("a good file");
        let told = "edge/path=/files/*: share_threshold: each value is counted for itself";
        assert_eq!(imported.left_out, [told]);
        let rule = imported.operations.iter().find(|operation| operation["name"] == "edge/team=a-*");
        assert_eq!(
            rule.map(|rule| &rule["body"]["key"]),
            Some(&json!([])),
            "a rule counts all of them together"
        );
    }

    #[test]
    fn a_file_that_is_none_is_refused() {
        assert!(import_descriptors("domain: [").is_err());
        assert!(import_descriptors("domain: a\nlimits: []").is_err(), "an unknown key");
    }
}
