//! Where the rules are, and how a store of them is followed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidegate_control::{Bucket, Snapshots, StoreConfig};
use tidegate_rules::RuleSet;
use tidegate_rules::store::Address;

use super::reader::Reader;

/// Where rules are.
#[derive(Clone, Debug)]
pub enum RulesConfig {
    /// In a file.
    File(PathBuf),
    /// In a store.
    Store(StoreConfig),
}

/// Where rules are, for answers: a store is shown without its password.
#[derive(Clone, Debug)]
pub(crate) enum RulesLocation {
    File(PathBuf),
    Store(Address),
}

impl RulesConfig {
    pub(crate) fn location(&self) -> RulesLocation {
        match self {
            Self::File(path) => RulesLocation::File(path.clone()),
            Self::Store(store) => RulesLocation::Store(store.address.clone()),
        }
    }
}

impl Reader<'_> {
    /// Reads the place of the rules: a file, or a store with its own settings.
    pub(super) fn rules(&mut self, data_dir: Option<&Path>) -> Option<RulesConfig> {
        let placement = self.text("rules_placement");
        let snapshots = self.text("rules_snapshots");
        let least = Duration::from_millis(100);
        let reconcile = self.time("rules_reconcile", least, Duration::from_hours(24));
        let look = self.optional_time("rules_poll", least, Duration::from_hours(24));
        let text = self.text("rules");
        let is_store = |text: &str| {
            ["sqlite:", "postgres:", "postgresql:"].iter().any(|scheme| text.starts_with(scheme))
        };
        let Some(text) = text.as_ref().filter(|text| is_store(text)) else {
            for (key, given) in [("rules_placement", &placement), ("rules_snapshots", &snapshots)] {
                if given.is_some() {
                    self.problem(
                        key,
                        "only for rules in a store: rules is neither sqlite:FILE nor postgres://...",
                    );
                }
            }
            return text.map(PathBuf::from).map(RulesConfig::File);
        };
        let address = match text.parse() {
            Ok(address) => address,
            Err(problem) => {
                self.problem("rules", format!("{problem}, or the path of a file"));
                return None;
            }
        };
        if let Some(Err(problem)) = placement.as_deref().map(check_placement) {
            self.problem("rules_placement", problem);
        }
        let snapshots = match snapshots.as_deref() {
            Some("none") => None,
            Some(url) if url.starts_with("s3:") => {
                let bucket = Bucket::new(url, |name| std::env::var(name).ok());
                bucket
                    .map(Box::new)
                    .map(Snapshots::Bucket)
                    .map_err(|problem| self.problem("rules_snapshots", problem))
                    .ok()
            }
            Some(folder) => Some(Snapshots::Folder(PathBuf::from(folder))),
            None => data_dir.map(|folder| Snapshots::Folder(folder.join("rules"))),
        };
        Some(RulesConfig::Store(StoreConfig { address, placement, snapshots, reconcile, look }))
    }
}

/// Checks that rules can be placed by a dimension, by compiling a rule set without rules.
fn check_placement(dimension: &str) -> Result<(), String> {
    let empty = tidegate_rules::rows::RuleRows::default();
    RuleSet::compile(&empty, Some(dimension), 0).map(drop).map_err(|problems| problems.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;

    #[test]
    fn rules_are_in_a_file_or_a_store() {
        let rules = |given: &[(&str, &str)]| read(given, "data_dir = '/tmp/x'").map(|config| config.rules);
        let file = rules(&[("rules", "rules.toml")]);
        assert!(matches!(file, Ok(Some(RulesConfig::File(path))) if path == Path::new("rules.toml")));
        let store = |given: &[(&str, &str)]| match rules(given) {
            Ok(Some(RulesConfig::Store(store))) => store,
            other => panic!("{other:?}"),
        };
        let usual = store(&[("rules", "postgres://ada:secret@db/rules")]);
        assert_eq!(usual.snapshots.as_ref().map(ToString::to_string).as_deref(), Some("/tmp/x/rules"));
        assert_eq!((usual.placement.as_deref(), usual.reconcile), (None, Duration::from_mins(5)));
        assert_eq!(usual.look, None, "as often as suits the store");
        let seldom = store(&[("rules", "sqlite:a.db"), ("rules_poll", "1h")]);
        assert_eq!(seldom.look, Some(Duration::from_hours(1)));
        assert!(!format!("{usual:?}").contains("secret"));
        let other =
            store(&[("rules", "sqlite:a.db"), ("rules_snapshots", "none"), ("rules_placement", "user")]);
        assert!(other.snapshots.is_none());
        assert_eq!(other.placement.as_deref(), Some("user"));
        for (given, problem) in [
            (&[("rules", "sqlite:a.db"), ("rules_placement", "")][..], "rules_placement: empty"),
            (&[("rules", "sqlite:a.db"), ("rules_placement", "a b")], "rules_placement: placement: "),
            (
                &[("rules", "a.toml"), ("rules_placement", "user")],
                "rules_placement: only for rules in a store",
            ),
            (&[("rules_snapshots", "/tmp/y")], "rules_snapshots: only for rules in a store"),
            (
                &[("rules", "sqlite:a.db"), ("rules_snapshots", "s3:books")],
                "rules_snapshots: \"s3:books\" is not ",
            ),
            (&[("rules", "sqlite:")], "rules: must be `sqlite:FILE`, "),
        ] {
            let problems = rules(given).expect_err(problem);
            assert!(problems.iter().any(|found| found.starts_with(problem)), "{problem}: {problems:?}");
        }
    }
}
