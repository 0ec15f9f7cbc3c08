//! Shared helpers of the command's tests: the program, its files, and third-party tools that talk
//! to it.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod examples;
pub mod raw;
pub mod terminal;

use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate_testkit::{Server, ServerFleet};

/// The program with its arguments.
pub fn tidegate(arguments: &[&str]) -> Command {
    tidegate_testkit::tidegate(env!("CARGO_BIN_EXE_tidegate"), arguments)
}

/// A server of the test's own, with these arguments besides its addresses.
pub fn serve(arguments: &[&str]) -> Server {
    Server::start(env!("CARGO_BIN_EXE_tidegate"), arguments)
}

/// Servers of the test's own that share rules and arguments. None is started yet.
pub fn fleet(rules: &str, arguments: &[&str]) -> ServerFleet {
    ServerFleet::new(env!("CARGO_BIN_EXE_tidegate"), rules, arguments)
}

/// A file of the test's own, for as long as its folder lives. Gives its path.
pub fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("a file");
    path.to_string_lossy().into_owned()
}

/// The entry of a configuration for a token, which is also called that.
pub fn token_entry(token: &str, tenant: &str, role: &str) -> String {
    let hash = tidegate_server::auth::TokenHash::of(token.as_bytes());
    format!("[[tokens]]\nname = '{token}'\nhash = '{hash}'\ntenant = '{tenant}'\nrole = '{role}'\n")
}

/// Returns the path of a tool: installed by `cargo xtask tools`, or on the `PATH`.
pub fn tool(name: &str) -> PathBuf {
    let installed = tools_dir().join("py/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path =
        std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).map(|folder| folder.join(name));
    std::iter::once(installed)
        .chain(on_path)
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: run `cargo xtask tools`"))
}

/// The folder with the packages of npm.
pub fn node_dir() -> PathBuf {
    let folder = tools_dir().join("node");
    assert!(
        folder.join("node_modules").is_dir(),
        "the npm packages are not installed: run `cargo xtask tools`"
    );
    folder
}

fn tools_dir() -> PathBuf {
    // The folder of this program's temporary files is below the target folder.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below the target folder");
    target.join("tools")
}
