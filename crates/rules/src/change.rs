//! Changes of rules: operations applied together, their author and reason, and the consent that
//! they require.

use std::collections::HashSet;
use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::rows::RowKind;

/// Maximum operations of one change. Higher: larger imports in one step, which blocks all other
/// changes meanwhile.
pub const OPERATIONS_MAX: usize = 10_000;

/// Maximum bytes of the names and bodies in one change. Higher: more memory to read or apply a
/// change.
pub const CHANGE_BYTES_MAX: usize = 16 << 20;

/// How many bytes one body has at most. Higher: fewer rows in one change.
pub const BODY_BYTES_MAX: usize = 64 << 10;

/// How many bytes a name has at most: of a row, an emergency, a credential, a person.
pub const NAME_BYTES_MAX: usize = 256;

/// How many bytes a reason, or the expected effect of a change, has at most.
pub const TEXT_BYTES_MAX: usize = 64 << 10;

/// A part of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Operation {
    /// A row is made, or gets another body.
    Put {
        /// Kind of the row.
        #[serde(with = "kind")]
        kind: RowKind,
        /// Its name.
        name: String,
        /// Its new body, a JSON object.
        body: String,
    },
    /// A row is no more.
    Delete {
        /// Kind of the row.
        #[serde(with = "kind")]
        kind: RowKind,
        /// Its name.
        name: String,
    },
}

impl Operation {
    /// The row that it is about.
    pub fn row(&self) -> (RowKind, &str) {
        match self {
            Self::Put { kind, name, .. } | Self::Delete { kind, name } => (*kind, name),
        }
    }

    /// Returns the body of the row after the operation; `None` if the operation deletes the row.
    pub fn body(&self) -> Option<&str> {
        match self {
            Self::Put { body, .. } => Some(body),
            Self::Delete { .. } => None,
        }
    }

    /// Returns the operation after which a row has a body; `None` deletes the row.
    pub fn leaving(kind: RowKind, name: String, body: Option<String>) -> Self {
        match body {
            Some(body) => Self::Put { kind, name, body },
            None => Self::Delete { kind, name },
        }
    }
}

/// Returns the stored name of a row kind.
pub fn kind_name(kind: RowKind) -> &'static str {
    match kind {
        RowKind::Template => "template",
        RowKind::Rule => "rule",
        RowKind::Override => "override",
    }
}

/// Returns the row kind with a stored name.
pub fn kind_of(name: &str) -> Option<RowKind> {
    [RowKind::Template, RowKind::Rule, RowKind::Override].into_iter().find(|kind| kind_name(*kind) == name)
}

mod kind {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::{RowKind, kind_name, kind_of};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    pub(super) fn serialize<S: Serializer>(kind: &RowKind, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(kind_name(*kind))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<RowKind, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(from)?;
        kind_of(&name).ok_or_else(|| D::Error::unknown_variant(&name, &["template", "rule", "override"]))
    }
}

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Returns its name in the store and in output.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            pub(crate) fn parse_name(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}

words! {
    /// The consent that a change requires before it is applied. The proposal states it.
    ChangeNeeds {
        /// It may be applied.
        Nothing = "nothing",
        /// A confirmation of its effect when it is applied.
        Confirmation = "confirmation",
        /// An approval by a person other than its author.
        Approver = "approver",
    }
}

words! {
    /// Where a change is.
    ChangeState {
        /// It can be applied, with the consent that it needs.
        Proposed = "proposed",
        /// It waits for an approval by a person other than its author.
        Waiting = "waiting",
        /// It applies.
        Applied = "applied",
        /// It will never apply.
        Rejected = "rejected",
        /// It applied, and was undone by a later one.
        RolledBack = "rolled_back",
    }
}

