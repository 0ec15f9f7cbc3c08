//! Tokens that the store knows, besides those of the configuration.

use std::sync::Arc;

use tidegate_rules::store::StoreRevisions;

use crate::control::{Control, LoadError};
use crate::node::Node;

impl<N: Node> Control<N> {
    /// Takes over the tokens of the store. A store that never had any does not remove the tokens of
    /// a snapshot, because it may replace a lost store.
    pub(super) async fn take_credentials(&self, revisions: &StoreRevisions) -> Result<(), LoadError> {
        let node = self.node()?;
        let found = self.store.credentials().await?;
        let says_nothing = revisions.credential_revision == 0 && found.is_empty();
        if says_nothing || **self.credentials.load() == found {
            return Ok(());
        }
        node.admit_stored(&found);
        self.credentials.store(Arc::new(found));
        Ok(())
    }
}
