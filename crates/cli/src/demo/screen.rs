//! The view on a terminal: redrawn ten times a second, with keys that cut links.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Chart, Dataset, Gauge, GraphType, LegendPosition, Paragraph, Row, Table,
};
use ratatui::{DefaultTerminal, Frame, symbols};

use super::account::AccountState;
use super::world::{ATTACK, LINKS, NAMES, PER_SECOND, REGIONS, Reading};
use super::{LOOK_EVERY, Regions, US_PER_SECOND, View, World, held, seconds};

/// How much of the past is drawn.
const PAST: Duration = Duration::from_mins(1);

/// Interval over which rates are averaged, µs.
const RATE_OVER_US: u64 = US_PER_SECOND;

/// A frame, a header and the regions.
const TABLE_ROWS: u16 = 6;

const GOOD: Color = Color::Green;
const ODD: Color = Color::Yellow;
const BAD: Color = Color::Red;

/// The terminal, which is as it was before when this is dropped.
pub(super) struct Screen {
    terminal: DefaultTerminal,
    picture: Picture,
}

impl Screen {
    pub(super) fn open(delay: Duration) -> io::Result<Self> {
        Ok(Self { terminal: ratatui::try_init()?, picture: Picture { delay, past: VecDeque::new() } })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

impl View for Screen {
    fn show(&mut self, reading: &Reading, account_state: &AccountState) -> io::Result<()> {
        self.picture.take(reading, account_state);
        self.terminal.draw(|frame| self.picture.draw(frame)).map(drop)
    }

    fn wait(&mut self, world: &World, regions: &Regions) -> io::Result<bool> {
        let is_quit = event::poll(LOOK_EVERY)? && press(world, &event::read()?);
        Ok(is_quit || regions.is_stopped(Duration::ZERO)?)
    }
}

/// Handles a key. Returns whether it is a key that quits.
fn press(world: &World, event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    if key.kind != KeyEventKind::Press {
        return false;
    }
    match key.code {
        KeyCode::Char('1') => world.turn_link(0),
        KeyCode::Char('2') => world.turn_link(1),
        KeyCode::Char('3') => world.turn_link(2),
        KeyCode::Char('a') => world.turn_attacker(),
        KeyCode::Char('q') | KeyCode::Esc => return true,
        // In raw mode it does not arrive as a signal.
        KeyCode::Char('c') => return key.modifiers.contains(KeyModifiers::CONTROL),
        _ => {}
    }
    false
}

/// The content of the screen.
struct Picture {
    delay: Duration,
    past: VecDeque<(Reading, AccountState)>,
}

impl Picture {
    fn take(&mut self, reading: &Reading, account_state: &AccountState) {
        self.past.push_back((reading.clone(), *account_state));
        let past_us = u64::try_from(PAST.as_micros()).unwrap_or(u64::MAX);
        while self.past.front().is_some_and(|(old, _)| old.elapsed_us + past_us < reading.elapsed_us) {
            self.past.pop_front();
        }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let Some((reading, account_state)) = self.past.back() else { return };
        let rows = [
            Constraint::Length(2),
            Constraint::Length(TABLE_ROWS),
            Constraint::Length(1),
            Constraint::Length(3),
            Constraint::Min(6),
            Constraint::Length(1),
        ];
        let [head, regions, links, gauge, chart, help] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(self.head(reading), head);
        frame.render_widget(self.regions(reading), regions);
        frame.render_widget(links_line(reading), links);
        frame.render_widget(bound_gauge(account_state), gauge);
        self.draw_chart(frame, chart);
        frame.render_widget(help_line(), help);
    }

    fn head(&self, reading: &Reading) -> Paragraph<'static> {
        let (attacker, users) = (reading.attacker(), reading.users());
        let attack = if reading.attacks {
            Span::styled(format!("sends {}/s in each region", ATTACK * PER_SECOND), BAD)
        } else {
            Span::styled("is quiet", GOOD)
        };
        let denied = if users.denied == 0 { GOOD } else { ODD };
        Paragraph::new(vec![
            Line::from(vec![
                Span::styled("tidegate demo ", Style::new().add_modifier(Modifier::BOLD)),
                Span::raw(format!(
                    "{:.0} s: one limit of {PER_SECOND}/s for all of three regions, {} ms apart",
                    seconds(reading.elapsed_us).floor(),
                    self.delay.as_millis()
                )),
            ]),
            Line::from(vec![
                Span::raw("Attacker "),
                attack,
                Span::raw(format!(": {} denied. Users: {} admitted, ", attacker.denied, users.admitted)),
                Span::styled(format!("{} denied", users.denied), denied),
            ]),
        ])
    }

    fn regions(&self, reading: &Reading) -> Table<'static> {
        let rates = self.rates(reading);
        let rows = NAMES.iter().zip(&reading.regions).zip(rates).map(|((name, region), rate)| {
            let (how, limit, color) = if region.is_connected {
                ("the whole limit", PER_SECOND, GOOD)
            } else {
                ("its regional share", PER_SECOND / REGIONS as u64, ODD)
            };
            let lag = region.lag_us.map_or_else(|| "-".to_owned(), |lag_us| format!("{} ms", lag_us / 1_000));
            Row::new([
                (*name).to_owned(),
                how.to_owned(),
                format!("{limit}/s"),
                format!("{rate}/s"),
                region.attacker.admitted.to_string(),
                region.attacker.denied.to_string(),
                lag,
            ])
            .style(color)
        });
        let header = ["region", "spends", "limit", "admits", "admitted", "denied", "lag"];
        let widths = [8, 19, 8, 8, 10, 10, 9].map(Constraint::Length);
        Table::new(rows, widths)
            .header(Row::new(header).style(Modifier::BOLD))
            .block(Block::bordered().title(" key of the attacker, by region "))
    }