/// A change to propose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The revision that its author looked at. Rows that changed since are conflicts.
    pub base_revision: u64,
    /// Why.
    pub reason: String,
    /// Operations, applied together. No row occurs twice.
    pub operations: Vec<Operation>,
    /// Expected effect, as JSON.
    pub effect: Option<String>,
    /// Required consent.
    pub needs: ChangeNeeds,
    /// The changes that it undoes.
    pub undoes: Vec<u64>,
}

/// A change as the store keeps it. Its operations are read separately, because there may be many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// From 1, in the order in which they were proposed.
    pub id: u64,
    /// Where it is.
    pub state: ChangeState,
    /// Required consent.
    pub needs: ChangeNeeds,
    /// The revision that its author looked at.
    pub base_revision: u64,
    /// Name of the author.
    pub author: String,
    /// Why.
    pub reason: String,
    /// When it was proposed, in milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// How many operations it has.
    pub operation_count: u64,
    /// Expected effect, as JSON.
    pub effect: Option<String>,
    /// The changes that it undoes.
    pub undoes: Vec<u64>,
    /// Approver, and time of the approval in milliseconds since the Unix epoch.
    pub approval: Option<(String, u64)>,
    /// Its revision, once applied.
    pub revision: Option<u64>,
}

/// Input that the store refuses. The message names the field and the allowed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidInput(pub(crate) String);

impl fmt::Display for InvalidInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidInput {}

impl Proposal {
    /// Operations that need no consent, without an effect.
    pub fn new(base_revision: u64, reason: impl Into<String>, operations: Vec<Operation>) -> Self {
        let (reason, needs) = (reason.into(), ChangeNeeds::Nothing);
        Self { base_revision, reason, operations, effect: None, needs, undoes: Vec::new() }
    }

    /// Checks that the store can keep the proposal. Does not validate the meaning of its rows.
    pub(crate) fn check(&self) -> Result<(), InvalidInput> {
        check_text("reason", &self.reason)?;
        if let Some(effect) = &self.effect {
            check_effect(effect)?;
        }
        let count = self.operations.len();
        if !(1..=OPERATIONS_MAX).contains(&count) {
            return Err(InvalidInput(format!("operations: {count} are outside 1 to {OPERATIONS_MAX}")));
        }
        let mut rows = HashSet::with_capacity(count);
        for (at, operation) in self.operations.iter().enumerate() {
            let named = |problem: InvalidInput| InvalidInput(format!("operations[{at}].{problem}"));
            operation.check().map_err(named)?;
            if !rows.insert(operation.row()) {
                return Err(named(InvalidInput("name: an earlier operation has the same row".to_owned())));
            }
        }
        check_bytes("operations", self.operations.iter().map(Operation::bytes).sum(), CHANGE_BYTES_MAX)
    }
}

impl Operation {
    fn bytes(&self) -> usize {
        self.row().1.len() + self.body().map_or(0, str::len)
    }

    fn check(&self) -> Result<(), InvalidInput> {
        check_name("name", self.row().1)?;
        self.body().map_or(Ok(()), check_body)
    }
}

pub(crate) fn check_body(body: &str) -> Result<(), InvalidInput> {
    check_bytes("body", body.len(), BODY_BYTES_MAX)?;
    match serde_json::from_str::<IgnoredAny>(body) {
        Ok(_) if body.trim_ascii_start().starts_with('{') => Ok(()),
        Ok(_) => Err(InvalidInput("body: must be a JSON object".to_owned())),
        Err(error) => Err(InvalidInput(format!("body: must be a JSON object: {error}"))),
    }
}

