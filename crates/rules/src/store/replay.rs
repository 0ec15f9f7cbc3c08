//! Replays the audit, to compare the store with it.
//!
//! Each entry states what it did, or the digest of the operations that did it. So the entries, in
//! order, record the rows, changes, emergencies and credentials that a store must have.
//!
//! Entries of earlier versions lack some digests (`effect_sha256`, `created_ms`). A field that an
//! entry does not state is not compared. No entry loses a field unnoticed, because its hash covers
//! the whole detail.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::audit::{AuditEntry, hexadecimal};
use crate::change::{ChangeNeeds, ChangeState, Operation};
use crate::rows::RowKind;

/// The fields of all details. An entry has those of its action.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Detail {
    change: u64,
    base_revision: u64,
    reason: String,
    needs: String,
    operations_sha256: String,
    effect_sha256: Option<String>,
    undoes: Vec<u64>,
    revision: u64,
    #[serde(rename = "override")]
    override_name: String,
    version: u64,
    override_revision: u64,
    body: serde_json::Value,
    id: String,
    ids: Vec<String>,
    hash: String,
    name: String,
    tenant: String,
    role: String,
    created_ms: Option<u64>,
    expires_ms: Option<u64>,
    credentials: Vec<ExpiredCredential>,
}

#[derive(Deserialize)]
struct ExpiredCredential {
    hash: String,
}

/// The store as the entries of the audit made it.
#[derive(Default)]
pub(super) struct AuditReplay {
    pub(super) rows: HashMap<(RowKind, String), ReplayedRow>,
    pub(super) changes: BTreeMap<u64, ReplayedChange>,
    pub(super) emergencies: HashMap<String, ReplayedEmergency>,
    /// By the hash of the token.
    pub(super) credentials: HashMap<String, ReplayedCredential>,
    /// By the name of a credential and its maker.
    pub(super) makers: HashMap<(String, String), ReplayedMaker>,
    pub(super) revision: u64,
    pub(super) override_revision: u64,
    pub(super) emergency_revision: u64,
    pub(super) credential_revision: u64,
    /// By revision: the change whose operations are not those of the audit.
    pub(super) unproven: BTreeMap<u64, u64>,
}

/// A row of a rule, template or override.
pub(super) struct ReplayedRow {
    /// `None`: deleted.
    pub(super) body: Option<BodyDigest>,
    pub(super) version: u64,
    pub(super) revision: u64,
    pub(super) override_revision: u64,
}

/// A change. Its texts are digests, because there may be many.
pub(super) struct ReplayedChange {
    pub(super) state: ChangeState,
    pub(super) needs: String,
    pub(super) base_revision: u64,
    pub(super) author: String,
    pub(super) reason_sha256: String,
    pub(super) created_ms: u64,
    pub(super) operations_sha256: String,
    pub(super) effect_sha256: Option<String>,
    pub(super) undoes: Vec<u64>,
    pub(super) approval: Option<(String, u64)>,
    pub(super) revision: Option<u64>,
    /// Whether the operations that undo it are those that restore the rows before it.
    pub(super) restores_rows: bool,
}

pub(super) struct ReplayedEmergency {
    pub(super) body: BodyDigest,
    pub(super) author: String,
    pub(super) created_ms: u64,
    pub(super) expires_ms: u64,
    pub(super) revision: u64,
}

pub(super) struct ReplayedCredential {
    pub(super) name: String,
    pub(super) tenant: String,
    pub(super) role: String,
    pub(super) created_ms: Option<u64>,
    pub(super) expires_ms: Option<u64>,
    pub(super) revision: u64,
}

/// The record of the maker of a credential.
#[derive(Default)]
pub(super) struct ReplayedMaker {
    /// How many changes had been proposed.
    pub(super) change_count: u64,
    /// Whether the store must have the record. The first versions kept none.
    pub(super) is_certain: bool,
}

/// The digest of a body.
#[derive(Clone, Copy)]
pub(super) enum BodyDigest {
    /// Of its text.
    Text([u8; 32]),
    /// Of its meaning: an entry with a JSON object does not state how the row spells it.
    Json([u8; 32]),
}

