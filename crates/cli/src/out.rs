//! Output of the command: the only place that writes to standard output and standard error.

use std::fmt::{Arguments, Display};
use std::io::{self, ErrorKind, Write};

use crate::Failure;

/// Whether standard output still has a reader.
///
/// A reader that closes early, such as `head`, is not an error. The command completes and exits
/// with its usual status. It ends early only if its sole effect is its output.
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
    // A failed write to standard error cannot be reported anywhere.
    let _ = io::stderr().lock().write_all(format!("{words}\n").as_bytes());
}

/// Asks the user at the terminal, on standard error. Fails if the question cannot be written: the
/// user cannot confirm an unseen question.
pub(crate) fn ask(words: &str) -> Result<(), Failure> {
    let written = io::stderr().lock().write_all(words.as_bytes());
    written.map_err(|error| Failure::failed(format!("not applied: standard error: {error}")))
}

/// Escapes text for a terminal. Strangers choose keys and other text: these could move the cursor,
/// begin a new line or reverse the order of letters, and so forge output. Such characters are
/// replaced by their code points.
pub(crate) fn shown(words: impl Display) -> String {
    let words = words.to_string();
    if !words.contains(is_unseen) {
        return words;
    }
    let each = |letter: char| {
        if is_unseen(letter) { letter.escape_default().to_string() } else { letter.to_string() }
    };
    words.chars().map(each).collect()
}

/// Whether a character is invisible and affects the text around it.
fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

/// Prints a line of the result to standard output.
macro_rules! say {
    ($($words:tt)*) => { $crate::out::print_line(format_args!($($words)*)) };
}

/// Prints a line about the result to standard error.
macro_rules! aside {
    ($($words:tt)*) => { $crate::out::print_aside(format_args!($($words)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        let cases = [
            ("a\nb\r\tc", r"a\nb\r\tc"),
            ("\u{1b}[2J\u{1b}]0;owned\u{7}", r"\u{1b}[2J\u{1b}]0;owned\u{7}"),
            ("\u{9b}31m\u{7f}\0", r"\u{9b}31m\u{7f}\u{0}"),
            ("abc\u{202e}fed\u{2066}", r"abc\u{202e}fed\u{2066}"),
            ("ann\u{200b}\u{feff}\u{2028}", r"ann\u{200b}\u{feff}\u{2028}"),
        ];
        for (words, wanted) in cases {
            assert_eq!(shown(words), wanted);
        }
    }

    #[test]
    fn printable_text_is_unchanged() {
        for words in ["", "user:42", r#"C:\users 'ann' "bob""#, "größe 日本語 عربى 🙂"] {
            assert_eq!(shown(words), words);
        }
    }
}
