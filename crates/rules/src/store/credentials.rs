//! Credentials: who may ask. Only the hash of a token is ever here.

use serde_json::json;

use super::database::{Cells, Value};
use super::{Act, Store, StoreError};
use crate::audit::is_hash;
use crate::change::{Invalid, check_name};

/// What is known of a token without knowing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// The SHA-256 of the token, in lower-case hexadecimal.
    pub hash: String,
    /// What people call it.
    pub name: String,
    /// Whose requests it stands for.
    pub tenant: String,
    /// What it may do.
    pub role: String,
    /// When it was made, in milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// When it ends, if it does.
    pub expires_ms: Option<u64>,
}

impl Store {
    /// Keeps a credential in place of the one with its hash.
    pub async fn put_credential(&self, new: &Credential, act: Act<'_>) -> Result<(), StoreError> {
        new.check()?;
        let mut writing = self.begin(act).await?;
        let put = "INSERT INTO tidegate_credentials (hash, name, tenant, role, created_ms, expires_ms) \
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (hash) DO UPDATE SET name = excluded.name, \
             tenant = excluded.tenant, role = excluded.role, created_ms = excluded.created_ms, \
             expires_ms = excluded.expires_ms";
        let values = [
            Value::Text(&new.hash),
            Value::Text(&new.name),
            Value::Text(&new.tenant),
            Value::Text(&new.role),
            Value::Number(new.created_ms),
            Value::OptionalNumber(new.expires_ms),
        ];
        writing.transaction.execute(put, &values).await?;
        let Credential { hash, name, tenant, role, expires_ms, .. } = new;
        let detail =
            json!({ "hash": hash, "name": name, "tenant": tenant, "role": role, "expires_ms": expires_ms });
        writing.note("credential.put", &detail).await?;
        writing.heads.credential_revision += 1;
        self.commit(writing).await
    }

    /// Ends a credential at once.
    pub async fn revoke_credential(&self, hash: &str, act: Act<'_>) -> Result<(), StoreError> {
        let mut writing = self.begin(act).await?;
        let revoke = "DELETE FROM tidegate_credentials WHERE hash = $1";
        if writing.transaction.execute(revoke, &[Value::Text(hash)]).await? == 0 {
            return Err(StoreError::NotThere("credential with this hash".to_owned()));
        }
        writing.note("credential.revoke", &json!({ "hash": hash })).await?;
        writing.heads.credential_revision += 1;
        self.commit(writing).await
    }

    /// All credentials, also those that have expired, by name.
    pub async fn credentials(&self) -> Result<Vec<Credential>, StoreError> {
        let all = "SELECT hash, name, tenant, role, created_ms, expires_ms FROM tidegate_credentials";
        let mut found = self.database.read().await?.all(all, &[], credential).await?;
        found.sort_unstable_by(|a, b| (&a.name, &a.hash).cmp(&(&b.name, &b.hash)));
        Ok(found)
    }
}

impl Credential {
    fn check(&self) -> Result<(), Invalid> {
        // A token that is mistaken for its hash must not be kept.
        if !is_hash(&self.hash) {
            return Err(Invalid("hash: must be a SHA-256 of 64 lower-case hexadecimal digits".to_owned()));
        }
        check_name("name", &self.name)?;
        // Whoever runs the servers belongs to no tenant.
        if !self.tenant.is_empty() {
            check_name("tenant", &self.tenant)?;
        }
        check_name("role", &self.role)
    }
}

fn credential(cells: &Cells<'_>) -> Result<Credential, StoreError> {
    Ok(Credential {
        hash: cells.owned(0)?,
        name: cells.owned(1)?,
        tenant: cells.owned(2)?,
        role: cells.owned(3)?,
        created_ms: cells.number(4)?,
        expires_ms: cells.optional_number(5)?,
    })
}
