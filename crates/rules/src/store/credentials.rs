//! Credentials, which authorize clients. Only the hash of a token is ever stored.

use serde_json::json;

use super::database::{Cells, Value};
use super::write_transaction::WriteTransaction;
use super::{Attribution, Store, StoreError};
use crate::audit::is_hash;
use crate::change::{Change, InvalidInput, check_name};

/// The most credentials of a store. Higher: more people and programs; all of them are in the memory
/// of every server, and read whenever one of them changes.
pub const CREDENTIALS_MAX: usize = 10_000;

/// Maximum credentials of one page.
pub const CREDENTIALS_PAGE_MAX: u64 = 1_000;

/// Maximum expired credentials removed at once. Higher: they are removed earlier, but other writers
/// wait longer.
const EXPIRED_REMOVED_MAX: u64 = 100;

/// The hash and properties of a token, without the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// The SHA-256 of the token, in lower-case hexadecimal.
    pub hash: String,
    /// Name for people.
    pub name: String,
    /// Tenant of the requests that it authorizes.
    pub tenant: String,
    /// Role, which selects its permissions.
    pub role: String,
    /// When it was made, in milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// When it ends, if it does.
    pub expires_ms: Option<u64>,
}

impl Store {
    /// Keeps a credential in place of the one with its hash, if there is room. Those that have
    /// expired are removed first.
    pub async fn put_credential(&self, new: &Credential, act: Attribution<'_>) -> Result<(), StoreError> {
        new.check()?;
        let mut writing = self.begin(act).await?;
        writing.remove_expired_credentials().await?;
        writing.check_room_for_credential(&new.hash).await?;
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
        writing.note_maker(&new.name).await?;
        let Credential { hash, name, tenant, role, created_ms, expires_ms } = new;
        let detail = json!({
            "hash": hash,
            "name": name,
            "tenant": tenant,
            "role": role,
            "created_ms": created_ms,
            "expires_ms": expires_ms,
        });
        writing.note("credential.put", &detail).await?;
        writing.revisions.credential_revision += 1;
        self.commit(writing).await
    }

    /// Ends a credential at once.
    pub async fn revoke_credential(&self, hash: &str, act: Attribution<'_>) -> Result<(), StoreError> {
        let mut writing = self.begin(act).await?;
        let revoke = "DELETE FROM tidegate_credentials WHERE hash = $1";
        if writing.transaction.execute(revoke, &[Value::Text(hash)]).await? == 0 {
            return Err(StoreError::NotThere("credential with this hash".to_owned()));
        }
        writing.note("credential.revoke", &json!({ "hash": hash })).await?;
        writing.revisions.credential_revision += 1;
        self.commit(writing).await
    }

    /// All credentials, also those that have expired, by name.
    pub async fn credentials(&self) -> Result<Vec<Credential>, StoreError> {
        let all = "SELECT hash, name, tenant, role, created_ms, expires_ms FROM tidegate_credentials";
        let mut found = self.urgent.read().await?.all(all, &[], credential).await?;
        found.sort_unstable_by(|a, b| (&a.name, &a.hash).cmp(&(&b.name, &b.hash)));
        Ok(found)
    }

    /// Some of them, by hash: those after `after`, up to `limit`.
    pub async fn credentials_after(&self, after: &str, limit: u64) -> Result<Vec<Credential>, StoreError> {
        let page = "SELECT hash, name, tenant, role, created_ms, expires_ms FROM tidegate_credentials \
             WHERE hash > $1 ORDER BY hash LIMIT $2";
        // One more than a page shows whether another page follows.
        let values = [Value::Text(after), Value::Number(limit.min(CREDENTIALS_PAGE_MAX + 1))];
        self.database.read().await?.all(page, &values, credential).await
    }
}

/// Begins a query with `related`: the name `$1`, and all names that are connected with it by makers
/// of credentials. Two credentials of one maker are connected too, since it may use both.
macro_rules! related_names {
    () => {
        "WITH RECURSIVE related (name) AS (SELECT CAST($1 AS TEXT) UNION \
         SELECT CASE WHEN maker.name = related.name THEN maker.made_by ELSE maker.name END \
         FROM related JOIN tidegate_makers AS maker \
         ON maker.name = related.name OR maker.made_by = related.name) "
    };
}
pub(super) use related_names;

/// Begins a query with `makers`: the name `$1`, its makers and theirs.
macro_rules! makers {
    () => {
        "WITH RECURSIVE makers (name) AS (SELECT CAST($1 AS TEXT) UNION \
         SELECT maker.made_by FROM makers JOIN tidegate_makers AS maker ON maker.name = makers.name)"
    };
}

