//! Command line of the fault injector: rehearse a NIC failure on a running job, safely.
//! The work is done by the library; here are arguments, texts and exit codes.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
