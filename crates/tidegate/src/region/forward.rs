//! Limits that one region decides for each key: others ask it.

use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::engine::{Paid, Resolution};
use tidegate_core::origin::NEVER_US;
use tidegate_core::{Class, Decided, Retry};
use tidegate_courier::{Act, Answers, Forward, ForwardQuestion, Forwarded, Said};

use super::ladder::closed;
use super::question::{Policy, Question};
use super::regions::{Layout, Neighbours};
use super::{Regime, Region, Ruling, Rung, resolved};
use crate::decision::Outcome;
use crate::gate::Gate;

/// The other region that decides a question, if one does: its place among all.
pub(super) fn owner(question: &Question<'_, '_>) -> Option<usize> {
    let kept = question.kept();
    let layout = kept.layout.as_deref().filter(|_| kept.policy.regime == Regime::Strict)?;
    layout.owner(&[kept.prefix(), question.key()])
}

/// What tells another region to give back what it charged. The moment is of the clock here, by which the courier counts as well.
pub(super) fn rolled_back(paid: Paid) -> Act {
    match paid {
        Paid::Here { since_us } => Act::RollBack { since_us },
        // Nobody here knows another region's clock: all of it has drained then.
        Paid::There { .. } => Act::RollBack { since_us: 0 },
    }
}

impl Region {
    /// Has another region decide. Where it does not answer in time, nothing passes.
    pub(super) async fn ask_abroad<'g>(&self, owner: usize, group: &[&Question<'g, '_>]) -> Ruling<'g> {
        let said = self.forward(owner, Act::Decide, group).await;
        let resolution = said.and_then(|said| resolution(said, group.len()));
        match resolution {
            Some(resolution) => Ruling { decision: resolved(group, &resolution), rung: Rung::Regional },
            None => Ruling { decision: closed(group), rung: Rung::Closed },
        }
    }

    async fn forward(&self, owner: usize, act: Act, group: &[&Question<'_, '_>]) -> Option<Said> {
        let neighbours = self.neighbours.as_deref()?;
        ask(neighbours, owner, forwarded(act, group)).await
    }

    /// Gives back what was charged here, then or later, for a request of another region that does not pass in the end.
    fn roll_back_for_another(&self, questions: &[Question<'_, '_>], since_us: u64) {
        for question in questions {
            self.driver.roll_back_for_another(question.partition(), &question.charge(), since_us);
        }
    }

    /// Tells another region of what was spent or is given back, by and by and again until it was heard: a charge counts at least
    /// once, a refund at most once. What is given up in the end is counted by the courier.
    pub(super) fn tell_abroad(&self, owner: usize, act: Act, question: &Question<'_, '_>) {
        let Some(neighbours) = self.neighbours.as_deref() else { return };
        let (Some(forwarder), Some(region)) = (neighbours.forwarder(), neighbours.layout.id(owner)) else {
            return;
        };
        let forward = forwarded(act, &[question]);
        self.driver.spawn(async move {
            forwarder.tell(region, forward).await;
        });
    }
}

async fn ask(neighbours: &Neighbours, owner: usize, forward: Forward) -> Option<Said> {
    let forwarder = neighbours.forwarder()?;
    let answer = forwarder.ask(neighbours.layout.id(owner)?, forward, neighbours.forward_time_max()).await;
    answer?.said
}

fn forwarded(act: Act, group: &[&Question<'_, '_>]) -> Forward {
    let question = |question: &&Question<'_, '_>| {
        let (gate, kept) = (question.ask.gate(), question.kept());
        ForwardQuestion {
            tenant: kept.tenant().to_owned(),
            name: kept.name().to_owned(),
            limit: *gate.limit(),
            tolerance_ppm: kept.policy.tolerance_ppm,
            version: kept.policy.version,
            key: question.key().into(),
            placement: question.placement().map(Into::into),
            cost: question.ask.cost,
        }
    };
    // Numbered when it is sent.
    Forward { id: 0, act, questions: group.iter().map(question).collect() }
}

/// What another region said of so many limits, as an origin would have; nothing if it makes no sense.
fn resolution(said: Said, limits: usize) -> Option<Resolution> {
    let Said { remaining, denied } = said;
    if remaining.len() != limits {
        return None;
    }
    let remaining = remaining.into_boxed_slice();
    Some(match denied {
        None => Resolution::Allowed { remaining, charged_us: None },
        Some((by, retry_us)) => Resolution::Denied { by: by.into(), remaining, retry_us },
    })
}

