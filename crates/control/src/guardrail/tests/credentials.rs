//! Rules and overrides of credentials. The log has only the digests of these.

use tidegate_rules::{SecretHeaders, secret_digest};

use super::*;

const HEADER: &str = "header.authorization";

fn by_token(amount: u32, fields: &str) -> String {
    format!(r#"{{"key":["{HEADER}"],"limit":{amount},"period":"1h"{fields}}}"#)
}

/// Returns the effect of a change on 200 requests with one credential.
fn of_requests(operation: Operation) -> ChangeEffect {
    let rows = [row(RowKind::Rule, "a", &by_token(1_000, ""))].into();
    let rule_rows = RuleRows { revision: 1, rows, ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let change_plan = ChangePlan::new(&set, &rule_rows, &[operation], None, NOW_MS).expect("compiles");
    let mut test = change_plan.begin(1.0, Arc::default()).without_credentials(&SecretHeaders::default());
    let dimensions = vec![(HEADER.to_owned(), secret_digest(HEADER, "Bearer vip"))];
    for _ in 0..200 {
        assert!(test.take(&DecisionRecord { dimensions: dimensions.clone(), ..record("", NOW_MS, 1.0) }));
    }
    test.finish()
}

fn over_token(token: &str, amount: u32) -> Operation {
    let body = format!(r#"{{"rule":"a","key":["{token}"],"limit":{amount}}}"#);
    put(RowKind::Override, "o", &body)
}

#[test]
fn records_match_the_digest_of_a_credential() {
    let blocked = of_requests(over_token(&secret_digest(HEADER, "Bearer vip"), 0));
    assert!(blocked.because.starts_with("100.0 % of"), "{}", blocked.because);
    let other = of_requests(over_token(&secret_digest(HEADER, "Bearer other"), 0));
    assert!(other.because.starts_with("0.0 % of"), "{}", other.because);
    let all = of_requests(over_token("*", 0));
    assert!(all.because.starts_with("100.0 % of"), "{}", all.because);
}

#[test]
fn change_that_names_a_credential_in_clear_text_is_not_measured() {
    let words = "the log has only digests of \"header.authorization\"";
    for (operation, needs) in [
        (over_token("Bearer vip", 0), ChangeNeeds::Confirmation),
        (over_token("Bearer v*", 0), ChangeNeeds::Approver),
        (
            put(RowKind::Rule, "a", &by_token(100, r#","when":{"header.authorization":"Bearer v*"}"#)),
            ChangeNeeds::Approver,
        ),
    ] {
        let effect = of_requests(operation);
        assert_eq!(effect.needs, needs, "{}", effect.because);
        assert!(effect.because.contains(words), "{}", effect.because);
    }
    let raised = of_requests(over_token("Bearer vip", 2_000));
    assert_eq!(raised.needs, ChangeNeeds::Nothing, "{}", raised.because);
    let lowered = of_requests(put(RowKind::Rule, "a", &by_token(900, "")));
    assert!(lowered.because.starts_with("0.0 % of"), "{}", lowered.because);
}
