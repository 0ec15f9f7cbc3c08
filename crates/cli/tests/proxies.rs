//! Real proxies in front of a service, with the configurations of the folder `examples`.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::examples::{example, fill};
use support::raw::{Reply, request, send_from};
use support::{serve, tool};
use tidegate_testkit::{Process, START_TIME_MAX, Server, free_port, wait_for_port, wait_until};

/// Addresses of clients. They differ from the proxy's address, 127.0.0.1.
const CLIENT: &str = "127.0.0.2";
const OTHER_CLIENT: &str = "127.0.0.3";
/// Address of the readiness probe, counted apart from the clients.
const PROBE: &str = "127.0.0.4";

/// Starts a service that answers every request with 200, and counts requests.
fn service() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            let mut reader = BufReader::new(stream);
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 2) {
                line.clear();
            }
            let _ = reader
                .get_mut()
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        }
    });
    (address, count)
}

/// A proxy between clients and the service, with Tidegate beside it.
struct Stage {
    proxy: SocketAddr,
    reached: Arc<AtomicUsize>,
    _process: Process,
    _tidegate: Server,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// Starts a proxy with an example. `start` gets a folder, the example with its addresses filled
    /// in, and the port to listen on.
    fn set(name: &str, start: impl FnOnce(&Path, &str, u16) -> Command) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rules = fill(&example("rules.toml"), "limit = 60", "limit = 3");
        // With this period, no unit drains during the test, even on a busy machine.
        let rules = write(folder.path(), "rules.toml", &fill(&rules, "\"1m\"", "\"1h\""));
        // The clients are on loopback too, so only the proxy's own address may be trusted.
        let tidegate = serve(&["--rules", &rules.to_string_lossy(), "--trusted-proxies", "127.0.0.1"]);
        let (service, reached) = service();
        let config = fill(&example(name), "127.0.0.1:8080", &tidegate.address("http").to_string());
        let config = fill(&config, "127.0.0.1:3000", &service.to_string());
        let port = free_port();
        let process = Process::spawn(&mut start(folder.path(), &config, port));
        let proxy = SocketAddr::from(([127, 0, 0, 1], port));
        wait_for_port(name, proxy);
        let stage = Self { proxy, reached, _process: process, _tidegate: tidegate, _folder: folder };
        // Traefik opens its port before it has read its routes.
        wait_until(&format!("{name} to answer"), START_TIME_MAX, || {
            matches!(stage.ask(PROBE, "/probe", &[]).status, 200 | 429)
        });
        stage
    }

    fn ask(&self, from: &str, target: &str, fields: &[(&str, &str)]) -> Reply {
        send_from(from, self.proxy, &request("GET", target, fields, None))
    }

    /// Checks that an allowed response states the remaining units. Not every proxy forwards that
    /// header.
    fn assert_remaining_header(&self) {
        let reply = self.ask(OTHER_CLIENT, "/first", &[]);
        let left = reply.header("ratelimit").and_then(|value| value.strip_prefix("\"per_client\";r=2;t="));
        assert!(left.is_some(), "{reply:?}");
    }

    /// Checks the properties that hold behind every proxy.
    fn limits_clients(&self) {
        let before = self.reached.load(Ordering::SeqCst);
        for spoofed in ["192.0.2.1", "192.0.2.2, 127.0.0.1", "unknown"] {
            let reply = self.ask(CLIENT, "/hello", &[("X-Forwarded-For", spoofed)]);
            assert_eq!((reply.status, reply.body.as_str()), (200, "ok"), "{reply:?}");
        }
        for spoofed in ["192.0.2.3", "127.0.0.1", "", "127.0.0.3, 127.0.0.1"] {
            let reply =
                self.ask(CLIENT, "/hello", &[("X-Forwarded-For", spoofed), ("Forwarded", "for=192.0.2.4")]);
            is_denied(&reply);
        }
        // Other spellings of the path are the same path.
        for target in ["//hello", "/%68ello", "/hello?again", "/x/../hello", "/hello?deny_status=403"] {
            is_denied(&self.ask(CLIENT, target, &[]));
        }
        // A forged original path does not help: the proxy overwrites it, or the request is refused.
        for (name, value) in
            [("X-Forwarded-Uri", "/free"), ("X-Original-URI", "/free"), ("X-Original-URL", "/free")]
        {
            let reply = self.ask(CLIENT, "/hello", &[(name, value)]);
            assert!(matches!(reply.status, 400 | 429 | 500), "{name}: {reply:?}");
        }
        assert_eq!(self.reached.load(Ordering::SeqCst), before + 3, "only what may pass reaches the service");
        // Another client and another path have meters of their own.
        assert_eq!(self.ask(OTHER_CLIENT, "/hello", &[]).status, 200);
        assert_eq!(self.ask(CLIENT, "/other", &[]).status, 200);
    }
}

fn is_denied(reply: &Reply) {
    assert_eq!(reply.status, 429, "{reply:?}");
    let seconds = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok());
    let retry_after = seconds(reply.header("retry-after"));
    assert!(retry_after.is_some_and(|after| (1..=1_200).contains(&after)), "{reply:?}");
    assert_eq!(reply.header("ratelimit-policy"), Some("\"per_client\";q=3;w=3600"));
    let limit = reply.header("ratelimit").and_then(|value| value.strip_prefix("\"per_client\";r=0;t="));
    assert!(seconds(limit) <= retry_after && limit.is_some(), "{reply:?}");
}

fn write(folder: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("a file");
    path
}

#[test]
fn nginx_denies_by_auth_request() {
    let stage = Stage::set("nginx.conf", |folder, example, port| {
        let servers = fill(example, "listen 80;", &format!("listen 127.0.0.1:{port};"));
        let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary = kinds.map(|kind| format!("{kind}_temp_path {}/{kind};\n", folder.display())).concat();
        // A single process, so that the test can stop all of it.
        let config = format!(
            "daemon off;\nmaster_process off;\npid {}/pid;\nerror_log stderr crit;\nevents {{}}\nhttp {{\naccess_log \
             off;\n{temporary}{servers}\n}}\n",
            folder.display()
        );
        let config = write(folder, "nginx.conf", &config);
        let mut command = Command::new(tool("nginx"));
        command.arg("-e").arg("stderr").arg("-p").arg(folder).arg("-c").arg(config);
        command
    });
    stage.assert_remaining_header();
    stage.limits_clients();
}

#[test]
fn caddy_denies_by_forward_auth() {
    let stage = Stage::set("Caddyfile", |folder, example, port| {
        let site = fill(example, ":80 {", &format!(":{port} {{"));
        let config =
            write(folder, "Caddyfile", &format!("{{\n\tadmin off\n\tpersist_config off\n}}\n\n{site}"));
        let mut command = Command::new(tool("caddy"));
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(config);
        command.env("HOME", folder).env("XDG_DATA_HOME", folder).env("XDG_CONFIG_HOME", folder);
        command.stderr(Stdio::null());
        command
    });
    stage.assert_remaining_header();
    stage.limits_clients();
}

#[test]
fn traefik_denies_by_forward_auth() {
    let stage = Stage::set("traefik.yaml", |folder, example, port| {
        let config = write(folder, "dynamic.yml", example);
        let mut command = Command::new(tool("traefik"));
        command.arg(format!("--entryPoints.web.address=127.0.0.1:{port}"));
        command.arg(format!("--providers.file.filename={}", config.display()));
        command.args([
            "--global.checkNewVersion=false",
            "--global.sendAnonymousUsage=false",
            "--log.level=ERROR",
        ]);
        command
    });
    stage.limits_clients();
}
