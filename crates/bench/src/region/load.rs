//! The requests of a case, their due times and their answers.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, Exp};
use tidegate_load::{Turns, run_clients, wait_until};

use super::case::{Case, Costs};
use super::client::{Answer, Connection, SourceKind, Timeline};
use super::exact::Arrival;
use super::over::PassedRequest;
use crate::machine;

/// Connections of all servers together.
const CONNECTIONS: usize = 64;

/// Longest time to use up a key in a busy region, and the pause between two attempts.
const PREPARE_TIME_MAX: Duration = Duration::from_secs(30);
const PREPARE_AGAIN: Duration = Duration::from_millis(20);

/// A request that is to be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DueRequest {
    pub(super) after: Duration,
    pub(super) key: u32,
    pub(super) cost: u64,
}

/// A request that was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentRequest {
    pub(crate) key: u32,
    pub(crate) cost: u64,
    pub(crate) answer: Answer,
}

impl SentRequest {
    /// Whether the answer counts for or against the limit. A request that passed undecided does
    /// neither.
    pub(crate) fn is_judged(&self) -> bool {
        !(self.answer.allowed && self.answer.source_kind == SourceKind::Nothing)
    }

    pub(crate) fn arrival(&self) -> Arrival {
        Arrival { cost: self.cost, sent_us: self.answer.sent_us }
    }

    pub(crate) fn passed(&self) -> Option<PassedRequest> {
        let Answer { allowed, sent_us, answered_us, .. } = self.answer;
        (allowed && self.is_judged()).then_some(PassedRequest { cost: self.cost, sent_us, answered_us })
    }
}

/// The requests to one server in order, and their answers.
///
/// The slots for all answers exist before the first request. A growing vector would take new
/// memory, and clients with equal loads would do so at the same moment. In a virtual machine,
/// everything would wait until the host supplies that memory.
struct Slate {
    due: Vec<DueRequest>,
    answers: Vec<OnceLock<Answer>>,
    turns: Turns,
}

impl Slate {
    fn new(due: Vec<DueRequest>) -> Self {
        let answers = due.iter().map(|_| OnceLock::new()).collect();
        Self { turns: Turns::new(due.len() as u64), due, answers }
    }

    /// Returns the next request for one client, and the slot for its answer.
    fn next(&self) -> Option<(DueRequest, &OnceLock<Answer>)> {
        let next = self.turns.take()? as usize;
        self.due.get(next).copied().zip(self.answers.get(next))
    }

    /// Returns the requests that were answered.
    fn made(self) -> impl Iterator<Item = SentRequest> {
        let answers = self.answers.into_iter().map(OnceLock::into_inner);
        let made = |(DueRequest { key, cost, .. }, answer): (DueRequest, Option<Answer>)| {
            Some(SentRequest { key, cost, answer: answer? })
        };
        self.due.into_iter().zip(answers).filter_map(made)
    }
}

/// A case on its way: which keys it has, and at which servers.
pub(super) struct Load<'a> {
    pub(super) case: Case,
    pub(super) servers: &'a [SocketAddr],
    pub(super) timeline: Timeline,
    pub(super) keys: u32,
    pub(super) per_second: f64,
    pub(super) time: Duration,
    /// Of all runs: a run never meets the keys of another.
    pub(super) run: u32,
}

/// A key by the name under which it was used up.
pub(super) struct Key {
    name: String,
    pub(super) before: Option<SentRequest>,
}

impl Key {
    /// A key that no request has named yet.
    pub(super) fn fresh(name: String) -> Self {
        Self { name, before: None }
    }

    #[cfg(test)]
    pub(super) fn used_up(before: SentRequest) -> Self {
        Self { name: String::new(), before: Some(before) }
    }
}

