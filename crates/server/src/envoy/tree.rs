//! Descriptors at work: which limit a request's descriptor is under.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use arrayvec::ArrayVec;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tidegate::{Gate, Limit};
use tidegate_rules::pattern::Pattern;

use super::file::{DEPTH_MAX, DescriptorRow, File, LimitRow};
use crate::shared::Shared;

/// The most entries of a request's descriptor. Higher: longer descriptors; more stack for each
/// request.
pub(crate) const ENTRIES_MAX: usize = 64;

/// The longest domain and the longest key of an entry: they are Envoy's own configuration. Higher:
/// longer names; more to hash for each request.
pub(crate) const DOMAIN_BYTES_MAX: usize = 256;
pub(crate) const KEY_BYTES_MAX: usize = 256;

/// The longest value of an entry, in bytes. Values come from clients. By default Envoy accepts 60
/// KiB of header fields in all, and a value that is refused here passes if Envoy fails open.
/// Higher: more to hash for each request.
pub(crate) const VALUE_BYTES_MAX: usize = 64 << 10;

/// The longest name of a limit in a file, in bytes. Every status of a response repeats it.
const NAME_BYTES_MAX: usize = 256;

/// Length at which header fields cut a name, in bytes. Higher: fewer names are cut; larger
/// responses for requests with many limits.
const HEADER_NAME_BYTES_MAX: usize = 128;

/// The most descriptors of all files, counted once for each tenant: a bound on their memory, some
/// 300 bytes each.
const DESCRIPTORS_MAX: usize = 1_000_000;

/// The parts of a key: the domain, the unit, and each entry's key and value.
pub(super) type Parts<'p> = ArrayVec<&'p [u8], { 2 + 2 * ENTRIES_MAX }>;

/// The descriptors of all domains.
#[derive(Debug, Default)]
pub(super) struct Domains {
    by_name: HashMap<String, Level>,
    descriptors: usize,
}

/// The descriptors that may come next.
#[derive(Debug, Default)]
struct Level {
    /// By `key_value`, or `key` where any value will do.
    steps: HashMap<String, Step>,
    /// Those of the above with a `*`, in the order of the file.
    wild: Vec<Pattern>,
}

#[derive(Debug)]
struct Step {
    rule: Option<Rule>,
    below: Level,
    /// All values that match are counted together, under this one.
    shared: Option<String>,
}

/// The rule for a descriptor.
#[derive(Debug)]
pub(super) struct Rule {
    /// As configured; may be empty.
    pub(super) name: String,
    pub(super) replaces: Vec<String>,
    pub(super) mode: Mode,
    /// `None` if the descriptor is unlimited.
    pub(super) quota: Option<Quota>,
}

/// So much in such a time.
#[derive(Debug)]
pub(super) struct Quota {
    pub(super) requests_per_unit: u32,
    pub(super) unit: Unit,
    /// By tenant.
    pub(super) gates: Box<[Gate]>,
}

/// The treatment of a request that is over a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// It is denied.
    Enforce,
    /// It passes, and is only counted.
    Shadow,
    /// It is denied if all of its limits with this mode are over.
    Quota,
    /// It is denied, and charged nevertheless: its hits have happened.
    Always,
}

/// A unit's length. Theirs are as long as these, too: a month is 30 days, a year 365.
pub(super) fn period(unit: Unit) -> Option<Duration> {
    const DAY: u64 = 24 * 60 * 60;
    let seconds = match unit {
        Unit::Unknown => return None,
        Unit::Second => 1,
        Unit::Minute => 60,
        Unit::Hour => 60 * 60,
        Unit::Day => DAY,
        Unit::Week => 7 * DAY,
        Unit::Month => 30 * DAY,
        Unit::Year => 365 * DAY,
    };
    Some(Duration::from_secs(seconds))
}

/// Returns a limit of `requests_per_unit` per unit. All of them may come at once, as in a fixed
/// window.
pub(super) fn limit_of(requests_per_unit: u32, unit: Unit) -> Option<Limit> {
    Limit::gcra(requests_per_unit.into(), period(unit)?).ok()
}

/// Returns the name of a limit for header fields.
pub(super) fn header_name(name: &str) -> &str {
    &name[..name.floor_char_boundary(HEADER_NAME_BYTES_MAX)]
}