    /// Returns the attacker's units that each region admitted in the last second.
    fn rates(&self, reading: &Reading) -> [u64; REGIONS] {
        let since_us = reading.elapsed_us.saturating_sub(RATE_OVER_US);
        let before = self.past.iter().rev().find(|(old, _)| old.elapsed_us <= since_us);
        std::array::from_fn(|region| {
            let before = before.map_or(0, |(old, _)| old.regions[region].attacker.admitted);
            reading.regions[region].attacker.admitted - before
        })
    }

    fn draw_chart(&self, frame: &mut Frame<'_>, area: Rect) {
        let line = |of: fn(&AccountState) -> u64| -> Vec<(f64, f64)> {
            self.past
                .iter()
                .map(|(_, account_state)| (seconds(account_state.elapsed_us), float(of(account_state))))
                .collect()
        };
        let (bound, bucket, admitted) = (
            line(|account_state| account_state.bound),
            line(|account_state| account_state.bucket),
            line(|account_state| account_state.admitted),
        );
        let lines =
            [("bound", &bound, BAD), ("one bucket", &bucket, Color::Cyan), ("admitted", &admitted, GOOD)];
        let datasets = lines.map(|(name, points, color)| {
            Dataset::default()
                .name(name)
                .marker(symbols::Marker::Braille)
                .graph_type(GraphType::Line)
                .style(color)
                .data(points)
        });
        let from = admitted.first().map_or(0.0, |(at, _)| *at);
        let to = admitted.last().map_or(0.0, |(at, _)| *at).max(from + 1.0);
        let low = admitted.first().map_or(0.0, |(_, units)| *units);
        let high = bound.last().map_or(1.0, |(_, units)| *units).max(low + 1.0);
        let axis = |from: f64, to: f64, unit: &str| {
            Axis::default().bounds([from, to]).labels([format!("{from:.0}{unit}"), format!("{to:.0}{unit}")])
        };
        let chart = Chart::new(datasets.into())
            .block(Block::bordered().title(" admitted in all regions "))
            .x_axis(axis(from, to, " s"))
            .y_axis(axis(low, high, ""))
            .legend_position(Some(LegendPosition::BottomRight))
            .hidden_legend_constraints((Constraint::Ratio(1, 2), Constraint::Ratio(1, 2)));
        frame.render_widget(chart, area);
    }
}

