//! `tidegate demo`: three regions in this process under attack, with links to cut. Compares the
//! admitted units with the promised bound.

mod account;
mod plain;
mod screen;
mod wan;
mod world;

use std::fmt;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use self::account::{Account, AccountState};
use self::plain::Plain;
use self::screen::Screen;
use self::world::{PER_SECOND, Reading, World};
use crate::{CommandResult, EXIT_FAILED, Failure};

/// Interval between readings of the demo.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The longest run that ends by itself.
const SECONDS_MAX: u64 = 86_400;

/// Maximum one-way delay between two regions, ms. With more, rounds arrive so late that regions
/// take the delay for a cut link.
const DELAY_MS_MAX: u64 = 250;

const US_PER_SECOND: u64 = 1_000_000;

pub(crate) fn command() -> Command {
    Command::new("demo")
        .about("Show three regions under attack, with links to cut")
        .long_about(
            "Run three regions in this process, each with an origin in memory and a replicator, over a \
             network with a delay and with links to cut. In each region an attacker sends ten times a \
             limit, and ordinary users a part of theirs. The demo compares the admitted usage with a \
             single bucket and with the bound.\n\nKeys: 1, 2, 3 cut or heal a link; a turns the attacker \
             on or off; q quits. Without a terminal, the demo prints a line each second.\n\nExit status: 0 \
             if the bound holds, 1 if it is exceeded.",
        )
        .arg(
            number("seconds", "SECONDS", 1, SECONDS_MAX)
                .help("Duration of the demo [default: until a signal or q]"),
        )
        .arg(
            number("delay", "MS", 0, DELAY_MS_MAX)
                .default_value("80")
                .help("One-way delay between two regions, 0 to 250"),
        )
        .arg(number("cut", "SECONDS", 0, SECONDS_MAX).help("Time at which a link is cut"))
        .arg(number("heal", "SECONDS", 0, SECONDS_MAX).requires("cut").help(
            "Time at which the link is \
                                                                             healed",
        ))
        .arg(
            Arg::new("link")
                .long("link")
                .value_name("N")
                .value_parser(value_parser!(u8).range(1..=3))
                .default_value("1")
                .help("Link to cut: 1 eu-us, 2 us-ap, 3 ap-eu"),
        )
        .arg(
            Arg::new("plain")
                .long("plain")
                .action(ArgAction::SetTrue)
                .help("Print a line each second, as without a terminal"),
        )
}

fn number(name: &'static str, unit: &'static str, least: u64, most: u64) -> Arg {
    Arg::new(name).long(name).value_name(unit).value_parser(value_parser!(u64).range(least..=most))
}

/// The scheduled end, cut and repair of a run.
struct Script {
    end_us: Option<u64>,
    cut_us: Option<u64>,
    heal_us: Option<u64>,
    link: usize,
}

impl Script {
    fn read(matches: &ArgMatches) -> Result<Self, Failure> {
        let us = |name| matches.get_one::<u64>(name).map(|seconds| seconds * US_PER_SECOND);
        let script = Self {
            end_us: us("seconds"),
            cut_us: us("cut"),
            heal_us: us("heal"),
            link: matches.get_one::<u8>("link").map_or(0, |link| usize::from(*link) - 1),
        };
        if script.heal_us.is_some_and(|heal_us| Some(heal_us) <= script.cut_us) {
            return Err(Failure::usage("--heal: the time must be after --cut"));
        }
        Ok(script)
    }

    /// Performs each scheduled action once, when it is due.
    fn act(&mut self, world: &World, elapsed_us: u64) {
        let is_due = |due_us: &mut Option<u64>| due_us.take_if(|due_us| *due_us <= elapsed_us).is_some();
        if is_due(&mut self.cut_us) {
            world.set_link(self.link, false);
        }
        if is_due(&mut self.heal_us) {
            world.set_link(self.link, true);
        }
    }

    fn is_over(&self, elapsed_us: u64) -> bool {
        self.end_us.is_some_and(|end_us| elapsed_us >= end_us)
    }
}

