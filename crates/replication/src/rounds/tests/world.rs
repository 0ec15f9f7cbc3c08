//! Regions with replicators that crash and are replaced in the middle of every step, on a network
//! that loses, repeats and reorders messages. No component is lost or dropped too early, and no
//! region claims to know more than it does.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use tidegate_core::origin::{RegionId, RoundReply, RoundRequest};

use super::super::{PartitionRound, Rounds};
use super::{charged, component, gathered, rounds};
use crate::message::{Ack, Batch};

const REGIONS: usize = 3;
const PARTITIONS: u16 = 2;
const KEYS: u8 = 3;

/// Maximum components in a reply of the simulated origin: small, so that there is often more.
const ANSWER_MAX: usize = 2;

/// Location of a meter: partition and key.
type MeterPlace = (u16, u8);

/// An origin, as far as a replicator sees it.
#[derive(Default)]
struct Store {
    charged: BTreeMap<MeterPlace, u64>,
    /// Usage charged while isolated. It is not published until the region hears all peers again.
    parted: BTreeMap<MeterPlace, u64>,
    /// Stamps by place, and the last one given.
    dirty_meters: BTreeMap<MeterPlace, u64>,
    stamp: u64,
    /// Merged usage of other regions.
    merged: BTreeMap<(usize, MeterPlace), u64>,
}

impl Store {
    fn gather(&mut self, partition: u16, round: &RoundRequest) -> RoundReply {
        let mut found: Vec<(u64, u8)> = self
            .dirty_meters
            .iter()
            .filter(|((of, _), stamp)| *of == partition && **stamp > round.after)
            .map(|((_, key), stamp)| (*stamp, *key))
            .collect();
        found.sort_unstable();
        let most = usize::from(round.most).min(ANSWER_MAX);
        let more = found.len() > most;
        found.truncate(most);
        let upto = found.last().map_or(round.after, |(stamp, _)| *stamp);
        let components = found.iter().map(|(_, key)| component(&[*key], self.charged[&(partition, *key)]));
        let reply = gathered(components.collect(), upto, more);
        let joined = round.connected_for_us > 0;
        let more = more | (joined && self.join(partition));
        RoundReply { more, includes_isolated: joined, ..reply }
    }

    /// Marks usage charged while isolated as dirty, after all that was gathered. Returns whether
    /// there was any.
    fn join(&mut self, partition: u16) -> bool {
        let parted: Vec<(MeterPlace, u64)> =
            self.parted.extract_if(.., |(of, _), _| *of == partition).collect();
        for (place, units) in &parted {
            self.charge(*place, *units);
        }
        !parted.is_empty()
    }

    fn charge(&mut self, place: MeterPlace, units: u64) {
        self.stamp += 1;
        self.dirty_meters.insert(place, self.stamp);
        *self.charged.entry(place).or_default() += units;
    }
}

/// A charge and its time.
struct RecordedCharge {
    at_us: u64,
    region: usize,
    place: MeterPlace,
    sum: u64,
    /// The same including usage charged while isolated.
    all: u64,
}

enum MessageInTransit {
    Batch { from: usize, replicator: usize, to: usize, batch: Batch },
    Ack { from: usize, replicator: usize, to: usize, ack: Ack },
}