impl BodyDigest {
    fn of_text(text: &str) -> Self {
        Self::Text(Sha256::digest(text).into())
    }

    fn of_json(body: &serde_json::Value) -> Self {
        Self::Json(Sha256::digest(body.to_string()).into())
    }

    pub(super) fn is_of(&self, body: &str) -> bool {
        match self {
            Self::Text(digest) => Sha256::digest(body)[..] == *digest,
            Self::Json(digest) => serde_json::from_str::<serde_json::Value>(body)
                .is_ok_and(|body| Sha256::digest(body.to_string())[..] == *digest),
        }
    }
}

/// The operations of an applied change, as the store has them.
#[derive(Default)]
pub(super) struct StoredOperations {
    pub(super) operations: String,
    pub(super) restores: String,
}

pub(super) fn sha256(text: &str) -> String {
    hexadecimal(&Sha256::digest(text))
}

impl AuditReplay {
    /// Takes the next entry. Returns the change that it applied, whose operations come next.
    pub(super) fn take(&mut self, entry: &AuditEntry) -> Option<u64> {
        // No server writes a detail that it cannot read.
        let detail: Detail = serde_json::from_str(&entry.detail).ok()?;
        let id = detail.change;
        match entry.action.as_str() {
            "change.propose" => self.propose(entry, detail),
            "change.approve" => self.change(id, |change| {
                change.state = ChangeState::Proposed;
                change.approval = Some((entry.actor.clone(), entry.at_ms));
            }),
            "change.wait" => self.change(id, |change| {
                (change.state, change.approval) = (ChangeState::Waiting, None);
                (change.needs, change.effect_sha256) = (detail.needs, detail.effect_sha256);
            }),
            "change.reject" => self.change(id, |change| change.state = ChangeState::Rejected),
            "change.apply" => {
                self.mark_applied(id, detail.revision);
                return Some(id);
            }
            "override.set" => self.set_override(detail),
            "override.delete" => self.delete_override(detail),
            "emergency.put" | "emergency.renew" | "emergency.end" | "emergency.expire" => {
                self.take_emergency(entry, detail);
            }
            "credential.put" | "credential.revoke" | "credential.expire" => {
                self.take_credential(entry, detail);
            }
            _ => {}
        }
        None
    }

    fn change(&mut self, id: u64, with: impl FnOnce(&mut ReplayedChange)) {
        if let Some(change) = self.changes.get_mut(&id) {
            with(change);
        }
    }

    fn propose(&mut self, entry: &AuditEntry, detail: Detail) {
        let waits = detail.needs == ChangeNeeds::Approver.word();
        let change = ReplayedChange {
            state: if waits { ChangeState::Waiting } else { ChangeState::Proposed },
            needs: detail.needs,
            base_revision: detail.base_revision,
            author: entry.actor.clone(),
            reason_sha256: sha256(&detail.reason),
            created_ms: entry.at_ms,
            operations_sha256: detail.operations_sha256,
            effect_sha256: detail.effect_sha256,
            undoes: detail.undoes,
            approval: None,
            revision: None,
            restores_rows: true,
        };
        self.changes.insert(detail.change, change);
    }

    fn mark_applied(&mut self, id: u64, revision: u64) {
        self.revision = revision;
        let mut undoes = Vec::new();
        self.change(id, |change| {
            (change.state, change.revision) = (ChangeState::Applied, Some(revision));
            undoes.clone_from(&change.undoes);
        });
        for undone in undoes {
            self.change(undone, |change| change.state = ChangeState::RolledBack);
        }
    }

    /// Applies the operations of a change, as the store has them.
    pub(super) fn apply(&mut self, id: u64, stored: &StoredOperations) {
        let Some(change) = self.changes.get(&id) else { return };
        let revision = self.revision;
        if sha256(&stored.operations) != change.operations_sha256 {
            self.unproven.insert(revision, id);
        }
        let operations: Vec<Operation> = serde_json::from_str(&stored.operations).unwrap_or_default();
        let restores: Vec<Operation> = serde_json::from_str(&stored.restores).unwrap_or_default();
        let restores_rows = self.unproven.contains_key(&revision) || self.restore(&restores, &operations);
        for operation in &operations {
            let (kind, name) = operation.row();
            let key = (kind, name.to_owned());
            let version = self.rows.get(&key).map_or(0, |row| row.version) + 1;
            let body = operation.body().map(BodyDigest::of_text);
            self.rows.insert(key, ReplayedRow { body, version, revision, override_revision: 0 });
        }
        self.change(id, |change| change.restores_rows = restores_rows);
    }

