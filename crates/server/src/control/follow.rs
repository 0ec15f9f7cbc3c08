//! Follows the store: begins with what it holds or the last good snapshot, and takes over what changes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_rules::book::Book;
use tidegate_rules::store::{Signal, Store};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::{Control, Look, NotTaken, Tried, compile, rollback, snapshots};
use crate::config::StoreConfig;
use crate::shared::{Shared, StartError};

/// How long to wait before something is tried again that the store did not give. Shorter: what it did not give is there
/// earlier; a store in trouble is asked more.
const RETRY: Duration = Duration::from_secs(1);

/// A server that follows the store of its rules, or will once it is there.
pub(crate) struct Following {
    config: StoreConfig,
    shared: Arc<Shared>,
    /// What a snapshot gave, until there is a store.
    begun: Result<Arc<Control>, Book>,
}

impl Following {
    /// Puts the rules of the store in force; if they cannot be had, those of the last good snapshot.
    pub(crate) async fn start(config: &StoreConfig, shared: &Arc<Shared>) -> Result<Self, StartError> {
        let (config, shared) = (config.clone(), Arc::clone(shared));
        let (control, problem) = match Store::open(&config.address).await {
            Err(error) => (None, error.to_string()),
            Ok(store) => {
                let control = control(store, Book::default(), &config, &shared);
                match control.take_rows(Look::First).await {
                    Ok(()) => {
                        shared.metrics.control.store_is_up(true);
                        shared.follows(Arc::clone(&control));
                        return Ok(Self { config, shared, begun: Ok(control) });
                    }
                    Err(problem) => (Some(control), located(&config, &problem.to_string())),
                }
            }
        };
        shared.metrics.control.store_is_up(control.is_some());
        let book = begin_with_snapshot(&config, &shared, &problem)?;
        let begun = match control {
            None => Err(book),
            Some(control) => {
                *control.in_force() = Arc::new(book);
                shared.follows(Arc::clone(&control));
                Ok(control)
            }
        };
        Ok(Self { config, shared, begun })
    }

    /// Takes over what changes, until told to stop.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let Self { config, shared, begun } = self;
        let control = match begun {
            Ok(control) => control,
            Err(book) => {
                let store = tokio::select! {
                    () = stop.cancelled() => return,
                    store = find(&config) => store,
                };
                let control = control(store, book, &config, &shared);
                shared.follows(Arc::clone(&control));
                control
            }
        };
        let rows = follow_rows(Arc::clone(&control));
        let emergencies = follow_emergencies(Arc::clone(&control));
        let kept = config.snapshots.as_deref().map(Arc::<Path>::from);
        let kept =
            kept.map(|folder| tokio::spawn(snapshots::keep(Arc::clone(&control), folder, stop.clone())));
        tokio::select! {
            () = stop.cancelled() => {}
            () = watch(&control, config.reconcile) => {}
            () = rows => {}
            () = emergencies => {}
            () = rollback::look(Arc::clone(&control)) => {}
        }
        if let Some(kept) = kept {
            // What it could not write it has told.
            let _ = kept.await;
        }
        control.store().close().await;
    }
}

fn control(store: Store, book: Book, config: &StoreConfig, shared: &Arc<Shared>) -> Arc<Control> {
    Arc::new(Control {
        store,
        shared: Arc::downgrade(shared),
        runtime: Handle::current(),
        placement: config.placement.clone(),
        configured: shared.credentials.load_full(),
        in_force: Mutex::new(Arc::new(book)),
        loading: tokio::sync::Mutex::new(Tried::default()),
        loading_emergencies: tokio::sync::Mutex::new(()),
        rows_wanted: Notify::new(),
        everything_wanted: AtomicBool::new(false),
        emergencies_wanted: Notify::new(),
        denials: Mutex::default(),
    })
}

/// Each line of what is wrong with what a store holds, with where that is.
fn located(config: &StoreConfig, problem: &str) -> String {
    let lines: Vec<String> =
        problem.lines().map(|line| format!("rules: {}: {line}", config.address)).collect();
    lines.join("\n")
}

/// Puts the last good snapshot in force, and says so.
fn begin_with_snapshot(config: &StoreConfig, shared: &Shared, problem: &str) -> Result<Book, StartError> {
    let begun = config.snapshots.as_deref().ok_or_else(|| "rules_snapshots is \"none\"".to_owned());
    let begun = begun.and_then(|folder| {
        let (book, written_ms) = snapshots::read(folder)?;
        let rules = compile(&book, config.placement.as_deref(), shared)
            .map_err(|problems| format!("the last good snapshot in {}: {problems}", folder.display()))?;
        Ok((book, written_ms, rules))
    });
    let (book, written_ms, rules) = begun.map_err(|also| {
        StartError::Rules(format!("{problem}\nrules_snapshots: nothing to start from instead: {also}"))
    })?;
    let age_s = written_ms.map(|written_ms| shared.now_ms().saturating_sub(written_ms) / 1_000);
    tracing::error!(
        problem,
        revision = book.revision,
        emergency_revision = book.emergency_revision,
        written_s_ago = age_s,
        "the store of rules does not give them: starting with the last good snapshot"
    );
    shared.metrics.control.in_force(book.revision, book.emergency_revision);
    shared.rules.store(Arc::new(rules));
    Ok(book)
}

