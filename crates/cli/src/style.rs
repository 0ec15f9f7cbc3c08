//! Colours of the output: on a terminal only, unless `--color` says otherwise.

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::sync::OnceLock;

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use clap::Arg;

/// An allowed request, a healthy server.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default().bold();
/// A denied request, a degraded server, an error.
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
/// Warnings and notices.
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// The streams with colours. Unit tests leave it empty, so their output has none.
static COLORS: OnceLock<Colors> = OnceLock::new();

#[derive(Clone, Copy, Default)]
struct Colors {
    stdout: bool,
    stderr: bool,
}

impl Colors {
    fn current() -> Self {
        COLORS.get().copied().unwrap_or_default()
    }
}

/// The flag of every command.
pub(crate) fn arg() -> Arg {
    Arg::new("color")
        .long("color")
        .value_name("WHEN")
        .global(true)
        .display_order(900)
        .default_value("auto")
        .value_parser(["auto", "always", "never"])
        .help("When to print colours; auto: on a terminal, unless NO_COLOR is set")
}

/// Sets the colours of both streams. It runs before the arguments are parsed, because help texts
/// and usage errors have colours too.
pub(crate) fn init(arguments: impl Iterator<Item = OsString>) {
    choice(arguments).write_global();
    let colors = Colors {
        stdout: AutoStream::choice(&io::stdout()) != ColorChoice::Never,
        stderr: AutoStream::choice(&io::stderr()) != ColorChoice::Never,
    };
    // A second call would repeat the first one.
    let _ = COLORS.set(colors);
}

/// Finds `--color` among raw arguments. The parser reports an invalid value later.
fn choice(arguments: impl Iterator<Item = OsString>) -> ColorChoice {
    let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    let mut choice = ColorChoice::Auto;
    while let Some(argument) = arguments.next() {
        let value = match argument.as_str() {
            "--" => break,
            "--color" => arguments.next(),
            other => other.strip_prefix("--color=").map(str::to_owned),
        };
        choice = match value.as_deref() {
            Some("always") => ColorChoice::Always,
            Some("never") => ColorChoice::Never,
            Some(_) => ColorChoice::Auto,
            None => choice,
        };
    }
    choice
}

/// Whether standard output has colours.
pub(crate) fn is_on() -> bool {
    Colors::current().stdout
}

/// Whether standard error has colours.
pub(crate) fn is_on_aside() -> bool {
    Colors::current().stderr
}

/// A text in a style, for standard output.
pub(crate) fn paint(style: Style, text: impl Display) -> String {
    painted(Colors::current().stdout, style, &text)
}

/// A text in a style, for standard error.
pub(crate) fn paint_aside(style: Style, text: impl Display) -> String {
    painted(Colors::current().stderr, style, &text)
}

fn painted(is_on: bool, style: Style, text: &dyn Display) -> String {
    if is_on { format!("{style}{text}{style:#}") } else { text.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice_of(arguments: &[&str]) -> ColorChoice {
        choice(arguments.iter().map(OsString::from))
    }

    #[test]
    fn the_flag_is_found_anywhere_before_the_end_of_flags() {
        assert_eq!(choice_of(&["tidegate", "check"]), ColorChoice::Auto);
        assert_eq!(choice_of(&["tidegate", "--color", "never", "check"]), ColorChoice::Never);
        assert_eq!(choice_of(&["tidegate", "check", "user=a", "--color=always"]), ColorChoice::Always);
        assert_eq!(choice_of(&["tidegate", "--color=always", "check", "--color", "auto"]), ColorChoice::Auto);
        assert_eq!(choice_of(&["tidegate", "check", "--", "--color=always"]), ColorChoice::Auto);
        assert_eq!(choice_of(&["tidegate", "--color"]), ColorChoice::Auto);
    }

    #[test]
    fn a_style_surrounds_the_text_only_where_colours_are_on() {
        assert_eq!(painted(false, BAD, &"deny"), "deny");
        assert_eq!(painted(true, BAD, &"deny"), "\u{1b}[1m\u{1b}[31mdeny\u{1b}[0m");
        assert_eq!(paint(BAD, "deny"), "deny", "without `init` there are none");
    }
}