impl Load<'_> {
    /// Gives every key a name, and uses as much of its limit as the case states.
    pub(super) fn prepare(&self) -> Result<Vec<Key>> {
        let cost = self.case.used_before(self.time);
        if cost == 0 {
            return Ok((0..self.keys).map(|key| Key::fresh(self.name(key, 0))).collect());
        }
        let open = |server: &SocketAddr| Connection::open(*server, self.timeline);
        let mut connections = self.servers.iter().map(open).collect::<Result<Vec<_>>>()?;
        let count = connections.len();
        (0..self.keys).map(|key| self.use_up(&mut connections[key as usize % count], key, cost)).collect()
    }

    fn name(&self, key: u32, attempt: u32) -> String {
        format!("{}-{key}-{attempt}", self.run)
    }

    /// Spends `cost` of a key. The effect of an attempt that was not decided in time is unknown, so
    /// the next attempt uses another name.
    fn use_up(&self, connection: &mut Connection, key: u32, cost: u64) -> Result<Key> {
        let (rule, deadline) = (self.case.rule.name(), machine::now() + PREPARE_TIME_MAX);
        let mut attempt = 0;
        loop {
            let name = self.name(key, attempt);
            let answer = connection.check(&rule, &name, cost)?;
            if answer.allowed && answer.source_kind != SourceKind::Nothing {
                return Ok(Key { name, before: Some(SentRequest { key, cost, answer }) });
            }
            ensure!(machine::now() < deadline, "{rule} denied a cost of {cost} on a new key");
            wait_until(machine::now() + PREPARE_AGAIN);
            attempt += 1;
        }
    }

    /// Makes all requests, and returns them with their answers.
    pub(super) fn run(&self, keys: &[Key]) -> Result<Vec<SentRequest>> {
        let rule = self.case.rule.name();
        let clients = Clients { servers: self.servers, timeline: self.timeline, rule: &rule, keys };
        Ok(clients.run(self.draw())?.into_iter().flatten().collect())
    }

    /// Draws the requests to each server. They arrive at random, as from independent users, and
    /// those of one key go to all servers in turn.
    fn draw(&self) -> Vec<Vec<DueRequest>> {
        let mut chance = SmallRng::seed_from_u64(u64::from(self.run));
        let mut nodes = vec![Vec::new(); self.servers.len()];
        let mut turns: Vec<usize> = (0..self.keys as usize).collect();
        // A rate above 0, which this is, makes a distribution.
        let Ok(gaps) = Exp::new(self.per_second) else { return nodes };
        let mut after = 0.0;
        loop {
            after += gaps.sample(&mut chance);
            if after >= self.time.as_secs_f64() {
                return nodes;
            }
            let key = chance.random_range(0..self.keys);
            let cost = match self.case.costs {
                Costs::One => 1,
                Costs::Mixed => chance.random_range(1..=self.case.costs.most()),
            };
            let turn = &mut turns[key as usize];
            let node = *turn % nodes.len();
            *turn += 1;
            nodes[node].push(DueRequest { after: Duration::from_secs_f64(after), key, cost });
        }
    }
}

/// Clients that check keys of one rule.
#[derive(Clone, Copy)]
pub(super) struct Clients<'a> {
    pub(super) servers: &'a [SocketAddr],
    pub(super) timeline: Timeline,
    pub(super) rule: &'a str,
    pub(super) keys: &'a [Key],
}

impl Clients<'_> {
    /// Makes the requests to each server when they are due. Returns them for each server, with
    /// their answers.
    pub(super) fn run(self, due: Vec<Vec<DueRequest>>) -> Result<Vec<Vec<SentRequest>>> {
        let nodes: Vec<Slate> = due.into_iter().map(Slate::new).collect();
        let started = machine::now();
        run_clients(CONNECTIONS, |number| {
            let node = number % self.servers.len();
            self.ask(self.servers[node], started, &nodes[node])
        })?;
        let made: Vec<Vec<SentRequest>> = nodes.into_iter().map(|slate| slate.made().collect()).collect();
        ensure!(made.iter().any(|node| !node.is_empty()), "no request was made");
        Ok(made)
    }

    /// Makes the due requests of one server over one connection.
    fn ask(&self, server: SocketAddr, started: Instant, slate: &Slate) -> Result<()> {
        // Opened when the first request is due: a server closes a connection that sends nothing.
        let mut opened = None;
        while let Some((next, answered)) = slate.next() {
            wait_until(started + next.after);
            let connection = match &mut opened {
                Some(connection) => connection,
                empty => empty.insert(Connection::open(server, self.timeline)?),
            };
            let key = self.keys.get(next.key as usize).context("a key without a name")?;
            let answer = connection.check(self.rule, &key.name, next.cost)?;
            answered.set(answer).map_err(|_| anyhow!("a request was made twice"))?;
        }
        Ok(())
    }
}

