//! Stacks of the processes of a hanging test program, so that a deadlock can be understood from the
//! output of the gate.

use std::fs;
use std::process::{Command, Stdio};

/// Frames of one thread. The innermost ones show the lock or the call that a thread waits for.
const FRAMES_MAX: u32 = 40;

/// Processes whose stacks are printed. A suite starts some dozens of servers at most.
const PROCESSES_MAX: usize = 32;

/// Returns the stacks of all threads of a process group.
pub(crate) fn of_group(group: u32) -> String {
    let members = members(group);
    let shown = members.iter().take(PROCESSES_MAX).map(|pid| of_process(*pid));
    let mut text: String = shown.collect();
    if members.len() > PROCESSES_MAX {
        let more = members.len() - PROCESSES_MAX;
        text.extend(["and ", &more.to_string(), " more processes\n"]);
    }
    text
}

/// Returns the ids of the group's processes.
fn members(group: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut members: Vec<u32> = ids.filter(|pid| group_of(*pid) == Some(group)).collect();
    members.sort_unstable();
    members
}

fn group_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the last parenthesis may contain spaces. State, parent and group follow.
    stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

fn of_process(pid: u32) -> String {
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command_line = String::from_utf8_lossy(&command_line).replace('\0', " ");
    let backtrace = format!("thread apply all backtrace {FRAMES_MAX}");
    let debugger = Command::new("gdb")
        .args(["--batch", "--nx", "-ex", &backtrace, "-p", &pid.to_string()])
        .stdin(Stdio::null())
        .output();
    let stacks = match debugger {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => format!("cannot run gdb: {error}\n"),
    };
    format!("--- stacks of process {pid}: {}\n{stacks}", command_line.trim_end())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;

    use super::*;

    #[test]
    fn stacks_of_all_processes_of_a_group_are_shown() {
        let mut script = Command::new("sh");
        script.args(["-c", "tail -f /dev/null & exec tail -f /dev/null"]).process_group(0);
        let mut child = script.stdout(Stdio::null()).spawn().unwrap();
        // The group has two processes as soon as the shell has started the first.
        while members(child.id()).len() < 2 {
            std::thread::yield_now();
        }
        let text = of_group(child.id());
        let kill = format!("kill -s KILL -- -{}", child.id());
        Command::new("sh").args(["-c", &kill]).status().unwrap();
        child.wait().unwrap();
        assert_eq!(text.matches("--- stacks of process").count(), 2, "{text}");
        assert!(text.contains("#0"), "a frame of a thread: {text}");
    }
}