struct World {
    now_us: u64,
    stores: Vec<Store>,
    /// All replicators so far, by region. An old one may not know yet that it lost its lease.
    replicators: Vec<Vec<Rounds>>,
    answers: Vec<(usize, usize, PartitionRound, RoundReply)>,
    network: Vec<MessageInTransit>,
    history: Vec<RecordedCharge>,
    incarnations: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Wait {
        us: u64,
    },
    Charge {
        region: usize,
        partition: u16,
        key: u8,
    },
    ChargeApart {
        region: usize,
        partition: u16,
        key: u8,
    },
    /// The replicator calls the origin; the reply is in transit.
    Gather {
        region: usize,
        replicator: Index,
        partition: u16,
    },
    Answer {
        which: Index,
        lost: bool,
    },
    EndRound {
        region: usize,
        replicator: Index,
    },
    Send {
        region: usize,
        replicator: Index,
        to: usize,
    },
    /// A message arrives, the oldest or another, and possibly again later.
    Arrive {
        which: Index,
        again: bool,
    },
    Lose {
        which: Index,
    },
    /// Only a part of a batch is merged when its receiver dies.
    ArriveInPart {
        which: Index,
        groups: usize,
    },
    Reconnect {
        region: usize,
        replicator: Index,
        to: usize,
    },
    TakeOver {
        region: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let region = || 0..REGIONS;
    let index = any::<Index>;
    let step = prop_oneof![
        2 => (1u64..400_000).prop_map(|us| Step::Wait { us }),
        4 => (region(), 0..PARTITIONS, 0..KEYS).prop_map(|(region, partition, key)|
            Step::Charge { region, partition, key }),
        2 => (region(), 0..PARTITIONS, 0..KEYS).prop_map(|(region, partition, key)|
            Step::ChargeApart { region, partition, key }),
        8 => (region(), index(), 0..PARTITIONS)
            .prop_map(|(region, replicator, partition)| Step::Gather { region, replicator, partition }),
        8 => (index(), prop::bool::weighted(0.1)).prop_map(|(which, lost)| Step::Answer { which, lost }),
        4 => (region(), index()).prop_map(|(region, replicator)| Step::EndRound { region, replicator }),
        8 => (region(), index(), region()).prop_map(|(region, replicator, to)| Step::Send { region, replicator, to }),
        12 => (index(), prop::bool::weighted(0.2)).prop_map(|(which, again)| Step::Arrive { which, again }),
        1 => index().prop_map(|which| Step::Lose { which }),
        1 => (index(), 0usize..3).prop_map(|(which, groups)| Step::ArriveInPart { which, groups }),
        2 => (region(), index(), region()).prop_map(|(region, replicator, to)|
            Step::Reconnect { region, replicator, to }),
        1 => region().prop_map(|region| Step::TakeOver { region }),
    ];
    prop::collection::vec(step, 1..400)
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            now_us: 0,
            stores: (0..REGIONS).map(|_| Store::default()).collect(),
            replicators: (0..REGIONS).map(|_| Vec::new()).collect(),
            answers: Vec::new(),
            network: Vec::new(),
            history: Vec::new(),
            incarnations: 0,
        };
        for region in 0..REGIONS {
            world.take_over(region);
        }
        world
    }

    /// Returns the clock of a region. Clocks of regions are unrelated.
    fn clock_us(&self, region: usize) -> u64 {
        self.now_us + [1_000_000_000, 5_000_000, 70_000_000_000][region]
    }

    fn take_over(&mut self, region: usize) {
        self.incarnations += 1;
        let peers: Vec<u64> = (0..REGIONS).filter(|peer| *peer != region).map(|peer| peer as u64).collect();
        self.replicators[region].push(rounds(&peers, PARTITIONS, self.incarnations));
        let replicator = self.replicators[region].len() - 1;
        for to in (0..REGIONS).filter(|to| *to != region) {
            self.reconnect(region, replicator, to);
        }
    }

    fn reconnect(&mut self, region: usize, replicator: usize, to: usize) {
        let echo_us = self.clock_us(to);
        let rounds = &mut self.replicators[region][replicator];
        rounds.disconnected(RegionId(to as u64));
        rounds.connected(RegionId(to as u64), echo_us);
    }

    fn charge(&mut self, region: usize, place: MeterPlace) {
        self.stores[region].charge(place, 1);
        self.note(region, place);
    }

    fn charge_apart(&mut self, region: usize, place: MeterPlace) {
        *self.stores[region].parted.entry(place).or_default() += 1;
        self.note(region, place);
    }

    fn note(&mut self, region: usize, place: MeterPlace) {
        let store = &self.stores[region];
        let sum = store.charged.get(&place).copied().unwrap_or_default();
        let all = sum + store.parted.get(&place).copied().unwrap_or_default();
        self.history.push(RecordedCharge { at_us: self.now_us, region, place, sum, all });
    }

    fn gather(&mut self, region: usize, replicator: usize, partition: u16) {
        let now_us = self.clock_us(region);
        for partition_round in self.replicators[region][replicator].partition_rounds(now_us, partition) {
            self.trim(region, partition, partition_round.round.trim);
            let answer = self.stores[region].gather(partition, &partition_round.round);
            self.answers.push((region, replicator, partition_round, answer));
        }
    }

    /// Drops dirty meters up to a stamp. Fails if another region has not merged one of them.
    fn trim(&mut self, region: usize, partition: u16, trim: u64) {
        let dropped: Vec<MeterPlace> = self.stores[region]
            .dirty_meters
            .iter()
            .filter(|((of, _), stamp)| *of == partition && **stamp <= trim)
            .map(|(place, _)| *place)
            .collect();
        for place in dropped {
            let sum = self.stores[region].charged[&place];
            for other in (0..REGIONS).filter(|other| *other != region) {
                assert!(
                    self.merged(other, region, place) >= sum,
                    "the dirty mark of {place:?} in {region} was dropped before {other} merged it"
                );
            }
            self.stores[region].dirty_meters.remove(&place);
        }
    }

    fn merged(&self, at: usize, of: usize, place: MeterPlace) -> u64 {
        self.stores[at].merged.get(&(of, place)).copied().unwrap_or_default()
    }

    fn answer(&mut self, which: usize) {
        let (region, replicator, partition_round, answer) = self.answers.swap_remove(which);
        let now_us = self.clock_us(region);
        self.replicators[region][replicator].on_round_reply(now_us, &partition_round, &answer);
    }

    /// Sends a batch, if there is one to be sent.
    fn send(&mut self, from: usize, replicator: usize, to: usize) -> bool {
        let now_us = self.clock_us(from);
        let next = self.replicators[from][replicator].next_batch(now_us, RegionId(to as u64));
        let is_sent = next.is_some();
        self.network.extend(next.map(|batch| MessageInTransit::Batch { from, replicator, to, batch }));
        is_sent
    }

    fn merge(&mut self, from: usize, to: usize, batch: &Batch, groups: usize) {
        for group in batch.groups.iter().take(groups) {
            for component in &group.components {
                let place = (group.partition, component.key[0]);
                let merged = self.stores[to].merged.entry((from, place)).or_default();
                *merged = (*merged).max(charged(component));
            }
        }
    }

    fn arrive(&mut self, which: usize, again: bool) {
        match self.network.swap_remove(which) {
            MessageInTransit::Batch { from, replicator, to, batch } => {
                self.merge(from, to, &batch, usize::MAX);
                let now_us = self.clock_us(to);
                let receiver = self.replicators[to].last_mut().expect("a region has a replicator");
                let ack = receiver.merged(now_us, RegionId(from as u64), &batch);
                self.network.push(MessageInTransit::Ack { from: to, replicator, to: from, ack });
                if again {
                    self.network.push(MessageInTransit::Batch { from, replicator, to, batch });
                }
            }
            MessageInTransit::Ack { from, replicator, to, ack } => {
                let now_us = self.clock_us(to);
                self.replicators[to][replicator].acknowledged(now_us, RegionId(from as u64), &ack);
                if again {
                    self.network.push(MessageInTransit::Ack { from, replicator, to, ack });
                }
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let replicator = |world: &Self, region: usize, replicator: &Index| {
            replicator.index(world.replicators[region].len())
        };
        match step {
            Step::Wait { us } => self.now_us += us,
            Step::Charge { region, partition, key } => self.charge(*region, (*partition, *key)),
            Step::ChargeApart { region, partition, key } => self.charge_apart(*region, (*partition, *key)),
            Step::Gather { region, replicator: which, partition } => {
                self.gather(*region, replicator(self, *region, which), *partition);
            }
            Step::Answer { which, lost } if !self.answers.is_empty() => {
                let which = which.index(self.answers.len());
                if *lost {
                    self.answers.swap_remove(which);
                } else {
                    self.answer(which);
                }
            }
            Step::EndRound { region, replicator: which } => {
                let which = replicator(self, *region, which);
                self.replicators[*region][which].round_ended();
            }
            Step::Send { region, replicator: which, to } if region != to => {
                self.send(*region, replicator(self, *region, which), *to);
            }
            Step::Arrive { which, again } if !self.network.is_empty() => {
                self.arrive(which.index(self.network.len()), *again);
            }
            Step::Lose { which } if !self.network.is_empty() => {
                self.network.swap_remove(which.index(self.network.len()));
            }
            Step::ArriveInPart { which, groups } if !self.network.is_empty() => {
                let which = which.index(self.network.len());
                if let MessageInTransit::Batch { from, to, batch, .. } = self.network.swap_remove(which) {
                    self.merge(from, to, &batch, *groups);
                    self.take_over(to);
                }
            }
            Step::Reconnect { region, replicator: which, to } if region != to => {
                self.reconnect(*region, replicator(self, *region, which), *to);
            }
            Step::TakeOver { region } => self.take_over(*region),
            _ => {}
        }
        self.check_liveness();
    }

    /// Checks each last-heard age: a region must know all usage that is older.
    fn check_liveness(&self) {
        for region in 0..REGIONS {
            let now_us = self.clock_us(region);
            let rounds = self.replicators[region].last().expect("a region has a replicator");
            for peer in (0..REGIONS).filter(|peer| *peer != region) {
                let liveness = &rounds
                    .peers
                    .iter()
                    .find(|of| of.region == RegionId(peer as u64))
                    .expect("known")
                    .liveness;
                self.check_known(region, peer, liveness.last_heard_age_us(now_us), |charged| charged.sum);
                self.check_known(region, peer, liveness.isolated_age_us(now_us), |charged| charged.all);
            }
            let effective_us = rounds.effective_age_us(now_us);
            for at in 0..REGIONS {
                for of in (0..REGIONS).filter(|of| *of != at) {
                    self.check_known(at, of, effective_us, |charged| charged.sum);
                }
            }
        }
    }

    fn check_known(
        &self,
        at: usize,
        of: usize,
        last_heard_age_us: Option<u64>,
        sum: impl Fn(&RecordedCharge) -> u64,
    ) {
        let Some(until_us) =
            last_heard_age_us.map(|last_heard_age_us| self.now_us.saturating_sub(last_heard_age_us))
        else {
            return;
        };
        // A charge at exactly this instant may have come just after it.
        for charged in self.history.iter().filter(|charged| charged.region == of && charged.at_us < until_us)
        {
            let (merged, sum) = (self.merged(at, of, charged.place), sum(charged));
            assert!(merged >= sum, "{at} claims to know {of} until {until_us}, but {merged} < {sum}");
        }
    }

    /// Runs the current replicators without faults until every component has reached every region.
    fn heal(&mut self) {
        self.answers.clear();
        self.network.clear();
        for _ in 0..20 {
            for region in 0..REGIONS {
                let replicator = self.replicators[region].len() - 1;
                for to in (0..REGIONS).filter(|to| *to != region) {
                    self.reconnect(region, replicator, to);
                }
                (0..PARTITIONS).for_each(|partition| self.gather(region, replicator, partition));
                while !self.answers.is_empty() {
                    self.answer(0);
                }
                self.replicators[region][replicator].round_ended();
                for to in (0..REGIONS).filter(|to| *to != region) {
                    while self.send(region, replicator, to) {}
                    while !self.network.is_empty() {
                        self.arrive(0, false);
                    }
                }
            }
            self.now_us += 200_000;
            self.check_liveness();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn all_regions_converge_after_any_faults(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.heal();
        for region in 0..REGIONS {
            prop_assert!(world.stores[region].dirty_meters.is_empty(), "acknowledged meters are not dirty");
            for (place, sum) in &world.stores[region].charged {
                for other in (0..REGIONS).filter(|other| *other != region) {
                    prop_assert_eq!(world.merged(other, region, *place), *sum);
                }
            }
            let rounds = world.replicators[region].last().expect("a region has a replicator");
            prop_assert!(rounds.connected_for_us(world.clock_us(region)) > 0, "the region is connected");
            prop_assert!(rounds.is_settled(world.clock_us(region)), "the region is settled");
            prop_assert!(world.stores[region].parted.is_empty());
        }
    }
}
