//! `r2cc-bench`: runs suites and proves what they claim. See `r2cc-bench --help`.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
