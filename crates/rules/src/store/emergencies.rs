//! Emergencies, which take precedence over all rules for a limited time, on connections of their
//! own.

use serde::Deserialize;
use serde_json::json;

use super::database::Value;
use super::write_transaction::WriteTransaction;
use super::{Attribution, Store, StoreError, rows};
use crate::RuleSet;
use crate::change::{InvalidInput, Operation, check_body, check_name, kind_name};
use crate::emergency::EMERGENCIES_MAX;
use crate::problems::Problems;
use crate::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};

/// Maximum time to the expiry of an emergency, in milliseconds. Longer: fewer renewals, but a
/// forgotten emergency lasts longer.
pub const EMERGENCY_MS_MAX: u64 = 60 * 60 * 1_000;

impl Store {
    /// Puts an emergency in place of the one with its id. Gives the emergency revision.
    pub async fn put_emergency(
        &self,
        emergency: &EmergencyRow,
        act: Attribution<'_>,
    ) -> Result<u64, StoreError> {
        check_name("id", &emergency.id)?;
        check_body(&emergency.body)?;
        check_expiry(emergency.expires_ms, act.now_ms)?;
        let mut writing = self.begin_urgently(act).await?;
        writing.remove_expired().await?;
        writing.check_room(&emergency.id).await?;
        writing.check_sense(emergency).await?;
        let put = "INSERT INTO tidegate_emergencies (id, body, author, created_ms, expires_ms) \
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO UPDATE SET body = excluded.body, \
             author = excluded.author, created_ms = excluded.created_ms, expires_ms = excluded.expires_ms";
        let values = [
            Value::Text(&emergency.id),
            Value::Text(&emergency.body),
            Value::Text(act.by),
            Value::Number(act.now_ms),
            Value::Number(emergency.expires_ms),
        ];
        writing.transaction.execute(put, &values).await?;
        let detail =
            json!({ "id": emergency.id, "body": emergency.body, "expires_ms": emergency.expires_ms });
        writing.note("emergency.put", &detail).await?;
        self.commit_emergency(writing).await
    }

    /// Lets one that has not expired last for longer. Gives the emergency revision.
    pub async fn renew_emergency(
        &self,
        id: &str,
        expires_ms: u64,
        act: Attribution<'_>,
    ) -> Result<u64, StoreError> {
        check_expiry(expires_ms, act.now_ms)?;
        let mut writing = self.begin_urgently(act).await?;
        writing.remove_expired().await?;
        let renew = "UPDATE tidegate_emergencies SET expires_ms = $2 WHERE id = $1";
        let renewed =
            writing.transaction.execute(renew, &[Value::Text(id), Value::Number(expires_ms)]).await?;
        if renewed == 0 {
            return Err(StoreError::NotThere(format!("emergency {id:?}")));
        }
        writing.note("emergency.renew", &json!({ "id": id, "expires_ms": expires_ms })).await?;
        self.commit_emergency(writing).await
    }

    /// Ends one. Gives the emergency revision.
    pub async fn end_emergency(&self, id: &str, act: Attribution<'_>) -> Result<u64, StoreError> {
        let mut writing = self.begin_urgently(act).await?;
        let end = "DELETE FROM tidegate_emergencies WHERE id = $1";
        if writing.transaction.execute(end, &[Value::Text(id)]).await? == 0 {
            return Err(StoreError::NotThere(format!("emergency {id:?}")));
        }
        writing.note("emergency.end", &json!({ "id": id })).await?;
        self.commit_emergency(writing).await
    }

    async fn commit_emergency(&self, mut writing: WriteTransaction<'_>) -> Result<u64, StoreError> {
        writing.revisions.emergency_revision += 1;
        let revision = writing.revisions.emergency_revision;
        self.commit(writing).await?;
        Ok(revision)
    }
}

