//! Reads `cargo metadata`: where the project lies, and the graph of its dependencies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use serde_json::Value;

use crate::Failure;
use crate::command;

/// The package with model-checked concurrency.
const MODEL_CHECKED: &str = "tidegate-core";

/// Dependencies behind this condition are built for the model checker only and never ship.
const MODEL_CHECKER_ONLY: &str = "cfg(loom)";

/// The facts about the workspace that the steps of the gate need.
#[derive(Debug, Default)]
pub(crate) struct Project {
    pub(crate) root: PathBuf,
    pub(crate) target_dir: PathBuf,
    pub(crate) loom_tests: Vec<String>,
}

impl Project {
    pub(crate) fn load() -> Result<Self, Failure> {
        Self::parse(&cargo_metadata(&["--no-deps"])?)
    }

    fn parse(metadata: &Value) -> Result<Self, Failure> {
        Ok(Self {
            root: text(metadata, "workspace_root")?.into(),
            target_dir: text(metadata, "target_directory")?.into(),
            loom_tests: loom_tests(metadata)?,
        })
    }
}

fn loom_tests(metadata: &Value) -> Result<Vec<String>, Failure> {
    let mut names = Vec::new();
    for package in list(metadata, "packages")? {
        if text(package, "name")? != MODEL_CHECKED {
            continue;
        }
        for target in list(package, "targets")? {
            let name = text(target, "name")?;
            let is_test = list(target, "kind")?.iter().any(|kind| kind == "test");
            if is_test && name.starts_with("loom") {
                names.push(name.to_owned());
            }
        }
    }
    Ok(names)
}

/// Our crates, their declared dependencies, and all packages that the resolver chose.
#[derive(Debug)]
pub(crate) struct Graph {
    members: Vec<Member>,
    default_members: Vec<PackageId>,
    packages: BTreeMap<PackageId, Package>,
}

type PackageId = String;

/// A crate of the workspace.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) id: PackageId,
    /// The packages named in its manifest: of every kind, on every platform, optional or not.
    pub(crate) declares: BTreeSet<String>,
}

#[derive(Debug)]
struct Package {
    name: String,
    edges: Vec<Edge>,
}

/// One resolved dependency of a package.
#[derive(Debug)]
pub(crate) struct Edge {
    to: PackageId,
    /// Whether the dependency is part of a user's build: not only for tests, build scripts or the
    /// model checker.
    pub(crate) ships: bool,
}

impl Graph {
    /// Reads the graph with all our features enabled. Features are unified over the workspace, as
    /// in a build of the whole workspace.
    pub(crate) fn load() -> Result<Self, Failure> {
        Self::parse(&cargo_metadata(&["--all-features"])?)
    }

    pub(crate) fn parse(metadata: &Value) -> Result<Self, Failure> {
        let names = package_names(metadata)?;
        Ok(Self {
            members: members(metadata)?,
            default_members: texts(metadata, "workspace_default_members")?,
            packages: resolved_packages(metadata, &names)?,
        })
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    pub(crate) fn default_members(&self) -> &[PackageId] {
        &self.default_members
    }

    /// Returns the names along a shortest path of followed edges, from the package `start` to each
    /// package named in `wanted`.
    pub(crate) fn paths<'a>(
        &'a self,
        start: &'a str,
        wanted: &[&str],
        follow: fn(&Edge) -> bool,
    ) -> Vec<Vec<&'a str>> {
        let mut reached_from = BTreeMap::from([(start, None)]);
        let mut queue = VecDeque::from([start]);
        let mut found = Vec::new();
        while let Some(id) = queue.pop_front() {
            let Some(package) = self.packages.get(id) else { continue };
            if wanted.contains(&package.name.as_str()) {
                found.push(self.path_back(id, &reached_from));
            }
            for edge in package.edges.iter().filter(|edge| follow(edge)) {
                if !reached_from.contains_key(edge.to.as_str()) {
                    reached_from.insert(&edge.to, Some(id));
                    queue.push_back(&edge.to);
                }
            }
        }
        found
    }

    fn path_back<'a>(&'a self, end: &'a str, reached_from: &BTreeMap<&str, Option<&'a str>>) -> Vec<&'a str> {
        let step_back = |id: &&str| reached_from.get(*id).copied().flatten();
        let mut path: Vec<&str> = std::iter::successors(Some(end), step_back)
            .map(|id| self.packages.get(id).map_or(id, |package| package.name.as_str()))
            .collect();
        path.reverse();
        path
    }
}