    /// Whether operations restore the rows that others are about to write.
    fn restore(&self, restores: &[Operation], written: &[Operation]) -> bool {
        let restores_row = |(restore, write): (&Operation, &Operation)| {
            let (kind, name) = write.row();
            let row = self.rows.get(&(kind, name.to_owned()));
            let is_unproven = match row {
                Some(row) => self.unproven.contains_key(&row.revision),
                None => !self.unproven.is_empty(),
            };
            let before = row.and_then(|row| row.body);
            let is_same = match (before, restore.body()) {
                (Some(before), Some(body)) => before.is_of(body),
                (before, body) => before.is_none() && body.is_none(),
            };
            restore.row() == write.row() && (is_unproven || is_same)
        };
        restores.len() == written.len() && restores.iter().zip(written).all(restores_row)
    }

    fn set_override(&mut self, detail: Detail) {
        self.override_revision = detail.override_revision;
        let key = (RowKind::Override, detail.override_name);
        let revision = self.rows.get(&key).map_or(self.revision, |row| row.revision);
        let body = Some(BodyDigest::of_json(&detail.body));
        let (version, override_revision) = (detail.version, detail.override_revision);
        self.rows.insert(key, ReplayedRow { body, version, revision, override_revision });
    }

    fn delete_override(&mut self, detail: Detail) {
        self.override_revision = detail.override_revision;
        if let Some(row) = self.rows.get_mut(&(RowKind::Override, detail.override_name)) {
            (row.body, row.override_revision) = (None, detail.override_revision);
            row.version += 1;
        }
    }

    fn take_emergency(&mut self, entry: &AuditEntry, detail: Detail) {
        if entry.action != "emergency.expire" {
            self.emergency_revision += 1;
        }
        let expires_ms = detail.expires_ms.unwrap_or_default();
        match entry.action.as_str() {
            "emergency.put" => {
                let emergency = ReplayedEmergency {
                    body: BodyDigest::of_text(detail.body.as_str().unwrap_or_default()),
                    author: entry.actor.clone(),
                    created_ms: entry.at_ms,
                    expires_ms,
                    revision: self.emergency_revision,
                };
                self.emergencies.insert(detail.id, emergency);
            }
            "emergency.renew" => {
                if let Some(emergency) = self.emergencies.get_mut(&detail.id) {
                    (emergency.expires_ms, emergency.revision) = (expires_ms, self.emergency_revision);
                }
            }
            "emergency.end" => drop(self.emergencies.remove(&detail.id)),
            _ => self.emergencies.retain(|id, _| !detail.ids.contains(id)),
        }
    }

    fn take_credential(&mut self, entry: &AuditEntry, detail: Detail) {
        if entry.action != "credential.expire" {
            self.credential_revision += 1;
        }
        match entry.action.as_str() {
            "credential.put" => {
                let maker = self.makers.entry((detail.name.clone(), entry.actor.clone())).or_default();
                maker.change_count = self.changes.last_key_value().map_or(0, |(id, _)| *id);
                // An entry with this field is of a version that keeps the record.
                maker.is_certain |= detail.created_ms.is_some();
                let Detail { name, tenant, role, created_ms, expires_ms, .. } = detail;
                let revision = self.credential_revision;
                let credential = ReplayedCredential { name, tenant, role, created_ms, expires_ms, revision };
                self.credentials.insert(detail.hash, credential);
            }
            "credential.revoke" => drop(self.credentials.remove(&detail.hash)),
            _ => {
                for expired in detail.credentials {
                    self.credentials.remove(&expired.hash);
                }
            }
        }
    }
}