/// The unit as a part of the key: as with windows of different lengths, counts of different units
/// do not mix.
pub(super) fn unit_part(unit: Unit) -> &'static [u8] {
    unit.as_str_name().as_bytes()
}

impl Domains {
    /// Adds the domain of a file.
    pub(super) fn add(&mut self, file: File, shared: &Shared) -> Result<(), Vec<String>> {
        let domain = file.domain.unwrap_or_default();
        if domain.is_empty() {
            return Err(vec!["config file cannot have empty domain".to_owned()]);
        }
        if domain.len() > DOMAIN_BYTES_MAX {
            return Err(vec![format!("domain: {} bytes is outside 1 to {DOMAIN_BYTES_MAX}", domain.len())]);
        }
        if self.by_name.contains_key(&domain) {
            return Err(vec![format!("duplicate domain '{domain}' in config file")]);
        }
        let mut builder = Builder { shared, problems: Vec::new(), descriptors: self.descriptors };
        let level = builder.level(file.descriptors.unwrap_or_default(), &domain, 1);
        self.descriptors = builder.descriptors;
        builder.check_size();
        if !builder.problems.is_empty() {
            return Err(builder.problems);
        }
        self.by_name.insert(domain, level);
        Ok(())
    }

    /// Whether no domain is known.
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Whether the domain is known. An unknown domain has no limits.
    pub(super) fn contains(&self, domain: &str) -> bool {
        self.by_name.contains_key(domain)
    }

    /// The rule for a descriptor, and the parts of the key that it counts. A rule applies at the
    /// depth of the descriptor's last entry only.
    pub(super) fn find<'d>(
        &'d self,
        domain: &str,
        entries: &[Entry],
        kept: &'d [Entry],
        parts: &mut Parts<'d>,
    ) -> Option<&'d Rule> {
        let mut level = self.by_name.get(domain)?;
        let mut composite = String::new();
        let mut rule = None;
        for (entry, kept) in entries.iter().zip(kept) {
            let step = level.step(entry, kept, &mut composite, parts)?;
            (level, rule) = (&step.below, step.rule.as_ref());
        }
        rule
    }
}

impl Level {
    /// The descriptor for an entry: of its very value, else the first pattern that matches, else of
    /// any value. `kept` is the entry as it is counted.
    fn step<'d>(
        &'d self,
        entry: &Entry,
        kept: &'d Entry,
        composite: &mut String,
        parts: &mut Parts<'d>,
    ) -> Option<&'d Step> {
        composite.clear();
        composite.push_str(&entry.key);
        composite.push('_');
        composite.push_str(&entry.value);
        let composite = composite.as_str();
        let wild = || self.wild.iter().find(|pattern| pattern.matches(composite));
        let step = match self.steps.get(composite) {
            Some(step) => step,
            None => match wild() {
                Some(pattern) => self.steps.get(pattern.as_str())?,
                None => self.steps.get(entry.key.as_str())?,
            },
        };
        let value = step.shared.as_deref().unwrap_or(&kept.value);
        // Requests with more entries are refused before.
        parts.try_push(kept.key.as_bytes()).ok()?;
        parts.try_push(value.as_bytes()).ok()?;
        Some(step)
    }
}

/// Builds the descriptors of a file, and notes all that is wrong.
struct Builder<'s> {
    shared: &'s Shared,
    problems: Vec<String>,
    descriptors: usize,
}

