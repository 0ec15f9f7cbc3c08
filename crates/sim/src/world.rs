//! The world: one queue of events, from which everything follows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tidegate_core::engine::{Effect, Failure, Resolution};
use tidegate_core::origin::{Call, CallError, Lapse, OriginMeter, Partition, Reply, StoreId, Terms};
use tidegate_core::{Algorithm, Limit};

use crate::bucket::Judge;
use crate::bug::Bug;
use crate::clock::SkewedClock;
use crate::network::{arrivals, hits};
use crate::node::{Asking, Node, PARTITIONS, Spent, name, partition_of};
use crate::report::{Report, Violation};
use crate::scenario::{Scenario, Shape};
use crate::trace::Trace;

/// What the origin's clock shows when the world begins: some day in our time.
const EPOCH_US: u64 = 1_800_000_000_000_000;

const SECOND_US: u64 = 1_000_000;

/// How often an origin that will lose data is copied: what it loses is at most this old.
const SNAPSHOT_US: u64 = SECOND_US / 2;

/// How long the world goes on after the last request, so that everything is reported and every lapse is over.
const SETTLE_US: u64 = 120 * SECOND_US;

/// The longest pause of an origin.
const PAUSE_US_MAX: u64 = 20 * SECOND_US;

/// The longest time until a node hears of a changed limit.
const RULE_LAG_US: u64 = SECOND_US;

/// What share of what one bucket would admit a world that is well admits at least, in hundredths.
const WELL_PERCENT: u64 = 97;

#[derive(Debug)]
enum Event {
    Request { key: usize, cost: u64 },
    Wake { node: usize, life: u32 },
    CallArrives { node: usize, life: u32, partition: u16, call: Arc<Call> },
    Answered { node: usize, life: u32, partition: u16, sequence: u64, answer: Result<Reply, CallError> },
    Crash,
    Restart,
    Cut,
    Pause,
    Lose,
    ChangeRule,
    LearnRule { node: usize, version: usize },
    Snapshot,
    Close,
}

#[derive(Debug)]
struct Scheduled {
    at_us: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.order).cmp(&(other.at_us, other.order))
    }
}

/// A request that waits for its node's engine.
struct Waits {
    node: usize,
    life: u32,
    key: usize,
    cost: u64,
}

/// The store of the region.
#[derive(Clone)]
struct Store {
    partitions: Vec<Partition>,
    paused_until_us: u64,
    boot: u64,
}

struct World<'s> {
    scenario: &'s Scenario,
    bug: Option<Bug>,
    rng: Rng,
    now_us: u64,
    order: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    nodes: Vec<Node>,
    next_node: u64,
    store: Store,
    snapshot: Vec<Partition>,
    limits: [(Limit, Terms); 2],
    rule: usize,
    rule_version: u32,
    /// What passed, key by key: when, and what it cost.
    admissions: Vec<Vec<(u64, u64)>>,
    admitted: Vec<Judge>,
    ideal: Vec<Judge>,
    waiting: BTreeMap<u64, Waits>,
    tickets: u64,
    passed: u64,
    waited: u64,
    unanswered: u64,
    calls: u64,
    updates: u64,
    lapses: u64,
    faults: u64,
    closed: bool,
    violations: Vec<Violation>,
    trace: Trace,
}

/// Runs a world to its end, with a known mistake in it if one is given.
pub fn run(scenario: &Scenario, bug: Option<Bug>, keeps_trace: bool) -> Report {
    let mut world = World::new(scenario, bug, keeps_trace);
    world.plan();
    while let Some(Reverse(next)) = world.queue.pop() {
        world.now_us = next.at_us;
        world.happen(next.event);
    }
    world.judge();
    world.report()
}

impl<'s> World<'s> {
    fn new(scenario: &'s Scenario, bug: Option<Bug>, keeps_trace: bool) -> Self {
        let terms = terms(scenario, &scenario.limit, 1);
        let half = halved(&scenario.limit);
        let partitions = vec![Partition::default(); usize::from(PARTITIONS)];
        let mut world = Self {
            scenario,
            bug,
            rng: Rng::with_seed(scenario.seed ^ 0x5eed),
            now_us: 0,
            order: 0,
            queue: BinaryHeap::new(),
            nodes: Vec::new(),
            next_node: 1,
            store: Store { partitions: partitions.clone(), paused_until_us: 0, boot: 1 },
            snapshot: partitions,
            limits: [
                (scenario.limit.at_origin(), terms),
                (half.at_origin(), self::terms(scenario, &half, 1)),
            ],
            rule: 0,
            rule_version: 1,
            admissions: vec![Vec::new(); scenario.keys],
            admitted: vec![Judge::new(terms); scenario.keys],
            ideal: vec![Judge::new(terms); scenario.keys],
            waiting: BTreeMap::new(),
            tickets: 0,
            passed: 0,
            waited: 0,
            unanswered: 0,
            calls: 0,
            updates: 0,
            lapses: 0,
            faults: 0,
            closed: false,
            violations: Vec::new(),
            trace: Trace::new(keeps_trace),
        };
        world.nodes = (0..scenario.nodes).filter_map(|_| world.new_node(0)).collect();
        world
    }

