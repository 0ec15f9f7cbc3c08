//! The stretch of a node's report interval while more updates are due than an origin should
//! process.
//!
//! Fewer updates are due as the interval grows: a meter is reported once in it, and a longer grant
//! is extended less often. So the interval is stretched in proportion, and the lives of grants with
//! it.

use super::EngineSettings;

/// Stretches are counted in thousandths.
const MILLI: u64 = 1_000;

const US_PER_SECOND: u64 = 1_000_000;

/// The longest stretch. Higher: more keys on one origin; older counts, and the grant of a dead node
/// is lost for longer.
const STRETCH_MAX: u64 = 5 * MILLI;

/// Time of a measurement before the stretch changes, µs. Longer: steadier; later relief under load.
const WINDOW_US: u64 = 500_000;

/// The stretch of the time between two reports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    stretch: u64,
    /// Start of the present measurement, and the updates due until then.
    since_us: u64,
    due: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { stretch: MILLI, since_us: 0, due: 0 }
    }
}

impl Pace {
    /// Measures the pace by the updates due until now.
    pub(super) fn measure(&mut self, now_us: u64, due: u64, settings: &EngineSettings) {
        let elapsed_us = now_us.saturating_sub(self.since_us);
        if elapsed_us < WINDOW_US {
            return;
        }
        let per_second = (due - self.due).saturating_mul(US_PER_SECOND) / elapsed_us;
        let needed = self.stretch.saturating_mul(per_second) / settings.updates_per_s_max.max(1);
        // Half of the way, so that a short peak of load changes little.
        self.stretch = u64::midpoint(self.stretch, needed).clamp(MILLI, STRETCH_MAX);
        (self.since_us, self.due) = (now_us, due);
    }

    /// The settings at this pace.
    pub(super) fn of(self, settings: &EngineSettings) -> EngineSettings {
        let stretched = |us: u64| us.saturating_mul(self.stretch) / MILLI;
        EngineSettings {
            flush_us: stretched(settings.flush_us),
            life_us: stretched(settings.life_us),
            strict_life_us: stretched(settings.strict_life_us),
            ..*settings
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    /// Runs measurements in which as many updates are due as the interval allows. Returns the
    /// interval afterwards.
    fn flush_us_after(pace: &mut Pace, windows: u64, due_at_100_ms: u64) -> u64 {
        let settings = EngineSettings::default();
        for _ in 0..windows {
            let due = due_at_100_ms * settings.flush_us / pace.of(&settings).flush_us;
            pace.measure(pace.since_us + WINDOW_US, pace.due + due / 2, &settings);
        }
        pace.of(&settings).flush_us
    }

    #[test]
    fn the_interval_is_as_long_as_it_has_to_be_and_no_longer() {
        let mut pace = Pace::default();
        assert_eq!(flush_us_after(&mut pace, 9, 4_500), 100_000);
        let busy = flush_us_after(&mut pace, 20, 15_000);
        assert!((290_000..=310_000).contains(&busy), "{busy}");
        assert_eq!(flush_us_after(&mut pace, 20, 450_000), 500_000, "at most five times as long");
        assert_eq!(flush_us_after(&mut pace, 20, 4_500), 100_000);
    }
}
