//! The printed tables, and the ratios beside their bars.

use super::{CONNECTIONS, CaseResult, Figures, KEYS, Row};
use crate::machine;

/// Ratio that Tidegate must reach beside another server, in operations per CPU second.
struct Bar {
    case: &'static str,
    beside: &'static str,
    /// `None` where the ratio is only printed.
    at_least: Option<f64>,
}

const fn bar(case: &'static str, beside: &'static str, at_least: Option<f64>) -> Bar {
    Bar { case, beside, at_least }
}

const BARS: [Bar; 7] = [
    bar("resp_p1", "redis_ping", Some(0.95)),
    bar("resp_p16", "redis_incr", Some(1.5)),
    bar("resp_p16", "redis_gcra_lua", Some(8.0)),
    bar("http", "throttlecrab_http", Some(1.3)),
    bar("http", "noop_http", None),
    bar("grpc", "throttlecrab_grpc", Some(1.5)),
    bar("grpc", "noop_grpc", None),
];

/// Prints a table for each case, then the ratios.
pub(super) fn print(rows: &[Row]) {
    let mut case = "";
    for row in rows {
        if row.case != case {
            case = row.case;
            println!(
                "\n{case}: {CONNECTIONS} connections, {KEYS} keys\n  {:<18} {:>13} {:>11} {:>9} {:>9} {:>9}",
                "contender", "ops/cpu s", "ops/s", "p50 us", "p99 us", "shed"
            );
        }
        println!("  {:<18} {}", row.contender, figures_line(&row.result));
    }
    println!("\ntidegate beside, in operations per second of the server's CPU time");
    BARS.iter().filter_map(|bar| stand(bar, rows)).for_each(|line| println!("  {line}"));
    println!("  machine: {} cores, shared by the server and the load", machine::cores());
}

fn figures_line(result: &CaseResult) -> String {
    match result {
        CaseResult::Failed { failed } => format!("failed: {failed}"),
        CaseResult::Figures(Figures { ops_per_cpu_s, per_second, p50_us, p99_us, shed }) => {
            format!("{ops_per_cpu_s:>13.0} {per_second:>11.0} {p50_us:>9.0} {p99_us:>9.0} {shed:>9}")
        }
    }
}

/// Returns a ratio beside its bar, if both servers were measured.
fn stand(bar: &Bar, rows: &[Row]) -> Option<String> {
    let ratio = ratio(bar, rows)?;
    let verdict = match bar.at_least {
        Some(least) if ratio >= least => format!("reaches {least}"),
        Some(least) => format!("below {least}"),
        None => "no bar".to_owned(),
    };
    Some(format!("{:<9} {:<18} {ratio:>6.2}x  {verdict}", bar.case, bar.beside))
}

fn ratio(bar: &Bar, rows: &[Row]) -> Option<f64> {
    let of = |contender| {
        let row = rows.iter().find(|row| row.case == bar.case && row.contender == contender)?;
        row.figures().map(|figures| figures.ops_per_cpu_s)
    };
    Some(of("tidegate")? / of(bar.beside)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(contender: &'static str, ops_per_cpu_s: f64) -> Row {
        let figures = Figures { ops_per_cpu_s, per_second: 1.0, p50_us: 1.0, p99_us: 1.0, shed: 0 };
        Row { case: "resp_p16", contender, result: CaseResult::Figures(figures) }
    }

    #[test]
    fn ratio_is_printed_with_its_bar_if_both_rows_exist() {
        let failed = CaseResult::Failed { failed: "not there".to_owned() };
        let failed = Row { case: "resp_p1", contender: "redis_ping", result: failed };
        let on_its_own = Row { case: "resp_p1", ..row("tidegate", 1.0) };
        let (incr, script) = (row("redis_incr", 100.0), row("redis_gcra_lua", 50.0));
        let rows = [on_its_own, failed, row("tidegate", 300.0), incr, script];
        let lines: Vec<String> = BARS.iter().filter_map(|bar| stand(bar, &rows)).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("3.00x  reaches 1.5") && lines[1].contains("6.00x  below 8"), "{lines:?}");
    }
}
