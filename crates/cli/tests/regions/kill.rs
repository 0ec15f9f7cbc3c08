//! Replicators that are killed at each step of their work.
//!
//! A proxy passes the traffic of a process up to the bytes that mark a step, and holds the rest.
//! The process stays at that step until it is killed, however fast the machine is.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tidegate_testkit::{Proxy, REGIONS, Traffic, ask, wait_until};

use crate::client::{FOR_EVER, TIME_MAX};
use crate::world::World;

/// A limit of which less than one unit drains in a quarter of an hour. The usage stays far below
/// it, and below the regional share of an isolated region.
const LIMIT: u64 = 20_000;

/// More than the sixteenth that a region may keep to itself.
const MUCH: u64 = 2_000;
const LITTLE: u64 = 100;

/// A user that all regions know from the start, and charge in every step.
const KNOWN: &str = "alice";

/// The region with the usage, a peer with held traffic, and a peer that always receives the usage.
const HERE: usize = 0;
const PEER: usize = 1;
const THIRD: usize = 2;

/// Bytes of a replicator's request for changes to its Redis. Only this script has three keys.
const ROUND: &[u8] = b"\r\n$1\r\n3\r\n";

/// The Redis key of the replicator lease.
const LEASE: &str = "tg2:{0}:c";

/// Rounds that a replicator runs while it is held at a step, if it can. By then it has dropped all
/// that it drops.
const ROUNDS: u64 = 2;

/// Region and server.
type Place = (usize, usize);

/// Brings a replicator to a step. Returns it, or `None` if its lease expired before that was seen.
type ClusterStatus = fn(&mut Scene) -> Option<ReplicatorNode>;

const STEPS: [(&str, ClusterStatus); 7] = [
    ("has the lease and nothing else", lease),
    ("asks what changed", ask_for_changes),
    ("is told what changed", gather),
    ("sends a batch", send),
    ("merges a batch", merge),
    ("answers that it merged a batch", answer),
    ("hears that a batch was merged", acknowledge),
];

#[test]
fn nothing_is_lost_or_counted_twice_wherever_a_replicator_is_killed() {
    let mut scene = Scene::new();
    scene.spend_everywhere();
    scene.compare();
    for (step, stand) in STEPS {
        let victim = scene.replicator_at(step, stand);
        scene.world.ground.regions[victim.place.0].servers[victim.place.1].process.kill();
        scene.mend();
        scene.spend_everywhere();
        let next = scene.replicator(victim.place.0);
        assert_ne!(next.name, victim.name, "{step}");
        scene.compare();
        println!("killed: {} that {step}, in the region {}", victim.name, REGIONS[victim.place.0]);
    }
    // This usage takes the same path as late components: when it has arrived, so have they.
    scene.spend_everywhere();
    scene.fresh = scene.granted.borrow().keys().cloned().collect();
    // Usage on a regional share is replicated after the next call for its meter.
    scene.compare_with(|at, user| {
        scene.world.client((at, 0)).ask(&[("user", user)], 0);
    });
}

/// The replicator of a region, and its name in Redis.
struct ReplicatorNode {
    place: Place,
    name: String,
}

impl ReplicatorNode {
    /// The other server of its region.
    fn other(&self) -> Place {
        (self.place.0, 1 - self.place.1)
    }
}

struct Scene {
    world: World,
    /// Units that clients were admitted, by user.
    granted: RefCell<BTreeMap<String, u64>>,
    /// The users of this step.
    fresh: Vec<String>,
    tries: u32,
}

impl Scene {
    fn new() -> Self {
        let rules = format!(
            "placement='user'\n[[rules]]\nname='global'\nclass='cost'\nregime='best_effort'\n\
             key=['user']\nlimit={LIMIT}\nperiod='{FOR_EVER}'\n"
        );
        let world = World::start_on_wires(&rules, 2, &[]);
        let scene = Self { world, granted: RefCell::default(), fresh: vec![KNOWN.to_owned()], tries: 0 };
        scene.world.wait_for_connected(true);
        scene.spend((HERE, 0), KNOWN, MUCH);
        scene
    }