fn links_line(reading: &Reading) -> Line<'static> {
    let mut spans = vec![Span::raw(" links: ")];
    for (link, (one, other)) in LINKS.iter().enumerate() {
        let (state, color) = if reading.links_up[link] { ("up", GOOD) } else { ("CUT", BAD) };
        let words = format!(" {} {}-{} {state} ", link + 1, NAMES[*one], NAMES[*other]);
        spans.push(Span::styled(words, Style::new().fg(color).add_modifier(Modifier::BOLD)));
    }
    Line::from(spans)
}

fn bound_gauge(account_state: &AccountState) -> Gauge<'static> {
    let AccountState { admitted, bucket, bound, is_held, .. } = *account_state;
    let color = match (is_held, admitted <= bucket) {
        (false, _) => BAD,
        (true, false) => ODD,
        (true, true) => GOOD,
    };
    let label = format!("{admitted} admitted, one bucket {bucket}, bound {bound}: {}", held(is_held));
    Gauge::default()
        .block(Block::bordered().title(" against the bound "))
        // With a background of its own, the label is readable on the filled and on the empty part.
        .gauge_style(Style::new().fg(color).bg(Color::Black))
        .ratio((float(admitted) / float(bound.max(1))).min(1.0))
        .label(label)
}

fn help_line() -> Paragraph<'static> {
    Paragraph::new(" 1 2 3 cut or heal a link   a attacker on or off   q quit ").style(Modifier::REVERSED)
}

#[expect(clippy::cast_precision_loss, reason = "for a picture")]
fn float(units: u64) -> f64 {
    units as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::world::{Counts, RegionReading};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn reading(seconds: u64, admitted: u64, is_connected: bool) -> Reading {
        let region = RegionReading {
            attacker: Counts { admitted, denied: 9 * admitted },
            users: Counts { admitted: 10, denied: 0 },
            is_connected,
            lag_us: Some(280_000),
        };
        let elapsed_us = seconds * US_PER_SECOND;
        let partitions = u32::from(!is_connected);
        let links_up = [true, is_connected, true];
        Reading { elapsed_us, regions: [region; REGIONS], links_up, attacks: true, partitions }
    }

    fn account_state(reading: &Reading, is_held: bool) -> AccountState {
        let (elapsed_us, admitted) = (reading.elapsed_us, reading.attacker().admitted);
        AccountState { elapsed_us, admitted, bucket: 500, bound: 1_300, is_held }
    }

    fn drawn(picture: &Picture) -> String {
        let mut terminal = Terminal::new(TestBackend::new(92, 30)).expect("in memory");
        terminal.draw(|frame| picture.draw(frame)).expect("in memory");
        terminal.backend().to_string()
    }

    #[test]
    fn screen_shows_a_cut_link_and_admissions_per_second() {
        let mut picture = Picture { delay: Duration::from_millis(80), past: VecDeque::new() };
        for (seconds, admitted, is_connected) in [(3, 100, true), (4, 142, false)] {
            let reading = reading(seconds, admitted, is_connected);
            picture.take(&reading, &account_state(&reading, true));
        }
        let drawn = drawn(&picture);
        for words in
            ["2 us-ap CUT", "1 eu-us up", "42/s", "33/s", "its regional share", "280 ms", "426 admitted"]
        {
            assert!(drawn.contains(words), "{words:?} in\n{drawn}");
        }
        assert!(drawn.contains("bound 1300: held"), "{drawn}");
    }

    #[test]
    fn screen_shows_an_exceeded_bound() {
        let mut picture = Picture { delay: Duration::ZERO, past: VecDeque::new() };
        let reading = reading(4, 900, true);
        picture.take(&reading, &account_state(&reading, false));
        assert!(drawn(&picture).contains("bound 1300: EXCEEDED"));
    }

    #[test]
    fn readings_are_kept_for_a_minute() {
        let mut picture = Picture { delay: Duration::ZERO, past: VecDeque::new() };
        for seconds in 0..200 {
            let reading = reading(seconds, seconds, true);
            picture.take(&reading, &account_state(&reading, true));
        }
        assert_eq!(picture.past.len(), 61);
    }
}