/// Decides what other regions forward, as one that decides for those keys.
pub(super) struct Owner {
    /// Without neighbours: what was forwarded is not forwarded again.
    pub(super) region: Region,
    /// Who decides for which keys, as this process was told.
    layout: Arc<Layout>,
}

impl Answers for Owner {
    fn answer(&self, forward: Forward) -> Pin<Box<dyn Future<Output = Forwarded> + Send + '_>> {
        Box::pin(async move {
            let id = forward.id;
            Forwarded { id, said: self.decide(&forward).await }
        })
    }
}

impl Owner {
    async fn decide(&self, forward: &Forward) -> Option<Said> {
        let gates: Option<Vec<Gate>> = forward.questions.iter().map(|question| self.gate(question)).collect();
        let gates = gates?;
        // Where regions were told of different ones, two of them might decide for a key: then neither does for the other.
        if !gates.iter().zip(&forward.questions).all(|(gate, asked)| self.decides_for(gate, &asked.key)) {
            return None;
        }
        let questions: Vec<Question<'_, '_>> =
            gates.iter().zip(&forward.questions).map(|(gate, asked)| asked_here(gate, asked)).collect();
        match forward.act {
            Act::Decide => said(&self.region.check(&questions).await.ok()?),
            Act::Charge => {
                self.region.charge(&questions);
                Some(nothing_left(&questions))
            }
            Act::Refund => {
                self.region.refund(&questions);
                Some(nothing_left(&questions))
            }
            Act::RollBack { since_us } => {
                self.region.roll_back_for_another(&questions, since_us);
                Some(nothing_left(&questions))
            }
        }
    }

    /// Whether this region decides for a key, as far as this process was told.
    fn decides_for(&self, gate: &Gate, key: &[u8]) -> bool {
        gate.kept().is_some_and(|kept| self.layout.owner(&[kept.prefix(), key]).is_none())
    }

    fn gate(&self, question: &ForwardQuestion) -> Option<Gate> {
        let ForwardQuestion { tenant, name, limit, tolerance_ppm, version, .. } = question;
        let (tolerance_ppm, version) = (*tolerance_ppm, *version);
        // Decided here, and asked of nobody else.
        let regime = Regime::Regional;
        let policy = Policy { tolerance_ppm, regime, version, ..Policy::of(Class::Security) };
        self.region.gate_with(tenant, name, *limit, policy).ok()
    }
}

fn asked_here<'g, 'k>(gate: &'g Gate, asked: &'k ForwardQuestion) -> Question<'g, 'k> {
    let question = gate.question(&asked.key).cost(asked.cost);
    match &asked.placement {
        Some(placement) => question.placed_by(placement),
        None => question,
    }
}

/// What a ruling comes to; nothing, if it is not the origin's word.
fn said(ruling: &Ruling<'_>) -> Option<Said> {
    if ruling.rung > Rung::Regional {
        return None;
    }
    let outcomes = ruling.decision.outcomes();
    let retry_us = |retry: Option<Retry>| match retry {
        Some(Retry::After(us)) => us,
        _ => NEVER_US,
    };
    let denied = match ruling.decision.decided {
        Decided::Denied { by } => {
            Some((u16::try_from(by).ok()?, retry_us(outcomes.get(by)?.verdict().retry())))
        }
        Decided::Allowed => None,
    };
    Some(Said { remaining: outcomes.iter().map(Outcome::remaining).collect(), denied })
}

/// An answer to what asks nothing.
fn nothing_left(questions: &[Question<'_, '_>]) -> Said {
    Said { remaining: vec![0; questions.len()], denied: None }
}