    fn new_node(&mut self, life: u32) -> Option<Node> {
        let skew = i64::from(self.scenario.faults.skew_ppm);
        let clock = SkewedClock {
            offset_us: self.rng.u64(0..1_000 * SECOND_US),
            rate_ppm: self.rng.i64(-skew..=skew),
            wall_offset_us: EPOCH_US,
        };
        self.next_node += 1;
        let id = self.next_node ^ self.rng.u64(..) << 16;
        Node::new(id, life, clock, self.rule)
    }

    /// Draws everything that comes from outside.
    fn plan(&mut self) {
        for _ in 0..self.scenario.requests {
            let at_us = self.request_time();
            let (key, cost) = (self.draw_key(), self.rng.u64(1..=self.scenario.cost_max));
            self.schedule(at_us, Event::Request { key, cost });
        }
        let faults = self.scenario.faults;
        let plan: [(u32, fn() -> Event); 6] = [
            (faults.crashes, || Event::Crash),
            (faults.restarts, || Event::Restart),
            (faults.cuts, || Event::Cut),
            (faults.pauses, || Event::Pause),
            (faults.losses, || Event::Lose),
            (faults.rule_changes, || Event::ChangeRule),
        ];
        for (count, event) in plan {
            for _ in 0..count {
                let at_us = self.rng.u64(0..self.scenario.length_us);
                self.schedule(at_us, event());
            }
        }
        if faults.losses > 0 {
            self.schedule(0, Event::Snapshot);
        }
        self.schedule(self.scenario.length_us + PAUSE_US_MAX, Event::Close);
    }

    fn request_time(&mut self) -> u64 {
        let at_us = self.rng.u64(0..self.scenario.length_us);
        match self.scenario.shape {
            Shape::Steady => at_us,
            // A second of noise, twenty of quiet.
            Shape::Bursts => at_us - at_us % (20 * SECOND_US) + self.rng.u64(0..SECOND_US),
            Shape::Edges => {
                let period_us = self.scenario.limit.period_us();
                let edge_us = at_us - at_us % period_us + period_us;
                edge_us - self.rng.u64(0..=period_us / 10)
            }
        }
    }

    /// Keys weigh 1, 1/2, 1/3 and so on.
    fn draw_key(&mut self) -> usize {
        let keys = self.scenario.keys;
        let total: f64 = (1..=keys).map(|n| 1.0 / n as f64).sum();
        let mut point = self.rng.f64() * total;
        for key in 0..keys {
            point -= 1.0 / (key + 1) as f64;
            if point <= 0.0 {
                return key;
            }
        }
        keys - 1
    }

