//! `tidegate serve`: starts a server.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::pin::pin;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};
use tidegate_server::settings::{SETTINGS, Setting};
use tidegate_server::{Config, Server, StartError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;

use crate::{Done, Failure};

/// A server that a second signal ended exits with this plus the signal's number, as shells tell it.
const EXIT_SIGNAL: u8 = 128;

pub(crate) fn command() -> Command {
    Command::new("serve")
        .about("Starts a server; needs no configuration")
        .long_about(
            "Starts a server. Nothing needs to be set: it listens on this machine only, keeps its counts in memory, and \
             answers HTTP, Envoy's rate limit service, Redis clients and forward-auth.\n\nEvery setting is a flag, a \
             TIDEGATE_* variable, and a key of the configuration file, in this order of precedence.",
        )
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .env("TIDEGATE_CONFIG")
                .help("Configuration file (TOML): the settings below as keys, [[tenants]] and [[tokens]]"),
        )
        .arg(
            Arg::new("check_config")
                .long("check-config")
                .action(ArgAction::SetTrue)
                .help("Read everything, say what is wrong, and do not start"),
        )
        .args(SETTINGS.iter().map(flag))
}

fn flag(setting: &'static Setting) -> Arg {
    let long = setting.key.replace('_', "-");
    let variable = format!("TIDEGATE_{}", setting.key.to_uppercase());
    let help = if setting.default.is_empty() {
        setting.about.to_owned()
    } else {
        format!("{} [default: {}]", setting.about, setting.default)
    };
    Arg::new(setting.key).long(long).value_name(setting.value).env(variable).help(help)
}

pub(crate) fn run(matches: &ArgMatches) -> Done {
    let mut config = read_config(matches)?;
    if matches.get_flag("check_config") {
        Server::check(&mut config).map_err(Failure::usage)?;
        println!("the configuration is good");
        return Ok(ExitCode::SUCCESS);
    }
    log_to_stderr();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    let done = runtime.block_on(serve(config));
    // Whoever is told twice to stop does not wait for what still runs.
    runtime.shutdown_background();
    done
}

fn read_config(matches: &ArgMatches) -> Result<Config, Failure> {
    let given: HashMap<String, String> = SETTINGS
        .iter()
        .filter_map(|setting| Some((setting.key.to_owned(), matches.get_one::<String>(setting.key)?.clone())))
        .collect();
    let file = match matches.get_one::<String>("config") {
        None => None,
        Some(path) => Some(
            std::fs::read_to_string(path)
                .map_err(|error| Failure::usage(format!("config: {path}: {error}")))?,
        ),
    };
    Config::read(&given, file.as_deref()).map_err(Failure::usage)
}

async fn serve(config: Config) -> Done {
    let server = Server::start(config).map_err(not_started)?;
    warn_of_clear_text(&server);
    let mut signals = Signals::new().map_err(Failure::failed)?;
    let addresses: Vec<String> = server
        .addresses()
        .iter()
        .map(|(listener, address)| format!("{}={address}", listener.as_str()))
        .collect();
    // Whoever started the server waits for this line.
    println!("tidegate is ready: {}", addresses.join(" "));
    let (stop, stopped) = oneshot::channel();
    let mut running = pin!(server.run(async { drop(stopped.await) }));
    tokio::select! {
        ended = &mut running => return finished(ended),
        _ = signals.next() => {}
    }
    tracing::info!("stopping: finishing what was begun; a second signal ends it at once");
    let _ = stop.send(());
    tokio::select! {
        ended = &mut running => finished(ended),
        signal = signals.next() => {
            tracing::warn!("told to stop twice: not waiting for what was begun");
            Ok(ExitCode::from(EXIT_SIGNAL.saturating_add(signal)))
        }
    }
}

fn finished(ended: Result<(), StartError>) -> Done {
    ended.map(|()| ExitCode::SUCCESS).map_err(Failure::failed)
}

/// What asks a server to stop.
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
    match &error {
        StartError::File(_) => Failure::usage(error),
        StartError::System(_, cause) if cause.kind() == ErrorKind::AddrInUse => Failure::failed(format!(
            "{error}: another program listens there; stop it, or choose another address (port 0 takes a free one)"
        )),
        StartError::Limiter(_) | StartError::System(..) => Failure::failed(error),
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
                "can be reached from other machines without encryption: set tls_cert and tls_key"
            );
        }
    }
}

fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("TIDEGATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
