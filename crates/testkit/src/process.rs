//! A process that ends with the test that started it.

use std::process::{Child, ChildStdout, Command};

use rustix::process::{Pid, kill_process};

use crate::wait::{START_TIME_MAX, wait_until};

pub use rustix::process::Signal;

/// A process that is killed, by its id, when the test is done with it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program.
    pub fn spawn(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self { child, name }
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its standard output, which must be piped. Only the first call succeeds.
    pub fn stdout(&mut self) -> ChildStdout {
        self.child.stdout.take().expect("its output is piped and not taken yet")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let sent = kill_process(Pid::from_child(&self.child), signal);
        sent.unwrap_or_else(|error| panic!("cannot find {}: {error}", self.name));
    }

    /// Kills it with SIGKILL, and waits until it has exited.
    pub fn kill(&mut self) {
        self.child.kill().expect("its own child");
        self.child.wait().expect("its own child");
    }

    /// Terminates it with SIGTERM, and returns its exit status.
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.exit_status()
    }

    /// Waits for its end, and gives its exit status.
    pub fn exit_status(&mut self) -> Option<i32> {
        let mut status = None;
        wait_until(&format!("{} to stop", self.name), START_TIME_MAX, || {
            status = self.child.try_wait().expect("its own child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Process {
        Process::spawn(Command::new("sleep").arg("1000"))
    }

    /// Returns the state letter of a process in `/proc`.
    fn state(process: &Process) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    #[test]
    fn process_stops_continues_and_ends_on_signals() {
        let mut process = sleeper();
        process.signal(Signal::STOP);
        wait_until("the process to stop", START_TIME_MAX, || state(&process) == Some('T'));
        process.signal(Signal::CONT);
        wait_until("the process to continue", START_TIME_MAX, || state(&process) == Some('S'));
        assert!(process.is_running());
        assert_eq!(process.terminate(), None, "a signal ended it");
        assert!(!process.is_running());
    }

    #[test]
    fn a_process_ends_with_its_test_also_when_it_stands_still() {
        let process = sleeper();
        process.signal(Signal::STOP);
        let path = format!("/proc/{}", process.id());
        assert!(std::fs::exists(&path).expect("looks"));
        drop(process);
        assert!(!std::fs::exists(&path).expect("looks"));
    }
}
