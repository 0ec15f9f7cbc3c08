//! A plot of the admissions against the limit and its bound.

use std::fmt::Write;

use crate::report::Report;

const WIDTH: f64 = 1_000.0;

const HEIGHT: f64 = 400.0;

const MARGIN: f64 = 50.0;

/// The picture of a world's busiest key, as SVG.
pub fn plot(report: &Report) -> String {
    let curve = &report.curve;
    let bound = curve.limit + curve.surplus;
    let highest = curve.points.iter().map(|(_, level)| *level).max().unwrap_or(0);
    // A surplus far above the curve would flatten the rest of the plot.
    let top = highest.max(curve.limit).max(bound.min(2 * highest.max(curve.limit))).max(1) as f64 * 1.1;
    let across = |at_us: u64| MARGIN + at_us as f64 / report.simulated_us.max(1) as f64 * WIDTH;
    let up = |units: u64| MARGIN + HEIGHT - units as f64 / top * HEIGHT;
    let mut svg = String::new();
    let (width, height) = (WIDTH + 2.0 * MARGIN, HEIGHT + 2.0 * MARGIN);
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\">seed {}: units of key 0 that count against its limit, over {} s\
         </text>\n",
        report.seed,
        report.simulated_us / 1_000_000
    );
    line(&mut svg, up(curve.limit), "#1f6feb", &format!("limit {}", curve.limit));
    if (bound as f64) < top && curve.surplus > 0 {
        line(&mut svg, up(bound), "#cf222e", &format!("bound {bound}"));
    }
    svg.push_str("<g stroke=\"#2da44e\" stroke-width=\"1\">\n");
    for (at_us, level) in highest_in_each_pixel(&curve.points, report.simulated_us) {
        let x = across(at_us);
        let _ =
            writeln!(svg, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>", up(0), up(level));
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

fn line(svg: &mut String, y: f64, colour: &str, words: &str) {
    let right = MARGIN + WIDTH;
    let _ = writeln!(
        svg,
        "<line x1=\"{MARGIN}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" \
         stroke-dasharray=\"6 3\"/><text x=\"{MARGIN}\" y=\"{:.1}\" fill=\"{colour}\">{words}</text>",
        y - 4.0
    );
}

/// A picture shows no more than one line for each pixel.
fn highest_in_each_pixel(points: &[(u64, u64)], length_us: u64) -> Vec<(u64, u64)> {
    let pixel_us = (length_us / WIDTH as u64).max(1);
    let mut kept: Vec<(u64, u64)> = Vec::new();
    for (at_us, level) in points {
        match kept.last_mut() {
            Some(last) if last.0 / pixel_us == at_us / pixel_us => last.1 = last.1.max(*level),
            _ => kept.push((*at_us, *level)),
        }
    }
    kept
}
