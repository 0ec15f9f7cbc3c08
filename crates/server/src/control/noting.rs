//! Which changes came into force, and which rules they may have made stricter: those are watched. What the store does not tell
//! at once is asked again with every look, so that no change goes unwatched.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use tidegate_record::{Record, Verdict};
use tidegate_rules::book::{Book, Kind};
use tidegate_rules::change::{Operation, State};
use tidegate_rules::store::{Rollback, StoreError};

use super::applied::Applied;
use super::denials::{Denials, REMEMBERED_MAX, WATCHED_MS};
use super::rollback::{AUTOMATIC, may_pass};
use super::{Control, Unfit, let_go};
use crate::guardrail::{Approved, RECORDS_MAX, Trial, tightened, with};
use crate::rules::GatedRules;
use crate::shared::Shared;

/// What was in force until it was replaced.
#[derive(Debug)]
pub(super) struct Replaced {
    pub(super) book: Arc<Book>,
    pub(super) rules: Arc<GatedRules>,
    /// When that was.
    pub(super) at_ms: u64,
}

/// Changes that are in force, and that nobody has looked at yet.
#[derive(Debug)]
pub(super) struct Unnoted {
    /// Those up to this revision were looked at.
    noted: u64,
    /// What was in force before them; nothing if this server has just started.
    before: Option<Replaced>,
}

impl Unnoted {
    /// What came into force before this server did anything.
    pub(super) fn at_start() -> Self {
        Self { noted: 0, before: None }
    }
}

/// A change, and what it does.
struct News {
    applied: Applied,
    operations: Vec<Operation>,
}

/// What is known of the time before changes.
struct Before {
    book: Arc<Book>,
    /// The rules that may deny more since; nothing if that is not known.
    stricter: Option<BTreeSet<String>>,
}

/// What a row says of other rows.
#[derive(Deserialize)]
struct Refers {
    rule: Option<String>,
    template: Option<String>,
}

impl Control {
    /// Measures how long what was just put in force took, and watches what it does from now on.
    pub(super) async fn note_applied(self: &Arc<Self>, replaced: Replaced) {
        let mut unnoted = self.unnoted.lock().await;
        // Those of a change before may just have gone on.
        self.with_denials(Denials::set_aside).await;
        match &*unnoted {
            // What was in force earlier is what all changes since are compared with.
            Some(_) => self.let_go_of(replaced),
            None => *unnoted = Some(Unnoted { noted: replaced.book.revision, before: Some(replaced) }),
        }
        self.note(&mut unnoted).await;
    }

    /// Looks at changes that could not be looked at before.
    pub(super) async fn note_unnoted(self: &Arc<Self>) {
        self.note(&mut *self.unnoted.lock().await).await;
    }

    async fn note(self: &Arc<Self>, unnoted: &mut Option<Unnoted>) {
        let Some(changes) = unnoted else { return };
        if let Err(error) = self.try_note(changes).await {
            return tracing::warn!(%error, "changes that were taken over are not watched yet: tried again");
        }
        self.with_denials(Denials::go_on).await;
        if let Some(replaced) = unnoted.take().and_then(|noted| noted.before) {
            self.let_go_of(replaced);
        }
    }

    fn let_go_of(&self, Replaced { book, rules, .. }: Replaced) {
        self.runtime.spawn(let_go(rules));
        self.runtime.spawn(let_go(Arc::clone(&book.rows)));
    }

    async fn try_note(self: &Arc<Self>, unnoted: &mut Unnoted) -> Result<(), StoreError> {
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        let news = self.news(unnoted, &shared).await?;
        let Some(first) = news.first() else { return Ok(()) };
        let before = if let Some(replaced) = &unnoted.before {
            self.since_replaced(replaced, &news, &shared).await
        } else {
            self.recall(first.applied.at_ms, &shared).await;
            self.since_start(first.applied.revision, &news, &shared).await?
        };
        for News { applied, operations } in news {
            if let Some(replaced) = &unnoted.before {
                shared.metrics.control.lagged(replaced.at_ms.saturating_sub(applied.at_ms));
            }
            let revision = applied.revision;
            // What restores order is not undone by what it ends.
            if applied.by != AUTOMATIC {
                self.watch_change(&applied, operations, &before).await?;
            }
            unnoted.noted = revision;
        }
        Ok(())
    }

    /// The changes to look at: all since the rules were replaced; after a start, those that would still be watched.
    async fn news(&self, unnoted: &Unnoted, shared: &Shared) -> Result<Vec<News>, StoreError> {
        let since_ms = match unnoted.before {
            Some(_) => 0,
            None => shared.now_ms().saturating_sub(WATCHED_MS),
        };
        let mut news = Vec::new();
        for applied in self.applied_after(unnoted.noted).await? {
            if applied.at_ms >= since_ms {
                let operations = self.store.operations(applied.change).await?;
                news.push(News { applied, operations });
            }
        }
        Ok(news)
    }

    async fn since_replaced(&self, replaced: &Replaced, news: &[News], shared: &Arc<Shared>) -> Before {
        let (book, rules) = (Arc::clone(&replaced.book), Arc::clone(&replaced.rules));
        let operations = all_of(news);
        let (known, shared) = (Arc::clone(&book), Arc::clone(shared));
        let stricter = aside(move || {
            let in_force = shared.rules.load();
            tightened((rules.set(), in_force.set()), &known, &operations, shared.now_ms())
        });
        Before { book, stricter: stricter.await }
    }

