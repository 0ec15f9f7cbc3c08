//! Undoes a change by itself when the rules that it touched suddenly deny far more.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};

use serde::Deserialize;
use tidegate_rules::book::{Book, Kind};
use tidegate_rules::change::Operation;
use tidegate_rules::store::{Act, Rollback, StoreError};
use tokio::time::{MissedTickBehavior, interval};

use super::applied::Applied;
use super::denials::{Denials, Jump, LOOK_EVERY};
use super::{Control, Look};

/// Who undoes a change that nobody undid, as the audit says.
pub(crate) const AUTOMATIC: &str = "tidegate: automatic";

/// What a row says of other rows.
#[derive(Deserialize)]
struct Refers {
    rule: Option<String>,
    template: Option<String>,
}

impl Control {
    /// Measures how long what was just put in force took, and watches what it does from now on.
    pub(super) async fn note_applied(self: &Arc<Self>, before: Arc<Book>) {
        match self.try_note(before).await {
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "the changes that were just taken over are not watched"),
        }
    }

    async fn try_note(self: &Arc<Self>, before: Arc<Book>) -> Result<(), StoreError> {
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        let now_ms = shared.now_ms();
        for applied in self.applied_after(before.revision).await? {
            shared.metrics.control.lagged(now_ms.saturating_sub(applied.at_ms));
            // What restores order is not undone by what it ends.
            if applied.by != AUTOMATIC {
                self.watch_change(&applied, &before).await?;
            }
        }
        Ok(())
    }

    async fn watch_change(self: &Arc<Self>, applied: &Applied, before: &Arc<Book>) -> Result<(), StoreError> {
        let operations = self.store.operations(applied.change).await?;
        let (control, before) = (Arc::clone(self), Arc::clone(before));
        let (change, at_ms) = (applied.change, applied.at_ms);
        let watching = tokio::task::spawn_blocking(move || {
            let rules = touched(&operations, &before, &control.book());
            let mut denials = control.denials();
            denials.watch(change, at_ms, rules);
            if let Some(shared) = control.shared.upgrade() {
                denials.mark(&shared.rules.load());
            }
        });
        if let Err(error) = watching.await {
            tracing::error!(%error, change, "is not watched");
        }
        Ok(())
    }

    pub(super) fn denials(&self) -> MutexGuard<'_, Denials> {
        // Counts that are off by one look judge as well.
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn undo(&self, jump: &Jump) {
        let Jump { change, rule, before_per_minute, denied } = jump;
        let reason = format!(
            "denials of rule {rule:?} went from {before_per_minute:.0} to {denied} a minute within five minutes of change \
             {change}"
        );
        let act = Act { by: AUTOMATIC, now_ms: self.now_ms() };
        match self.store.rollback(Rollback::Change(*change), &reason, act).await {
            Ok(_) => {
                tracing::error!(change, reason, "rolled back");
                if let Some(shared) = self.shared.upgrade() {
                    shared.metrics.control.rolled_back();
                }
                self.want(Look::Heads);
            }
            Err(error @ (StoreError::Unreachable(_) | StoreError::Busy | StoreError::Database(_))) => {
                return tracing::warn!(change, %error, "to be rolled back, and tried again");
            }
            // Another server did, or somebody changed it further and knows better.
            Err(error) => tracing::info!(change, %error, "not rolled back by this server"),
        }
        self.denials().forget(*change);
    }
}

/// Looks at denials, for ever.
pub(super) async fn look(control: Arc<Control>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(shared) = control.shared.upgrade() else { return };
        let looking = Arc::clone(&control);
        let looked = tokio::task::spawn_blocking(move || {
            let mut denials = looking.denials();
            let rules = shared.rules.load_full();
            denials.take_from(&rules);
            let jumps = denials.look(shared.now_ms());
            denials.mark(&rules);
            jumps
        });
        match looked.await {
            Ok(jumps) => {
                for jump in jumps {
                    control.undo(&jump).await;
                }
            }
            Err(error) => return tracing::error!(%error, "changes are no longer watched"),
        }
    }
}

/// The rules that operations are about: by themselves, by overrides of theirs, or by a template.
fn touched(operations: &[Operation], before: &Book, after: &Book) -> BTreeSet<String> {
    let mut rules = BTreeSet::new();
    let mut templates = BTreeSet::new();
    for operation in operations {
        match operation.row() {
            (Kind::Rule, name) => drop(rules.insert(name.to_owned())),
            (Kind::Template, name) => drop(templates.insert(name)),
            (Kind::Override, name) => {
                let was = before.rows.iter().find(|row| row.kind == Kind::Override && row.name == name);
                let bodies = operation.body().into_iter().chain(was.map(|row| row.body.as_str()));
                rules.extend(bodies.filter_map(refers).filter_map(|refers| refers.rule));
            }
        }
    }
    if !templates.is_empty() {
        let follows = |body: &str| {
            refers(body).and_then(|refers| refers.template).is_some_and(|name| templates.contains(&*name))
        };
        let all = after.rows.iter().filter(|row| row.kind == Kind::Rule && follows(&row.body));
        rules.extend(all.map(|row| row.name.clone()));
    }
    rules
}

fn refers(body: &str) -> Option<Refers> {
    serde_json::from_str(body).ok()
}

#[cfg(test)]
mod tests {
    use tidegate_rules::book::Row;

    use super::*;

    fn row(kind: Kind, name: &str, body: &str) -> Row {
        Row { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
    }

    fn book(rows: Vec<Row>) -> Book {
        Book { rows, ..Book::default() }
    }

    #[test]
    fn rules_are_touched_by_themselves_by_overrides_and_by_templates() {
        let before = book(vec![row(Kind::Override, "x", r#"{"rule":"was"}"#)]);
        let after = book(vec![
            row(Kind::Rule, "pro_a", r#"{"template":"pro"}"#),
            row(Kind::Rule, "free_a", r#"{"template":"free"}"#),
            row(Kind::Rule, "none", "{}"),
        ]);
        let put = |kind, name: &str, body: &str| Operation::Put {
            kind,
            name: name.to_owned(),
            body: body.to_owned(),
        };
        let delete = |kind, name: &str| Operation::Delete { kind, name: name.to_owned() };
        for (operation, rules) in [
            (put(Kind::Rule, "a", "{}"), &["a"][..]),
            (delete(Kind::Rule, "a"), &["a"]),
            (put(Kind::Override, "x", r#"{"rule":"is"}"#), &["is", "was"]),
            (delete(Kind::Override, "x"), &["was"]),
            (put(Kind::Template, "pro", "{}"), &["pro_a"]),
        ] {
            let found = touched(&[operation], &before, &after);
            assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), rules);
        }
    }
}