/// Shows the state of the demo.
trait View {
    fn show(&mut self, reading: &Reading, account_state: &AccountState) -> io::Result<()>;

    /// Waits for one interval and handles the user's input. Returns whether the user wants to quit.
    fn wait(&mut self, world: &World, regions: &Regions) -> io::Result<bool>;
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let script = Script::read(matches)?;
    let delay = Duration::from_millis(matches.get_one::<u64>("delay").copied().unwrap_or_default());
    let is_plain = matches.get_flag("plain") || !io::stdout().is_terminal() || !io::stdin().is_terminal();

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    let world = Arc::new(runtime.block_on(World::open(delay))?);
    let regions = Regions::run(runtime)?;
    let ended = if is_plain {
        watch(&world, script, &regions, &mut Plain::default())
    } else {
        Screen::open(delay).and_then(|mut screen| watch(&world, script, &regions, &mut screen))
    };
    let summary = ended.map_err(Failure::failed)?;
    say!("{summary}")?;
    Ok(if summary.account_state.is_held { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) })
}

/// Watches until it is over.
fn watch(world: &World, mut script: Script, regions: &Regions, view: &mut dyn View) -> io::Result<Summary> {
    let mut account = Account::new(world.limit(), world.fleet());
    loop {
        let reading = world.reading();
        let account_state = account.take(reading.elapsed_us, reading.attacker().admitted, reading.partitions);
        view.show(&reading, &account_state)?;
        script.act(world, reading.elapsed_us);
        if script.is_over(reading.elapsed_us) || view.wait(world, regions)? {
            return Ok(Summary { reading, account_state });
        }
    }
}

/// The regions. They run on a thread of their own until the process ends, so drawing does not delay
/// them.
struct Regions {
    /// Receives a message when a signal asks the process to stop.
    stopped: Receiver<()>,
}

impl Regions {
    fn run(runtime: Runtime) -> Result<Self, Failure> {
        let (stop, stopped) = mpsc::channel();
        let (mut interrupt, mut terminate) = {
            let _inside = runtime.enter();
            let listen = |kind| signal(kind).map_err(Failure::failed);
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?)
        };
        let run = move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    if stop.send(()).is_err() {
                        return;
                    }
                }
            });
        };
        std::thread::Builder::new().name("regions".to_owned()).spawn(run).map_err(Failure::failed)?;
        Ok(Self { stopped })
    }

    /// Whether a signal asks the process to stop within this time.
    fn is_stopped(&self, within: Duration) -> io::Result<bool> {
        match self.stopped.recv_timeout(within) {
            Ok(()) => Ok(true),
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => {
                Err(io::Error::other("the thread of the regions has ended"))
            }
        }
    }
}

/// The result of a run.
struct Summary {
    reading: Reading,
    account_state: AccountState,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AccountState { elapsed_us, admitted, bucket, bound, is_held } = self.account_state;
        let (attacker, users) = (self.reading.attacker(), self.reading.users());
        let asked = attacker.admitted + attacker.denied;
        let partitions = self.reading.partitions;
        writeln!(f, "attacker: {asked} requests in {:.1} s, admitted {admitted}", seconds(elapsed_us))?;
        writeln!(f, "one bucket of {PER_SECOND}/s: at most {bucket}")?;
        writeln!(
            f,
            "bound of three regions: at most {bound} (network partitions: {partitions}): {}",
            held(is_held)
        )?;
        let asked = users.admitted + users.denied;
        write!(f, "users: {asked} requests, denied {}", users.denied)
    }
}

/// Whether the bound was held, in a word.
fn held(is_held: bool) -> &'static str {
    if is_held { "held" } else { "EXCEEDED" }
}

/// For people.
#[expect(clippy::cast_precision_loss, reason = "a run lasts a day at most")]
fn seconds(us: u64) -> f64 {
    us as f64 / US_PER_SECOND as f64
}
