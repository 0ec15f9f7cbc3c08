//! What many rules say alike, kept once.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use foldhash::quality::RandomState;

use crate::rule::Condition;

/// Texts and lists that were seen already.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    texts: HashSet<Arc<str>, RandomState>,
    keys: HashSet<Arc<[Arc<str>]>, RandomState>,
    conditions: HashSet<Arc<[Condition]>, RandomState>,
}

impl Interner {
    pub(crate) fn text(&mut self, text: &str) -> Arc<str> {
        shared(&mut self.texts, text)
    }

    pub(crate) fn key(&mut self, key: Vec<Arc<str>>) -> Arc<[Arc<str>]> {
        shared(&mut self.keys, key)
    }

    pub(crate) fn conditions(&mut self, conditions: Vec<Condition>) -> Arc<[Condition]> {
        shared(&mut self.conditions, conditions)
    }
}

fn shared<T, N>(known: &mut HashSet<Arc<T>, RandomState>, new: N) -> Arc<T>
where
    T: ?Sized + Hash + Eq,
    N: Borrow<T> + Into<Arc<T>>,
{
    if let Some(known) = known.get(new.borrow()) {
        return Arc::clone(known);
    }
    let new: Arc<T> = new.into();
    known.insert(Arc::clone(&new));
    new
}
