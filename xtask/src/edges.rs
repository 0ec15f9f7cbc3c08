//! Allowed dependencies between our crates, and packages that they must not reach.

use std::fmt;

use crate::Failure;
use crate::metadata::{Graph, Member};

/// A crate of ours, and its row of the table in ARCHITECTURE.md.
struct Room {
    name: &'static str,
    /// The crates of ours that it may depend on, for any purpose: to build, to test, to use.
    may_use: &'static [&'static str],
    contains: &'static str,
    never: &'static str,
}

const ROOMS: &[Room] = &[
    Room {
        name: "tidegate-core",
        may_use: &[],
        contains: "limits, decision arithmetic, meter table, node engine, origin transition, bounds",
        never: "reads a clock or random numbers, does I/O, knows a runtime or serde",
    },
    Room {
        name: "tidegate-origin",
        may_use: &["tidegate-core", "tidegate-testkit"],
        contains: "the origin in memory and on Redis (Lua)",
        never: "has arithmetic that differs from `core`",
    },
    Room {
        name: "tidegate-replication",
        may_use: &["tidegate-core", "tidegate-origin", "tidegate-testkit"],
        contains: "replication rounds, wire format, connections between regions",
        never: "compares the clocks of two machines",
    },
    Room {
        name: "tidegate",
        may_use: &["tidegate-core", "tidegate-replication", "tidegate-origin"],
        contains: "the SDK: `Limiter`, gates, reservations, the clock, HTTP headers, the module `region`",
        never: "needs a server; needs a runtime outside `region`",
    },
    Room {
        name: "tidegate-private-files",
        may_use: &[],
        contains: "files and folders that only their owner may read",
        never: "knows their content",
    },
    Room {
        name: "tidegate-rules",
        may_use: &["tidegate-core", "tidegate-private-files", "tidegate-testkit"],
        contains: "rules, overrides, rule store, audit",
        never: "decides a request; knows a protocol",
    },
    Room {
        name: "tidegate-record",
        may_use: &["tidegate-private-files", "tidegate-testkit"],
        contains: "decision log, Parquet and OTLP export",
        never: "blocks the thread that decides",
    },
    Room {
        name: "tidegate-control",
        may_use: &["tidegate-core", "tidegate-rules", "tidegate-record", "tidegate-testkit"],
        contains: "following a rule store, snapshots, plans, back-tests, approvals, automatic rollback",
        never: "decides a check; delays a check; knows a surface",
    },
    Room {
        name: "tidegate-server",
        may_use: &[
            "tidegate",
            "tidegate-control",
            "tidegate-record",
            "tidegate-rules",
            "tidegate-core",
            "tidegate-testkit",
        ],
        contains: "listeners, workers, surfaces, admin API",
        never: "decides a limit by its own arithmetic",
    },
    Room {
        name: "tidegate-cli",
        may_use: &[
            "tidegate-server",
            "tidegate-sim",
            "tidegate",
            "tidegate-load",
            "tidegate-rules",
            "tidegate-testkit",
        ],
        contains: "the `tidegate` command",
        never: "opens a database itself",
    },
    Room {
        name: "tidegate-load",
        may_use: &[],
        contains: "load generator: closed or open loop over HTTP and RESP; a hostile tenant and its victim",
        never: "decides whether a result is good",
    },
    Room {
        name: "tidegate-sim",
        may_use: &["tidegate-core", "tidegate-replication"],
        contains: "seeded simulator of nodes, origins and regions",
        never: "decides; draws from anything but its seed",
    },
    Room {
        name: "tidegate-oracle",
        may_use: &["tidegate-core"],
        contains: "slow, exact model of decisions",
        never: "shares arithmetic with the code that it judges",
    },
    Room {
        name: "tidegate-bench",
        may_use: &[
            "tidegate",
            "tidegate-load",
            "tidegate-oracle",
            "tidegate-record",
            "tidegate-rules",
            "tidegate-testkit",
        ],
        contains: "benchmarks against other limiters",
        never: "is a dependency of the product",
    },
    Room {
        name: "tidegate-testkit",
        may_use: &[],
        contains: "servers, stores and proxies that tests can break",
        never: "ships",
    },
    Room { name: "xtask", may_use: &[], contains: "the commands of this repository", never: "ships" },
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
    let Some(room) = ROOMS.iter().find(|room| room.name == member.name) else {
        return vec![Violation::Unlisted { member: member.name.clone() }];
    };
    member
        .declares
        .iter()
        .filter(|name| is_ours(name, graph) && !room.may_use.contains(&name.as_str()))
        .map(|name| Violation::Forbidden { member: member.name.clone(), depends_on: name.clone() })
        .collect()
}

fn is_ours(name: &str, graph: &Graph) -> bool {
    graph.members().iter().any(|member| member.name == name)
}

