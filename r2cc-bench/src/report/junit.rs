//! JUnit XML: one test case for every check of every repetition.

use std::io;
use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::exit::{ExitCode, Verdict};
use super::summary::Summary;
use crate::check::{CheckResult, CheckStatus, NOT_KNOWN};

/// `summary` and its repetitions as a JUnit document.
///
/// A check that fails is a failure; one that cannot tell is an error; notes and checks left
/// out are skipped. A run that ended early has an error case of its own.
pub fn junit(summary: &Summary) -> io::Result<String> {
    let runs = if summary.runs.is_empty() { std::slice::from_ref(summary) } else { &summary.runs };
    let mut report = Report::new("r2cc-bench");
    for (position, run) in runs.iter().enumerate() {
        let name = match (&run.row, runs.len()) {
            (Some(row), _) => format!("{} row {row}", run.suite),
            (None, 1) => run.suite.clone(),
            (None, _) => format!("{} repetition {}", run.suite, position + 1),
        };
        let mut suite = TestSuite::new(name.clone());
        let millis: f64 = run.baseline.millis.iter().chain(run.iterations.iter().map(|it| &it.millis)).sum();
        suite.set_time(Duration::try_from_secs_f64(millis / 1e3).unwrap_or_default());
        for check in &run.checks {
            suite.add_test_case(case(check, &name));
        }
        if let Some(why) = &run.ended_early {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_message(why.clone()).set_type(type_name(run.verdict, run.exit_code));
            suite.add_test_case(TestCase::new("run", status));
        }
        report.add_test_suite(suite);
    }
    report.to_string().map_err(io::Error::other)
}

fn type_name(verdict: Verdict, exit_code: i32) -> String {
    let code = ExitCode::from_code(exit_code).unwrap_or(ExitCode::Internal).code();
    format!("{} (exit code {code})", verdict.words())
}

fn case(check: &CheckResult, class_name: &str) -> TestCase {
    let unit =
        if check.unit.is_empty() || check.actual == NOT_KNOWN { String::new() } else { format!(" {}", check.unit) };
    let mut message = format!("{}{unit}, expected {}", check.actual, check.expected);
    if let Some(detail) = &check.detail {
        message.push_str(&format!("; {detail}"));
    }
    let mut status = match check.status {
        CheckStatus::Pass => TestCaseStatus::success(),
        CheckStatus::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        CheckStatus::Inconclusive => TestCaseStatus::non_success(NonSuccessKind::Error),
        CheckStatus::Note | CheckStatus::Skipped => TestCaseStatus::skipped(),
    };
    if check.status != CheckStatus::Pass {
        status.set_message(format!("{}: {message}", check.status.word()));
    }
    let mut case = TestCase::new(check.name.clone(), status);
    case.set_classname(class_name);
    case
}
