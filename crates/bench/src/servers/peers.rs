//! How each server is started, and installed if it has to be.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use tidegate_testkit::free_port;

use super::case::{Case, Contestant};
use super::process::Server;

/// The pinned release of the peer that has no package anywhere else.
const THROTTLECRAB_SERVER: &str = "0.4.40";

/// Threads of every server that answer: redis-server has one, and the load needs the other core of
/// a small machine. With more threads than the load keeps busy, each wakes up for less work, and
/// all look worse.
const THREADS: &str = "1";

/// The environment variable for the number of threads of servers on tokio.
const TOKIO_THREADS: &str = "TOKIO_WORKER_THREADS";

/// Starts the server of a row; of Tidegate the given build, if there is one.
pub(super) fn start(case: Case, contender: Contestant, build: Option<&Path>) -> Result<Server> {
    match contender {
        Contestant::Tidegate => start_tidegate(case, build),
        Contestant::RedisPing | Contestant::RedisIncr | Contestant::RedisGcraLua => start_redis(),
        Contestant::ThrottlecrabHttp => start_throttlecrab("http"),
        Contestant::ThrottlecrabGrpc => start_throttlecrab("grpc"),
        Contestant::NoopHttp => start_noop("http"),
        Contestant::NoopGrpc => start_noop("grpc"),
    }
}

fn start_tidegate(case: Case, build: Option<&Path>) -> Result<Server> {
    let program = tidegate(build)?;
    let listener = match case {
        Case::RespP1 | Case::RespP16 => "resp",
        Case::Http => "http",
        Case::Grpc => "grpc",
    };
    let metrics_port = free_port();
    let server = Server::start(|port, folder| {
        let descriptors = folder.join("descriptors.yaml");
        // A limit for every value of one key, as Envoy users write it.
        let text = format!(
            "domain: bench\ndescriptors:\n  - key: user\n    rate_limit:\n      unit: minute\n      \
             requests_per_unit: {}\n",
            super::LIMIT
        );
        let written = std::fs::write(&descriptors, text);
        let mut command = Command::new(program);
        command.args(["serve", "--data-dir", "none", "--memory", "256MB", "--workers", THREADS]);
        for other in ["resp", "http", "grpc"] {
            let address = if other == listener { format!("127.0.0.1:{port}") } else { "off".to_owned() };
            command.arg(format!("--{other}-listen")).arg(address);
        }
        command.arg("--admin-listen").arg(format!("127.0.0.1:{metrics_port}"));
        if listener == "grpc" && written.is_ok() {
            command.arg("--envoy-descriptors").arg(descriptors);
        }
        command
    })?;
    Ok(server.with_metrics_at(metrics_port))
}

/// Returns the given build. Without one, builds Tidegate with the same cargo in the `dist` profile,
/// beside this program.
pub(crate) fn tidegate(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let mut build = cargo();
    build
        .args(["build", "--quiet", "--profile", "dist", "--package", "tidegate-cli", "--target-dir"])
        .arg(target_dir()?);
    let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().context("cargo")?;
    ensure!(status.success(), "tidegate could not be built: cargo ended with {status}");
    Ok(target_dir()?.join("dist/tidegate"))
}

fn start_redis() -> Result<Server> {
    Server::start(|port, folder| {
        let mut command = Command::new("redis-server");
        command.args([
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--port",
            &port.to_string(),
            "--dir",
        ]);
        command.arg(folder);
        command
    })
    .context("Debian has it in redis-server")
}

fn start_throttlecrab(transport: &str) -> Result<Server> {
    let program = throttlecrab()?;
    Server::start(|port, _| {
        let mut command = Command::new(program);
        command.arg(format!("--{transport}"));
        command.args([format!("--{transport}-host"), "127.0.0.1".to_owned()]);
        command.args([format!("--{transport}-port"), port.to_string()]);
        command.args(["--log-level", "error", "--store-capacity", &super::KEYS.to_string()]);
        command.env(TOKIO_THREADS, THREADS);
        command
    })
}

fn throttlecrab() -> Result<PathBuf> {
    let tools = target_dir()?.join("tools");
    let program = tools.join("bin/throttlecrab-server");
    if !program.is_file() {
        install_throttlecrab(&tools)?;
    }
    Ok(program)
}

fn install_throttlecrab(tools: &Path) -> Result<()> {
    if Command::new("protoc").arg("--version").output().is_err() {
        bail!("throttlecrab-server needs protoc to be built: Debian has it in protobuf-compiler");
    }
    eprintln!("installing throttlecrab-server {THROTTLECRAB_SERVER} (some minutes, once)");
    let build = tools.join("build-peers");
    let mut install = cargo();
    install
        .args(["install", "--quiet", "--locked"])
        .arg(format!("throttlecrab-server@{THROTTLECRAB_SERVER}"));
    install.arg("--root").arg(tools).arg("--target-dir").arg(&build);
    let status = install.status().context("cargo")?;
    ensure!(status.success(), "throttlecrab-server could not be built: cargo ended with {status}");
    // Some hundred megabytes that are never needed again.
    std::fs::remove_dir_all(&build).with_context(|| build.display().to_string())
}

fn start_noop(transport: &str) -> Result<Server> {
    let program = std::env::current_exe().context("the path of this program")?;
    Server::start(|port, _| {
        let mut command = Command::new(program);
        command.args(["servers", "noop", "--transport", transport, "--port", &port.to_string()]);
        command.args(["--threads", THREADS]);
        command
    })
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// This program lies in a folder of the target folder, named after the profile.
fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().context("the path of this program")?;
    program.ancestors().nth(2).map(Path::to_owned).context("this program is not in a target folder")
}
