//! The environment variables that `serve` reads. Any other variable with their prefix is an error,
//! because a misspelt setting would otherwise be ignored silently.

use std::ffi::{OsStr, OsString};

use tidegate_server::settings::{SETTINGS, Setting};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

const PREFIX: &str = "TIDEGATE_";

/// The configuration file.
pub(crate) const CONFIG: &str = "TIDEGATE_CONFIG";

/// The log filter.
pub(crate) const LOG: &str = "TIDEGATE_LOG";

/// Variables of the commands that call a server. They may also be set where a server starts.
pub(crate) const SERVER: &str = "TIDEGATE_SERVER";
pub(crate) const TOKEN: &str = "TIDEGATE_TOKEN";

const LOG_DEFAULT: &str = "info";

/// The variable of a setting.
pub(crate) fn variable(setting: &Setting) -> String {
    format!("{PREFIX}{}", setting.key.to_uppercase())
}

/// A problem for each variable that looks like ours and is not.
pub(crate) fn unknown(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let is_unknown = |(name, value): &(OsString, OsString)| {
        let name = name.to_string_lossy();
        name.starts_with(PREFIX) && !is_known(&name) && !is_service_link(&name, value)
    };
    let mut problems: Vec<String> = variables
        .filter(is_unknown)
        .map(|(name, _)| format!("{}: unknown variable; see `tidegate serve --help`", name.display()))
        .collect();
    problems.sort();
    problems
}

fn is_known(name: &str) -> bool {
    [CONFIG, LOG, SERVER, TOKEN].contains(&name) || SETTINGS.iter().any(|setting| variable(setting) == name)
}

/// Whether Kubernetes set the variable for a service link. For a service named `tidegate` it sets
/// `TIDEGATE_SERVICE_HOST`, `TIDEGATE_SERVICE_PORT_HTTP`, `TIDEGATE_PORT=tcp://...`,
/// `TIDEGATE_PORT_8080_TCP_ADDR` and the like in every container.
fn is_service_link(name: &str, value: &OsStr) -> bool {
    let named_port = |(_, rest): (&str, &str)| rest.starts_with(|first: char| first.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.split_once("_PORT_").is_some_and(named_port)
        || name.ends_with("_PORT") && value.to_string_lossy().contains("://")
}

/// Parses the value of [`LOG`] as a log filter.
pub(crate) fn log_filter(value: Option<&OsStr>) -> Result<EnvFilter, String> {
    let text = match value {
        None => LOG_DEFAULT,
        Some(value) => value.to_str().ok_or_else(|| format!("{LOG}: the value is not UTF-8"))?,
    };
    let problem = |what: &str, why: &str| {
        format!(
            "{LOG}: {what:?} {why}; expected a level such as \"info\", or a filter such as \
             \"tidegate_server=debug\""
        )
    };
    // The parser would take a single unknown word for the name of a module, and nothing would be
    // logged.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let wrong = text.split(',').find(|part| !part.contains(['=', '[']) && !is_level(part));
    match wrong {
        Some(part) => Err(problem(part, "is not a log level")),
        None => {
            EnvFilter::builder().parse(text).map_err(|error| problem(text, &format!("is invalid: {error}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown_of(names: &[(&str, &str)]) -> Vec<String> {
        unknown(names.iter().map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn unknown_environment_variables_are_reported() {
        let problems = unknown_of(&[
            ("PATH", "/bin"),
            ("TIDEGATE_HTTP_LISTEN", "off"),
            ("TIDEGATE_CONFIG", "x"),
            ("TIDEGATE_TOKEN", "tg_0"),
            ("TIDEGATE_MEMROY", "1GB"),
            ("TIDEGATE_HTTP_PORT", "8080"),
        ]);
        let told: Vec<_> = problems.iter().filter_map(|problem| problem.split_once(": ")).collect();
        assert_eq!(
            told.iter().map(|(key, _)| *key).collect::<Vec<_>>(),
            ["TIDEGATE_HTTP_PORT", "TIDEGATE_MEMROY"]
        );
    }

    #[test]
    fn kubernetes_service_variables_are_accepted() {
        let links = [
            ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
            ("TIDEGATE_SERVICE_PORT", "8080"),
            ("TIDEGATE_SERVICE_PORT_HTTP", "8080"),
            ("TIDEGATE_PORT", "tcp://10.0.0.1:8080"),
            ("TIDEGATE_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
            ("TIDEGATE_ADMIN_PORT_8090_TCP_PROTO", "tcp"),
        ];
        assert_eq!(unknown_of(&links), Vec::<String>::new());
    }

    #[test]
    fn filters_are_levels_or_name_one() {
        let filter = |text: &str| log_filter(Some(OsStr::new(text)));
        assert!(log_filter(None).is_ok());
        for good in ["warn", "DEBUG", "off", "tidegate_server=debug", "info,hyper=warn"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for wrong in ["", "wran", "info,", "=,==", "tidegate_server=loud"] {
            let problem = filter(wrong).expect_err(wrong);
            assert!(problem.starts_with("TIDEGATE_LOG: "), "{problem}");
        }
    }
}