    /// Waits until the replicator of a region has reached a step with its lease.
    fn replicator_at(&mut self, step: &str, stand: ClusterStatus) -> ReplicatorNode {
        let mut found = None;
        wait_until(&format!("a replicator that {step}"), TIME_MAX, || {
            self.world.wait_for_connected(true);
            found = stand(self);
            if found.is_none() {
                self.mend();
            }
            found.is_some()
        });
        found.expect("waited for")
    }

    /// Returns two new users. Their names occur only in traffic about them.
    fn users(&mut self) -> [&'static str; 2] {
        self.tries += 1;
        // The patterns of `Traffic` are `'static`.
        let users = ["first", "second"].map(|user| &*format!("{user}-{:03}", self.tries).leak());
        self.fresh = users.iter().chain([&KNOWN]).map(ToString::to_string).collect();
        users
    }

    /// Spends until so much was granted at once.
    fn spend(&self, at: Place, user: &str, cost: u64) {
        let mut client = self.world.client(at);
        // If Redis does not reply in time, the check is denied and costs nothing.
        wait_until("a grant", TIME_MAX, || client.check(&[("user", user)], cost).allowed);
        *self.granted.borrow_mut().entry(user.to_owned()).or_default() += cost;
    }

    fn spend_all(&self, at: Place, users: [&str; 2]) {
        self.spend(at, KNOWN, LITTLE);
        for user in users {
            self.spend(at, user, MUCH);
        }
    }

    /// Returns the holder of the lease. The value also contains the lag.
    fn holder(&self, region: usize) -> Option<String> {
        let lease: Option<String> = ask(&self.world.ground.regions[region].redis, &["GET", LEASE]);
        lease.and_then(|lease| lease.split(' ').next().map(str::to_owned))
    }

    fn replicator(&self, region: usize) -> ReplicatorNode {
        let place = (region, self.world.replicator(region));
        let mut name = None;
        wait_until("its lease", TIME_MAX, || {
            name = self.holder(region);
            name.is_some()
        });
        ReplicatorNode { place, name: name.expect("waited for") }
    }

    fn is_replicator(&self, replicator: &ReplicatorNode) -> bool {
        self.holder(replicator.place.0).as_ref() == Some(&replicator.name)
            && self.world.abroad(replicator.place)["replicator"] == true
    }

    /// Waits for a condition. Returns whether it came true while the process was the replicator.
    fn meets(&self, replicator: &ReplicatorNode, what: &str, condition: impl Fn() -> bool) -> bool {
        let mut is_met = false;
        wait_until(what, TIME_MAX, || {
            is_met = condition();
            is_met || !self.is_replicator(replicator)
        });
        is_met && self.is_replicator(replicator)
    }

    /// Whether a replicator runs `ROUNDS` more rounds, with the condition still true.
    fn goes_on(&self, replicator: &ReplicatorNode, condition: impl Fn() -> bool) -> bool {
        let rounds = || self.world.abroad(replicator.place)["rounds"].as_u64().expect("a number");
        let enough = rounds() + ROUNDS;
        self.meets(replicator, "more rounds", || rounds() >= enough && condition())
    }

    /// The meter of a user at the Redis of a region: its partition and its name.
    fn meter(&self, region: usize, user: &str) -> Option<(String, String)> {
        let redis = &self.world.ground.regions[region].redis;
        let key = ask::<Vec<String>>(redis, &["KEYS", &format!("tg2:*:m:*{user}*")]).pop()?;
        key.split_once(":m:").map(|(partition, name)| (partition.to_owned(), name.to_owned()))
    }

    fn knows(&self, region: usize, user: &str) -> bool {
        self.meter(region, user).is_some()
    }

    /// Whether the meter of a user is dirty in the Redis of a region.
    fn is_marked(&self, region: usize, user: &str) -> bool {
        self.meter(region, user).is_some_and(|(partition, name)| {
            let marks = format!("{partition}:k");
            ask::<Option<String>>(&self.world.ground.regions[region].redis, &["ZSCORE", &marks, &name])
                .is_some()
        })
    }

    fn set(&self, from: Place, to: usize, traffic: Traffic) {
        self.world.ground.ways(from, to).for_each(|way| way.set(traffic));
    }

    fn is_keeping(&self, from: Place, to: usize) -> bool {
        self.world.ground.ways(from, to).any(|way| way.keeping() > 0)
    }

