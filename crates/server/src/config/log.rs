//! Settings of the decision log.

use std::time::Duration;

use tidegate_record::Otlp;

use super::reader::Reader;

/// The settings of the decision log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    /// The share of allowed decisions that is logged. Denials are always logged.
    pub sample_rate: f64,
    /// The time after which records are deleted.
    pub retention: Duration,
    /// The largest size of the log, in bytes.
    pub bytes_max: u64,
    /// Time that the records of a rule must cover to show that a change denies little.
    pub evidence: Duration,
    /// Where it is sent besides.
    pub otlp: Option<Otlp>,
}

impl Reader<'_> {
    pub(super) fn log(&mut self, has_folder: bool) -> Option<LogConfig> {
        let is_on = match self.text("decision_log").as_deref() {
            None => has_folder,
            Some("on") if has_folder => true,
            Some("off") => false,
            Some("on") => {
                self.problem("decision_log", "\"on\" needs a folder: data_dir is \"none\"");
                false
            }
            Some(other) => {
                self.problem("decision_log", format!("{other:?} is neither \"on\" nor \"off\""));
                false
            }
        };
        let log = LogConfig {
            sample_rate: self.share("log_sample"),
            retention: self.time("log_retention", Duration::from_mins(1), Duration::from_hours(365 * 24)),
            bytes_max: self.size("log_bytes_max") as u64,
            evidence: self.time("log_evidence", Duration::ZERO, Duration::from_hours(1)),
            otlp: self.otlp(is_on),
        };
        is_on.then_some(log)
    }

    fn otlp(&mut self, log_is_on: bool) -> Option<Otlp> {
        let (url, headers) = (self.text("log_otlp"), self.text("log_otlp_headers"));
        let Some(url) = url else {
            if headers.is_some() {
                self.problem("log_otlp_headers", "there is no log_otlp to send them to");
            }
            return None;
        };
        if !log_is_on {
            self.problem("log_otlp", "needs the decision log, which is off: it needs a data_dir");
        }
        let to = Otlp::new(&url).map_err(|problem| self.problem("log_otlp", problem)).ok()?;
        let to = to.with_headers(&headers.unwrap_or_default());
        to.map_err(|problem| self.problem("log_otlp_headers", problem)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;

    #[test]
    fn decisions_are_logged_where_there_is_a_folder() {
        let log = |given: &[(&str, &str)]| read(given, "").expect("good").log;
        let logged = LogConfig {
            sample_rate: 0.001,
            retention: Duration::from_hours(7 * 24),
            bytes_max: 1 << 30,
            evidence: Duration::from_mins(5),
            otlp: None,
        };
        assert_eq!(log(&[("data_dir", "/tmp/x")]), Some(logged.clone()));
        assert_eq!(log(&[("data_dir", "none")]), None);
        assert_eq!(log(&[("data_dir", "/tmp/x"), ("decision_log", "off")]), None);
        let given = [("data_dir", "/tmp/x"), ("decision_log", "on"), ("log_sample", "0.5")];
        assert_eq!(log(&given), Some(LogConfig { sample_rate: 0.5, ..logged }));
        let given = [("data_dir", "/tmp/x"), ("log_otlp", "http://h:4318"), ("log_otlp_headers", "a=b")];
        assert!(log(&given).is_some_and(|log| log.otlp.is_some()));
        for (given, problem) in [
            (&[("log_otlp", "h:4318")][..], "log_otlp: \"h:4318\" is not a URL"),
            (&[("log_otlp_headers", "a=b")], "log_otlp_headers: there is no log_otlp"),
            (&[("log_otlp", "http://h"), ("log_otlp_headers", "secret")], "log_otlp_headers: the header 1 "),
            (&[("log_otlp", "http://h"), ("decision_log", "off")], "log_otlp: needs the decision log"),
        ] {
            let problems = read(&[&[("data_dir", "/tmp/x")], given].concat(), "").expect_err(problem);
            assert!(problems[0].starts_with(problem) && !problems[0].contains("secret"), "{problems:?}");
        }
    }
}
