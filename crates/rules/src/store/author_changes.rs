//! The recent changes of an author, and the rows before them: a series of small changes is judged
//! like one large change.

use std::collections::BTreeMap;

use super::credentials::related_names;
use super::database::{Database, Value};
use super::transaction::Transaction;
use super::{Store, StoreError};
use crate::change::{CHANGE_BYTES_MAX, Operation};
use crate::rows::RowKind;

/// Maximum number of the latest changes among which those of an author are looked for. Higher:
/// busier stores are judged exactly; a plan reads more.
pub const AUTHOR_CHANGES_MAX: u64 = 10_000;

/// Maximum bytes of the earlier rows that are kept. Higher: more memory of a plan.
const EARLIER_BYTES_MAX: usize = 2 * CHANGE_BYTES_MAX;

/// The changes of an author, and of credentials related to it. An approved change ends the
/// comparison for its rows, because its approver saw the result. So does the first change of the
/// store, before which there was nothing.
const AUTHOR_CHANGES: &str = concat!(
    related_names!(),
    "SELECT revision, created_ms, approver, restores FROM tidegate_changes \
     WHERE revision IS NOT NULL AND created_ms >= $2 \
     AND id > (SELECT change_count FROM tidegate_heads) - $3 \
     AND author IN (SELECT name FROM related) ORDER BY revision"
);

/// When the change was made before which none is looked at.
const LAST_UNREAD: &str =
    "SELECT created_ms FROM tidegate_changes WHERE id = (SELECT change_count FROM tidegate_heads) - $1";

/// The rows that an author changed within a time, without an approval, as they were before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthorChanges {
    /// By kind and name.
    pub rows: BTreeMap<(RowKind, String), EarlierRow>,
    /// Whether some changes of that time are missing, because there were too many or too large
    /// ones.
    pub is_partial: bool,
}

/// A row before the changes of an author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierRow {
    /// `None`: there was no such row.
    pub body: Option<String>,
    /// When the first of the changes was made, in milliseconds since the Unix epoch.
    pub changed_ms: u64,
}

impl AuthorChanges {
    /// When the first of the changes was made; `None` without any.
    pub fn first_ms(&self) -> Option<u64> {
        self.rows.values().map(|row| row.changed_ms).min()
    }
}

impl Store {
    /// Returns the rows that an author, or a credential related to it, changed since a time.
    pub async fn changes_by(&self, author: &str, since_ms: u64) -> Result<AuthorChanges, StoreError> {
        changes_on(&self.database, author, since_ms).await
    }

    /// Does the same for an emergency, which waits for no load of all rows.
    pub async fn changes_by_urgently(
        &self,
        author: &str,
        since_ms: u64,
    ) -> Result<AuthorChanges, StoreError> {
        changes_on(&self.urgent, author, since_ms).await
    }
}

async fn changes_on(database: &Database, author: &str, since_ms: u64) -> Result<AuthorChanges, StoreError> {
    let mut reading = database.read().await?;
    let mut found =
        AuthorChanges { is_partial: is_partial(&mut reading, since_ms).await?, ..Default::default() };
    let values = [Value::Text(author), Value::Number(since_ms), Value::Number(AUTHOR_CHANGES_MAX)];
    let mut bytes = 0;
    reading
        .each_while(AUTHOR_CHANGES, &values, |cells| {
            let is_settled = cells.number(0)? == 1 || cells.optional_text(2)?.is_some();
            let changed_ms = cells.number(1)?;
            for operation in serde_json::from_str::<Vec<Operation>>(cells.text(3)?)? {
                let (kind, name) = operation.row();
                let row = (kind, name.to_owned());
                if is_settled {
                    found.rows.remove(&row);
                    continue;
                }
                bytes += name.len() + operation.body().map_or(0, str::len);
                if bytes > EARLIER_BYTES_MAX {
                    found.is_partial = true;
                    return Ok(false);
                }
                let body = operation.body().map(str::to_owned);
                found.rows.entry(row).or_insert(EarlierRow { body, changed_ms });
            }
            Ok(true)
        })
        .await?;
    Ok(found)
}

