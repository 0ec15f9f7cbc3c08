//! `tidegate serve`: starts a server.

use std::collections::HashMap;
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};
use tidegate_server::settings::{SETTINGS, Setting};
use tidegate_server::{Config, OriginProbe, PreparedServer, SINGLE_PROBE_TIME_MAX, Server, StartError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::out::{Reader, shown};
use crate::{CommandResult, Failure, environment, style};

/// After a second signal, the exit status is this plus the signal's number, as in shells.
const EXIT_SIGNAL: u8 = 128;

pub(crate) fn command() -> Command {
    Command::new("serve")
        .about("Start a server; needs no configuration")
        .long_about(
            "Start a server. By default it listens on this machine only, keeps its meters in memory, and \
             serves HTTP, Envoy's rate limit service, Redis clients and forward-auth.\n\nEvery setting is \
             a flag, a TIDEGATE_* variable, and a key of the configuration file, in this order of \
             precedence.",
        )
        .after_long_help(
            "TIDEGATE_LOG sets the log level on standard error: \"info\" by default, \"warn\", \"debug\", \
             or a filter such as \"tidegate_server=debug\".\n\nSIGTERM or SIGINT stops the server after \
             the requests under way. A second signal ends it at once.\n\nExit status: 0 after a stop, 1 if \
             a port is in use or no rules are available, 64 if the configuration is invalid, 130 or 143 \
             after a second SIGINT or SIGTERM.",
        )
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .env(environment::CONFIG)
                .hide_env_values(true)
                .help("Configuration file (TOML): the settings below as keys, [[tenants]] and [[tokens]]"),
        )
        .arg(
            Arg::new("check_config")
                .long("check-config")
                .action(ArgAction::SetTrue)
                .help("Report all problems of the configuration, try the origin, and do not start"),
        )
        .args(SETTINGS.iter().map(flag))
}

fn flag(setting: &'static Setting) -> Arg {
    let long = setting.key.replace('_', "-");
    let help = if setting.default.is_empty() {
        setting.about.to_owned()
    } else {
        format!("{} [default: {}]", setting.about, setting.default)
    };
    let action = if setting.is_list { ArgAction::Append } else { ArgAction::Set };
    Arg::new(setting.key)
        .action(action)
        .long(long)
        .value_name(setting.value)
        .env(environment::variable(setting))
        .hide_env_values(true)
        .help(help)
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let mut problems = environment::unknown(std::env::vars_os());
    let log = std::env::var_os(environment::LOG);
    let filter = environment::log_filter(log.as_deref()).map_err(|problem| problems.push(problem)).ok();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    // Tasks that call the origin start when the runtime runs.
    let prepared = {
        let _inside = runtime.enter();
        prepare(matches, problems)?
    };
    if matches.get_flag("check_config") {
        say!("the configuration is valid")?;
        runtime.block_on(print_origin(&prepared))?;
        return Ok(ExitCode::SUCCESS);
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_default())
        .with_writer(std::io::stderr)
        .with_ansi(style::is_on_aside())
        .init();
    let done = runtime.block_on(serve(prepared));
    // After a second signal, the process does not wait for tasks that still run.
    runtime.shutdown_background();
    done
}

/// Tries the origin of a valid configuration. An origin that fails is no problem of the
/// configuration, because a server starts without it.
async fn print_origin(prepared: &PreparedServer) -> Result<Reader, Failure> {
    let Some(address) = prepared.origin() else { return say!("origin: none") };
    aside!("contacting the origin {} for at most {SINGLE_PROBE_TIME_MAX:?}", shown(&address));
    let Some(OriginProbe { state, is_usable }) = prepared.probe_origin().await else {
        return say!("origin: {}", shown(address));
    };
    say!("origin: {}: {}", shown(address), shown(state))?;
    if is_usable {
        return Ok(Reader::There);
    }
    say!("the origin does not work as expected; a server starts all the same")
}

/// Reads the whole configuration, and reports all problems at once.
fn prepare(matches: &ArgMatches, mut problems: Vec<String>) -> Result<PreparedServer, Failure> {
    let given = |setting: &Setting| {
        // A repeated flag is a list.
        let values: Vec<&str> = matches.get_many::<String>(setting.key)?.map(String::as_str).collect();
        Some((setting.key.to_owned(), values.join(",")))
    };
    let given: HashMap<String, String> = SETTINGS.iter().filter_map(given).collect();
    let file = matches.get_one::<String>("config").map(Path::new);
    let (config, found) = Config::read_on(&given, file);
    problems.extend(found);
    PreparedServer::read(config, problems).map_err(Failure::usage)
}

async fn serve(prepared: PreparedServer) -> CommandResult {
    let server = Server::start(prepared).await.map_err(not_started)?;
    warn_of_clear_text(&server);
    let mut signals = Signals::new().map_err(Failure::failed)?;
    let listeners = server.addresses();
    let listeners = listeners.iter().map(|(listener, address)| (listener.as_str(), *address));
    let peer = server.peer_address().map(|address| ("peer", address));
    let addresses: Vec<String> =
        listeners.chain(peer).map(|(name, address)| format!("{name}={address}")).collect();
    // The program that started the server waits for this line.
    say!("tidegate is ready: {}", addresses.join(" "))?;
    let (stop, stopped) = oneshot::channel();
    let mut running = pin!(server.run(async { drop(stopped.await) }));
    tokio::select! {
        ended = &mut running => return finished(ended),
        _ = signals.next() => {}
    }
    tracing::info!("stopping after the requests under way; a second signal ends the server at once");
    let _ = stop.send(());
    tokio::select! {
        ended = &mut running => finished(ended),
        signal = signals.next() => {
            tracing::warn!("second signal: ending without the requests under way");
            Ok(ExitCode::from(EXIT_SIGNAL.saturating_add(signal)))
        }
    }
}

fn finished(ended: Result<(), StartError>) -> CommandResult {
    ended.map(|()| ExitCode::SUCCESS).map_err(Failure::failed)
}

/// The signals that ask a server to stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminate: signal(terminate)?, interrupt: signal(interrupt)? })
    }

    /// The number of the next one.
    async fn next(&mut self) -> u8 {
        let kind = tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
        };
        u8::try_from(kind.as_raw_value()).unwrap_or_default()
    }
}

fn not_started(error: StartError) -> Failure {
    match error {
        StartError::File(_) => Failure::usage(error),
        StartError::Limiter(_) | StartError::Rules(_) | StartError::Ports(_) | StartError::System(..) => {
            Failure::failed(error)
        }
    }
}

/// Tokens and keys cross the network readable: fine behind a proxy that encrypts, and nowhere else.
fn warn_of_clear_text(server: &Server) {
    if server.is_encrypted() {
        return;
    }
    for (listener, address) in server.addresses() {
        if !address.ip().is_loopback() {
            tracing::warn!(
                listener = listener.as_str(),
                %address,
                "the listener is open to other machines without encryption: set tls_cert and tls_key"
            );
        }
    }
}
