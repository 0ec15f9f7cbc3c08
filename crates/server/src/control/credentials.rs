//! Tokens that the store knows, beside those of the configuration.

use std::sync::Arc;

use tidegate_rules::store::Credential;

use super::{Control, NotTaken};
use crate::auth::{Credentials, Principal, Role, TokenHash};
use crate::shared::Shared;

impl Control {
    /// Takes over the tokens of the store. One that makes no sense here opens nothing, and keeps no other from working.
    pub(super) async fn take_credentials(&self) -> Result<(), NotTaken> {
        let shared = self.shared()?;
        // Whoever reaches a server without tokens of its own may do everything already, also while the store is gone.
        if self.configured.is_open() {
            return Ok(());
        }
        let mut merged = (*self.configured).clone();
        for credential in self.store.credentials().await? {
            if let Err(problem) = add(&mut merged, &credential, &shared) {
                tracing::warn!(
                    credential = credential.name,
                    problem,
                    "a token of the store opens nothing here"
                );
            }
        }
        shared.credentials.store(Arc::new(merged));
        Ok(())
    }
}

fn add(merged: &mut Credentials, credential: &Credential, shared: &Shared) -> Result<(), String> {
    let tenant = shared.tenants.iter().position(|tenant| tenant.name == credential.tenant);
    let tenant = tenant.ok_or_else(|| format!("tenant: {:?} is not configured", credential.tenant))?;
    let role = Role::of_name(&credential.role);
    let role = role.ok_or_else(|| format!("role: there is none called {:?}", credential.role))?;
    let hash: TokenHash = format!("sha256:{}", credential.hash).parse().map_err(str::to_owned)?;
    let principal = Principal { tenant, role };
    merged.add_named(hash, principal, &credential.name, credential.expires_ms).map_err(str::to_owned)
}
