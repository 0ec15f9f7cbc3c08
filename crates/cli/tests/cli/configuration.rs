//! The configuration of a server: all its problems, and its listeners.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;

use crate::support::{serve, tidegate as command};
use crate::{RULES, folder_with, json, start_with_log, status, stderr, stdout, tidegate};

#[test]
fn every_problem_of_a_configuration_is_listed() {
    let (_folder, file) =
        folder_with("tidegate.toml", "memory = '3 bananas'\nworkers = 0\ncolour = 'blue'\n");
    for check in [&["--check-config"][..], &[]] {
        let arguments = [&["serve", "--config", &file, "--http-listen", "localhost"], check].concat();
        let output = tidegate(&arguments);
        assert_eq!(status(&output), 64, "{output:?}");
        let at = |line: u32| format!("error: {file}: line {line}: ");
        let problems = [
            at(1) + "memory: ",
            at(2) + "workers: ",
            at(3) + "colour: not a setting",
            "error: http_listen: \"localhost\"".to_owned(),
        ];
        for problem in problems {
            assert!(stderr(&output).contains(&problem), "{problem}: {output:?}");
        }
    }
}

#[test]
fn no_problem_hides_another() {
    let (_rules, rules) = folder_with("rules.toml", "[[rules]]\nname = 3");
    let (_broken, broken) = folder_with("broken.toml", "[[rules]\n");
    let (_descriptors, descriptors) = folder_with("descriptors.yaml", "domain: 7\ndescriptors: nothing");
    let (_config, config) = folder_with(
        "tidegate.toml",
        "memory = '3 bananas'\ntls_key = '/nowhere.key'\n[[tokens]]\nname = 't'\nhash = 'secret'\n",
    );
    let below_a_file = format!("{config}/data");
    let flags = [
        ["--config", &config],
        ["--rules", &rules],
        ["--envoy-descriptors", &descriptors],
        ["--tls-cert", "/nowhere.pem"],
        ["--tls-client-ca", "/nowhere-else.pem"],
        ["--data-dir", &below_a_file],
        // Not reported: while a token is invalid, the server cannot judge whether a public address
        // is allowed.
        ["--http-listen", "0.0.0.0:0"],
    ];
    for check in [&["--check-config"][..], &[]] {
        let mut serve = command(&[&["serve"], check, flags.as_flattened()].concat());
        serve.env("TIDEGATE_IDLE_TIMEOUT", "").env("TIDEGATE_MEMROY", "1GB").env("TIDEGATE_LOG", "wran");
        let output = serve.output().expect("it runs");
        assert_eq!((status(&output), stdout(&output)), (64, ""), "{output:?}");
        let mut keys: Vec<&str> = stderr(&output)
            .lines()
            .map(|line| {
                let mut words = line.strip_prefix("error: ").expect("a problem").split(": ");
                // A problem of the file has its place first.
                words.find(|word| *word != config && !word.starts_with("line ")).expect("a key")
            })
            .collect();
        keys.sort_unstable();
        keys.dedup();
        let wrong = [
            "TIDEGATE_LOG",
            "TIDEGATE_MEMROY",
            "data_dir",
            "envoy_descriptors",
            "idle_timeout",
            "memory",
            "rules",
            "tls_cert",
            "tls_client_ca",
            "tls_key",
            "tokens[0]",
        ];
        assert_eq!(keys, wrong, "{}", stderr(&output));
    }
    // An unreadable file hides its own problems only.
    let (missing, unclosed) =
        ("config: /nowhere.toml: No such file", format!("{broken}: line 1, column 9: "));
    for (config, problem) in [("/nowhere.toml", missing), (&broken, &unclosed)] {
        let output = tidegate(&["serve", "--config", config, "--rules", &broken, "--workers", "0"]);
        let lines: Vec<&str> = stderr(&output).lines().collect();
        assert_eq!((status(&output), lines.len()), (64, 3), "{output:?}");
        for problem in [
            &format!("error: {problem}")[..],
            &format!("error: rules: {broken}: line 1, column 9: "),
            "error: workers: ",
        ] {
            assert!(lines.iter().any(|line| line.starts_with(problem)), "{problem}: {output:?}");
        }
    }
}

