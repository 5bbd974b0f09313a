//! `r2cc-bench compare`: what became worse from one recorded run, or set of runs, to another.

use std::path::PathBuf;

use clap::Args;
use r2cc_bench::compare::{self, LoadError};
use r2cc_bench::report::{ExitCode as Code, Paint};
use r2cc_bench::suite::Percent;

use super::{Format, complain, said};

#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 the same or better, 1 worse (a time, or a check that fails now), 3 the runs cannot \
tell, 64 usage, or a path without runs."
)]
pub(super) struct CompareArgs {
    /// The runs to compare with: a results folder, its summary.json, or a folder of results folders.
    before: PathBuf,
    /// The runs in question.
    after: PathBuf,
    /// Relative change of a time from which it counts.
    #[arg(long, default_value = "1%")]
    threshold: Percent,
    /// Output form.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn compare(args: &CompareArgs) -> Code {
    let sides = compare::load(&args.before).and_then(|before| Ok((before, compare::load(&args.after)?)));
    let (before, after) = match sides {
        Ok(sides) => sides,
        Err(error @ (LoadError::Unreadable { .. } | LoadError::Malformed { .. } | LoadError::Empty { .. })) => {
            complain(error);
            return Code::Usage;
        }
    };
    let found = compare::compare(&before, &after, args.threshold.0);
    if found.suites.is_empty() {
        let names = |side: &compare::Side| side.keys().cloned().collect::<Vec<_>>().join(", ");
        complain(format!(
            "nothing to compare: {} has {}, {} has {}\n  hint: both sides need runs of one suite",
            args.before.display(),
            names(&before),
            args.after.display(),
            names(&after)
        ));
        return Code::Usage;
    }
    let text = match args.format {
        Format::Text => compare::words(&found, Paint::for_stdout()),
        Format::Json => serde_json::to_string_pretty(&found).unwrap_or_default(),
    };
    said(text.trim_end(), Code::from_code(found.exit_code).unwrap_or(Code::Internal))
}