/// Opens a store that was gone, once it is there.
async fn find(config: &StoreConfig) -> Store {
    let mut ticks = interval(RETRY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match Store::open(&config.address).await {
            Ok(store) => return store,
            Err(error) => tracing::debug!(%error, "looking for the store of rules"),
        }
    }
}

/// Wakes whoever loads when something may have changed, and all of it now and then.
async fn watch(control: &Arc<Control>, reconcile: Duration) {
    let seed = control.now_ms() ^ u64::from(std::process::id()).rotate_left(32);
    let mut watch = control.store().watch(seed);
    let mut ticks = interval(varied(reconcile, seed));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first comes at once, and all was just loaded.
    ticks.tick().await;
    let mut is_up = true;
    loop {
        let wanted = tokio::select! {
            signal = watch.next() => match signal {
                Signal::MayHaveChanged => {
                    // What was said meanwhile is not known.
                    let look = if is_up { Look::Heads } else { Look::Everything };
                    if !is_up {
                        tracing::info!("the store of rules is there again");
                    }
                    is_up = true;
                    look
                }
                Signal::Lost(problem) => {
                    if is_up {
                        tracing::error!(problem, "the store of rules is gone: the last good rules stay in force");
                    }
                    is_up = false;
                    report(control, is_up);
                    continue;
                }
            },
            _ = ticks.tick() => Look::Everything,
        };
        report(control, is_up);
        control.want(wanted);
    }
}

fn report(control: &Control, is_up: bool) {
    if let Some(shared) = control.shared.upgrade() {
        shared.metrics.control.store_is_up(is_up);
    }
}

impl Control {
    pub(super) fn want(&self, look: Look) {
        if look == Look::Everything {
            self.everything_wanted.store(true, Ordering::Relaxed);
        }
        // Nothing is kept of a second call before the first was heard: both mean the same.
        self.emergencies_wanted.notify_one();
        self.rows_wanted.notify_one();
    }

    fn wanted(&self) -> Look {
        let everything = self.everything_wanted.swap(false, Ordering::Relaxed);
        if everything { Look::Everything } else { Look::Heads }
    }
}

async fn follow_rows(control: Arc<Control>) {
    let mut is_done = true;
    loop {
        wait(&control.rows_wanted, is_done).await;
        let look = control.wanted();
        is_done = told("rules", control.take_rows(look).await);
        if !is_done && look == Look::Everything {
            control.everything_wanted.store(true, Ordering::Relaxed);
        }
    }
}

async fn follow_emergencies(control: Arc<Control>) {
    let mut is_done = true;
    loop {
        wait(&control.emergencies_wanted, is_done).await;
        is_done = told("emergencies", control.take_emergencies().await);
    }
}

/// Waits to be woken, and after a failure not for long.
async fn wait(wanted: &Notify, is_done: bool) {
    if is_done {
        wanted.notified().await;
    } else {
        // Either is a reason to try.
        let _ = timeout(RETRY, wanted.notified()).await;
    }
}

/// Says what was not taken over; whether trying again would be pointless.
fn told(what: &str, taken: Result<(), NotTaken>) -> bool {
    match taken {
        Ok(()) | Err(NotTaken::Stopping) => true,
        Err(NotTaken::Refused(problems)) => {
            tracing::error!(what, %problems, "refused whole; the last good set stays in force");
            true
        }
        Err(NotTaken::Failed(error)) => {
            tracing::warn!(what, %error, "not loaded; the last good set stays in force");
            false
        }
    }
}

/// A time that is varied by up to a fifth, so that servers that started together do not ask together.
fn varied(time: Duration, seed: u64) -> Duration {
    // One step of a linear congruential generator: nothing but a spread is asked of it.
    let drawn = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407) >> 48;
    let share = u32::try_from(drawn).unwrap_or_default();
    time / 5 * 4 + (time / 5 * 2 / u32::from(u16::MAX)).saturating_mul(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_differ_by_a_fifth_at_most() {
        let time = Duration::from_mins(5);
        let drawn: Vec<Duration> = (0..1_000).map(|seed| varied(time, seed)).collect();
        assert!(drawn.iter().all(|drawn| *drawn >= time / 5 * 4 && *drawn <= time / 5 * 6));
        assert!(drawn.iter().any(|drawn| *drawn < time / 10 * 9) && drawn.iter().any(|drawn| *drawn > time));
    }
}
