//! nccl-tests' text: a banner, the columns, a footer. Data for standard output, as its tools print it.

use std::fmt::Write;

use super::options::Options;
use super::sweep::{Half, PerIteration, Row};

/// A rank, for the banner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// Its node.
    pub node: String,
    /// Its NICs.
    pub nics: Vec<String>,
}

/// The banner and the heads of the columns.
pub fn header(options: &Options, devices: &[Device]) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        text.push_str(&words);
        text.push('\n');
    };
    line(format!("# r2cc-bench perf version {}", env!("CARGO_PKG_VERSION")));
    line(format!("# Collective test starting: {}", options.collective.program()));
    let step = if options.step_factor > 1 {
        format!("{}(factor)", options.step_factor)
    } else {
        format!("{}(bytes)", options.step_bytes)
    };
    line(format!(
        "# minBytes {} maxBytes {} step: {step} warmup iters: {} iters: {} agg iters: 1 validation: {} graph: 0",
        options.min_bytes,
        options.max_bytes,
        options.warmup,
        options.iterations,
        if options.verify { options.iterations } else { options.checks },
    ));
    line("#".to_owned());
    line("# Using devices".to_owned());
    for device in devices {
        line(format!(
            "#  Rank {:2} Group  0 Pid {:6} on {:>10} device  - [host memory] {}",
            device.rank,
            device.pid,
            device.node,
            device.nics.join(",")
        ));
    }
    line("#".to_owned());
    let per_iteration = options.per_iteration;
    let wide = if per_iteration { 76 } else { 34 };
    line(format!("# {:60} {:^wide$}  {:^wide$}", "", "out-of-place", "in-place"));
    let half = |names: [&str; 4], extra: [&str; 4]| {
        let mut text = format!("  {:>8}  {:>6}  {:>6}  {:>6}", names[0], names[1], names[2], names[3]);
        if per_iteration {
            let _ = write!(text, "  {:>9}  {:>9}  {:>9}  {:>6}", extra[0], extra[1], extra[2], extra[3]);
        }
        text
    };
    let names = half(["time", "algbw", "busbw", "#wrong"], ["i_min", "i_max", "i_p99", "i_cv%"]);
    let units = half(["(us)", "(GB/s)", "(GB/s)", ""], ["(us)", "(us)", "(us)", ""]);
    line(format!("#{:>11}  {:>12}  {:>8}  {:>6}  {:>6}{names}{names}", "size", "count", "type", "redop", "root"));
    line(format!("#{:>11}  {:>12}  {:>8}  {:>6}  {:>6}{units}{units}", "(B)", "(elements)", "", "", ""));
    text
}

/// One row; a half that is not defined is all `N/A`.
pub fn row(row: &Row, per_iteration: bool) -> String {
    let Row { size, count, dtype, op, root, .. } = row;
    let mut text = format!("{size:>12}  {count:>12}  {dtype:>8}  {op:>6}  {root:>6}");
    for of in [Some(&row.out_of_place), row.in_place.as_ref()] {
        half(&mut text, of, per_iteration);
    }
    text
}

fn half(text: &mut String, half: Option<&Half>, per_iteration: bool) {
    let number = |value: Option<f64>, width: usize| value.map_or_else(|| "N/A".to_owned(), |v| fitted(v, width));
    let of = |field: fn(&Half) -> f64| half.map(field);
    let wrong = half.and_then(|half| half.wrong).map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "  {:>8}  {:>6}  {:>6}  {wrong:>6}",
        number(of(|h| h.time_us), 8),
        number(of(|h| h.alg_bw), 6),
        number(of(|h| h.bus_bw), 6),
    );
    if per_iteration {
        let times = half.and_then(|half| PerIteration::of(&half.times_us));
        let of = |field: fn(&PerIteration) -> f64| number(times.as_ref().map(field), 9);
        let (min, max, p99) = (of(|t| t.min_us), of(|t| t.max_us), of(|t| t.p99_us));
        let cv = number(times.as_ref().map(|t| t.cv_percent), 6);
        let _ = write!(text, "  {min:>9}  {max:>9}  {p99:>9}  {cv:>6}");
    }
}

/// A number in `width` places: two decimals, fewer where they do not fit, else powers of ten.
fn fitted(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:.1e}"))
}

/// The footer: failed checks, the mean bus bandwidth over all rows and halves.
pub fn footer(options: &Options, rows: &[Row]) -> String {
    let (failed, average) = (failed_checks(rows), average_bus_bw(rows));
    let word = if failed == 0 { "OK" } else { "FAILED" };
    format!(
        "# Out of bounds values : {failed} {word}\n# Avg bus bandwidth    : {average:.6}\n#\n# Collective test concluded: {}\n#",
        options.collective.program()
    )
}

/// Halves of rows with a wrong element.
pub fn failed_checks(rows: &[Row]) -> usize {
    rows.iter().flat_map(Row::halves).filter(|half| half.wrong.is_some_and(|wrong| wrong > 0)).count()
}

/// The mean of the bus bandwidths of all halves, GB/s.
pub fn average_bus_bw(rows: &[Row]) -> f64 {
    let all: Vec<f64> = rows.iter().flat_map(Row::halves).map(|half| half.bus_bw).collect();
    if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lose_decimals_before_they_lose_places() {
        assert_eq!(fitted(12.345, 8), "12.35");
        assert_eq!(fitted(123_456.7, 8), "123456.7");
        assert_eq!(fitted(12_345_678.9, 8), "12345679");
        assert_eq!(fitted(123_456_789.0, 8), "1.2e8");
        assert_eq!(fitted(0.0, 6), "0.00");
    }
}