/// Whether the store has more changes since a time than are read.
async fn is_partial(reading: &mut Transaction, since_ms: u64) -> Result<bool, StoreError> {
    let last =
        reading.one(LAST_UNREAD, &[Value::Number(AUTHOR_CHANGES_MAX)], |cells| cells.number(0)).await?;
    Ok(last.is_some_and(|created_ms| created_ms >= since_ms))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::change::{Change, ChangeNeeds, Proposal};
    use crate::store::{Attribution, Credential};

    async fn store() -> Store {
        Store::open(&"sqlite::memory:".parse().expect("an address")).await.expect("opens")
    }

    fn limit(limit: u32) -> String {
        format!(r#"{{"limit":{limit},"period":"1h"}}"#)
    }

    async fn propose(store: &Store, (by, now_ms): (&str, u64), name: &str, body: Option<String>) -> Change {
        let base = store.revisions().await.expect("revisions").revision;
        let operation = Operation::leaving(RowKind::Rule, name.to_owned(), body);
        let needs = ChangeNeeds::Approver;
        let proposal = Proposal { needs, ..Proposal::new(base, "a test", vec![operation]) };
        store.propose(&proposal, Attribution { by, now_ms }).await.expect("proposed")
    }

    /// Applies a change that needs nothing.
    async fn put(store: &Store, (by, now_ms): (&str, u64), name: &str, amount: u32) {
        let base = store.revisions().await.expect("revisions").revision;
        let operation = Operation::leaving(RowKind::Rule, name.to_owned(), Some(limit(amount)));
        let proposal = Proposal::new(base, "a test", vec![operation]);
        store.apply_new(&proposal, false, Attribution { by, now_ms }).await.expect("applied");
    }

    async fn rows(store: &Store, author: &str, since_ms: u64) -> Vec<(String, Option<String>, u64)> {
        let found = store.changes_by(author, since_ms).await.expect("changes");
        assert!(!found.is_partial);
        found.rows.into_iter().map(|((_, name), row)| (name, row.body, row.changed_ms)).collect()
    }

    #[tokio::test]
    async fn rows_are_as_before_the_first_change_of_their_author_since_a_time() {
        let store = store().await;
        put(&store, ("ada", 10), "first", 1).await;
        put(&store, ("ada", 20), "a", 100).await;
        put(&store, ("ada", 30), "a", 90).await;
        put(&store, ("bob", 40), "a", 80).await;
        put(&store, ("ada", 50), "a", 70).await;
        assert_eq!(rows(&store, "ada", 0).await, [("a".to_owned(), None, 20)], "the first change is settled");
        assert_eq!(rows(&store, "ada", 30).await, [("a".to_owned(), Some(limit(100)), 30)]);
        assert_eq!(rows(&store, "ada", 31).await, [("a".to_owned(), Some(limit(80)), 50)]);
        assert_eq!(rows(&store, "bob", 0).await, [("a".to_owned(), Some(limit(90)), 40)]);
        assert_eq!(rows(&store, "eve", 0).await, []);
    }

    #[tokio::test]
    async fn an_approved_change_ends_the_comparison_of_its_rows() {
        let store = store().await;
        put(&store, ("ada", 10), "first", 1).await;
        put(&store, ("ada", 20), "a", 100).await;
        put(&store, ("ada", 20), "b", 100).await;
        let change = propose(&store, ("ada", 30), "a", Some(limit(5))).await;
        let bob = Attribution { by: "bob", now_ms: 31 };
        store.approve(change.id, bob).await.expect("approved");
        store.apply(change.id, false, bob).await.expect("applied");
        assert_eq!(rows(&store, "ada", 0).await, [("b".to_owned(), None, 20)]);
        put(&store, ("ada", 40), "a", 4).await;
        assert_eq!(rows(&store, "ada", 15).await[0], ("a".to_owned(), Some(limit(5)), 40));
    }

    #[tokio::test]
    async fn changes_of_related_credentials_count_too() {
        let store = store().await;
        put(&store, ("ada", 10), "first", 1).await;
        for (at, (name, maker)) in [("eve", "ada"), ("max", "ada"), ("zoe", "max")].into_iter().enumerate() {
            let credential = Credential {
                hash: at.to_string().repeat(64),
                name: name.to_owned(),
                tenant: String::new(),
                role: "operator".to_owned(),
                created_ms: 1,
                expires_ms: None,
            };
            store.put_credential(&credential, Attribution { by: maker, now_ms: 11 }).await.expect("put");
        }
        for (author, rule) in [("eve", "a"), ("ada", "b"), ("max", "c"), ("zoe", "d")] {
            put(&store, (author, 20), rule, 100).await;
        }
        for author in ["ada", "eve", "max", "zoe"] {
            assert_eq!(rows(&store, author, 0).await.len(), 4, "{author}");
            let urgent = store.changes_by_urgently(author, 0).await.expect("changes");
            assert_eq!(urgent.rows.len(), 4, "{author}");
        }
        assert_eq!(rows(&store, "bob", 0).await, []);
    }

    #[tokio::test]
    async fn no_more_changes_are_read_than_fit() {
        let store = store().await;
        put(&store, ("ada", 10), "first", 1).await;
        for amount in [1, 2, 3, 4] {
            put(&store, ("ada", 20), "a", amount).await;
        }
        let large = |rule: &str| {
            let body = Some("x".repeat(EARLIER_BYTES_MAX / 2 + 1));
            json!([Operation::leaving(RowKind::Rule, rule.to_owned(), body)]).to_string()
        };
        let mut writing = store.database.write().await.expect("begins");
        for (change, restores) in [(2, large("b")), (3, large("c")), (4, "unreadable".to_owned())] {
            let set = "UPDATE tidegate_changes SET restores = $2 WHERE id = $1";
            let values = [Value::Number(change), Value::Text(&restores)];
            assert_eq!(writing.execute(set, &values).await.expect("runs"), 1);
        }
        writing.commit().await.expect("commits");
        let found = store.changes_by("ada", 0).await.expect("the last changes are not read");
        assert_eq!((found.is_partial, found.rows.len()), (true, 1));
    }
}