/// Returns the edges that the table grants and no crate uses.
pub(crate) fn unused(graph: &Graph) -> Vec<String> {
    let unused = |member: &Member| {
        let room = ROOMS.iter().find(|room| room.name == member.name);
        let granted = room.map_or(&[][..], |room| room.may_use).iter();
        let idle = granted.filter(|name| !member.declares.iter().any(|declared| declared == *name));
        idle.map(|name| format!("{} -> {name}", member.name)).collect::<Vec<_>>()
    };
    graph.members().iter().flat_map(unused).collect()
}

/// The heading of the table of crates in ARCHITECTURE.md.
const TABLE_HEAD: &str = "| crate | may depend on | contains | never |\n|---|---|---|---|\n";

/// Returns the table of crates for ARCHITECTURE.md.
fn table() -> String {
    let row = |room: &Room| {
        let Room { name, may_use, contains, never } = room;
        let short = |name: &str| name.strip_prefix("tidegate-").unwrap_or(name).to_owned();
        let uses: Vec<String> = may_use.iter().copied().map(short).collect();
        let uses = if uses.is_empty() { "-".to_owned() } else { uses.join(", ") };
        format!("| `{}` | {uses} | {contains} | {never} |\n", short(name))
    };
    ROOMS.iter().map(row).fold(TABLE_HEAD.to_owned(), |table, row| table + &row)
}

/// Returns the page with its table of crates replaced by the generated one.
pub(crate) fn with_table(page: &str) -> Result<String, Failure> {
    let missing = || format!("ARCHITECTURE.md: no table begins with {:?}", TABLE_HEAD.lines().next());
    let start = page.find(TABLE_HEAD).ok_or_else(missing)?;
    let rest = &page[start..];
    let length = rest.find("\n\n").map_or(rest.len(), |end| end + 1);
    Ok(format!("{}{}{}", &page[..start], table(), &rest[length..]))
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
    use std::fs;
    use std::path::Path;

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
    fn each_edge_of_the_table_is_used() {
        assert_eq!(unused(&Graph::load().unwrap()), [""; 0]);
        let sound = Graph::parse(&sound().metadata()).unwrap();
        assert!(unused(&sound).contains(&"tidegate-bench -> tidegate-oracle".to_owned()));
    }

    #[test]
    fn architecture_has_the_generated_table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace");
        let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
        assert_eq!(with_table(&page).unwrap(), page, "`cargo xtask edges` writes the table");
    }

    #[test]
    fn only_the_table_of_a_page_is_replaced() {
        let page = |rows: &str| format!("# A\n\n{TABLE_HEAD}{rows}\nThe end.\n");
        let rows = table().replace(TABLE_HEAD, "");
        assert_eq!(with_table(&page("| `old` | - | x | y |\n")), Ok(page(&rows)));
        assert!(with_table("# A\n").is_err());
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
    fn forbidden_dependency_is_caught_for_any_kind() {
        for kind in [normal(), for_tests(), for_build_script(), on("cfg(loom)")] {
            let violations = sound().with("tidegate-core", "tidegate-oracle", kind.clone()).violations();
            assert_eq!(violations, [forbidden("tidegate-core", "tidegate-oracle")], "{kind}");
        }
    }

    #[test]
    fn only_the_benchmark_may_use_the_oracle_and_no_crate_the_benchmark() {
        for Room { name: member, .. } in ROOMS {
            for measured in ["tidegate-oracle", "tidegate-bench"] {
                // Without default members, because another test covers the benchmark's peers.
                let made = FakeWorkspace { members: vec![member, measured], ..FakeWorkspace::default() };
                let granted = (*member, measured) == ("tidegate-bench", "tidegate-oracle");
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
    fn test_and_loom_dependencies_of_the_core_may_be_impure() {
        for kind in [for_tests(), for_build_script(), on("cfg(loom)")] {
            assert_eq!(sound().with("tidegate-core", "serde", kind).violations(), []);
        }
        let violations = sound().with("tidegate-core", "serde", on("cfg(not(loom))")).violations();
        assert_eq!(violations, [impure(&["tidegate-core", "serde"])]);
    }

    #[test]
    fn competitor_dependency_of_a_default_member_is_caught() {
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
    fn only_tests_use_the_test_kit() {
        let made = || {
            let workspace = sound().with_member("tidegate-testkit").with_member("tidegate-rules");
            workspace.with_default_member("tidegate-rules")
        };
        let shipped = made().with("tidegate-rules", "tidegate-testkit", normal()).violations();
        assert_eq!(shipped, [Violation::TestKit { path: owned(&["tidegate-rules", "tidegate-testkit"]) }]);
        assert_eq!(made().with("tidegate-rules", "tidegate-testkit", for_tests()).violations(), []);
        assert_eq!(made().with("tidegate-bench", "tidegate-testkit", normal()).violations(), []);
    }

    #[test]
    fn violation_prints_the_dependency_path() {
        assert_eq!(
            impure(&["tidegate-core", "between", "serde"]).to_string(),
            "tidegate-core must stay pure, but has tidegate-core -> between -> serde"
        );
        assert_eq!(forbidden("a", "b").to_string(), "a may not depend on b");
    }
}
