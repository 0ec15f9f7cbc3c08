//! This server as a node of the control plane: it puts rules in force and accepts stored tokens.

use std::collections::HashSet;
use std::sync::Arc;

use tidegate_control::{ControlEvent, CredentialTarget, LogReplay, Node, NodeRules, RuleCount, RuleTarget};
use tidegate_core::bound::Fleet;
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::store::Credential;
use tidegate_rules::{NamespaceOverrides, RuleSet};

use crate::auth::{Credentials, OPERATING_TENANT, Principal, Role, TokenHash};
use crate::decision_log::DecisionLog;
use crate::rules::{ActiveRules, check_tenants, warn_of};
use crate::shared::Shared;

/// The control plane of this server.
pub(crate) type Control = tidegate_control::Control<Shared>;

impl NodeRules for ActiveRules {
    fn set(&self) -> &RuleSet {
        self.set()
    }

    fn counts(&self) -> &[RuleCount] {
        self.counts()
    }
}

impl RuleTarget for Shared {
    type Rules = ActiveRules;

    fn check_set(&self, set: &RuleSet) -> Result<(), String> {
        check_tenants(set, &self.tenants)
    }

    fn prepare(&self, set: RuleSet) -> Result<ActiveRules, String> {
        warn_of(&set, &self.fleet.configured);
        ActiveRules::new(set, self)
    }

    fn with_emergencies(
        &self,
        rules: &ActiveRules,
        revision: u64,
        rows: &[EmergencyRow],
    ) -> Result<ActiveRules, String> {
        rules.with_emergencies((revision, rows), self)
    }

    fn with_namespaces(&self, rules: &ActiveRules, namespaces: Arc<NamespaceOverrides>) -> ActiveRules {
        rules.with_set(rules.set().with_namespaces(namespaces))
    }

    fn rules(&self) -> Arc<ActiveRules> {
        self.rules.load_full()
    }

    fn replace_rules(&self, rules: Arc<ActiveRules>) -> Arc<ActiveRules> {
        self.rules.store(rules)
    }

    fn has_tenant(&self, name: &str) -> bool {
        self.tenants.iter().any(|tenant| tenant.name == name)
    }

    fn fleet(&self) -> &Fleet {
        &self.fleet.configured
    }
}

impl CredentialTarget for Shared {
    fn is_open(&self) -> bool {
        self.credentials.load().is_open()
    }

    /// A token that is invalid here gives no access and does not affect the others.
    fn admit_stored(&self, stored: &[Credential]) {
        let mut merged = self.credentials.load().configured();
        // Without configured tokens the server already allows everything to every caller, also
        // while the store is unreachable.
        if merged.is_open() {
            return;
        }
        for credential in stored {
            if let Err(problem) = add(&mut merged, credential, self) {
                let name = &credential.name;
                tracing::warn!(credential = name, problem, "a token of the store opens nothing here");
            }
        }
        self.credentials.store(merged);
    }

    fn has_approver_beside(&self, names: &HashSet<String>) -> bool {
        self.credentials.load().has_approver_beside(names, OPERATING_TENANT, self.now_ms())
    }
}

fn add(merged: &mut Credentials, credential: &Credential, shared: &Shared) -> Result<(), String> {
    let tenant = shared.tenants.iter().position(|tenant| tenant.name == credential.tenant);
    let tenant = tenant.ok_or_else(|| format!("tenant: {:?} is not configured", credential.tenant))?;
    let role = Role::of_name(&credential.role);
    let role = role.ok_or_else(|| format!("role: there is none called {:?}", credential.role))?;
    let hash: TokenHash = format!("sha256:{}", credential.hash).parse().map_err(str::to_owned)?;
    let principal = Principal { tenant, role };
    merged.add_stored(hash, principal, &credential.name, credential.expires_ms).map_err(str::to_owned)
}

impl Node for Shared {
    fn now_ms(&self) -> u64 {
        self.now_ms()
    }

    fn log(&self) -> Option<&LogReplay> {
        self.telemetry.decision_log.as_ref().map(DecisionLog::replay)
    }

    fn note(&self, event: ControlEvent) {
        self.telemetry.metrics.control.note(event);
    }

    fn follow(&self, control: Arc<Control>) {
        self.rules.follow(control);
    }
}
