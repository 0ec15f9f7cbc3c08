//! Disks that fail: a library that is preloaded into a process makes calls on the files below one
//! folder fail, as a control file has it. The library is C, because it takes the place of functions
//! of libc; no crate does that without unsafe code here.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("faults.c");

/// A kind of fault, by its bit in the control file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// The disk is full: files cannot grow or be created (`ENOSPC`). Bytes that are there can be
    /// written again.
    Full,
    /// Writes fail (`EIO`).
    Io,
    /// Syncs fail (`EIO`).
    Sync,
    /// Writes reach the file by half, and fail (`ENOSPC`).
    Torn,
    /// Reads fail (`EIO`).
    Read,
}

impl DiskFault {
    /// All kinds, in the order of [`FaultSwitch::counts`].
    pub const ALL: [Self; 5] = [Self::Full, Self::Io, Self::Sync, Self::Torn, Self::Read];
}

/// The share of calls that fail of each 1,024.
pub const ALWAYS: u32 = 1_024;

// Places in the control file, in native byte order.
const PER_1024_AT: u64 = 4;
const SEED_AT: u64 = 8;
const KILL_IN_AT: u64 = 16;
const COUNTS_AT: u64 = 24;
const LOSES_UNSYNCED_AT: u64 = COUNTS_AT + 8 * DiskFault::ALL.len() as u64;
const CONTROL_BYTES: u64 = LOSES_UNSYNCED_AT + 8;

/// Switches the faults of the processes that were started with its control file.
#[derive(Debug)]
pub struct FaultSwitch {
    control: File,
}

impl FaultSwitch {
    /// Creates a control file without faults.
    pub fn create(control: &Path) -> Self {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(control);
        let file = file.expect("a control file");
        file.set_len(CONTROL_BYTES).expect("a control file");
        Self { control: file }
    }

    /// Opens the control file of another process.
    pub fn open(control: &Path) -> Self {
        Self { control: File::options().read(true).write(true).open(control).expect("a control file") }
    }

    /// Lets calls fail from now on, `per_1024` of each 1,024 that a kind is about.
    pub fn begin(&self, kinds: &[DiskFault], per_1024: u32, seed: u64) {
        let bits = kinds.iter().fold(0_u32, |bits, kind| bits | 1 << *kind as u32);
        self.write(&seed.to_ne_bytes(), SEED_AT);
        self.write(&per_1024.to_ne_bytes(), PER_1024_AT);
        self.write(&bits.to_ne_bytes(), 0);
    }

    /// Ends all faults.
    pub fn end(&self) {
        self.begin(&[], 0, 0);
    }

    /// Lets the process kill itself with SIGKILL in the middle of the given change of a file,
    /// counted from now; 0 for never.
    pub fn kill_in(&self, calls: u64) {
        self.write(&calls.to_ne_bytes(), KILL_IN_AT);
    }

    /// Sets whether a kill undoes all writes since the last sync of their file, as if the machine
    /// lost its power. Only writes from now on are undone.
    pub fn lose_unsynced(&self, loses: bool) {
        self.write(&u64::from(loses).to_ne_bytes(), LOSES_UNSYNCED_AT);
    }

    /// Returns the number of failed calls by kind.
    pub fn counts(&self) -> [u64; DiskFault::ALL.len()] {
        DiskFault::ALL.map(|kind| {
            let mut count = [0; 8];
            let at = COUNTS_AT + 8 * kind as u64;
            self.control.read_exact_at(&mut count, at).expect("a control file");
            u64::from_ne_bytes(count)
        })
    }

    fn write(&self, bytes: &[u8], at: u64) {
        self.control.write_all_at(bytes, at).expect("a control file");
    }
}

/// The library, built by the C compiler.
#[derive(Debug)]
pub struct FaultLibrary {
    library: PathBuf,
}

impl FaultLibrary {
    /// Builds the library in a folder.
    pub fn build(folder: &Path) -> Self {
        let (source, library) = (folder.join("faults.c"), folder.join("libfaults.so"));
        std::fs::write(&source, SOURCE).expect("a source file");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
        let built = compiler.arg(&library).arg(&source).arg("-ldl").status().expect("a C compiler, `cc`");
        assert!(built.success(), "the library of disk faults does not compile");
        Self { library }
    }

    /// Adds the library to a command. Faults apply to the files below `disk`, by this control file.
    pub fn preload(&self, command: &mut Command, disk: &Path, control: &Path) {
        // Open files are known by their real path.
        let disk = disk.canonicalize().expect("a folder");
        command.env("LD_PRELOAD", &self.library);
        command.env("DISK_FAULTS_FOLDER", disk).env("DISK_FAULTS_CONTROL", control);
    }
}

