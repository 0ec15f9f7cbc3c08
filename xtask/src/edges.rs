//! Allowed dependencies between our crates, and packages that they must not reach.

use std::fmt;

use crate::metadata::{Graph, Member};

/// Each crate of ours and those of ours it may depend on, for any purpose: to build, to test, to
/// use. A row may stand here before its crate does.
const ALLOWED: &[(&str, &[&str])] = &[
    ("tidegate-core", &[]),
    ("tidegate-origin", &["tidegate-core", "tidegate-testkit"]),
    ("tidegate-replication", &["tidegate-core", "tidegate-origin", "tidegate-testkit"]),
    ("tidegate-rules", &["tidegate-core", "tidegate-testkit"]),
    ("tidegate", &["tidegate-core", "tidegate-replication", "tidegate-origin", "tidegate-testkit"]),
    ("tidegate-record", &["tidegate-testkit"]),
    (
        "tidegate-server",
        &["tidegate", "tidegate-record", "tidegate-rules", "tidegate-core", "tidegate-testkit"],
    ),
    // Its tests change a store past the servers that follow it.
    ("tidegate-cli", &["tidegate-server", "tidegate-sim", "tidegate", "tidegate-rules", "tidegate-testkit"]),
    ("tidegate-sim", &["tidegate-core", "tidegate-replication", "tidegate-oracle"]),
    ("tidegate-oracle", &["tidegate-core"]),
    (
        "tidegate-bench",
        &[
            "tidegate",
            "tidegate-core",
            "tidegate-oracle",
            "tidegate-record",
            "tidegate-rules",
            "tidegate-testkit",
        ],
    ),
    ("tidegate-testkit", &[]),
    ("xtask", &[]),
];

/// The crate that decides from its arguments alone.
const PURE: &str = "tidegate-core";

/// Packages that would bring a runtime, I/O, a clock or randomness into the pure crate.
const IMPURE: &[&str] = &[
    // Runtimes, networks and formats.
    "async-std",
    "futures-executor",
    "hyper",
    "mio",
    "redis",
    "reqwest",
    "serde",
    "smol",
    "socket2",
    "tokio",
    // Clocks.
    "chrono",
    "clocksource",
    "coarsetime",
    "fastant",
    "instant",
    "jiff",
    "minstant",
    "quanta",
    "time",
    "web-time",
    // Chance.
    "fastrand",
    "getrandom",
];

/// The rate limiters that the benchmark compares with. A build of the product does not build them.
const PEERS: &[&str] = &["governor", "limitador", "pingora-limits", "throttlecrab"];

/// The crate for tests only, never a part of the product.
const TEST_KIT: &str = "tidegate-testkit";

/// A broken rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A crate of the workspace that the table does not know.
    Unlisted { member: String },
    /// One of our crates depends on another of ours that the table does not grant it.
    Forbidden { member: String, depends_on: String },
    /// The pure crate reaches a package that is not pure.
    Impure { path: Vec<String> },
    /// A crate that is built by default reaches a package that only the benchmark may use.
    Peer { path: Vec<String> },
    /// A crate that is built by default reaches the test kit.
    TestKit { path: Vec<String> },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlisted { member } => write!(f, "{member} is not in the table of xtask/src/edges.rs"),
            Self::Forbidden { member, depends_on } => write!(f, "{member} may not depend on {depends_on}"),
            Self::Impure { path } => write!(f, "{PURE} must stay pure, but has {}", path.join(" -> ")),
            Self::Peer { path } => {
                write!(f, "only the benchmark may use its peers, but there is {}", path.join(" -> "))
            }
            Self::TestKit { path } => {
                write!(f, "only tests may use {TEST_KIT}, but there is {}", path.join(" -> "))
            }
        }
    }
}

/// Every broken rule in the graph.
pub(crate) fn check(graph: &Graph) -> Vec<Violation> {
    let mut violations: Vec<Violation> =
        graph.members().iter().flat_map(|member| check_table(member, graph)).collect();
    violations.extend(check_purity(graph));
    violations.extend(check_peers(graph));
    violations.extend(check_test_kit(graph));
    violations
}

fn check_table(member: &Member, graph: &Graph) -> Vec<Violation> {
    let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == member.name) else {
        return vec![Violation::Unlisted { member: member.name.clone() }];
    };
    member
        .declares
        .iter()
        .filter(|name| is_ours(name, graph) && !allowed.contains(&name.as_str()))
        .map(|name| Violation::Forbidden { member: member.name.clone(), depends_on: name.clone() })
        .collect()
}

fn is_ours(name: &str, graph: &Graph) -> bool {
    graph.members().iter().any(|member| member.name == name)
}

