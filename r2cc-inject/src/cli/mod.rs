//! From arguments to an exit code.

mod apply;
mod args;
mod doctor;
mod plan;
mod survey;

use std::{
    fmt::Display,
    io::{self, IsTerminal, Write},
    process::ExitCode,
};

use args::{Arguments, Command};
use clap::Parser;

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Ok = 0,
    /// the environment is not ready
    NotReady = 4,
    /// a fault was left behind
    LeftBehind = 6,
    /// a command, a fault or a target that cannot be meant
    Usage = 64,
    Internal = 70,
    /// ended by a signal; everything is healed
    Interrupted = 130,
}

/// Why the program ends badly.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(exit: Exit, text: impl Display) -> Self {
        Self { exit, text: text.to_string() }
    }

    pub(crate) fn usage(text: impl Display) -> Self {
        Self::new(Exit::Usage, text)
    }

    pub(crate) fn not_ready(text: impl Display) -> Self {
        Self::new(Exit::NotReady, text)
    }
}

impl From<r2cc_inject::Error> for Failure {
    fn from(error: r2cc_inject::Error) -> Self {
        use r2cc_inject::Error;
        let exit = match &error {
            Error::BadRequest { .. } | Error::BadPorts { .. } | Error::Symbol(_) => Exit::Usage,
            Error::BrokenObject { .. } | Error::MapMemory { .. } | Error::UnknownFault => Exit::Internal,
            _ => Exit::NotReady,
        };
        Self::new(exit, error)
    }
}

impl From<r2cc_inject::policy::Refusal> for Failure {
    fn from(refusal: r2cc_inject::policy::Refusal) -> Self {
        use r2cc_inject::policy::Refusal;
        let exit = match &refusal {
            Refusal::System { .. } => Exit::NotReady,
            _ => Exit::Usage,
        };
        Self::new(exit, refusal)
    }
}

impl From<r2cc_inject::watcher::SweepError> for Failure {
    fn from(error: r2cc_inject::watcher::SweepError) -> Self {
        use r2cc_inject::watcher::SweepError;
        let exit = match &error {
            SweepError::Unreadable { .. } => Exit::NotReady,
            SweepError::LeftBehind { .. } => Exit::LeftBehind,
        };
        Self::new(exit, error)
    }
}

impl From<r2cc_inject::watcher::WatchError> for Failure {
    fn from(error: r2cc_inject::watcher::WatchError) -> Self {
        use r2cc_inject::watcher::WatchError;
        let exit = match &error {
            WatchError::LeftBehind(_) => Exit::LeftBehind,
            _ => Exit::NotReady,
        };
        Self::new(exit, error)
    }
}

/// Writes to stdout; a reader that has gone (`| head`) is no error.
pub(crate) fn say(line: impl Display) {
    let _unread = writeln!(io::stdout(), "{line}");
}

/// Writes to stderr.
pub(crate) fn talk(line: impl Display) {
    let _unread = writeln!(io::stderr(), "{line}");
}

pub(crate) fn run() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _unread = error.print();
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Ok };
            return ExitCode::from(exit as u8);
        }
    };
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_max_level(tracing::Level::WARN)
        .init();
    let log = &arguments.audit_log;
    let result = match &arguments.command {
        Command::Plan { fault, format } => plan::show(fault, *format),
        Command::Apply { fault, format } => apply::apply(fault, *format, log),
        Command::Status { format } => survey::status(*format),
        Command::Heal { all: _, pid } => survey::heal(*pid, log),
        Command::Doctor { allow } => doctor::doctor(allow.as_deref(), log),
        Command::Audit { last, format } => survey::audit(*last, *format, log),
        Command::Watch { record } => r2cc_inject::watcher::run(record).map(|()| Exit::Ok).map_err(Failure::from),
    };
    let exit = result.unwrap_or_else(|failure| {
        talk(format!("error: {}", failure.text));
        failure.exit
    });
    ExitCode::from(exit as u8)
}
