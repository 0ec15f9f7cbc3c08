//! Helpers of the log's tests.

#![allow(unreachable_pub, reason = "a module of test programs")]

use tidegate_record::{DecisionEntry, LimitTerms, RecordVerdict};

/// 2026-11-16 14:32:17 UTC.
pub const NOW_MS: u64 = 1_794_839_537_000;

/// A denial with all fields set.
pub fn denied(key: &str, at_ms: u64) -> DecisionEntry<'_> {
    DecisionEntry {
        at_ms,
        tenant: "acme",
        surface: "check",
        key,
        cost: 2,
        verdict: RecordVerdict::Denied,
        rule: "per_user",
        rule_version: 3,
        set_version: "5f2a",
        replaced_by: "launch",
        limit: LimitTerms { amount: 100, burst: 120, period_ms: 60_000 },
        remaining: 1,
        retry_ms: Some(600),
        source: "regional",
        reason: "block",
        until_ms: Some(NOW_MS + 3_600_000),
    }
}