impl Builder<'_> {
    fn level(&mut self, rows: Vec<DescriptorRow>, parent: &str, depth: usize) -> Level {
        let mut level = Level::default();
        if depth > DEPTH_MAX && !rows.is_empty() {
            self.problems.push(format!("'{parent}': nested deeper than {DEPTH_MAX} descriptors"));
            return level;
        }
        for row in rows {
            self.descriptors += 1;
            let Some((composite, step)) = self.step(row, parent, depth) else { continue };
            if level.steps.contains_key(&composite) {
                self.problems.push(format!("duplicate descriptor composite key '{parent}.{composite}'"));
                continue;
            }
            if composite.contains('*') {
                level.wild.push(Pattern::new(composite.as_str()));
            }
            level.steps.insert(composite, step);
        }
        level
    }

    fn step(&mut self, row: DescriptorRow, parent: &str, depth: usize) -> Option<(String, Step)> {
        let Some(key) = row.key.filter(|key| !key.is_empty()) else {
            self.problems.push(format!("'{parent}': descriptor has empty key"));
            return None;
        };
        if key.len() > KEY_BYTES_MAX {
            let bytes = key.len();
            self.problems.push(format!("'{parent}': key: {bytes} bytes is outside 1 to {KEY_BYTES_MAX}"));
            return None;
        }
        let value = row.value.unwrap_or_default();
        let composite = if value.is_empty() { key } else { format!("{key}_{value}") };
        let path = format!("{parent}.{composite}");
        let shared = row.share_threshold == Some(true);
        if shared && !value.contains('*') {
            self.problems.push(format!(
                "share_threshold can only be used with wildcard values (with a '*'), but found key '{composite}'"
            ));
        }
        let always = row.metadata.unwrap_or_default().charges_always();
        let mode = match (row.shadow_mode, row.quota_mode) {
            (Some(true), _) => Mode::Shadow,
            (_, Some(true)) => Mode::Quota,
            _ if always => Mode::Always,
            _ => Mode::Enforce,
        };
        if always && mode != Mode::Always {
            self.problems.push(format!(
                "'{path}': metadata.tidegate.charge: \"always\" goes with neither shadow_mode nor quota_mode"
            ));
        }
        let rule = row.rate_limit.and_then(|limit| self.rule(limit, mode, &path));
        let below = self.level(row.descriptors.unwrap_or_default(), &path, depth + 1);
        Some((composite, Step { rule, below, shared: shared.then_some(value) }))
    }

    fn rule(&mut self, row: LimitRow, mode: Mode, path: &str) -> Option<Rule> {
        let name = row.name.unwrap_or_default();
        if name.len() > NAME_BYTES_MAX {
            let bytes = name.len();
            self.problems.push(format!("'{path}': name: {bytes} bytes is outside 0 to {NAME_BYTES_MAX}"));
        }
        let replaces: Vec<String> =
            row.replaces.unwrap_or_default().into_iter().map(|row| row.name.unwrap_or_default()).collect();
        if replaces.iter().any(String::is_empty) {
            self.problems.push(format!("'{path}': should not have an empty replaces entry"));
        }
        if !name.is_empty() && replaces.contains(&name) {
            self.problems.push(format!("'{path}': replaces should not contain name of same descriptor"));
        }
        let written = row.unit.unwrap_or_default();
        let unit = Unit::from_str_name(&written.to_ascii_uppercase()).filter(|unit| *unit != Unit::Unknown);
        let quota = match (row.unlimited == Some(true), unit) {
            (true, Some(_)) => {
                self.problems.push(format!("'{path}': should not specify rate limit unit when unlimited"));
                return None;
            }
            (true, None) => None,
            (false, None) => {
                self.problems.push(format!(
                    "'{path}': invalid rate limit unit '{written}'; known: second, minute, hour, day, week, month, year"
                ));
                return None;
            }
            (false, Some(unit)) => {
                let called = if name.is_empty() { path } else { name.as_str() };
                Some(self.quota(row.requests_per_unit.unwrap_or_default(), unit, called)?)
            }
        };
        Some(Rule { name, replaces, mode, quota })
    }

    fn quota(&mut self, requests_per_unit: u32, unit: Unit, name: &str) -> Option<Quota> {
        let limit = limit_of(requests_per_unit, unit)?;
        if self.is_full() {
            // `check_size` reports this once, at the end.
            return None;
        }
        let name: std::sync::Arc<str> = header_name(name).into();
        let gate = |tenant: &crate::shared::Tenant| {
            tenant.envoy.with_limit(limit).with_name(std::sync::Arc::clone(&name))
        };
        Some(Quota { requests_per_unit, unit, gates: self.shared.tenants.iter().map(gate).collect() })
    }

    fn is_full(&self) -> bool {
        self.descriptors.saturating_mul(self.shared.tenants.len()) > DESCRIPTORS_MAX
    }

    fn check_size(&mut self) {
        if self.is_full() {
            let counted = self.descriptors.saturating_mul(self.shared.tenants.len());
            self.problems.push(format!(
                "descriptors: {counted}, counted once for each tenant, is outside 0 to {DESCRIPTORS_MAX}"
            ));
        }
    }
}

/// The names that the rules of one request put out of force.
pub(super) fn replaced<'r>(rules: impl Iterator<Item = &'r Rule>) -> HashSet<&'r str> {
    rules.flat_map(|rule| rule.replaces.iter().map(String::as_str)).collect()
}