impl WriteTransaction<'_> {
    /// Checks that an emergency is valid with the current version of the rule that it names. Every
    /// server would refuse an invalid one, and the rest of the rule set with it. Other rules,
    /// possibly many, matter only for the number of header fields that all use together.
    async fn check_sense(&mut self, emergency: &EmergencyRow) -> Result<(), StoreError> {
        let mut rows = Vec::new();
        if let RowReferences { rule: Some(name), .. } = refers(&emergency.body) {
            let missing = || StoreError::NotThere(format!("rule {name:?}"));
            let rule = self.row(RowKind::Rule, &name).await?.ok_or_else(missing)?;
            if let RowReferences { template: Some(name), .. } = refers(&rule.body) {
                rows.extend(self.row(RowKind::Template, &name).await?);
            }
            rows.push(rule);
        }
        let rule_rows =
            RuleRows { rows: rows.into(), emergencies: vec![emergency.clone()], ..RuleRows::default() };
        let set = RuleSet::compile(&rule_rows, None, self.act.now_ms).map_err(|problems| unfit(&problems))?;
        if set.emergencies_look_at_headers() { self.check_headers(emergency).await } else { Ok(()) }
    }

    /// Limits the header fields that all rules and emergencies use together. This compiles all
    /// rules while other writers wait, so it runs only for an emergency that uses header fields. An
    /// earlier check may have missed an emergency added since.
    async fn check_headers(&mut self, emergency: &EmergencyRow) -> Result<(), StoreError> {
        let mut emergencies = self.transaction.all(rows::EMERGENCIES, &[], rows::emergency).await?;
        emergencies.retain(|other| other.id != emergency.id);
        let rows = self.transaction.all(rows::RULES, &[], rows::row).await?;
        let mut rule_rows = RuleRows { rows: rows.into(), emergencies, ..RuleRows::default() };
        // No server loads rules that do not compile. The emergency then applies to the rule set
        // that servers have.
        let Ok(set) = RuleSet::compile(&rule_rows, None, self.act.now_ms) else { return Ok(()) };
        rule_rows.emergencies.push(emergency.clone());
        set.with_emergencies(0, &rule_rows.emergencies, self.act.now_ms)
            .map(drop)
            .map_err(|problems| unfit(&problems))
    }

    async fn row(&mut self, kind: RowKind, name: &str) -> Result<Option<RuleRow>, StoreError> {
        let select = "SELECT kind, name, body, version FROM tidegate_rows WHERE kind = $1 AND name = $2 \
             AND body IS NOT NULL";
        self.transaction.one(select, &[Value::Text(kind_name(kind)), Value::Text(name)], rows::row).await
    }

    /// For the same reason a rule is not deleted while an emergency is about it.
    pub(super) async fn check_emergencies(&mut self, operations: &[Operation]) -> Result<(), StoreError> {
        let emergencies = self.transaction.all(rows::EMERGENCIES, &[], rows::emergency).await?;
        let found = in_emergency(operations, &emergencies, self.act.now_ms);
        if found.is_empty() { Ok(()) } else { Err(StoreError::InEmergency(found)) }
    }

    /// One more than may be would be refused by every server, and all others with it.
    async fn check_room(&mut self, id: &str) -> Result<(), StoreError> {
        let select = "SELECT count(*) FROM tidegate_emergencies WHERE id <> $1";
        let others = self.transaction.one(select, &[Value::Text(id)], |cells| cells.number(0)).await?;
        if others.is_some_and(|others| others < EMERGENCIES_MAX as u64) {
            Ok(())
        } else {
            Err(StoreError::TooManyEmergencies)
        }
    }

    async fn remove_expired(&mut self) -> Result<(), StoreError> {
        let remove = "DELETE FROM tidegate_emergencies WHERE expires_ms <= $1 RETURNING id";
        let mut removed =
            self.transaction.all(remove, &[Value::Number(self.act.now_ms)], |cells| cells.owned(0)).await?;
        removed.sort_unstable();
        if !removed.is_empty() {
            self.note("emergency.expire", &json!({ "ids": removed })).await?;
        }
        Ok(())
    }
}

fn unfit(problems: &Problems) -> StoreError {
    InvalidInput(problems.to_string()).into()
}

/// The rules that operations delete although an emergency is about them, each with its id.
pub fn in_emergency(
    operations: &[Operation],
    emergencies: &[EmergencyRow],
    now_ms: u64,
) -> Vec<(String, String)> {
    let is_deleted = |rule: &str| {
        operations
            .iter()
            .any(|operation| operation.row() == (RowKind::Rule, rule) && operation.body().is_none())
    };
    let lasting = emergencies.iter().filter(|emergency| now_ms < emergency.expires_ms);
    let about = lasting.filter_map(|emergency| Some((refers(&emergency.body).rule?, emergency.id.clone())));
    about.filter(|(rule, _)| is_deleted(rule)).collect()
}

/// References of a row to other rows.
#[derive(Default, Deserialize)]
struct RowReferences {
    rule: Option<String>,
    template: Option<String>,
}

/// A body that cannot be parsed has no references.
fn refers(body: &str) -> RowReferences {
    serde_json::from_str(body).unwrap_or_default()
}

fn check_expiry(expires_ms: u64, now_ms: u64) -> Result<(), InvalidInput> {
    let latest = now_ms.saturating_add(EMERGENCY_MS_MAX);
    if expires_ms > now_ms && expires_ms <= latest {
        return Ok(());
    }
    let earliest = now_ms.saturating_add(1);
    Err(InvalidInput(format!("expires_ms: {expires_ms} is outside {earliest} to {latest}, an hour from now")))
}
