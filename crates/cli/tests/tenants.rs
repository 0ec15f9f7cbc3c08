//! Tenants of one server: whatever a hostile one does, the decisions of another are as without it.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use support::raw::{request, send};
use support::{serve, write};
use tidegate_load::{
    HostileTenant, TENANTS_CONFIG, TenantAttack, VICTIM_RULES, VictimReport, VictimTenant, now,
};
use tidegate_testkit::Server;

/// Checks of each connection of the victim.
const CHECKS: u64 = 140;

/// Replies to an attack, after which it has had its effect.
const ATTACKS: u64 = 24;

/// Connections of the hostile tenant.
const ATTACKERS: usize = 16;

/// How long an attack may take.
const ATTACK_TIME_MAX: Duration = Duration::from_mins(3);

#[test]
fn a_hostile_tenant_changes_no_decision_of_another() {
    for attack in TenantAttack::ALL {
        let folder = tempfile::tempdir().unwrap();
        let config = write(folder.path(), "tidegate.toml", TENANTS_CONFIG);
        let rules = write(folder.path(), "rules.toml", VICTIM_RULES);
        let server = serve(&["--config", &config, "--rules", &rules, "--workers", "2"]);
        let address = server.address("http");
        let victim = VictimTenant { address, connections: 4, every: None };
        let calm = victim.check("calm", |report| report.checks < CHECKS).unwrap();
        assert_as_calm(&calm, attack);

        let hostile = HostileTenant { address, attack, connections: ATTACKERS };
        hostile.prepare().unwrap();
        let (attacked, progress) = hostile
            .attack(|progress| {
                let ends: Instant = now() + ATTACK_TIME_MAX;
                let is_enough =
                    |report: &VictimReport| report.checks >= CHECKS && progress.replies() >= ATTACKS;
                victim
                    .check("attacked", |report| report.unexpected == 0 && !is_enough(report) && now() < ends)
            })
            .unwrap();
        let attacked = attacked.unwrap();
        assert_as_calm(&attacked, attack);
        assert!(progress.replies() >= ATTACKS && progress.failures() == 0, "{attack:?}: {progress:?}");
        assert_eq!(calm.sources.keys().collect::<Vec<_>>(), attacked.sources.keys().collect::<Vec<_>>());
        assert!(of_tenant(&server, "tidegate_tenant_shed_total", "victim") < 1.0);
        let time = |tenant| of_tenant(&server, "tidegate_tenant_time_seconds_total", tenant);
        assert!(time("hostile") > time("victim") && time("victim") > 0.0, "{}", time("victim"));
    }
}

/// All decisions are by meters, and none differs from those of a server without an attack.
fn assert_as_calm(report: &VictimReport, attack: TenantAttack) {
    assert_eq!(report.unexpected, 0, "{attack:?}: {:?}", report.described);
    let by_meters = report.sources.get("local").copied();
    assert_eq!(by_meters, Some(report.checks), "{attack:?}: {:?}", report.sources);
}

/// The counter of a tenant.
fn of_tenant(server: &Server, counter: &str, tenant: &str) -> f64 {
    let scrape = request("GET", "/metrics", &[("authorization", "Bearer known")], None);
    let body = send(server.address("admin"), &scrape).body;
    let name = format!("{counter}{{tenant=\"{tenant}\"}} ");
    let line = body.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name} in {body}")).parse().unwrap()
}