    /// What was there before changes that came into force before this server started is found by restoring it, beside what is
    /// in force. Where that cannot be, any of their rules may have become stricter.
    async fn since_start(
        self: &Arc<Self>,
        first: u64,
        news: &[News],
        shared: &Arc<Shared>,
    ) -> Result<Before, StoreError> {
        let book = self.book();
        let restoring = Rollback::ToRevision(first.saturating_sub(1));
        let restored = match self.store.restoring(restoring, "").await {
            Ok(restored) => restored.operations,
            Err(StoreError::NothingToRestore) => {
                return Ok(Before { book, stricter: Some(BTreeSet::new()) });
            }
            Err(error) if may_pass(&error) => return Err(error),
            Err(_) => return Ok(Before { book, stricter: None }),
        };
        let (operations, shared) = (all_of(news), Arc::clone(shared));
        let (known, back) = (Arc::clone(&book), restored.clone());
        let compare = move |trial: Trial| {
            let (before, in_force) = (Arc::new(with(&known, &back)), shared.rules.load());
            let sets = (trial.after(), in_force.set());
            let stricter = tightened(sets, &before, &operations, shared.now_ms());
            Before { book: before, stricter: Some(stricter) }
        };
        match self.attempt(&book, &restored, compare).await {
            Ok(before) => Ok(before),
            Err(Unfit::Store(error)) if may_pass(&error) => Err(error),
            Err(_) => Ok(Before { book, stricter: None }),
        }
    }

    /// Has what rules denied before a change that is older than this server from the decision log, if there is one: what they
    /// always denied is no jump.
    async fn recall(self: &Arc<Self>, changed_ms: u64, shared: &Shared) {
        let Some(journal) = &shared.journal else { return };
        let window = (changed_ms.saturating_sub(WATCHED_MS), changed_ms);
        let counts: HashMap<Box<str>, u64> = HashMap::new();
        match journal.replay(window, RECORDS_MAX, counts, count_denial, |counts| counts).await {
            Ok(denied) => {
                self.with_denials(move |denials| denials.recall(denied)).await;
            }
            Err(error) => {
                tracing::warn!(%error, "it is not known what rules denied before this server started");
            }
        }
    }

    async fn watch_change(
        self: &Arc<Self>,
        applied: &Applied,
        operations: Vec<Operation>,
        before: &Before,
    ) -> Result<(), StoreError> {
        let kept = self.store.change(applied.change).await?;
        // Somebody undid it since.
        if kept.state != State::Applied {
            return Ok(());
        }
        // What somebody has seen coming is no surprise.
        let approved = kept.effect.as_deref().filter(|_| kept.approval.is_some()).and_then(Approved::read);
        let touched = touched(&operations, &before.book, &self.book());
        let stricter = before.stricter.clone();
        let (shared, change) = (self.shared.upgrade(), (applied.change, applied.at_ms));
        self.with_denials(move |denials| {
            let rules = to_watch(touched, stricter.as_ref(), denials);
            let gone = denials.watch(change, rules, approved.as_ref());
            if let Some(shared) = shared {
                denials.begin(&shared.rules.load());
            }
            for change in gone {
                tracing::error!(change, "no longer watched: too many are, of later changes");
            }
        })
        .await;
        Ok(())
    }
}

fn all_of(news: &[News]) -> Vec<Operation> {
    news.iter().flat_map(|news| news.operations.iter().cloned()).collect()
}

/// Does what goes through all rules beside those who answer.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let ended = |error| tracing::error!(%error, "it is not known which rules became stricter");
    tokio::task::spawn_blocking(work).await.map_err(ended).ok()
}

fn count_denial(counts: &mut HashMap<Box<str>, u64>, record: &Record) -> bool {
    if record.verdict != Verdict::Allowed && !record.rule.is_empty() {
        *counts.entry(record.rule.as_str().into()).or_default() += 1;
    }
    counts.len() < REMEMBERED_MAX
}

/// The rules of a change that may deny more by it: where others let pass more, whoever asks too much of them would undo that. But
/// what only mends what another change did a moment ago is in question with it.
fn to_watch(
    touched: BTreeSet<String>,
    stricter: Option<&BTreeSet<String>>,
    denials: &Denials,
) -> BTreeSet<String> {
    let may_deny_more = |rule: &String| {
        stricter.is_none_or(|stricter| stricter.contains(rule)) || denials.is_in_question(rule)
    };
    touched.into_iter().filter(may_deny_more).collect()
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
                let was = before.row(Kind::Override, name);
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
        Book { rows: rows.into(), ..Book::default() }
    }

    #[test]
    fn only_rules_that_may_deny_more_are_watched() {
        let of = |stricter: Option<&str>, denials: &Denials| {
            let touched = ["lowered", "raised"].map(str::to_owned).into();
            let stricter = stricter.map(|rule| BTreeSet::from([rule.to_owned()]));
            to_watch(touched, stricter.as_ref(), denials).into_iter().collect::<Vec<_>>()
        };
        let mut denials = Denials::default();
        assert_eq!(of(Some("lowered"), &denials), ["lowered"]);
        assert_eq!(of(Some("another"), &denials), [""; 0], "another change did that");
        assert_eq!(of(None, &denials), ["lowered", "raised"], "nobody knows");
        denials.watch((7, 1), ["raised".to_owned()], None);
        assert_eq!(of(Some("another"), &denials), ["raised"], "a moment ago it was lowered");
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