/// Returns the requests answered per second when every connection always has one in flight.
pub(super) fn capacity(
    servers: &[SocketAddr],
    timeline: Timeline,
    rule: &str,
    time: Duration,
) -> Result<f64> {
    let ends = machine::now() + time;
    let answered = run_clients(CONNECTIONS, |number| -> Result<usize> {
        let mut connection = Connection::open(servers[number % servers.len()], timeline)?;
        let name = format!("capacity-{number}");
        let mut answered = 0;
        while machine::now() < ends {
            connection.check(rule, &name, 1)?;
            answered += 1;
        }
        Ok(answered)
    })?;
    Ok(answered.into_iter().sum::<usize>() as f64 / time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::case::Offer;

    fn load(servers: &[SocketAddr]) -> Load<'_> {
        let case = Case::all().into_iter().find(|case| {
            case.costs == Costs::Mixed && case.offer == Offer::Fourfold && case.rule.amount == 1_000
        });
        Load {
            case: case.unwrap(),
            servers,
            timeline: Timeline::new(),
            keys: 10,
            per_second: 1_000.0,
            time: Duration::from_secs(10),
            run: 1,
        }
    }

    #[test]
    fn requests_of_a_key_go_to_all_servers_in_turn_at_the_rate_that_was_asked_for() {
        let servers = [SocketAddr::from(([127, 0, 0, 1], 1)); 4];
        let nodes = load(&servers).draw();
        let total: usize = nodes.iter().map(Vec::len).sum();
        assert!((9_500..10_500).contains(&total), "{total}");
        for key in 0..10 {
            let of_key = nodes.iter().map(|node| node.iter().filter(|due| due.key == key).count());
            let (least, most) = (of_key.clone().min().unwrap(), of_key.max().unwrap());
            assert!(most - least <= 1 && least > 200, "{least} to {most}");
        }
        let in_order = |node: &Vec<DueRequest>| node.is_sorted_by_key(|due| due.after);
        assert!(nodes.iter().all(in_order));
        let costs = nodes.iter().flatten().map(|due| due.cost);
        assert_eq!((costs.clone().min(), costs.max()), (Some(1), Some(20)));
    }

    #[test]
    fn each_request_is_sent_by_one_client_and_kept_if_answered() {
        let due = |key| DueRequest { after: Duration::ZERO, key, cost: 3 };
        let slate = Slate::new(vec![due(1), due(2), due(3)]);
        let answer = Answer {
            allowed: true,
            source_kind: SourceKind::Region,
            status: 200,
            sent_us: 1,
            answered_us: 2,
        };
        let (first, answered) = slate.next().unwrap();
        let (second, _) = slate.next().unwrap();
        assert_eq!((first.key, second.key), (1, 2));
        answered.set(answer).unwrap();
        slate.next().unwrap().1.set(answer).unwrap();
        assert!(slate.next().is_none());
        let made: Vec<(u32, u64)> = slate.made().map(|made| (made.key, made.cost)).collect();
        assert_eq!(made, [(1, 3), (3, 3)]);
    }

    #[test]
    fn undecided_admissions_are_not_judged() {
        let answer = Answer {
            allowed: true,
            source_kind: SourceKind::Nothing,
            status: 200,
            sent_us: 1,
            answered_us: 2,
        };
        let made = |allowed, source_kind| SentRequest {
            key: 0,
            cost: 3,
            answer: Answer { allowed, source_kind, ..answer },
        };
        assert!(
            !made(true, SourceKind::Nothing).is_judged()
                && made(true, SourceKind::Nothing).passed().is_none()
        );
        assert!(made(false, SourceKind::Nothing).is_judged());
        assert_eq!(made(true, SourceKind::Alone).passed().map(|passed| passed.cost), Some(3));
        assert_eq!(made(false, SourceKind::Region).passed(), None);
    }
}
