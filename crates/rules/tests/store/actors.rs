//! Queries about the actors of a store: authors of changes, and makers of credentials.

use tidegate_rules::change::{ChangeNeeds, Proposal};
use tidegate_rules::store::{Credential, Store, StoreError};

use super::suite::{TestDatabase, by, proposal, put};

async fn put_credential(store: &Store, name: &str, maker: &str) {
    let credential = Credential {
        hash: format!("{:02x}", name.as_bytes()[0]).repeat(32),
        name: name.to_owned(),
        tenant: String::new(),
        role: "approver".to_owned(),
        created_ms: 1,
        expires_ms: None,
    };
    store.put_credential(&credential, by(maker)).await.expect("put");
}

pub(crate) async fn last_applied_change_of_an_author_is_found(test_database: &TestDatabase) {
    let store = test_database.store().await;
    assert_eq!(store.last_applied_by("ada").await.expect("asked"), None);
    for (limit, author) in [(1, "ada"), (2, "ada"), (3, "bob")] {
        let revision = store.revisions().await.expect("revisions").revision;
        let change = proposal(revision, vec![put("a", limit)]);
        store.apply_new(&change, false, by(author)).await.expect("applied");
    }
    let kept = proposal(3, vec![put("a", 4)]);
    store.propose(&kept, by("ada")).await.expect("proposed");
    let last = store.last_applied_by("ada").await.expect("asked").expect("there is one");
    assert_eq!((last.id, last.revision), (2, Some(2)), "the later one is not applied");
}

pub(crate) async fn related_actors_are_makers_and_all_that_they_made(test_database: &TestDatabase) {
    let store = test_database.store().await;
    for (name, maker) in [("ada", "root"), ("bob", "ada"), ("eve", "root"), ("zoe", "bob"), ("max", "ops")] {
        put_credential(&store, name, maker).await;
    }
    let related = async |author: &str| {
        let mut names = store.related_to(author).await.expect("asked");
        names.sort_unstable();
        names
    };
    assert_eq!(related("ada").await, ["bob", "eve", "root", "zoe"]);
    assert_eq!(related("zoe").await, ["ada", "bob", "eve", "root"]);
    assert_eq!(related("max").await, ["ops"]);
    assert_eq!(related("nobody").await, [""; 0]);
    let line = async |author: &str| {
        let mut names = store.line_of(author).await.expect("asked");
        names.sort_unstable();
        names
    };
    assert_eq!(line("zoe").await, ["ada", "bob", "root"]);
    assert_eq!(line("eve").await, ["root"]);
    assert_eq!(line("root").await, ["ada", "bob", "eve", "zoe"]);
    let needed = Proposal { needs: ChangeNeeds::Approver, ..proposal(0, vec![put("a", 1)]) };
    let id = store.propose(&needed, by("zoe")).await.expect("proposed").id;
    for maker in ["root", "ada", "bob"] {
        let refused = store.approve(id, by(maker)).await;
        assert!(matches!(refused, Err(StoreError::RelatedApproval(_))), "{maker}: {refused:?}");
    }
    store.approve(id, by("ops")).await.expect("unrelated");
}