    /// Restores all traffic, and replaces servers that are gone.
    fn mend(&mut self) {
        self.world.ground.restore();
        self.world.replace_gone();
    }

    fn spend_everywhere(&self) {
        (0..REGIONS.len()).for_each(|at| self.spend((at, 0), KNOWN, LITTLE));
    }

    /// Returns the units that the Redis of a region has charged to a user: the first number of the
    /// meter, divided by the third of its terms.
    fn charged(&self, region: usize, user: &str) -> Option<u64> {
        let (partition, name) = self.meter(region, user)?;
        let meter = format!("{partition}:m:{name}");
        let fields: Vec<Option<Vec<u8>>> =
            ask(&self.world.ground.regions[region].redis, &["HMGET", &meter, "m", "t"]);
        let number = |field: usize, at: usize| {
            let bytes = fields[field].as_ref()?.chunks_exact(8).nth(at)?;
            Some(f64::from_le_bytes(bytes.try_into().expect("eight")))
        };
        let units = number(0, 0)? / number(1, 2)?;
        Some(units.ceil().to_string().parse().expect("a whole number"))
    }

    /// Waits until every region has charged the units that all regions admitted. Nothing drains, so
    /// a double charge would stay.
    fn compare(&self) {
        self.compare_with(|_, _| ());
    }

    /// The same, after a look at the user in each region.
    fn compare_with(&self, look: impl Fn(usize, &str)) {
        for user in &self.fresh {
            let (granted, mut said) = (self.granted.borrow()[user], Vec::new());
            wait_until(&format!("{granted} of {user} to be charged everywhere"), TIME_MAX, || {
                (0..REGIONS.len()).for_each(|at| look(at, user));
                let now: Vec<_> = (0..REGIONS.len()).map(|at| self.charged(at, user)).collect();
                if now != said {
                    println!("{user}: {now:?} are charged, and {granted} were granted");
                    said = now;
                }
                said.iter().all(|charged| *charged == Some(granted))
            });
        }
    }
}

/// The usage waits in Redis. The new replicator has not requested it, and reaches no peer.
fn lease(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let before = scene.replicator(HERE);
    let heir = before.other();
    for (from, region) in [(before.place, PEER), (before.place, THIRD), (heir, PEER), (heir, THIRD)] {
        scene.set(from, region, Traffic::QuestionsUpTo(b""));
    }
    scene.world.ground.store(heir).set(Traffic::QuestionsUpTo(ROUND));
    let is_kept = || [PEER, THIRD].iter().all(|region| scene.is_keeping(before.place, *region));
    scene.meets(&before, "nothing to be told", is_kept).then_some(())?;
    scene.spend_all(before.place, [first, second]);
    // A stop in order: the server reports its usage and releases the lease.
    assert_eq!(scene.world.ground.regions[HERE].servers[before.place.1].process.terminate(), Some(0));
    wait_until("an heir", TIME_MAX, || scene.world.abroad(heir)["replicator"] == true);
    let heir = ReplicatorNode { place: heir, name: scene.holder(HERE)? };
    assert_ne!(heir.name, before.name);
    let store = scene.world.ground.store(heir.place);
    scene.meets(&heir, "its first round", || store.keeping() > 0).then_some(())?;
    assert!([first, second].iter().all(|user| scene.is_marked(HERE, user)));
    let abroad = scene.world.abroad(heir.place);
    let peers = abroad["peers"].as_array().expect("peers");
    assert!(peers.iter().all(|peer| peer["linked"] == false), "{abroad}");
    if_unknown_to_peers(scene, heir, [first, second])
}

/// The meters are dirty, and the request for them has not reached Redis.
fn ask_for_changes(scene: &mut Scene) -> Option<ReplicatorNode> {
    let users = scene.users();
    let replicator = scene.replicator(HERE);
    let store = scene.world.ground.store(replicator.place);
    store.set(Traffic::QuestionsUpTo(ROUND));
    scene.meets(&replicator, "a round", || store.keeping() > 0).then_some(())?;
    scene.spend_all(replicator.other(), users);
    let is_marked = || users.iter().all(|user| scene.is_marked(HERE, user));
    scene.meets(&replicator, "marks, and a round", || is_marked() && store.keeping() > 0).then_some(())?;
    if_unknown_to_peers(scene, replicator, users)
}