impl FaultLibrary {
    /// Lets files with this text in their path lose nothing at a kill.
    pub fn except(command: &mut Command, text: &str) {
        command.env("DISK_FAULTS_EXCEPT", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a shell command on a disk with faults. Returns whether it succeeded, and the content of
    /// the file `f` after.
    fn run(kinds: &[DiskFault], script: &str) -> (bool, String, [u64; 5]) {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, control) = (folder.path().join("disk"), folder.path().join("control"));
        std::fs::create_dir(&disk).expect("a folder");
        std::fs::write(disk.join("f"), "old").expect("a file");
        let switch = FaultSwitch::create(&control);
        switch.begin(kinds, ALWAYS, 1);
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).current_dir(&disk);
        FaultLibrary::build(folder.path()).preload(&mut shell, &disk, &control);
        let status = shell.output().expect("a shell").status;
        let content = std::fs::read_to_string(disk.join("f")).expect("a file");
        (status.success(), content, FaultSwitch::open(&control).counts())
    }

    #[test]
    fn each_kind_of_fault_fails_its_calls() {
        let write = "dd if=/dev/zero of=f bs=8 count=1 conv=notrunc";
        assert_eq!(run(&[], write), (true, "\0".repeat(8), [0; 5]));
        assert_eq!(run(&[DiskFault::Full], write), (false, "old".to_owned(), [1, 0, 0, 0, 0]));
        assert_eq!(run(&[DiskFault::Io], write), (false, "old".to_owned(), [0, 1, 0, 0, 0]));
        assert_eq!(run(&[DiskFault::Torn], write), (false, "\0".repeat(4), [0, 0, 0, 1, 0]));
        assert_eq!(run(&[DiskFault::Sync], &format!("{write} conv=fsync")).2, [0, 0, 1, 0, 0]);
        assert_eq!(run(&[DiskFault::Read], "dd if=f of=/dev/null").2, [0, 0, 0, 0, 1]);
        // A full disk takes what needs no room.
        let again = "dd if=/dev/zero of=f bs=3 count=1 conv=notrunc";
        assert_eq!(run(&[DiskFault::Full], again), (true, "\0".repeat(3), [0; 5]));
        assert!(!run(&[DiskFault::Full], "touch $PWD/new").0);
        assert!(run(&[DiskFault::Full], "touch ${PWD%/*}/other").0, "another folder");
    }

    #[test]
    fn a_kill_undoes_writes_that_are_not_synced() {
        let left = |changes: &str, loses: bool| {
            let folder = tempfile::tempdir().expect("a folder");
            let (disk, control) = (folder.path().join("disk"), folder.path().join("control"));
            std::fs::create_dir(&disk).expect("a folder");
            std::fs::write(disk.join("f"), "old and long").expect("a file");
            let switch = FaultSwitch::create(&control);
            switch.lose_unsynced(loses);
            switch.kill_in(3);
            let mut python = Command::new("python3");
            let script = format!("import os; f = os.open('f', os.O_WRONLY); {changes}");
            python.args(["-c", &script]).current_dir(&disk);
            FaultLibrary::build(folder.path()).preload(&mut python, &disk, &control);
            assert_eq!(python.output().expect("Python").status.code(), None, "a signal ended it");
            std::fs::read_to_string(disk.join("f")).expect("a file")
        };
        let synced = "os.write(f, b'new'); os.fsync(f); os.ftruncate(f, 1)";
        let unsynced = "os.write(f, b'new'); os.write(f, b'est and longer'); os.ftruncate(f, 1)";
        assert_eq!([left(synced, true), left(synced, false)], ["new and long"; 2]);
        assert_eq!([left(unsynced, true), left(unsynced, false)], ["old and long", "newest and longer"]);
    }

    #[test]
    fn a_process_is_killed_in_the_middle_of_a_write() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, control) = (folder.path().join("disk"), folder.path().join("control"));
        std::fs::create_dir(&disk).expect("a folder");
        FaultSwitch::create(&control).kill_in(2);
        let mut dd = Command::new("dd");
        dd.args(["if=/dev/zero", "of=f", "bs=8", "count=3"]).current_dir(&disk);
        FaultLibrary::build(folder.path()).preload(&mut dd, &disk, &control);
        let ended = dd.output().expect("dd").status;
        assert_eq!(ended.code(), None, "a signal ended it");
        assert_eq!(std::fs::read(disk.join("f")).expect("a file").len(), 12);
    }
}