    fn schedule(&mut self, at_us: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at_us, order: self.order, event }));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request { key, cost } => self.request(key, cost),
            Event::Wake { node, life } => self.wake(node, life),
            Event::CallArrives { node, life, partition, call } => {
                self.call_arrives(node, life, partition, &call);
            }
            Event::Answered { node, life, partition, sequence, answer } => {
                self.answered(node, life, partition, sequence, answer);
            }
            Event::Crash => self.replace(false),
            Event::Restart => self.replace(true),
            Event::Cut => self.cut(),
            Event::Pause => {
                self.faults += 1;
                self.store.paused_until_us = self.now_us + self.rng.u64(0..PAUSE_US_MAX);
            }
            Event::Lose => self.lose(),
            Event::ChangeRule => self.change_rule(),
            Event::LearnRule { node, version } => self.nodes[node].version = version,
            Event::Snapshot => {
                self.snapshot.clone_from(&self.store.partitions);
                if !self.closed {
                    self.schedule(self.now_us + SNAPSHOT_US, Event::Snapshot);
                }
            }
            Event::Close => self.close(),
        }
    }

    fn request(&mut self, key: usize, cost: u64) {
        let node = self.rng.usize(0..self.nodes.len());
        self.ideal[key].offer(EPOCH_US + self.now_us, cost);
        let now = self.nodes[node].now(self.now_us);
        let (limit, terms) = self.limits[self.nodes[node].version];
        match self.nodes[node].spend(now, &limit, key, cost) {
            Spent::Allowed => self.admit(key, EPOCH_US + self.now_us, cost),
            Spent::Denied => {}
            Spent::Asks => {
                self.tickets += 1;
                let (ticket, life) = (self.tickets, self.nodes[node].life);
                self.waiting.insert(ticket, Waits { node, life, key, cost });
                let mut effects = Vec::new();
                self.nodes[node].ask(now, &Asking { ticket, key, cost, limit, terms }, &mut effects);
                self.waited += 1;
                self.act(node, effects, None);
                self.poll(node);
            }
        }
        self.trace.note([self.now_us, 1, key as u64, self.passed], || {
            format!("node {node}: request of {cost} for key {key}")
        });
    }

    /// Notes that a request passed: when its node let it pass, or when the origin did.
    fn admit(&mut self, key: usize, at_us: u64, cost: u64) {
        self.passed += 1;
        self.trace.note([self.now_us, 4, key as u64, at_us], || {
            format!("{cost} admitted for key {key}, as of {} us", at_us - EPOCH_US)
        });
        self.admissions[key].push((at_us, cost));
    }

    fn wake(&mut self, node: usize, life: u32) {
        if self.nodes[node].life == life && self.nodes[node].wake_us <= self.now_us {
            self.nodes[node].wake_us = u64::MAX;
            self.poll(node);
        }
    }

    fn poll(&mut self, node: usize) {
        let mut effects = Vec::new();
        let here = &mut self.nodes[node];
        let now = here.clock.read(self.now_us);
        let next = here.engine.poll(now, &here.table, &mut effects);
        if let Some(next_us) = next {
            // A clock's reading may come up a moment later than asked for, never earlier.
            let at_us = here.clock.true_time(next_us).max(self.now_us + 1);
            if at_us < here.wake_us {
                here.wake_us = at_us;
                let life = here.life;
                self.schedule(at_us, Event::Wake { node, life });
            }
        }
        self.act(node, effects, None);
    }

    /// Does what an engine wants done. What the origin decided was decided when it did, not when its answer came.
    fn act(&mut self, node: usize, effects: Vec<Effect>, decided_us: Option<u64>) {
        let at_us = decided_us.unwrap_or(EPOCH_US + self.now_us);
        for effect in effects {
            match effect {
                Effect::Call { partition, call, .. } => self.send(node, partition, &call),
                Effect::Answer { ticket, resolution } => self.resolve(ticket, at_us, resolution),
            }
        }
    }

    fn resolve(&mut self, ticket: u64, at_us: u64, resolution: Resolution) {
        let Some(waits) = self.waiting.remove(&ticket) else { return };
        match resolution {
            Resolution::Allowed { .. } => self.admit(waits.key, at_us, waits.cost),
            Resolution::Denied { .. } => {}
            Resolution::Unanswered => self.unanswered += 1,
        }
    }

    fn send(&mut self, node: usize, partition: u16, call: &Arc<Call>) {
        let life = self.nodes[node].life;
        self.trace.note([self.now_us, 2, call.node.0, call.sequence], || {
            format!("node {node}: call {} to {partition}: {:?} {:?}", call.sequence, call.updates, call.asks)
        });
        if self.is_cut(node) && !self.scenario.faults.one_way {
            return;
        }
        let delay_us = self.scenario.delay_us;
        let faults = self.faults_now();
        let times: Vec<u64> = arrivals(&mut self.rng, &faults, delay_us).collect();
        for time in times {
            let call = Arc::clone(call);
            self.schedule(self.now_us + time, Event::CallArrives { node, life, partition, call });
        }
    }

    /// After the end the network is well, so that everything can be reported.
    fn faults_now(&self) -> crate::scenario::Faults {
        if self.closed { crate::scenario::Faults::default() } else { self.scenario.faults }
    }

    fn is_cut(&self, node: usize) -> bool {
        !self.closed && self.now_us < self.nodes[node].cut_until_us
    }

    fn call_arrives(&mut self, node: usize, life: u32, partition: u16, call: &Arc<Call>) {
        if self.now_us < self.store.paused_until_us {
            let call = Arc::clone(call);
            self.schedule(self.store.paused_until_us, Event::CallArrives { node, life, partition, call });
            return;
        }
        let mut call = Call::clone(call);
        call.store = StoreId { lineage: 1, boot: self.store.boot, parent: 0 };
        self.spoil(&mut call);
        let origin_us = EPOCH_US + self.now_us;
        let answer = self.store.partitions[usize::from(partition)].apply(origin_us, &call);
        self.trace.note([self.now_us, 3, call.node.0, call.sequence], || {
            format!("origin: {} answers {answer:?}", call.node.0)
        });
        let sequence = call.sequence;
        if self.is_cut(node) {
            return;
        }
        let (delay_us, faults) = (self.scenario.delay_us, self.faults_now());
        let times: Vec<u64> = arrivals(&mut self.rng, &faults, delay_us).collect();
        for time in times {
            let answer = answer.clone();
            self.schedule(self.now_us + time, Event::Answered { node, life, partition, sequence, answer });
        }
    }

    /// Where a known mistake is made.
    fn spoil(&mut self, call: &mut Call) {
        match self.bug {
            Some(Bug::TrustsLostData) => {
                call.acknowledged = 0;
                call.store = StoreId { lineage: 1, boot: 1, parent: 0 };
            }
            Some(Bug::ForgetsLapsed) => {
                for update in &mut call.updates {
                    update.terms = terms_with(self.scenario, &self.limits[0].0, Lapse::Forgiven, 1);
                }
            }
            Some(Bug::ImpatientOrigin) => call.updates.iter_mut().for_each(|update| update.life_us = 0),
            _ => {}
        }
    }

    fn answered(
        &mut self,
        node: usize,
        life: u32,
        partition: u16,
        sequence: u64,
        answer: Result<Reply, CallError>,
    ) {
        let here = &mut self.nodes[node];
        if here.life != life {
            return;
        }
        let now = here.clock.read(self.now_us);
        let (mut effects, mut decided_us) = (Vec::new(), None);
        match answer {
            Ok(mut reply) => {
                decided_us = Some(reply.now_us);
                self.lapses += reply.told.iter().filter(|told| told.lapsed).count() as u64;
                if self.bug == Some(Bug::ImpatientOrigin) {
                    reply.told.iter_mut().for_each(|told| told.life_us = SECOND_US);
                }
                here.engine.on_reply(now, &here.table, partition, sequence, &reply, &mut effects);
            }
            Err(CallError::Outdated { sequence: applied }) => {
                here.engine.on_failure(now, partition, sequence, Failure::Outdated { sequence: applied });
            }
            Err(CallError::NoSuchMeter { .. }) => {
                here.engine.on_failure(now, partition, sequence, Failure::Unanswered);
            }
        }
        self.act(node, effects, decided_us);
        self.poll(node);
    }

    /// A node goes, and another comes in its place. One that stops in an orderly way reports before it goes.
    fn replace(&mut self, orderly: bool) {
        self.faults += 1;
        let node = self.rng.usize(0..self.nodes.len());
        if orderly {
            self.nodes[node].engine.close();
            self.poll(node);
            // It has as long as it takes: the place is taken by another beside it.
            if let Some(fresh) = self.new_node(0) {
                self.nodes.push(fresh);
            }
            return;
        }
        let life = self.nodes[node].life + 1;
        let _ = hits(&mut self.rng, 0);
        self.waiting.retain(|_, waits| waits.node != node || waits.life == life);
        if let Some(fresh) = self.new_node(life) {
            let old = std::mem::replace(&mut self.nodes[node], fresh);
            self.count(&old);
        }
    }

    fn count(&mut self, node: &Node) {
        let stats = node.engine.stats();
        self.calls += stats.calls;
        self.updates += stats.updates;
    }

    fn cut(&mut self) {
        self.faults += 1;
        let node = self.rng.usize(0..self.nodes.len());
        self.nodes[node].cut_until_us = self.now_us + self.rng.u64(0..=self.scenario.faults.cut_us);
    }

    fn lose(&mut self) {
        self.faults += 1;
        self.store.partitions.clone_from(&self.snapshot);
        self.store.boot += 1;
    }

    /// The limit changes to half, or back. Nodes hear of it one after another.
    fn change_rule(&mut self) {
        self.faults += 1;
        self.rule_version += 1;
        self.rule = 1 - self.rule;
        let limit = self.limits[self.rule].0;
        self.limits[self.rule].1 = terms(self.scenario, &limit, self.rule_version);
        for node in 0..self.nodes.len() {
            let at_us = self.now_us + self.rng.u64(0..RULE_LAG_US);
            self.schedule(at_us, Event::LearnRule { node, version: self.rule });
        }
    }

    /// The end: everything is well again, and everyone reports.
    fn close(&mut self) {
        if self.closed {
            self.queue.clear();
            return;
        }
        self.closed = true;
        for node in 0..self.nodes.len() {
            self.nodes[node].engine.close();
            self.poll(node);
        }
        self.schedule(self.now_us + SETTLE_US, Event::Close);
    }

    fn judge(&mut self) {
        for (judge, admissions) in self.admitted.iter_mut().zip(&mut self.admissions) {
            admissions.sort_unstable();
            admissions.iter().for_each(|(at_us, cost)| judge.fill(*at_us, *cost));
        }
        self.judge_bound();
        self.judge_conservation();
        self.judge_share();
        let requests = self.waiting.len() as u64;
        if requests > 0 {
            self.violations.push(Violation::Forgotten { requests });
        }
    }

    fn judge_bound(&mut self) {
        let capacity = self.limits[0].1.capacity();
        let lapses = self.lapses + u64::from(self.scenario.faults.crashes);
        let allowed = match self.scenario.lapse {
            Lapse::Counted => 0,
            Lapse::Forgiven => (lapses + u64::from(self.scenario.faults.losses)) * capacity,
        };
        for (key, judge) in self.admitted.iter().enumerate() {
            let excess = judge.excess();
            if excess > allowed {
                self.violations.push(Violation::Bound {
                    key,
                    excess,
                    allowed,
                    at_us: judge.worst_us() - EPOCH_US,
                });
            }
        }
    }

    fn judge_conservation(&mut self) {
        let faults = &self.scenario.faults;
        if faults.losses > 0 {
            return;
        }
        let capacity = self.limits[0].1.capacity();
        let crashed = u64::from(faults.crashes) * capacity;
        let is_well = self.faults == 0 && faults.loss_ppm + faults.slow_ppm == 0;
        let (fewer, more) = match self.scenario.lapse {
            Lapse::Counted if is_well => (0, 0),
            Lapse::Counted => (0, u64::MAX),
            Lapse::Forgiven => (crashed, crashed),
        };
        for (key, judge) in self.admitted.iter().enumerate() {
            let meter = self.store.partitions[usize::from(partition_of(key))].meter(&name(key));
            let charged = meter.map_or(0, |meter| meter.charged() - meter.refunded().min(meter.charged()));
            let held = meter.map_or(0, OriginMeter::held);
            let admitted = judge.filled();
            // What a node that died held still counts as used.
            if admitted > charged + held + fewer || charged > admitted.saturating_add(more) {
                self.violations.push(Violation::Conservation { key, admitted, charged, fewer, more });
            }
        }
    }

    /// In a world that is well, a region admits nearly what one bucket would.
    fn judge_share(&mut self) {
        let Scenario { faults, limit, shape, cost_max, .. } = self.scenario;
        let is_well =
            *faults == crate::scenario::Faults::default() && *shape == Shape::Steady && *cost_max == 1;
        let is_roomy =
            limit.burst() >= 10 * self.scenario.nodes as u32 && limit.algorithm() == Algorithm::Gcra;
        let (admitted, ideal) = (total(&self.admitted), total(&self.ideal));
        if is_well && is_roomy && admitted * 100 < ideal * WELL_PERCENT {
            self.violations.push(Violation::Starved { admitted, ideal });
        }
    }

    fn report(mut self) -> Report {
        for node in std::mem::take(&mut self.nodes) {
            self.count(&node);
        }
        Report {
            seed: self.scenario.seed,
            simulated_us: self.scenario.length_us,
            requests: self.scenario.requests,
            passed: self.passed,
            waited: self.waited,
            unanswered: self.unanswered,
            admitted: total(&self.admitted),
            ideal: total(&self.ideal),
            calls: self.calls,
            updates: self.updates,
            faults: self.faults,
            violations: self.violations,
            trace: self.trace,
        }
    }
}

fn total(judges: &[Judge]) -> u64 {
    judges.iter().map(Judge::filled).sum()
}

fn terms(scenario: &Scenario, limit: &Limit, version: u32) -> Terms {
    terms_with(scenario, limit, scenario.lapse, version)
}

fn terms_with(scenario: &Scenario, limit: &Limit, lapse: Lapse, version: u32) -> Terms {
    Terms::new(limit, scenario.tolerance_ppm, lapse, version)
}

/// Half of a limit, or the limit itself if half of it makes no sense.
fn halved(limit: &Limit) -> Limit {
    let amount = u64::from(limit.amount() / 2).max(1);
    let period = Duration::from_micros(limit.period_us());
    let half = match limit.algorithm() {
        Algorithm::Gcra => {
            Limit::gcra(amount, period).and_then(|half| half.with_burst(u64::from(limit.burst() / 2).max(1)))
        }
        Algorithm::SlidingWindow => Limit::sliding_window(amount, period),
    };
    half.unwrap_or(*limit)
}
