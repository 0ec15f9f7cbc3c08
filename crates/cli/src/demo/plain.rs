//! A line each second, for logs and for people without a terminal.

use std::fmt::Write as _;
use std::io;

use super::account::AccountState;
use super::world::{LINKS, NAMES, Reading, RegionReading, World};
use super::{LOOK_EVERY, Regions, US_PER_SECOND, View, held};
use crate::out::{self, Reader};

#[derive(Default)]
pub(super) struct Plain {
    /// Number of seconds printed so far.
    shown: u64,
    is_unread: bool,
}

impl View for Plain {
    fn show(&mut self, reading: &Reading, account_state: &AccountState) -> io::Result<()> {
        let second = reading.elapsed_us / US_PER_SECOND;
        if second <= self.shown {
            return Ok(());
        }
        self.shown = second;
        let line = format!("{}\n", line(second, reading, account_state));
        self.is_unread = out::write(line.as_bytes())? == Reader::Gone;
        Ok(())
    }

    fn wait(&mut self, _: &World, regions: &Regions) -> io::Result<bool> {
        Ok(self.is_unread || regions.is_stopped(LOOK_EVERY)?)
    }
}

fn line(second: u64, reading: &Reading, account_state: &AccountState) -> String {
    let AccountState { admitted, bucket, bound, is_held, .. } = *account_state;
    let mut line =
        format!("{second:>3} s: admitted {admitted}, one bucket {bucket}, bound {bound}: {}", held(is_held));
    // Writing to a string does not fail.
    for (name, region) in NAMES.iter().zip(&reading.regions) {
        let _ = write!(line, "; {name} {}", describe_region(region));
    }
    for (link, (one, other)) in LINKS.iter().enumerate().filter(|(link, _)| !reading.links_up[*link]) {
        let _ = write!(line, "; link {} {}-{} cut", link + 1, NAMES[*one], NAMES[*other]);
    }
    line
}

fn describe_region(region: &RegionReading) -> String {
    let admitted = region.attacker.admitted;
    let how = if region.is_connected { "connected" } else { "isolated" };
    region.lag_us.map_or_else(
        || format!("{how} {admitted}"),
        |lag_us| format!("{how} {admitted} lag {} ms", lag_us / 1_000),
    )
}
