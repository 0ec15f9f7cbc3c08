//! Commands on a terminal of their own.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// The end of a question.
const QUESTION_END: &[u8] = b"[y/N] ";

/// The result of a command on a terminal.
pub struct TerminalRun {
    /// Exit status.
    pub status: i32,
    /// Standard output and standard error.
    pub printed: String,
    /// Whether the command asked a question.
    pub asked: bool,
}

/// Runs a command on its own terminal, and types this answer to its first question.
pub fn run_at_terminal(mut command: Command, answer: &[u8]) -> TerminalRun {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let controller = openpt(flags).expect("a terminal");
    grantpt(&controller).and_then(|()| unlockpt(&controller)).expect("a terminal to open");
    let name = ptsname(&controller, Vec::new()).expect("its name");
    // Not the tests' own terminal: they would end with it.
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal = open(OsStr::from_bytes(name.as_bytes()), flags, Mode::empty()).expect("opens");
    let terminal = File::from(terminal);
    command.stdin(terminal.try_clone().expect("another"));
    command.stdout(terminal.try_clone().expect("another")).stderr(terminal);
    let mut child = command.spawn().expect("it runs");
    // Only the command has the terminal open now: when it ends, there is no more to read.
    drop(command);
    let mut controller = File::from(controller);
    let (mut printed, mut bytes, mut asked) = (Vec::new(), [0; 1024], false);
    while let Ok(count @ 1..) = controller.read(&mut bytes) {
        printed.extend_from_slice(&bytes[..count]);
        if !asked && printed.ends_with(QUESTION_END) {
            controller.write_all(answer).expect("the answer is typed");
            asked = true;
        }
    }
    let status = child.wait().expect("it ended").code().expect("no signal");
    TerminalRun { status, printed: String::from_utf8(printed).expect("text"), asked }
}
