//! Clients that request more than the limit, and the units they get.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::world::World;

/// Admissions of one client, in seconds since the attack began, and their decision sources.
#[derive(Default)]
struct Log {
    admitted: Vec<f64>,
    last: String,
    sources: BTreeSet<String>,
}

/// Admissions of all clients.
pub struct AttackResult {
    /// The times of all that passed, in order, in seconds since the attack began.
    pub admitted: Vec<f64>,
    /// How long it went on.
    pub seconds: f64,
    /// All decision sources of the replies.
    pub sources: BTreeSet<String>,
}

/// One client at every server, all of them after the same key.
pub struct Attack {
    started: Instant,
    stop: Arc<AtomicBool>,
    logs: Vec<Arc<Mutex<Log>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Attack {
    /// Starts requests for a key, at `per_second` for all clients together.
    #[expect(
        clippy::disallowed_methods,
        reason = "an attack lasts for a time, and its requests come at times"
    )]
    pub fn start(world: &World, dimension: &'static str, key: &'static str, per_second: u32) -> Self {
        let (started, stop) = (Instant::now(), Arc::new(AtomicBool::new(false)));
        let places = world.ground.places();
        let every = Duration::from_secs(1) * u32::try_from(places.len()).expect("few") / per_second;
        let mut attack = Self { started, stop, logs: Vec::new(), threads: Vec::new() };
        for place in places {
            let (log, stop) = (Arc::new(Mutex::new(Log::default())), Arc::clone(&attack.stop));
            let (mut client, written) = (world.client(place), Arc::clone(&log));
            attack.logs.push(log);
            attack.threads.push(std::thread::spawn(move || {
                for number in 1.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let Some(answer) = client.ask(&[(dimension, key)], 1) else { continue };
                    let mut log = written.lock().expect("no panic");
                    if answer.allowed {
                        log.admitted.push(started.elapsed().as_secs_f64());
                    }
                    log.sources.insert(answer.source.clone());
                    log.last = answer.source;
                    drop(log);
                    std::thread::sleep((every * number).saturating_sub(started.elapsed()));
                }
            }));
        }
        attack
    }

    /// Returns the duration of the attack so far.
    pub fn seconds(&self) -> f64 {
        #[expect(clippy::disallowed_methods, reason = "what may pass depends on real time")]
        self.started.elapsed().as_secs_f64()
    }

    /// Returns the decision source of each client's last reply.
    pub fn sources(&self) -> Vec<String> {
        self.logs.iter().map(|log| log.lock().expect("no panic").last.clone()).collect()
    }

    /// Stops the attack. Returns the admissions of all clients.
    pub fn end(self) -> AttackResult {
        self.stop.store(true, Ordering::Relaxed);
        let seconds = self.seconds();
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        let (mut admitted, mut sources) = (Vec::new(), BTreeSet::new());
        for log in &self.logs {
            let mut log = log.lock().expect("no panic");
            admitted.append(&mut log.admitted);
            sources.append(&mut log.sources);
        }
        admitted.sort_by(f64::total_cmp);
        AttackResult { admitted, seconds, sources }
    }
}

/// Returns the rate of admissions in an interval: the slope of a line fitted to their cumulative
/// count. Waves average out.
pub fn rate(admitted: &[f64], from: f64, to: f64) -> f64 {
    let steps = 200;
    let at =
        |step: usize| from + (to - from) * f64::from(u32::try_from(step).expect("few")) / f64::from(steps);
    let points: Vec<(f64, f64)> = (0..=usize::try_from(steps).expect("few"))
        .map(|step| {
            let passed = admitted.partition_point(|when| *when <= at(step));
            (at(step), f64::from(u32::try_from(passed).expect("few")))
        })
        .collect();
    let count = f64::from(u32::try_from(points.len()).expect("few"));
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread
}
