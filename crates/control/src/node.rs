//! The node as the control plane sees it: it puts rules in force, and does nothing else by itself.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use tidegate_core::bound::Fleet;
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::Credential;
use tidegate_rules::{NamespaceOverrides, Rule, RuleSet, SecretHeaders};

use crate::control::Control;
use crate::log_replay::LogReplay;
use crate::rule_keys::{KeyMemory, RuleKeys};

/// A rule set in the form in which a node decides under it.
pub trait NodeRules: fmt::Debug + Send + Sync + 'static {
    /// The compiled rules.
    fn set(&self) -> &RuleSet;

    /// The recent keys of the rules, by position.
    fn keys(&self) -> &[RuleKeys];

    /// Returns all rules with their recent keys.
    fn counted(&self) -> impl Iterator<Item = (&Rule, &RuleKeys)> {
        self.set().rules().iter().zip(self.keys())
    }
}

/// The rules of a node, replaced as a whole.
pub trait RuleTarget {
    /// The form in which the node decides under rules.
    type Rules: NodeRules;

    /// Checks whether the node can take a set, without making it ready.
    fn check_set(&self, set: &RuleSet) -> Result<(), String>;

    /// Makes a set ready to decide, and warns of rules that their authors may not have intended.
    fn prepare(&self, set: RuleSet) -> Result<Self::Rules, String>;

    /// Returns the same rules under the emergencies of another revision.
    fn with_emergencies(
        &self,
        rules: &Self::Rules,
        revision: u64,
        rows: &[EmergencyRow],
    ) -> Result<Self::Rules, String>;

    /// Returns the same rules with other overrides of namespaces.
    fn with_namespaces(&self, rules: &Self::Rules, namespaces: Arc<NamespaceOverrides>) -> Self::Rules;

    /// Returns the rules in force.
    fn rules(&self) -> Arc<Self::Rules>;

    /// Puts rules in force, and returns the previous ones.
    fn replace_rules(&self, rules: Arc<Self::Rules>) -> Arc<Self::Rules>;

    /// Whether the node has a tenant of this name.
    fn has_tenant(&self, name: &str) -> bool;

    /// The configured fleet, for the warnings of a plan.
    fn fleet(&self) -> &Fleet;
}

/// The tokens that a node accepts.
pub trait CredentialTarget {
    /// Whether the node has no tokens, so that all callers are the same.
    fn is_open(&self) -> bool;

    /// Accepts the tokens of a store besides the configured ones, in place of earlier ones of a
    /// store.
    fn admit_stored(&self, stored: &[Credential]);

    /// Whether a credential that may approve changes has another name than these.
    fn has_approver_beside(&self, names: &HashSet<String>) -> bool;
}

/// A server whose rules come from a store.
pub trait Node: RuleTarget + CredentialTarget + fmt::Debug + Send + Sync + Sized + 'static {
    /// Milliseconds since the Unix epoch, by the node's clock.
    fn now_ms(&self) -> u64;

    /// The memory for the recent keys of rules.
    fn key_memory(&self) -> &KeyMemory;

    /// The header fields whose values the decision log has as digests only.
    fn secret_headers(&self) -> &SecretHeaders;

    /// The decision log; `None` if it is off.
    fn log(&self) -> Option<&LogReplay>;

    /// Counts an event.
    fn note(&self, event: ControlEvent);

    /// From now on the rules come from a store.
    fn follow(&self, control: Arc<Control<Self>>);
}

/// An event that a node counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlEvent {
    /// The store replied, or did not.
    StoreUp(bool),
    /// Rules of these revisions are in force.
    InForce {
        /// Revision of the rule rows.
        revision: u64,
        /// Revision of the emergencies.
        emergency_revision: u64,
    },
    /// The content of the store was loaded.
    Loaded,
    /// The content of the store is invalid, and the rules in force stay.
    LoadRefused,
    /// The store did not give its content.
    LoadFailed,
    /// A change was in force this long after it was made.
    Lagged {
        /// Milliseconds.
        ms: u64,
    },
    /// The audit of the store continues the last checkpoint, or does not.
    AuditContinues(bool),
    /// A change was rolled back automatically.
    RolledBack,
    /// A rollback failed: the rules do not compile without the change, or it was changed further.
    NotRolledBack,
    /// A change or an emergency that is never undone automatically raised an alarm.
    Alarmed,
}