fn members(metadata: &Value) -> Result<Vec<Member>, Failure> {
    let ids = texts(metadata, "workspace_members")?;
    let mut members = Vec::new();
    for package in list(metadata, "packages")? {
        let id = text(package, "id")?;
        if !ids.iter().any(|member| member == id) {
            continue;
        }
        let declared = list(package, "dependencies")?.iter().map(|dependency| text(dependency, "name"));
        members.push(Member {
            name: text(package, "name")?.to_owned(),
            id: id.to_owned(),
            declares: declared.map(|name| name.map(str::to_owned)).collect::<Result<_, _>>()?,
        });
    }
    Ok(members)
}

fn package_names(metadata: &Value) -> Result<BTreeMap<&str, &str>, Failure> {
    list(metadata, "packages")?
        .iter()
        .map(|package| Ok((text(package, "id")?, text(package, "name")?)))
        .collect()
}

fn resolved_packages(
    metadata: &Value,
    names: &BTreeMap<&str, &str>,
) -> Result<BTreeMap<PackageId, Package>, Failure> {
    let mut packages = BTreeMap::new();
    for node in list(field(metadata, "resolve")?, "nodes")? {
        let id = text(node, "id")?;
        let name =
            names.get(id).ok_or_else(|| format!("cargo metadata resolves the unknown package {id}"))?;
        let edges = list(node, "deps")?.iter().map(edge).collect::<Result<_, _>>()?;
        packages.insert(id.to_owned(), Package { name: (*name).to_owned(), edges });
    }
    Ok(packages)
}

fn edge(dependency: &Value) -> Result<Edge, Failure> {
    let mut ships = false;
    for kind in list(dependency, "dep_kinds")? {
        let is_normal = field(kind, "kind")?.is_null();
        ships |= is_normal && field(kind, "target")? != MODEL_CHECKER_ONLY;
    }
    Ok(Edge { to: text(dependency, "pkg")?.to_owned(), ships })
}

fn cargo_metadata(arguments: &[&str]) -> Result<Value, Failure> {
    let json =
        command::capture(command::cargo().args(["metadata", "--format-version", "1"]).args(arguments))?;
    serde_json::from_slice(&json).map_err(|error| format!("cargo metadata is not JSON: {error}"))
}

fn field<'a>(value: &'a Value, name: &str) -> Result<&'a Value, Failure> {
    value.get(name).ok_or_else(|| format!("cargo metadata lacks `{name}`"))
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str, Failure> {
    field(value, name)?.as_str().ok_or_else(|| format!("`{name}` in cargo metadata is not a text"))
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>, Failure> {
    field(value, name)?.as_array().ok_or_else(|| format!("`{name}` in cargo metadata is not a list"))
}

fn texts(value: &Value, name: &str) -> Result<Vec<String>, Failure> {
    let owned = |item: &Value| item.as_str().map(str::to_owned);
    let items: Option<Vec<String>> = list(value, name)?.iter().map(owned).collect();
    items.ok_or_else(|| format!("`{name}` in cargo metadata holds more than texts"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn finds_only_the_test_targets_of_the_core_that_are_named_loom() {
        let package = |name: &str| {
            json!({"name": name, "targets": [
                {"name": "loom_table", "kind": ["test"]},
                {"name": "loom_helper", "kind": ["example"]},
                {"name": "properties", "kind": ["test"]},
            ]})
        };
        let metadata = json!({
            "workspace_root": "root", "target_directory": "out",
            "packages": [package("tidegate"), package("tidegate-core")],
        });
        let project = Project::parse(&metadata).unwrap();
        assert_eq!(project.loom_tests, ["loom_table"]);
        assert_eq!((project.root, project.target_dir), ("root".into(), "out".into()));
    }

    #[test]
    fn missing_metadata_fields_are_reported() {
        assert_eq!(Graph::parse(&json!({})).unwrap_err(), "cargo metadata lacks `packages`");
        assert!(Project::parse(&json!({"workspace_root": 1})).unwrap_err().contains("workspace_root"));
    }
}