#[test]
fn variables_that_say_nothing_or_are_not_known_are_problems() {
    let check = |name: &str, value: &str| {
        let mut serve = command(&["serve", "--check-config", "--data-dir", "none"]);
        serve.env(name, value).output().expect("it runs")
    };
    let wrong = [
        ("TIDEGATE_HTTP_LISTEN", "", "http_listen: empty: leave it out for 127.0.0.1:8080"),
        ("TIDEGATE_RULES", "", "rules: empty"),
        ("TIDEGATE_WORKERS", "", "workers: empty"),
        ("TIDEGATE_CONFIG", "", "config: empty"),
        ("TIDEGATE_HTTP_LISTNE", "off", "TIDEGATE_HTTP_LISTNE: unknown variable"),
        ("TIDEGATE_LOG", "", "TIDEGATE_LOG: \"\" is not a log level"),
        ("TIDEGATE_LOG", "tidegate_server=loud", "TIDEGATE_LOG: "),
    ];
    for (name, value, words) in wrong {
        let output = check(name, value);
        assert_eq!((status(&output), stderr(&output).lines().count()), (64, 1), "{output:?}");
        assert!(stderr(&output).starts_with(&format!("error: {words}")), "{output:?}");
    }
    let good = [
        ("TIDEGATE_TRUSTED_PROXIES", ""),
        ("TIDEGATE_LOG", "warn"),
        ("TIDEGATE_TOKEN", "tg_0"),
        ("TIDEGATE_SERVER", "http://127.0.0.1:1"),
        ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
    ];
    for (name, value) in good {
        let output = check(name, value);
        assert_eq!(status(&output), 0, "{output:?}");
    }
}

#[test]
fn a_configuration_is_checked_with_the_files_it_names() {
    let (_folder, rules) = folder_with("rules.toml", RULES);
    let check = ["serve", "--check-config", "--data-dir", "none", "--rules"];
    let good = tidegate(&[&check[..], &[&rules]].concat());
    assert_eq!((status(&good), stdout(&good)), (0, "the configuration is valid\norigin: none\n"));
    std::fs::write(&rules, "[[rules]]\nname = 3").expect("written");
    let bad = tidegate(&[&check[..], &[&rules]].concat());
    assert_eq!(status(&bad), 64);
    assert!(stderr(&bad).contains("rules.toml: line 1: rules[0]."), "{bad:?}");
    let missing = tidegate(&["serve", "--check-config", "--config", "/nowhere.toml"]);
    assert_eq!(status(&missing), 64);
    assert!(stderr(&missing).contains("config: /nowhere.toml: "), "{missing:?}");
}

#[test]
fn settings_come_from_flags_before_variables_before_the_file() {
    let (_folder, file) = folder_with("tidegate.toml", "connections_max = 0\nworkers = 1\n");
    let serve = |flags: &[&str]| {
        let arguments =
            [&["serve", "--check-config", "--data-dir", "none", "--config", file.as_str()], flags].concat();
        let mut command = command(&arguments);
        command.env("TIDEGATE_WORKERS", "0");
        command.output().expect("it runs")
    };
    let output = serve(&[]);
    assert!(stderr(&output).contains("connections_max: \"0\""), "the file counts: {output:?}");
    assert!(stderr(&output).contains("workers: \"0\""), "the variable counts more: {output:?}");
    let output = serve(&["--workers", "1", "--connections-max", "1"]);
    assert_eq!(status(&output), 0, "the flag counts most: {output:?}");
}

#[test]
fn two_servers_cannot_have_one_port() {
    let first = serve(&[]);
    let taken = first.address("http").to_string();
    let second = tidegate(&[
        "serve",
        "--data-dir",
        "none",
        "--http-listen",
        &taken,
        "--grpc-listen",
        "off",
        "--resp-listen",
        "off",
        "--admin-listen",
        "off",
    ]);
    assert_eq!(status(&second), 1);
    assert!(stderr(&second).contains(&format!("http_listen: {taken}: ")), "{second:?}");
    assert!(stderr(&second).contains("another program listens there"), "{second:?}");
}