impl Region {
    /// This process as one that decides for others, by this layout.
    pub(super) fn as_owner(&self, layout: Arc<Layout>) -> Arc<dyn Answers> {
        Arc::new(Owner { region: Self { neighbours: None, ..self.clone() }, layout })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use tidegate_core::engine::Settings;
    use tidegate_core::origin::{Call, Gathered, Merge, Merged, Round};
    use tidegate_core::{Limit, Now};
    use tidegate_courier::{PeerConfig, owner_of, region_id};
    use tidegate_origin::{Answer, Bid, Lease, MemoryOrigin, Origin};

    use super::super::Regions;
    use super::*;
    use crate::{Clock, Limiter, SystemClock};

    const MINUTE: Duration = Duration::from_mins(1);

    /// Where nobody listens.
    const NOBODY: &str = "127.0.0.1:1";

    /// A region of one process that waits for whoever decides, however long it takes, and a limit that one region decides for each
    /// key.
    fn among(own: &str, peers: &[(&str, &str)]) -> (Region, Gate) {
        let clock = SystemClock::new();
        let origin = Arc::new(MemoryOrigin::new(move || clock.now().wall_us()));
        among_around(own, peers, origin, SystemClock::new())
    }

    /// The same around this origin, by this clock.
    fn among_around(
        own: &str,
        peers: &[(&str, &str)],
        origin: Arc<dyn Origin>,
        clock: impl Clock + 'static,
    ) -> (Region, Gate) {
        let mut regions = Regions::new(own, ([127, 0, 0, 1], 0).into());
        let peer = |(region, address): &(&str, &str)| PeerConfig {
            region: (*region).to_owned(),
            addresses: vec![(*address).to_owned()],
        };
        regions.peers = peers.iter().map(peer).collect();
        regions.forward_time_max = MINUTE;
        let limiter = Arc::new(Limiter::builder().clock(clock).build().expect("a limiter"));
        let patient = Settings { deadline_us: 60_000_000, hedge_us: 60_000_000, ..Settings::default() };
        let region = Region::join_among(regions, limiter, origin, patient).expect("a good one");
        let policy = Policy { regime: Regime::Strict, ..Policy::of(Class::Security) };
        let limit = Limit::gcra(10, MINUTE).expect("in range");
        let gate = region.gate_with("", "logins", limit, policy).expect("a name");
        (region, gate)
    }

    /// A key for which that one of the regions decides.
    fn key_of(owner: &str, regions: &[&str], gate: &Gate) -> String {
        let prefix = gate.kept().expect("an origin keeps it").prefix();
        let ids: Vec<_> = regions.iter().map(|name| region_id(name)).collect();
        let mut keys = (0..1_000).map(|number| format!("198.51.100.{number}"));
        let is_of_it = |key: &String| regions[owner_of(&ids, &[prefix, key.as_bytes()])] == owner;
        keys.find(is_of_it).expect("each region decides for some")
    }

    /// Asks until whoever decides is there: the first question may come before there is a connection.
    async fn ask_all(region: &Region, questions: &[Question<'_, '_>]) -> bool {
        let decided = async {
            loop {
                let ruling = region.check(questions).await.expect("few limits");
                if ruling.rung != Rung::Closed {
                    return ruling.is_allowed();
                }
            }
        };
        tokio::time::timeout(MINUTE, decided).await.expect("a connection")
    }

    /// A clock that is moved by hand, and is everybody's.
    #[derive(Clone, Debug)]
    struct Hand(Arc<AtomicU64>);

    impl Clock for Hand {
        fn now(&self) -> Now {
            let us = self.0.load(Ordering::Relaxed);
            Now::from_micros(us, us)
        }
    }

    /// What a region charged for a request of another one may be rolled back late. By then it has drained, and others have used what
    /// drained.
    #[tokio::test]
    async fn what_another_region_rolls_back_late_passes_once() {
        let clock = Hand(Arc::new(AtomicU64::new(1 << 50)));
        let reads = clock.clone();
        let origin = Arc::new(MemoryOrigin::new(move || reads.now().wall_us()));
        let eu =
            || among_around("eu", &[("us", NOBODY)], Arc::clone(&origin) as Arc<dyn Origin>, clock.clone());
        let (region, gate) = eu();
        let key = key_of("eu", &["eu", "us"], &gate);
        let told = async |region: &Region, act: Act| {
            let layout = Arc::clone(&region.neighbours.as_ref().expect("one of two").layout);
            let owner = region.as_owner(layout);
            let said = owner.answer(forwarded(act, &[&gate.question(&key).cost(10)])).await.said;
            said.expect("it decides for the key").denied.is_none()
        };
        let since_us = clock.now().mono_us();
        assert!(told(&region, Act::Decide).await);
        // All of it drains in a minute.
        clock.0.fetch_add(61_000_000, Ordering::Relaxed);
        assert!(told(&region, Act::Decide).await, "one burst");
        assert!(told(&region, Act::RollBack { since_us }).await);
        region.leave().await;
        assert!(!told(&eu().0, Act::Decide).await, "what had drained passes once");
        // Of what was charged just now nothing has.
        let (last, since_us) = (eu().0, clock.now().mono_us());
        assert!(!told(&last, Act::Decide).await);
        assert!(told(&last, Act::RollBack { since_us }).await);
        last.leave().await;
        assert!(told(&eu().0, Act::Decide).await, "it was given back");
    }

    /// An origin that takes down when it charged something, and of what moment something was given back.
    struct Witness {
        inner: MemoryOrigin,
        charged_us: AtomicU64,
        given_back: Mutex<Option<(u64, u64)>>,
    }

    impl Origin for Witness {
        fn call<'a>(&'a self, partition: u16, call: &'a Call) -> Answer<'a> {
            Box::pin(async move {
                let reply = self.inner.call(partition, call).await?;
                if call.asks.iter().flat_map(|ask| &ask.charges).any(|charge| charge.cost > 0) {
                    self.charged_us.store(reply.now_us, Ordering::SeqCst);
                }
                if let Some(update) = call.updates.iter().find(|update| update.refund > 0) {
                    let given_back = (update.refund, update.refund_of_us);
                    *self.given_back.lock().expect("nobody panicked") = Some(given_back);
                }
                Ok(reply)
            })
        }

        fn round<'a>(&'a self, partition: u16, round: &'a Round) -> Answer<'a, Gathered> {
            self.inner.round(partition, round)
        }

        fn merge<'a>(&'a self, partition: u16, merge: &'a Merge) -> Answer<'a, Merged> {
            self.inner.merge(partition, merge)
        }

        fn lease(&self, bid: Bid) -> Answer<'_, Lease> {
            self.inner.lease(bid)
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_one_region_charged_and_another_denied_is_rolled_back_with_the_moment_of_the_charge() {
        let clock = SystemClock::new();
        let witness = Arc::new(Witness {
            inner: MemoryOrigin::new(move || clock.now().wall_us()),
            charged_us: AtomicU64::new(0),
            given_back: Mutex::default(),
        });
        let peers = [("ap", NOBODY), ("us", NOBODY)];
        let (eu, _) = among_around("eu", &peers, Arc::clone(&witness) as Arc<dyn Origin>, SystemClock::new());
        let (ap, _) = among("ap", &[("eu", NOBODY), ("us", NOBODY)]);
        let address =
            |region: &Region| region.meet().expect("a free port").expect("it has peers").to_string();
        let (us, logins) = among("us", &[("eu", &address(&eu)), ("ap", &address(&ap))]);
        address(&us);
        let [of_eu, of_ap] = ["eu", "ap"].map(|owner| key_of(owner, &["ap", "eu", "us"], &logins));
        assert!(ask_all(&us, &[logins.question(&of_ap).cost(10)]).await);
        assert!(ask_all(&us, &[logins.question(&of_eu)]).await);
        let both = [logins.question(&of_eu).cost(7), logins.question(&of_ap).cost(10)];
        assert!(!ask_all(&us, &both).await, "nothing is left in ap");
        let heard = async {
            loop {
                if let Some(given_back) = *witness.given_back.lock().expect("nobody panicked") {
                    return given_back;
                }
                tokio::task::yield_now().await;
            }
        };
        let (units, of_us) = tokio::time::timeout(MINUTE, heard).await.expect("it is told");
        let charged_us = witness.charged_us.load(Ordering::SeqCst);
        assert_eq!(units, 7);
        assert!((1..=charged_us).contains(&of_us), "charged at {charged_us}, and given back as of {of_us}");
    }

    /// Where one region was told of another that is not known everywhere yet, keys that move there have one bucket and not two.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_region_decides_for_another_only_where_both_say_that_it_decides() {
        let (eu, _) = among("eu", &[("us", NOBODY), ("sa", NOBODY)]);
        let address = eu.meet().expect("a free port").expect("it has peers").to_string();
        let (us, logins) = among("us", &[("eu", &address)]);
        us.meet().expect("a free port");
        let prefix = logins.kept().expect("an origin keeps it").prefix();
        let is_of_eu = |regions: &[&str], key: &str| {
            let ids: Vec<_> = regions.iter().map(|name| region_id(name)).collect();
            regions[owner_of(&ids, &[prefix, key.as_bytes()])] == "eu"
        };
        let keys = (0..60).map(|number| format!("192.0.2.{number}"));
        let asked_of_eu = keys.filter(|key| is_of_eu(&["eu", "us"], key));
        let (kept, moved): (Vec<_>, Vec<_>) = asked_of_eu.partition(|key| is_of_eu(&["eu", "sa", "us"], key));
        assert!(!kept.is_empty() && !moved.is_empty());
        let ask = async |key: &str| us.check(&[logins.question(key)]).await.expect("one limit").rung;
        // The first question may come before there is a connection.
        let decided = async { while ask(&kept[0]).await == Rung::Closed {} };
        tokio::time::timeout(MINUTE, decided).await.expect("a connection");
        for key in &moved {
            assert_eq!(ask(key).await, Rung::Closed, "{key}: somebody else may be deciding for it");
        }
        for key in &kept {
            assert_eq!(ask(key).await, Rung::Regional, "{key}: whoever decides, it is this one");
        }
    }
}
