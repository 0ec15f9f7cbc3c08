//! Tenants and tokens of the configuration.

use serde::Deserialize;
use toml::Value;

use super::DEFAULT_TENANT;
use super::reader::{NAME_BYTES_MAX, Reader, is_name};
use crate::auth::{Credentials, Role, TokenHash};

/// The most tenants: each takes a part of the table.
const TENANTS_MAX: usize = 1_000;
/// The most tokens.
const TOKENS_MAX: usize = 100_000;
/// The heaviest tenant.
const WEIGHT_MAX: u32 = 1_000_000;

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Unique.
    pub name: String,
    /// Parts of the table.
    #[serde(default = "equal_weight")]
    pub weight: u32,
}

const fn equal_weight() -> u32 {
    1
}

/// A token as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenRow {
    name: String,
    hash: String,
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    role: Role,
}

impl Reader<'_> {
    pub(super) fn tenants(&mut self) -> Vec<TenantConfig> {
        let mut tenants: Vec<TenantConfig> = Vec::new();
        for (at, row) in self.rows("tenants", TENANTS_MAX).into_iter().enumerate() {
            let key = format!("tenants[{at}]");
            match row.try_into::<TenantConfig>() {
                Err(error) => self.problem(&key, error.message()),
                Ok(tenant) if !is_name(&tenant.name) => {
                    self.problem(
                        &key,
                        format!("name: {:?} is not 1 to {NAME_BYTES_MAX} printable bytes", tenant.name),
                    );
                }
                Ok(tenant) if tenants.iter().any(|known| known.name == tenant.name) => {
                    self.problem(&key, format!("name: {:?} is given twice", tenant.name));
                }
                Ok(tenant) if !(1..=WEIGHT_MAX).contains(&tenant.weight) => {
                    self.problem(&key, format!("weight: {} is outside 1 to {WEIGHT_MAX}", tenant.weight));
                    // Only the weight is wrong: tokens that name the tenant are valid.
                    tenants.push(TenantConfig { weight: equal_weight(), ..tenant });
                }
                Ok(tenant) => tenants.push(tenant),
            }
        }
        tenants
    }

    pub(super) fn credentials(&mut self, tenants: &[TenantConfig]) -> Credentials {
        let mut credentials = Credentials::default();
        let problems_before = self.problems.len();
        for (at, row) in self.rows("tokens", TOKENS_MAX).into_iter().enumerate() {
            let key = format!("tokens[{at}]");
            for problem in add_token(&mut credentials, row, tenants) {
                self.problem(&key, problem);
            }
        }
        self.tokens_known &= self.problems.len() == problems_before;
        credentials
    }
}

/// Adds a token, or returns every problem of its row.
fn add_token(credentials: &mut Credentials, row: Value, tenants: &[TenantConfig]) -> Vec<String> {
    let row: TokenRow = match row.try_into::<TokenRow>() {
        Ok(row) => row,
        Err(error) => return vec![error.message().to_owned()],
    };
    let mut problems = Vec::new();
    if !is_name(&row.name) {
        problems.push(format!("name: {:?} is not 1 to {NAME_BYTES_MAX} printable bytes", row.name));
    }
    let tenant = tenants.iter().position(|tenant| tenant.name == row.tenant).map(|at| 1 + at);
    let tenant = tenant.or((row.tenant == DEFAULT_TENANT).then_some(0));
    if tenant.is_none() {
        problems.push(format!("tenant: there is no [[tenants]] entry named {:?}", row.tenant));
    }
    let added = row.hash.parse().and_then(|hash: TokenHash| match tenant {
        Some(tenant) if problems.is_empty() => credentials.add(hash, &row.name, tenant, row.role),
        _ => Ok(()),
    });
    problems.extend(added.err().map(|problem| format!("hash: {problem}")));
    problems
}