/// Checks a name. Names are displayed and stored in databases, some of which do not accept every
/// character.
pub(crate) fn check_name(field: &str, name: &str) -> Result<(), InvalidInput> {
    let allowed = (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
    if allowed {
        return Ok(());
    }
    Err(InvalidInput(format!(
        "{field}: must have 1 to {NAME_BYTES_MAX} bytes, none of them a control character"
    )))
}

pub(crate) fn check_effect(effect: &str) -> Result<(), InvalidInput> {
    check_text("effect", effect)?;
    let read = serde_json::from_str::<IgnoredAny>(effect);
    read.map(drop).map_err(|error| InvalidInput(format!("effect: {error}")))
}

pub(crate) fn check_text(field: &str, text: &str) -> Result<(), InvalidInput> {
    check_bytes(field, text.len(), TEXT_BYTES_MAX)?;
    if text.contains('\0') {
        Err(InvalidInput(format!("{field}: must not have a zero character")))
    } else {
        Ok(())
    }
}

fn check_bytes(field: &str, bytes: usize, bytes_max: usize) -> Result<(), InvalidInput> {
    if bytes <= bytes_max {
        return Ok(());
    }
    Err(InvalidInput(format!("{field}: {bytes} bytes are outside 0 to {bytes_max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(name: &str, body: &str) -> Operation {
        Operation::Put { kind: RowKind::Rule, name: name.to_owned(), body: body.to_owned() }
    }

    fn of(operations: Vec<Operation>) -> Proposal {
        Proposal::new(0, "because", operations)
    }

    fn problem(proposal: &Proposal) -> String {
        proposal.check().expect_err("refused").to_string()
    }

    #[test]
    fn operations_are_read_as_they_were_written() {
        let delete = Operation::Delete { kind: RowKind::Template, name: "é\"".to_owned() };
        let operations = vec![put("a", r#"{"limit": 1}"#), delete];
        let text = serde_json::to_string(&operations).expect("text");
        assert_eq!(
            text,
            concat!(
                r#"[{"do":"put","kind":"rule","name":"a","body":"{\"limit\": 1}"},"#,
                r#"{"do":"delete","kind":"template","name":"é\""}]"#,
            )
        );
        assert_eq!(serde_json::from_str::<Vec<Operation>>(&text).expect("read"), operations);
        assert!(serde_json::from_str::<Vec<Operation>>(&text.replace("rule", "role")).is_err());
    }

    #[test]
    fn invalid_proposal_is_rejected_with_its_location() {
        assert_eq!(of(vec![put("a", "{}")]).check(), Ok(()));
        assert_eq!(problem(&of(vec![])), "operations: 0 are outside 1 to 10000");
        assert_eq!(
            problem(&of(vec![put("a", "{}"); OPERATIONS_MAX + 1])),
            "operations: 10001 are outside 1 to 10000"
        );
        let twice = of(vec![put("a", "{}"), put("a", "{}")]);
        assert_eq!(problem(&twice), "operations[1].name: an earlier operation has the same row");
        for name in ["", "a\0", "a\nb", &"a".repeat(NAME_BYTES_MAX + 1)] {
            let message = "operations[0].name: must have 1 to 256 bytes, none of them a control character";
            assert_eq!(problem(&of(vec![put(name, "{}")])), message);
        }
        for body in ["", "[]", "{", "{} x"] {
            let message = problem(&of(vec![put("a", body)]));
            assert!(message.starts_with("operations[0].body: must be a JSON object"), "{message}");
        }
        let large = format!("{{\"a\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX));
        assert_eq!(
            problem(&of(vec![put("a", &large)])),
            "operations[0].body: 65544 bytes are outside 0 to 65536"
        );
        let large = format!("{{\"a\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX - 100));
        let many = of((0..300).map(|number| put(&number.to_string(), &large)).collect());
        assert!(problem(&many).ends_with("bytes are outside 0 to 16777216"), "{}", problem(&many));
        let unsure = Proposal { effect: Some("{".to_owned()), ..of(vec![put("a", "{}")]) };
        assert!(problem(&unsure).starts_with("effect: "), "{}", problem(&unsure));
        let long = Proposal { reason: "x".repeat(TEXT_BYTES_MAX + 1), ..of(vec![put("a", "{}")]) };
        assert_eq!(problem(&long), "reason: 65537 bytes are outside 0 to 65536");
    }
}
