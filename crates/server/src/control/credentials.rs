//! Tokens that the store knows, beside those of the configuration.

use std::sync::Arc;

use tidegate_rules::store::{Credential, StoreRevisions};

use super::{Control, LoadError};
use crate::auth::{Credentials, Principal, Role, TokenHash};
use crate::shared::Shared;

impl Control {
    /// Takes over the tokens of the store. A store that never had any does not remove the tokens of
    /// a snapshot, because it may replace a lost store.
    pub(super) async fn take_credentials(&self, revisions: &StoreRevisions) -> Result<(), LoadError> {
        let shared = self.shared()?;
        let found = self.store.credentials().await?;
        let says_nothing = revisions.credential_revision == 0 && found.is_empty();
        if says_nothing || **self.credentials.load() == found {
            return Ok(());
        }
        admit(&self.configured, &found, &shared);
        self.credentials.store(Arc::new(found));
        Ok(())
    }
}

/// Adds the tokens of a store to the configured ones. A token that is invalid here gives no access
/// and does not affect the others.
pub(super) fn admit(configured: &Credentials, found: &[Credential], shared: &Shared) {
    // Without configured tokens the server already allows everything to every caller, also while
    // the store is unreachable.
    if configured.is_open() {
        return;
    }
    let mut merged = configured.clone();
    for credential in found {
        if let Err(problem) = add(&mut merged, credential, shared) {
            tracing::warn!(credential = credential.name, problem, "a token of the store opens nothing here");
        }
    }
    shared.credentials.store(merged);
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
