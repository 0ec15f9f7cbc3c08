//! Servers that start alike: one program, one file of rules, the same arguments.

use std::net::SocketAddr;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::process::Signal;
use crate::server::{Server, tidegate};

/// Servers with the same rules and arguments.
#[derive(Debug)]
pub struct ServerFleet {
    program: PathBuf,
    log_level: Option<&'static str>,
    arguments: Vec<String>,
    /// Its servers, in the order of their start.
    pub servers: Vec<Server>,
    /// With the rules, which the servers read until they stop.
    folder: TempDir,
}

impl ServerFleet {
    /// A fleet without servers yet. Each server starts with these arguments.
    pub fn new(program: impl Into<PathBuf>, rules: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let (program, servers) = (program.into(), Vec::new());
        let fleet = Self { program, log_level: None, arguments, servers, folder };
        fleet.replace_rules(rules);
        fleet
    }

    /// Lets its servers log errors only.
    #[must_use]
    pub fn with_errors_only(self) -> Self {
        Self { log_level: Some("error"), ..self }
    }

    /// Starts this many servers.
    #[must_use]
    pub fn with_servers(mut self, servers: usize) -> Self {
        self.servers = (0..servers).map(|_| self.start(&[])).collect();
        self
    }

    /// Starts a server with further arguments that is not one of [`Self::servers`].
    pub fn start(&self, arguments: &[&str]) -> Server {
        let mut command = tidegate(&self.program, &[]);
        command.envs(self.log_level.map(|level| ("TIDEGATE_LOG", level)));
        let rules = self.folder.path().join("rules.toml");
        let mut all = vec!["--rules", rules.to_str().expect("a path in UTF-8")];
        all.extend(self.arguments.iter().map(String::as_str).chain(arguments.iter().copied()));
        Server::start_as(command, &all)
    }

    /// Replaces the rules as a whole.
    pub fn replace_rules(&self, rules: &str) {
        let next = self.folder.path().join("next.toml");
        std::fs::write(&next, rules).expect("written");
        std::fs::rename(next, self.folder.path().join("rules.toml")).expect("renamed");
    }

    /// The address of a listener of each server.
    pub fn addresses(&self, listener: &str) -> Vec<SocketAddr> {
        self.servers.iter().map(|server| server.address(listener)).collect()
    }

    /// Stops every server in order. Each has then reported all its usage.
    pub fn stop(&mut self) {
        for server in &self.servers {
            server.process.signal(Signal::TERM);
        }
        for mut server in self.servers.drain(..) {
            assert_eq!(server.process.exit_status(), Some(0));
        }
    }
}
