//! Templates: fields that many rules share, such as those of a tier.

use toml::{Table, Value};

use crate::fields::{Fields, kind_of, read_flag, read_name, read_period};

/// The most templates of a set.
pub const TEMPLATES_MAX: usize = 1_000;

/// Fields of a template. It cannot name another template.
const FIELDS: &[&str] =
    &["name", "class", "paid", "tolerance", "regime", "mode", "algorithm", "limit", "period", "burst"];

/// Fields that a rule inherits unless it sets them.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) name: String,
    /// As they were written: a rule reads them as if they were its own.
    pub(crate) fields: Table,
}

impl Template {
    /// Reads a template; every field is checked by itself, and once more together with those of
    /// each rule.
    pub(crate) fn read(row: Value) -> Result<Self, Vec<String>> {
        let Value::Table(mut table) = row else {
            return Err(vec![format!(": a template is a table, not {}", kind_of(&row))]);
        };
        let mut fields = Fields::new(table.clone());
        let name = fields.required("name", read_name);
        fields.class();
        fields.optional("paid", |value| read_flag(&value));
        fields.tolerance_ppm();
        fields.regime();
        fields.mode();
        fields.algorithm();
        if fields.rest().contains_key("limit") {
            fields.amount();
        }
        fields.optional("period", read_period);
        fields.burst();
        fields.refuse_unknown("a template", FIELDS);
        table.remove("name");
        match name {
            Some(name) if fields.problems.is_empty() => Ok(Self { name, fields: table }),
            _ => Err(fields.problems),
        }
    }
}