/// Redis has replied, and the reply has not arrived.
fn gather(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let replicator = scene.replicator(HERE);
    let store = scene.world.ground.store(replicator.place);
    store.set(Traffic::AnswersUpTo(first.as_bytes()));
    scene.spend_all(replicator.other(), [first, second]);
    scene.meets(&replicator, "an answer", || store.keeping() > 0).then_some(())?;
    (!scene.knows(PEER, first) && !scene.knows(THIRD, first)).then_some(replicator)
}

/// A part of a batch has arrived, and the third region has all of it.
fn send(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let replicator = scene.replicator(HERE);
    scene.set(replicator.place, PEER, Traffic::QuestionsUpTo(first.as_bytes()));
    scene.spend_all(replicator.other(), [first, second]);
    let is_sent = || scene.is_keeping(replicator.place, PEER);
    let is_known = || [first, second].iter().all(|user| scene.knows(THIRD, user));
    scene.meets(&replicator, "a batch", || is_sent() && is_known()).then_some(())?;
    scene.goes_on(&replicator, is_sent).then_some(())?;
    (!scene.knows(PEER, first)).then_some(replicator)
}

/// A part of a batch is merged, and the rest has not reached the Redis.
fn merge(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let (replicator, peer) = (scene.replicator(HERE), scene.replicator(PEER));
    // While one batch is in flight, new usage goes into the next one, in order.
    scene.set(replicator.place, PEER, Traffic::QuestionsUpTo(b""));
    scene.meets(&replicator, "a batch", || scene.is_keeping(replicator.place, PEER)).then_some(())?;
    scene.spend(replicator.other(), KNOWN, LITTLE);
    for user in [first, second] {
        scene.spend(replicator.other(), user, MUCH);
        scene.meets(&replicator, "it to be carried", || scene.knows(THIRD, user)).then_some(())?;
    }
    let store = scene.world.ground.store(peer.place);
    store.set(Traffic::QuestionsUpTo(second.as_bytes()));
    scene.set(replicator.place, PEER, Traffic::Pass);
    let is_merging = || store.keeping() > 0 && scene.knows(PEER, first);
    scene.meets(&peer, "a batch to be merged in part", is_merging).then_some(())?;
    (!scene.knows(PEER, second)).then_some(peer)
}

/// A batch is fully merged, and the replicator that merged it has not received the reply of Redis.
fn answer(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let (replicator, peer) = (scene.replicator(HERE), scene.replicator(PEER));
    let store = scene.world.ground.store(peer.place);
    store.set(Traffic::QuestionsUpTo(second.as_bytes()));
    scene.spend_all(replicator.other(), [first, second]);
    scene.meets(&peer, "a batch to be merged", || store.keeping() > 0).then_some(())?;
    let lost = store.lost();
    store.set(Traffic::DropAnswers);
    let is_merged = || store.lost() > lost && [first, second].iter().all(|user| scene.knows(PEER, user));
    scene.meets(&peer, "all of it to be merged", is_merged).then_some(peer)
}

/// A batch is merged, and its acknowledgement has not arrived.
fn acknowledge(scene: &mut Scene) -> Option<ReplicatorNode> {
    let [first, second] = scene.users();
    let replicator = scene.replicator(HERE);
    scene.set(replicator.place, PEER, Traffic::QuestionsUpTo(second.as_bytes()));
    scene.spend_all(replicator.other(), [first, second]);
    scene.meets(&replicator, "a batch", || scene.is_keeping(replicator.place, PEER)).then_some(())?;
    let lost = || scene.world.ground.ways(replicator.place, PEER).map(Proxy::lost).sum::<u64>();
    let before = lost();
    scene.set(replicator.place, PEER, Traffic::DropAnswers);
    let is_answered = || lost() > before && scene.knows(PEER, second);
    scene.meets(&replicator, "an answer", is_answered).then_some(())?;
    scene.goes_on(&replicator, || true).then_some(replicator)
}

/// Returns the replicator if no peer knows the usage.
fn if_unknown_to_peers(
    scene: &Scene,
    replicator: ReplicatorNode,
    users: [&str; 2],
) -> Option<ReplicatorNode> {
    let is_known = |user: &&str| scene.knows(PEER, user) || scene.knows(THIRD, user);
    (!users.iter().any(is_known)).then_some(replicator)
}
