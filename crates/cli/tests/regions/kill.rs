//! Replicators that are killed at each step of their work.
//!
//! What a process says, or is told, passes up to the words that make a step and no further. So it stands there until it is killed,
//! however fast or slow the machine is.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tidegate_testkit::{Proxy, REGIONS, Traffic, ask, wait_until};

use crate::field::{FOR_EVER, TIME_MAX};
use crate::world::World;

/// Of this less than one drains in a quarter of an hour, and nobody comes near it: not near the part of a region that hears of no
/// other, either.
const LIMIT: u64 = 20_000;

/// More than the sixteenth that a region may keep to itself.
const MUCH: u64 = 2_000;
const LITTLE: u64 = 100;

/// Whom all regions know from the beginning, and charge in every step.
const KNOWN: &str = "alice";

/// The region where something is used, one that is told of it, and one that always is told.
const HERE: usize = 0;
const PEER: usize = 1;
const THIRD: usize = 2;

/// Words of a replicator's question to its Redis what changed: the script is the only one that is about three keys.
const ROUND: &[u8] = b"\r\n$1\r\n3\r\n";

/// The Redis key of the replicator lease.
const LEASE: &str = "tg2:{0}:c";

/// For how many of its rounds a replicator stands still that can go them: by then it has dropped all that it drops.
const ROUNDS: u64 = 2;

/// Region and server.
type Place = (usize, usize);

/// A step, and how a replicator comes to stand there: who that is, unless its lease ran out before it was seen.
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
    // What comes late has come when this has, which goes the same way.
    scene.spend_everywhere();
    scene.fresh = scene.granted.borrow().keys().cloned().collect();
    // Usage on a regional share is replicated after the next call for its meter.
    scene.compare_with(|at, user| {
        scene.world.client((at, 0)).ask(&[("user", user)], 0);
    });
}

/// A process that is the replicator of its region, and what its Redis knows it by.
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
    /// What clients were granted, by user.
    granted: RefCell<BTreeMap<String, u64>>,
    /// The users of this step.
    fresh: Vec<String>,
    tries: u32,
}

impl Scene {
    fn new() -> Self {
        let rules = format!(
            "placement='user'\n[[rules]]\nname='global'\nclass='cost'\nregime='best_effort'\nkey=['user']\nlimit={LIMIT}\nperiod='{FOR_EVER}'\n"
        );
        let world = World::start_on_wires(&rules, 2, &[]);
        let scene = Self { world, granted: RefCell::default(), fresh: vec![KNOWN.to_owned()], tries: 0 };
        scene.world.wait_for_connected(true);
        scene.spend((HERE, 0), KNOWN, MUCH);
        scene
    }

    /// Waits until the replicator of a region stands at a step, and holds its lease.
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

    /// Two users that nobody has heard of, and words that are in nothing that is not about them.
    fn users(&mut self) -> [&'static str; 2] {
        self.tries += 1;
        // Words of traffic outlive everything that carries it.
        let users = ["first", "second"].map(|user| &*format!("{user}-{:03}", self.tries).leak());
        self.fresh = users.iter().chain([&KNOWN]).map(ToString::to_string).collect();
        users
    }

    /// Spends until so much was granted at once.
    fn spend(&self, at: Place, user: &str, cost: u64) {
        let mut client = self.world.client(at);
        // A Redis that takes longer than a request waits is a refusal, and costs nothing.
        wait_until("a grant", TIME_MAX, || client.check(&[("user", user)], cost).allowed);
        *self.granted.borrow_mut().entry(user.to_owned()).or_default() += cost;
    }

    fn spend_all(&self, at: Place, users: [&str; 2]) {
        self.spend(at, KNOWN, LITTLE);
        for user in users {
            self.spend(at, user, MUCH);
        }
    }

    /// Who has the lease. Beside it stands how late others hear of the region.
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

    /// Waits for something, and says whether it came while a process was the replicator.
    fn meets(&self, replicator: &ReplicatorNode, what: &str, condition: impl Fn() -> bool) -> bool {
        let mut is_met = false;
        wait_until(what, TIME_MAX, || {
            is_met = condition();
            is_met || !self.is_replicator(replicator)
        });
        is_met && self.is_replicator(replicator)
    }

    /// Whether a replicator goes its rounds, as often as it has to, while something stays as it is.
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

    /// Whether the Redis of a region has it down that others may not have heard of a user.
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

    /// Lets everything pass again, with a server in every place.
    fn mend(&mut self) {
        self.world.ground.restore();
        self.world.replace_gone();
    }

    fn spend_everywhere(&self) {
        (0..REGIONS.len()).for_each(|at| self.spend((at, 0), KNOWN, LITTLE));
    }

    /// What the Redis of a region has charged to a user: the first number of a meter, in parts as many as the third of its terms.
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

    /// Waits until every region has charged what clients of all of them were granted. Nothing drains: what was charged
    /// twice would be for ever.
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

/// What was used waits at the Redis; who takes over has not asked for it, and reaches nobody.
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
    // As an operator does: it has told all that it granted, and gives the lease away.
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
    nobody_knows(scene, heir, [first, second])
}

/// What was used is marked, and the question for it has not reached the Redis.
fn ask_for_changes(scene: &mut Scene) -> Option<ReplicatorNode> {
    let users = scene.users();
    let replicator = scene.replicator(HERE);
    let store = scene.world.ground.store(replicator.place);
    store.set(Traffic::QuestionsUpTo(ROUND));
    scene.meets(&replicator, "a round", || store.keeping() > 0).then_some(())?;
    scene.spend_all(replicator.other(), users);
    let is_marked = || users.iter().all(|user| scene.is_marked(HERE, user));
    scene.meets(&replicator, "marks, and a round", || is_marked() && store.keeping() > 0).then_some(())?;
    nobody_knows(scene, replicator, users)
}

/// The Redis has answered, and the answer has not arrived.
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
    // While one batch is under way, what is used goes into the next, in its order.
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

/// All of a batch is merged, and who merged it has not heard so.
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

/// A batch is merged, and the answer that it is has not arrived.
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

/// Gives the replicator back if what was used is known nowhere else.
fn nobody_knows(scene: &Scene, replicator: ReplicatorNode, users: [&str; 2]) -> Option<ReplicatorNode> {
    let is_known = |user: &&str| scene.knows(PEER, user) || scene.knows(THIRD, user);
    (!users.iter().any(is_known)).then_some(replicator)
}
