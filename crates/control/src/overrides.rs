//! Overrides of namespaces: clients write them without a plan, and no rule is compiled again for
//! them.

use std::fmt;
use std::sync::Arc;

use tidegate_rules::NamespaceOverrides;
use tidegate_rules::rows::{OverrideChange, RuleRows};
use tidegate_rules::store::{OverrideOutcome, OverrideWrite, StoreError};

use crate::control::{Control, LoadDepth, LoadError, let_go};
use crate::node::Node;

/// The reason why overrides were not written.
#[derive(Debug)]
pub enum OverrideWriteError {
    /// The store refused them, or is unreachable.
    Store(StoreError),
    /// They are stored, and not yet in force on this node.
    NotInForce(String),
}

impl fmt::Display for OverrideWriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::NotInForce(problem) => {
                write!(f, "overrides: stored, but not in force on this server: {problem}")
            }
        }
    }
}

impl From<StoreError> for OverrideWriteError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl<N: Node> Control<N> {
    /// Writes overrides of clients in one transaction, and puts them in force on this node.
    /// Completes even if the caller is gone.
    pub async fn write_overrides(
        self: &Arc<Self>,
        writes: Vec<OverrideWrite>,
    ) -> Result<Vec<OverrideOutcome>, OverrideWriteError> {
        let control = Arc::clone(self);
        let written = self.runtime.spawn(async move {
            let (revision, outcomes) = control.store.write_overrides(&writes).await?;
            let taken = control.take_rows(LoadDepth::Heads).await;
            if control.rule_rows().override_revision >= revision {
                return Ok(outcomes);
            }
            let refused = || "the rules of the store are refused".to_owned();
            Err(OverrideWriteError::NotInForce(taken.err().map_or_else(refused, |error| error.to_string())))
        });
        written.await.unwrap_or_else(|error| Err(OverrideWriteError::NotInForce(error.to_string())))
    }

    /// Takes over the overrides that clients have written since the last load. The caller holds the
    /// lock of a load.
    pub(crate) async fn take_overrides(self: &Arc<Self>) -> Result<(), LoadError> {
        let known = self.rule_rows().override_revision;
        let (revisions, changes) = self.store.override_changes(known).await?;
        let revision = revisions.override_revision;
        let taken = self.blocking(move |control, node| control.put_overrides(revision, changes, node)).await;
        self.count_load(taken.as_ref().map(|_| ()));
        let replaced = taken?;
        self.runtime.spawn(let_go(Arc::clone(&replaced.rows)));
        Ok(())
    }

    /// Puts changed overrides in force, and returns the rows before.
    fn put_overrides(
        &self,
        revision: u64,
        changes: Vec<OverrideChange>,
        node: &N,
    ) -> Result<Arc<RuleRows>, LoadError> {
        let before = self.rule_rows();
        let after = before.with_overrides(revision, changes);
        let namespaces = NamespaceOverrides::compile(&after.rows, node.now_ms());
        let namespaces = namespaces.map_err(|problems| LoadError::Refused(problems.to_string()))?;
        let _replacing = self.replacing();
        // Emergencies do not wait for a load, so later ones may be in force.
        let now = self.rule_rows();
        let rule_rows = after.under(now.emergency_revision, now.emergencies.clone());
        node.replace_rules(Arc::new(node.with_namespaces(&node.rules(), Arc::new(namespaces))));
        self.in_force.store(Arc::new(rule_rows));
        Ok(before)
    }
}
