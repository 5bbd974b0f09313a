//! `r2cc-bench status`: what benches, and processes that use the library, are doing right now.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Args;
use r2cc_bench::live::{self, Told};
use r2cc_bench::report::ExitCode as Code;
use r2cc_inject::observe;

use super::{Format, complain, say};

#[derive(Args)]
pub(super) struct StatusArgs {
    /// Sockets to ask, as `R2CC_STATUS` names them; default: every bench on this machine and its ranks.
    sockets: Vec<PathBuf>,
    /// Ask again every second, until interrupted or nobody is left.
    #[arg(long)]
    watch: bool,
    /// Output form; json is one object a line.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn status(args: &StatusArgs) -> Code {
    let mut seen = false;
    loop {
        let told = match ask(args, seen) {
            Ok(told) => told,
            Err(code) => return code,
        };
        let text = match args.format {
            Format::Json => {
                told.iter().filter_map(|told| serde_json::to_string(told).ok()).collect::<Vec<_>>().join("\n")
            }
            Format::Text => in_words(&told),
        };
        let fresh = args.watch && args.format == Format::Text && std::io::stdout().is_terminal();
        let clear = if fresh { "\x1b[H\x1b[2J" } else { "" };
        if let Err(error) = say(format_args!("{clear}{}", text.trim_end())) {
            complain(format!("standard output: {error}"));
            return Code::NotReady;
        }
        if !args.watch {
            return Code::Pass;
        }
        seen = true;
        thread::sleep(Duration::from_secs(1));
    }
}

/// Asks everybody; with nobody to answer it ends, in peace if there has been somebody before.
fn ask(args: &StatusArgs, seen: bool) -> Result<Vec<Told>, Code> {
    let named = !args.sockets.is_empty();
    let sockets = if named { Ok(args.sockets.clone()) } else { live::sockets() };
    let sockets = sockets.map_err(|error| {
        complain(format!("/run/r2cc: {error}\n  hint: run as the user who runs the bench"));
        Code::NotReady
    })?;
    let mut told = Vec::new();
    for socket in &sockets {
        match live::ask(socket) {
            Ok(answer) => told.push(answer),
            // A rank may end, or not have begun, while its bench runs.
            Err(_) if !named || seen => {}
            Err(error) => complain(format!(
                "{}: {error}\n  hint: start the process with R2CC_STATUS={0}; its I/O threads open the socket",
                socket.display()
            )),
        }
    }
    match told.is_empty() {
        false => Ok(told),
        true if seen => Err(Code::Pass),
        true => {
            if !named {
                complain(
                    "no bench is running on this machine\n  hint: of another process name the socket of its R2CC_STATUS",
                );
            }
            Err(Code::NotReady)
        }
    }
}

fn in_words(told: &[Told]) -> String {
    let mut text = String::new();
    for told in told {
        match told {
            Told::Process(process) => text.push_str(&process.to_string()),
            Told::Bench(bench) => {
                text.push_str(&bench.line());
                text.push('\n');
                // Only root may look into the programs.
                for fault in observe::sessions().iter().flatten().flat_map(|session| session.faults()) {
                    if fault.owner_pid == bench.pid {
                        text.push_str(&format!("  fault {}: {}\n", fault.label, fault.status.phase()));
                    }
                }
            }
        }
    }
    text
}