#[test]
fn every_port_that_cannot_be_had_is_named() {
    let first = serve(&[]);
    let mut serve = command(&["serve", "--data-dir", "none"]);
    for listener in ["http", "grpc", "resp"] {
        serve.arg(format!("--{listener}-listen")).arg(first.address(listener).to_string());
    }
    // A network for documentation: no machine has an address in it.
    let output = serve.args(["--admin-listen", "192.0.2.1:0"]).output().expect("it runs");
    assert_eq!(status(&output), 64, "without tokens: {output:?}");

    let token = json(&tidegate(&["token", "new", "--json"]));
    let (_folder, config) =
        folder_with("tidegate.toml", &format!("[[tokens]]\nname = 'a'\nhash = {}\n", token["hash"]));
    let output = serve.args(["--config", &config]).output().expect("it runs");
    assert_eq!((status(&output), stderr(&output).lines().count()), (1, 4), "{output:?}");
    for listener in ["http", "grpc", "resp"] {
        let problem = format!("error: {listener}_listen: {}: ", first.address(listener));
        assert!(stderr(&output).contains(&problem), "{output:?}");
    }
    let admin = stderr(&output).lines().last().expect("four lines");
    assert!(admin.starts_with("error: admin_listen: 192.0.2.1:0: "), "{admin}");
    assert!(admin.ends_with("this machine has no such address"), "{admin}");
}

#[test]
fn listeners_have_an_address_each_and_one_is_on() {
    let check =
        |listen: &[&str]| tidegate(&[&["serve", "--check-config", "--data-dir", "none"], listen].concat());
    let output = check(&["--grpc-listen", "127.0.0.1:8080"]);
    assert_eq!(status(&output), 64, "{output:?}");
    assert_eq!(stderr(&output), "error: grpc_listen: 127.0.0.1:8080 is the address of http_listen too\n");
    let off = ["http", "grpc", "resp", "admin"].map(|listener| format!("--{listener}-listen=off"));
    let output = check(&off.each_ref().map(String::as_str));
    assert_eq!(status(&output), 64, "{output:?}");
    assert!(stderr(&output).starts_with("error: http_listen: \"off\""), "{output:?}");
    assert_eq!(status(&check(&["--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"])), 0);
}

#[test]
fn listening_to_others_in_clear_text_is_warned_of() {
    let token = json(&tidegate(&["token", "new", "--json"]));
    let entry = format!("[[tokens]]\nname = 'a'\nhash = {}\n", token["hash"]);
    let (_folder, config) = folder_with("tidegate.toml", &entry);
    let serve = |listen: &str| {
        let (mut server, _, log) = start_with_log(command(&[
            "serve",
            "--config",
            &config,
            "--data-dir",
            "none",
            "--admin-listen",
            listen,
            "--http-listen",
            "off",
            "--grpc-listen",
            "off",
            "--resp-listen",
            "off",
        ]));
        assert_eq!(server.terminate(), Some(0));
        std::fs::read_to_string(log.path()).expect("a log")
    };
    assert!(serve("0.0.0.0:0").contains("without encryption"));
    assert!(!serve("127.0.0.1:0").contains("without encryption"));
}

#[test]
fn the_ready_line_names_every_open_listener_with_its_port() {
    let mut serve = command(&[
        "serve",
        "--data-dir",
        "none",
        "--http-listen",
        "127.0.0.1:0",
        "--grpc-listen",
        "off",
        "--resp-listen",
        "off",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    let mut child = serve.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    child.kill().expect("its own child");
    child.wait().expect("its own child");
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["tidegate", "is", "ready:", http, admin] = words[..] else { panic!("{line}") };
    for (word, listener) in [(http, "http="), (admin, "admin=")] {
        let address = word.strip_prefix(listener).unwrap_or_else(|| panic!("{line}"));
        assert_ne!(address.parse::<SocketAddr>().expect("an address").port(), 0, "{line}");
    }
}
