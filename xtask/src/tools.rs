//! Installs the tools that the gate needs beyond a bare Rust toolchain.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::command;
use crate::metadata::Project;
use crate::programs;

/// The pinned release of cargo-deny. The configuration in `deny.toml` is written for it.
const CARGO_DENY: &str = "0.20.2";

/// Installs missing tools, and the programs that tests run beside the server.
pub(crate) fn install_all(project: &Project) -> Result<(), Failure> {
    install(project)?;
    programs::install(&tools_dir(project))
}

/// Installs missing tools, and leaves existing ones unchanged.
pub(crate) fn install(project: &Project) -> Result<(), Failure> {
    ensure_component("rustfmt", "fmt")?;
    ensure_component("clippy", "clippy")?;
    if cargo_deny(project).is_none() {
        install_cargo_deny(project)?;
    }
    Ok(())
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

/// The program, when the pinned release of it is there: ours first, then the one on the path.
pub(crate) fn cargo_deny(project: &Project) -> Option<PathBuf> {
    let ours = tools_dir(project).join("bin").join("cargo-deny");
    [ours, PathBuf::from("cargo-deny")].into_iter().find(|program| is_pinned_release(program))
}

fn is_pinned_release(program: &Path) -> bool {
    Command::new(program)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.stdout.trim_ascii_end() == format!("cargo-deny {CARGO_DENY}").as_bytes())
}

/// Compiles cargo-deny without optimisation. On two idle cores this takes 76 seconds instead of 174
/// with its own release profile and link-time optimisation; its checks then take two seconds
/// instead of one. The prebuilt wheel on the Python package index would be faster still. The newest
/// there is 0.14.2, which does not know all licences of today's dependencies (`Unicode-3.0`).
///
/// It is installed below the target directory. The user's own tools may be of another release.
fn install_cargo_deny(project: &Project) -> Result<(), Failure> {
    let root = tools_dir(project);
    let build = root.join("build");
    println!("installing cargo-deny {CARGO_DENY} (a minute or two, once)");
    command::run(
        command::cargo()
            .args(["install", "--quiet", "--locked", "--force"])
            .arg(format!("cargo-deny@{CARGO_DENY}"))
            .arg("--root")
            .arg(&root)
            .arg("--target-dir")
            .arg(&build)
            // Flags meant for the project, such as those of a coverage run, only slow this down.
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

fn tools_dir(project: &Project) -> PathBuf {
    project.target_dir.join("tools")
}