fn check_purity(graph: &Graph) -> Vec<Violation> {
    let pure = graph.members().iter().filter(|member| member.name == PURE);
    let paths = pure.flat_map(|member| graph.paths(&member.id, IMPURE, |edge| edge.ships));
    paths.map(|path| Violation::Impure { path: owned(&path) }).collect()
}

/// Follows dev-dependencies too: the tests of the product must not build the peers either.
fn check_peers(graph: &Graph) -> Vec<Violation> {
    let paths = graph.default_members().iter().flat_map(|id| graph.paths(id, PEERS, |_| true));
    paths.map(|path| Violation::Peer { path: owned(&path) }).collect()
}

fn check_test_kit(graph: &Graph) -> Vec<Violation> {
    let built = graph.default_members().iter();
    let paths = built.flat_map(|id| graph.paths(id, &[TEST_KIT], |edge| edge.ships));
    paths.map(|path| Violation::TestKit { path: owned(&path) }).collect()
}

fn owned(path: &[&str]) -> Vec<String> {
    path.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// An invented workspace, rendered as the output of `cargo metadata`.
    #[derive(Default)]
    struct FakeWorkspace {
        members: Vec<&'static str>,
        default_members: Vec<&'static str>,
        edges: Vec<(&'static str, &'static str, Value)>,
    }

    fn normal() -> Value {
        json!({"kind": null, "target": null})
    }

    fn for_tests() -> Value {
        json!({"kind": "dev", "target": null})
    }

    fn for_build_script() -> Value {
        json!({"kind": "build", "target": null})
    }

    fn on(target: &str) -> Value {
        json!({"kind": null, "target": target})
    }

    /// The crates of today with dependencies that keep every rule.
    fn sound() -> FakeWorkspace {
        FakeWorkspace {
            members: vec!["tidegate-core", "tidegate", "tidegate-oracle", "tidegate-bench", "xtask"],
            default_members: vec!["tidegate-core", "tidegate"],
            edges: vec![
                ("tidegate-core", "arrayvec", normal()),
                ("tidegate-core", "proptest", for_tests()),
                ("proptest", "getrandom", normal()),
                ("tidegate", "tidegate-core", normal()),
                ("tidegate", "tokio", normal()),
                ("tidegate-oracle", "tidegate-core", normal()),
                ("tidegate-bench", "tidegate", normal()),
                ("tidegate-bench", "governor", normal()),
            ],
        }
    }

    impl FakeWorkspace {
        fn with(mut self, from: &'static str, to: &'static str, kind: Value) -> Self {
            self.edges.push((from, to, kind));
            self
        }

        fn with_member(mut self, name: &'static str) -> Self {
            self.members.push(name);
            self
        }

        fn with_default_member(mut self, name: &'static str) -> Self {
            self.default_members.push(name);
            self
        }

        fn packages(&self) -> Vec<&'static str> {
            let ends = self.edges.iter().flat_map(|(from, to, _)| [*from, *to]);
            let mut names: Vec<_> = self.members.iter().copied().chain(ends).collect();
            names.sort_unstable();
            names.dedup();
            names
        }

        fn from(&self, name: &str) -> impl Iterator<Item = &(&'static str, &'static str, Value)> {
            self.edges.iter().filter(move |(from, _, _)| *from == name)
        }

        fn metadata(&self) -> Value {
            let id = |name: &&str| format!("id of {name}");
            let package = |name: &&str| {
                let declares = self.from(name).map(|(_, to, _)| json!({"name": to}));
                json!({"id": id(name), "name": name, "dependencies": declares.collect::<Vec<_>>()})
            };
            let node = |name: &&str| {
                let deps = self.from(name).map(|(_, to, kind)| json!({"pkg": id(to), "dep_kinds": [kind]}));
                json!({"id": id(name), "deps": deps.collect::<Vec<_>>()})
            };
            json!({
                "packages": self.packages().iter().map(package).collect::<Vec<_>>(),
                "workspace_members": self.members.iter().map(id).collect::<Vec<_>>(),
                "workspace_default_members": self.default_members.iter().map(id).collect::<Vec<_>>(),
                "resolve": {"nodes": self.packages().iter().map(node).collect::<Vec<_>>()},
            })
        }

        fn violations(&self) -> Vec<Violation> {
            check(&Graph::parse(&self.metadata()).unwrap())
        }
    }

    fn forbidden(member: &str, depends_on: &str) -> Violation {
        Violation::Forbidden { member: member.into(), depends_on: depends_on.into() }
    }

    fn impure(path: &[&str]) -> Violation {
        Violation::Impure { path: owned(path) }
    }

    fn peer(path: &[&str]) -> Violation {
        Violation::Peer { path: owned(path) }
    }

    #[test]
    fn this_workspace_keeps_the_rules() {
        assert_eq!(check(&Graph::load().unwrap()), []);
    }

    #[test]
    fn a_sound_workspace_breaks_nothing() {
        assert_eq!(sound().violations(), []);
    }

    #[test]
    fn a_crate_that_the_table_does_not_know_is_caught() {
        let violations = sound().with_member("tidegate-extra").violations();
        assert_eq!(violations, [Violation::Unlisted { member: "tidegate-extra".into() }]);
    }

    #[test]
    fn an_edge_that_the_table_does_not_grant_is_caught_whatever_it_is_for() {
        for kind in [normal(), for_tests(), for_build_script(), on("cfg(loom)")] {
            let violations = sound().with("tidegate-core", "tidegate-oracle", kind.clone()).violations();
            assert_eq!(violations, [forbidden("tidegate-core", "tidegate-oracle")], "{kind}");
        }
    }

    #[test]
    fn only_the_simulator_and_the_benchmark_may_use_the_oracle_and_nobody_the_benchmark() {
        for (member, _) in ALLOWED {
            for measured in ["tidegate-oracle", "tidegate-bench"] {
                // Without default members, because another test covers the benchmark's peers.
                let made = FakeWorkspace { members: vec![member, measured], ..FakeWorkspace::default() };
                let granted =
                    measured == "tidegate-oracle" && ["tidegate-sim", "tidegate-bench"].contains(member);
                let expected = if granted { vec![] } else { vec![forbidden(member, measured)] };
                assert_eq!(made.with(member, measured, for_tests()).violations(), expected);
            }
        }
    }

    #[test]
    fn nothing_of_ours_depends_on_xtask_nor_xtask_on_anything_of_ours() {
        let violations = sound().with("tidegate", "xtask", normal()).violations();
        assert_eq!(violations, [forbidden("tidegate", "xtask")]);
        let violations = sound().with("xtask", "tidegate-core", normal()).violations();
        assert_eq!(violations, [forbidden("xtask", "tidegate-core")]);
    }

    #[test]
    fn each_impure_package_is_caught_at_any_depth_of_the_core() {
        for name in IMPURE {
            let direct = sound().with("tidegate-core", name, normal()).violations();
            assert_eq!(direct, [impure(&["tidegate-core", name])]);
            let deep =
                sound().with("arrayvec", "between", on("cfg(windows)")).with("between", name, normal());
            assert_eq!(deep.violations(), [impure(&["tidegate-core", "arrayvec", "between", name])]);
        }
    }

    #[test]
    fn the_named_impure_packages_stay_named() {
        for name in ["tokio", "redis", "serde", "hyper", "quanta", "chrono", "time"] {
            assert!(IMPURE.contains(&name), "{name}");
        }
    }

    #[test]
    fn what_the_core_uses_only_for_tests_or_the_model_checker_may_be_impure() {
        for kind in [for_tests(), for_build_script(), on("cfg(loom)")] {
            assert_eq!(sound().with("tidegate-core", "serde", kind).violations(), []);
        }
        let violations = sound().with("tidegate-core", "serde", on("cfg(not(loom))")).violations();
        assert_eq!(violations, [impure(&["tidegate-core", "serde"])]);
    }

    #[test]
    fn a_peer_within_reach_of_a_default_member_is_caught_whatever_it_is_for() {
        for name in ["governor", "throttlecrab", "pingora-limits", "limitador"] {
            for kind in [normal(), for_tests(), for_build_script()] {
                let violations = sound().with("tidegate", "between", kind).with("between", name, normal());
                assert_eq!(violations.violations(), [peer(&["tidegate", "between", name])]);
            }
        }
    }

    #[test]
    fn the_benchmark_as_a_default_member_is_caught() {
        let violations = sound().with_default_member("tidegate-bench").violations();
        assert_eq!(violations, [peer(&["tidegate-bench", "governor"])]);
    }

    #[test]
    fn what_tests_are_made_of_is_used_by_tests_only() {
        let made = || sound().with_member("tidegate-testkit");
        let shipped = made().with("tidegate", "tidegate-testkit", normal()).violations();
        assert_eq!(shipped, [Violation::TestKit { path: owned(&["tidegate", "tidegate-testkit"]) }]);
        assert_eq!(made().with("tidegate", "tidegate-testkit", for_tests()).violations(), []);
        assert_eq!(made().with("tidegate-bench", "tidegate-testkit", normal()).violations(), []);
    }

    #[test]
    fn a_violation_tells_the_way_to_what_is_wrong() {
        assert_eq!(
            impure(&["tidegate-core", "between", "serde"]).to_string(),
            "tidegate-core must stay pure, but has tidegate-core -> between -> serde"
        );
        assert_eq!(forbidden("a", "b").to_string(), "a may not depend on b");
    }
}
