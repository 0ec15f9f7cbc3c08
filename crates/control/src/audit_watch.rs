//! Watches the end of the audit. Its checkpoints leave the store: in the log, and in snapshots. The
//! audit must always have the entry of the last one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tidegate_rules::audit::{ChainBreak, Checkpoint};
use tidegate_rules::store::StoreError;
use tokio::time::timeout;

use crate::control::Control;
use crate::node::{ControlEvent, Node};

/// Maximum wait for the store. Longer: a slower store still gives its checkpoint; a stop takes
/// longer while the store hangs.
const STORE_WAIT_MAX: Duration = Duration::from_secs(2);

/// The last checkpoint of the audit, and where the audit no longer continues it.
#[derive(Debug, Default)]
pub(crate) struct AuditWatch {
    last: Mutex<Option<Checkpoint>>,
    found: ArcSwapOption<ChainBreak>,
}

impl AuditWatch {
    /// Watches an audit that must continue a checkpoint.
    pub(crate) fn after(checkpoint: Option<Checkpoint>) -> Self {
        Self { last: Mutex::new(checkpoint), ..Self::default() }
    }

    /// Adds a checkpoint that the audit must have passed through, unless it is known to have passed
    /// through another one.
    pub(crate) fn expect(&self, checkpoint: Option<Checkpoint>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = last.take().or(checkpoint);
    }

    fn last(&self) -> Option<Checkpoint> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the end of an audit that continues the last checkpoint. Returns whether it is new.
    fn continues(&self, end: &Checkpoint) -> bool {
        self.found.store(None);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = last.as_ref() != Some(end) && end.count > 0;
        *last = Some(end.clone());
        is_new
    }

    /// Takes a break. Returns whether it is new. The last checkpoint stays: later snapshots prove
    /// the break too.
    fn breaks(&self, found: ChainBreak) -> bool {
        let found = Arc::new(found);
        self.found.swap(Some(Arc::clone(&found))).is_none_or(|known| known != found)
    }
}

impl<N: Node> Control<N> {
    /// Returns where the audit of the store does not continue the last checkpoint, which a snapshot
    /// or this server had.
    pub fn audit_break(&self) -> Option<Arc<ChainBreak>> {
        self.audit_watch.found.load_full()
    }

    /// Compares the audit with the last checkpoint, logs a new one, and returns the last that the
    /// audit passed through.
    pub(crate) async fn look_at_audit(&self) -> Option<Checkpoint> {
        let known = self.audit_watch.last().unwrap_or_default();
        let end = timeout(STORE_WAIT_MAX, self.store.checkpoint_after(&known)).await;
        match end {
            Ok(Ok(end)) => {
                if self.audit_watch.continues(&end) {
                    tracing::info!(checkpoint = %end, "the audit of the rule store has new entries");
                }
                self.count(ControlEvent::AuditContinues(true));
            }
            Ok(Err(StoreError::Audit(found))) => {
                self.count(ControlEvent::AuditContinues(false));
                if self.audit_watch.breaks(found.clone()) {
                    tracing::error!(
                        %found,
                        checkpoint = %known,
                        "the audit of the rule store does not continue its checkpoint: entries were cut off \
                         or rewritten, or the store was set back"
                    );
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "the end of the audit is not known"),
            Err(_) => tracing::debug!("the end of the audit is not known: the store does not answer"),
        }
        self.audit_watch.last()
    }
}
