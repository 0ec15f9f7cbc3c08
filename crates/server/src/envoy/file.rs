//! The descriptor file of envoyproxy/ratelimit: YAML, with every key it knows.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

/// The largest descriptor file. Higher: more descriptors; longer to read while the old ones stay in
/// force.
pub(super) const FILE_BYTES_MAX: usize = 4 << 20;

/// How deep descriptors may be nested. Higher: longer descriptors; more stack to read them.
pub(super) const DEPTH_MAX: usize = 16;

/// How deep YAML itself may be nested: each descriptor is a list and a map, a limit with its
/// `replaces` three more.
const YAML_DEPTH_MAX: usize = 2 * DEPTH_MAX + 8;

/// The most keys and values of a file, repeated ones counted as often as they are. Higher: more
/// memory while reading.
const YAML_NODES_MAX: usize = 2_000_000;

/// Largest number of YAML aliases in a file. Higher: more shorthand; a small file may expand into a
/// large one.
const YAML_ALIASES_MAX: usize = 10_000;

/// A descriptor file.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct File {
    pub(super) domain: Option<String>,
    pub(super) descriptors: Option<Vec<DescriptorRow>>,
}

/// A descriptor as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DescriptorRow {
    pub(super) key: Option<String>,
    pub(super) value: Option<String>,
    pub(super) rate_limit: Option<LimitRow>,
    pub(super) descriptors: Option<Vec<DescriptorRow>>,
    pub(super) shadow_mode: Option<bool>,
    pub(super) quota_mode: Option<bool>,
    pub(super) share_threshold: Option<bool>,
    pub(super) metadata: Option<Metadata>,
    // These two have no effect here: no label of ours is chosen by a client.
    #[serde(rename = "detailed_metric")]
    _detailed_metric: Option<bool>,
    #[serde(rename = "value_to_metric")]
    _value_to_metric: Option<bool>,
}

/// Free-form metadata, which envoyproxy/ratelimit ignores. The settings of Tidegate are under
/// `tidegate`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Metadata {
    tidegate: Option<TidegateMetadata>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TidegateMetadata {
    charge: Charge,
}

/// When hits are charged.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Charge {
    /// Also those that are over the limit.
    Always,
    /// Only those of requests that may pass. This is the default.
    Allowed,
}

impl Metadata {
    pub(super) fn charges_always(&self) -> bool {
        self.tidegate.as_ref().is_some_and(|ours| matches!(ours.charge, Charge::Always))
    }
}

/// A limit as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LimitRow {
    pub(super) unit: Option<String>,
    pub(super) requests_per_unit: Option<u32>,
    pub(super) unlimited: Option<bool>,
    pub(super) name: Option<String>,
    pub(super) replaces: Option<Vec<ReplacesRow>>,
}

/// A limit that gives way, by its name.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ReplacesRow {
    pub(super) name: Option<String>,
}

/// The file that `text` holds, or all that is wrong with its keys.
pub(super) fn parse(text: &str) -> Result<File, Vec<String>> {
    if text.len() > FILE_BYTES_MAX {
        return Err(vec![format!("{} bytes is outside 0 to {FILE_BYTES_MAX}", text.len())]);
    }
    let keys: Keys = read(text).map_err(|problem| vec![problem])?;
    let mut unknown = Vec::new();
    find_unknown(&keys, &FILE_KEYS, "", &mut unknown);
    if !unknown.is_empty() {
        return Err(unknown);
    }
    read(text).map_err(|problem| vec![problem])
}

fn read<'t, T: Deserialize<'t>>(text: &'t str) -> Result<T, String> {
    let budget = serde_saphyr::budget! {
        max_depth: YAML_DEPTH_MAX,
        max_documents: 1,
        max_nodes: YAML_NODES_MAX,
        max_events: 2 * YAML_NODES_MAX,
        max_aliases: YAML_ALIASES_MAX,
        max_total_scalar_bytes: FILE_BYTES_MAX,
    };
    let options = serde_saphyr::options! { budget: budget, with_snippet: false };
    // Logs and errors show each problem on one line.
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The known keys of one kind of map, and those of the maps below them.
struct KnownKeys {
    names: &'static [&'static str],
    below: &'static [(&'static str, &'static KnownKeys)],
}

static FILE_KEYS: KnownKeys =
    KnownKeys { names: &["domain", "descriptors"], below: &[("descriptors", &DESCRIPTOR_KEYS)] };

static DESCRIPTOR_KEYS: KnownKeys = KnownKeys {
    names: &[
        "key",
        "value",
        "rate_limit",
        "descriptors",
        "shadow_mode",
        "quota_mode",
        "detailed_metric",
        "value_to_metric",
        "share_threshold",
        "metadata",
    ],
    below: &[("descriptors", &DESCRIPTOR_KEYS), ("rate_limit", &LIMIT_KEYS)],
};

static LIMIT_KEYS: KnownKeys = KnownKeys {
    names: &["unit", "requests_per_unit", "unlimited", "name", "replaces"],
    below: &[("replaces", &REPLACES_KEYS)],
};

static REPLACES_KEYS: KnownKeys = KnownKeys { names: &["name"], below: &[] };

/// The keys of a file without the values, to report all unknown keys at once.
enum Keys {
    Map(Vec<(String, Keys)>),
    List(Vec<Keys>),
    Leaf,
}

fn find_unknown(keys: &Keys, known: &KnownKeys, path: &str, problems: &mut Vec<String>) {
    match keys {
        Keys::Leaf => {}
        Keys::List(items) => {
            for (at, item) in items.iter().enumerate() {
                find_unknown(item, known, &format!("{path}[{at}]"), problems);
            }
        }
        Keys::Map(entries) => {
            for (name, value) in entries {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                if !known.names.contains(&name.as_str()) {
                    problems.push(format!(
                        "{path}: unknown key '{name}'; known here: {}",
                        known.names.join(", ")
                    ));
                } else if let Some((_, below)) = known.below.iter().find(|(key, _)| key == name) {
                    find_unknown(value, below, &path, problems);
                }
            }
        }
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeysVisitor)
    }
}

struct KeysVisitor;

/// Visits scalars of all types: they have no keys.
macro_rules! leaf {
    ($($visit:ident: $value:ty,)+) => {
        $(fn $visit<E>(self, _: $value) -> Result<Keys, E> { Ok(Keys::Leaf) })+
    };
}

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }

    leaf! {
        visit_bool: bool,
        visit_i64: i64,
        visit_u64: u64,
        visit_i128: i128,
        visit_u128: u128,
        visit_f64: f64,
        visit_str: &str,
        visit_bytes: &[u8],
    }

    fn visit_unit<E>(self) -> Result<Keys, E> {
        Ok(Keys::Leaf)
    }

    fn visit_none<E>(self) -> Result<Keys, E> {
        Ok(Keys::Leaf)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Keys, D::Error> {
        Keys::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Keys, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Keys::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Keys, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Keys::Map(map))
    }
}
