//! What the command says: the only place that writes to standard output and standard error.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

use crate::Failure;

/// Whether somebody still reads standard output.
///
/// A reader that has seen enough, such as `head`, is no failure: what was asked for is done to its end, and the exit
/// status is the one it would have been. Only what is done for nothing but its words ends early.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    There,
    Gone,
}

/// Writes a text to standard output, as it is.
pub(crate) fn write(text: &[u8]) -> io::Result<Reader> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Ok(()) => Ok(Reader::There),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Reader::Gone),
        Err(error) => Err(error),
    }
}

/// The same in a command, which fails if there is no room for its words.
pub(crate) fn print(text: &[u8]) -> Result<Reader, Failure> {
    write(text).map_err(|error| Failure::failed(format!("standard output: {error}")))
}

pub(crate) fn print_line(words: Arguments<'_>) -> Result<Reader, Failure> {
    print(format!("{words}\n").as_bytes())
}

pub(crate) fn print_aside(words: Arguments<'_>) {
    // There is nobody left to tell that nobody can be told.
    let _ = io::stderr().lock().write_all(format!("{words}\n").as_bytes());
}

/// Asks the person at the terminal, aside from the answer. Nobody can mean what nobody was asked.
pub(crate) fn ask(words: &str) -> Result<(), Failure> {
    let told = io::stderr().lock().write_all(words.as_bytes());
    told.map_err(|error| Failure::failed(format!("not applied: standard error: {error}")))
}

/// A line of the answer, on standard output.
macro_rules! say {
    ($($words:tt)*) => { $crate::out::print_line(format_args!($($words)*)) };
}

/// A line about the answer, on standard error.
macro_rules! aside {
    ($($words:tt)*) => { $crate::out::print_aside(format_args!($($words)*)) };
}