impl Store {
    /// Returns the other names that are connected with a name by makers of credentials, over any
    /// number of steps. All of them may be one person.
    pub async fn related_to(&self, name: &str) -> Result<Vec<String>, StoreError> {
        let related = concat!(related_names!(), "SELECT name FROM related WHERE name <> $1");
        self.urgent.read().await?.all(related, &[Value::Text(name)], |cells| cells.owned(0)).await
    }

    /// Returns the names that never approve a change of `author`: the makers of its credential and
    /// the names that it made credentials for, over any number of steps.
    pub async fn line_of(&self, author: &str) -> Result<Vec<String>, StoreError> {
        let line = concat!(
            makers!(),
            ", made (name) AS (SELECT CAST($1 AS TEXT) UNION \
             SELECT maker.name FROM made JOIN tidegate_makers AS maker ON maker.made_by = made.name) \
             SELECT name FROM makers WHERE name <> $1 UNION SELECT name FROM made WHERE name <> $1"
        );
        self.urgent.read().await?.all(line, &[Value::Text(author)], |cells| cells.owned(0)).await
    }
}

impl WriteTransaction<'_> {
    /// Removes expired credentials, the earliest first. They authorize nothing, and would take up
    /// room for ever.
    async fn remove_expired_credentials(&mut self) -> Result<(), StoreError> {
        let remove = "DELETE FROM tidegate_credentials WHERE hash IN (SELECT hash FROM tidegate_credentials \
             WHERE expires_ms <= $1 ORDER BY expires_ms, hash LIMIT $2) RETURNING hash, name";
        let values = [Value::Number(self.act.now_ms), Value::Number(EXPIRED_REMOVED_MAX)];
        let named = |cells: &Cells<'_>| Ok((cells.owned(0)?, cells.owned(1)?));
        let mut removed = self.transaction.all(remove, &values, named).await?;
        removed.sort_unstable();
        if !removed.is_empty() {
            let expired: Vec<_> =
                removed.iter().map(|(hash, name)| json!({ "hash": hash, "name": name })).collect();
            self.note("credential.expire", &json!({ "credentials": expired })).await?;
        }
        Ok(())
    }

    /// Records the maker of a credential by name, and the number of changes proposed so far. The
    /// record outlives the credential: revoking a credential does not conceal its maker.
    async fn note_maker(&mut self, name: &str) -> Result<(), StoreError> {
        let note = "INSERT INTO tidegate_makers (name, made_by, change_count) VALUES ($1, $2, $3) \
             ON CONFLICT (name, made_by) DO UPDATE SET change_count = excluded.change_count";
        let values = [Value::Text(name), Value::Text(self.act.by), Value::Number(self.change_count)];
        self.transaction.execute(note, &values).await?;
        Ok(())
    }

    /// Refuses an approver that may be the author of the change: the maker of a credential knows
    /// its token. Compares counts of changes instead of times, because the clocks of servers
    /// differ.
    pub(super) async fn check_approver(&mut self, change: &Change) -> Result<(), StoreError> {
        let (author, approver) = (Value::Text(&change.author), Value::Text(self.act.by));
        let made = concat!(makers!(), " SELECT count(*) FROM makers WHERE name = $2");
        if self.is_any(made, &[author, approver]).await? || self.is_any(made, &[approver, author]).await? {
            return Err(StoreError::RelatedApproval(change.id));
        }
        let later = "SELECT count(*) FROM tidegate_makers WHERE name = $1 AND change_count >= $2";
        if self.is_any(later, &[approver, Value::Number(change.id)]).await? {
            return Err(StoreError::LaterApproval(change.id));
        }
        Ok(())
    }

    async fn is_any(&mut self, count: &'static str, values: &[Value<'_>]) -> Result<bool, StoreError> {
        let found = self.transaction.one(count, values, |cells| cells.number(0)).await?;
        Ok(found.is_some_and(|found| found > 0))
    }

    async fn check_room_for_credential(&mut self, hash: &str) -> Result<(), StoreError> {
        let select = "SELECT count(*) FROM tidegate_credentials WHERE hash <> $1";
        let others = self.transaction.one(select, &[Value::Text(hash)], |cells| cells.number(0)).await?;
        if others.is_some_and(|others| others < CREDENTIALS_MAX as u64) {
            Ok(())
        } else {
            Err(StoreError::TooManyCredentials)
        }
    }
}

impl Credential {
    fn check(&self) -> Result<(), InvalidInput> {
        // A token given by mistake in place of its hash must not be stored.
        if !is_hash(&self.hash) {
            return Err(InvalidInput(
                "hash: must be a SHA-256 of 64 lower-case hexadecimal digits".to_owned(),
            ));
        }
        check_name("name", &self.name)?;
        // Operators of the servers belong to no tenant.
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
