//! Limits that one region decides for each key: others ask it.

use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::engine::Resolution;
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
    use std::time::Duration;

    use tidegate_core::Limit;
    use tidegate_core::engine::Settings;
    use tidegate_courier::{PeerConfig, owner_of, region_id};
    use tidegate_origin::MemoryOrigin;

    use super::super::Regions;
    use super::*;
    use crate::{Clock, Limiter, SystemClock};

    const MINUTE: Duration = Duration::from_mins(1);

    /// Where nobody listens.
    const NOBODY: &str = "127.0.0.1:1";

    /// A region of one process that waits for whoever decides, however long it takes, and a limit that one region decides for each
    /// key.
    fn among(own: &str, peers: &[(&str, &str)]) -> (Region, Gate) {
        let mut regions = Regions::new(own, ([127, 0, 0, 1], 0).into());
        let peer = |(region, address): &(&str, &str)| PeerConfig {
            region: (*region).to_owned(),
            addresses: vec![(*address).to_owned()],
        };
        regions.peers = peers.iter().map(peer).collect();
        regions.forward_time_max = MINUTE;
        let clock = SystemClock::new();
        let origin = Arc::new(MemoryOrigin::new(move || clock.now().wall_us()));
        let limiter = Arc::new(Limiter::builder().build().expect("a limiter"));
        let patient = Settings { deadline_us: 60_000_000, hedge_us: 60_000_000, ..Settings::default() };
        let region = Region::join_among(regions, limiter, origin, patient).expect("a good one");
        let policy = Policy { regime: Regime::Strict, ..Policy::of(Class::Security) };
        let limit = Limit::gcra(10, MINUTE).expect("in range");
        let gate = region.gate_with("", "logins", limit, policy).expect("a name");
        (region, gate)
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
