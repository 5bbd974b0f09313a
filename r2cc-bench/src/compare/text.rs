//! A comparison on the terminal.

use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Style};

use super::{Change, Comparison, Fate, Measured, SuiteComparison};
use crate::report::{Paint, trimmed};

/// The whole text.
pub fn words(comparison: &Comparison, paint: Paint) -> String {
    let mut text = String::new();
    for suite in &comparison.suites {
        text.push_str(&suite_words(suite, paint));
        text.push('\n');
    }
    for (names, side) in [(&comparison.only_before, "first"), (&comparison.only_after, "second")] {
        for name in names {
            text.push_str(&format!("{name}: only on the {side} side\n"));
        }
    }
    text.push_str(&format!(
        "{}: at {} % confidence; a time counts from {} % on, single events from 5 ms on\n",
        coloured(comparison.verdict, paint),
        comparison.confidence * 100.0,
        comparison.threshold * 100.0,
    ));
    text
}

fn coloured(verdict: Change, paint: Paint) -> String {
    let code = match verdict {
        Change::Worse => 31,
        Change::CannotTell => 33,
        Change::Better | Change::Same => 32,
        Change::TooFew => 2,
    };
    paint.word(verdict.words(), code)
}

fn suite_words(suite: &SuiteComparison, paint: Paint) -> String {
    let runs = |count: usize| if count == 1 { "1 run".to_owned() } else { format!("{count} runs") };
    let mut text = format!("{}: {} and {}\n", suite.suite, runs(suite.runs.0), runs(suite.runs.1));
    let mut builder = Builder::default();
    builder.push_record(["", "first: median (range)", "second: median (range)", "change", "interval", ""]);
    for measured in &suite.measures {
        builder.push_record(row(measured, paint));
    }
    let mut table = builder.build();
    table.with(Style::psql()).modify(Columns::new(1..5), Alignment::right());
    text.push_str(&trimmed(&table));
    text.push('\n');
    if suite.runs.0.min(suite.runs.1) == 1 {
        text.push_str("one run a side shows what varies within a run, not between runs: --repeat shows both\n");
    }
    for check in &suite.checks {
        let code = match check.fate {
            Fate::New => 31,
            Fate::StillFailing | Fate::NoLongerKnown => 33,
            Fate::Fixed => 32,
        };
        let word = paint.word(&format!("{:<15}", check.fate.words()), code);
        let failed = |(failed, of): (usize, usize)| format!("{failed} of {of}");
        text.push_str(&format!(
            "{word}  {}: failed in {}, now in {}; {} (expected {})\n",
            check.name,
            failed(check.before),
            failed(check.after),
            check.actual,
            check.expected
        ));
    }
    for fact in &suite.environment {
        text.push_str(&format!("differs          {}: {} -> {}\n", fact.name, fact.before, fact.after));
    }
    text
}

fn row(measured: &Measured, paint: Paint) -> [String; 6] {
    let side = |spread: &super::Spread| {
        format!("{:.1} ({:.1} to {:.1}) {}", spread.median, spread.least, spread.most, measured.unit)
    };
    let (change, interval) = match (&measured.change, measured.relative) {
        (None, _) => ("-".to_owned(), "-".to_owned()),
        (Some(by), true) => {
            let percent = |ratio: f64| format!("{:+.2} %", (ratio - 1.0) * 100.0);
            (format!("{:.4} x", by.value), format!("{} to {}", percent(by.low), percent(by.high)))
        }
        (Some(by), false) => (format!("{:+.1} ms", by.value), format!("{:+.1} to {:+.1} ms", by.low, by.high)),
    };
    [
        measured.name.clone(),
        side(&measured.before),
        side(&measured.after),
        change,
        interval,
        coloured(measured.verdict, paint),
    ]
}
