//! Exit codes and the verdict: how the ends of a run, and of several runs, become one.
//!
//! A pure rule over check results and the way a run ended; the contract's order is here
//! and nowhere else.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::check::{CheckClass, CheckResult, CheckStatus};

/// Exit code of the bench; the number is the contract.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ExitCode {
    /// Every expectation holds.
    #[default]
    Pass,
    /// An expectation failed.
    Failed,
    /// An output element is wrong.
    WrongElements,
    /// The cut missed a running collective or stopped nothing, or the machine was too noisy.
    Inconclusive,
    /// The environment was not ready.
    NotReady,
    /// The run timed out.
    TimedOut,
    /// A fault was left behind.
    FaultLeftBehind,
    /// Wrong usage or an invalid suite; nothing ran.
    Usage,
    /// A defect of the bench itself.
    Internal,
    /// Interrupted by the user, and healed.
    Interrupted,
}

impl ExitCode {
    /// From the one that outranks all to the one that outranks none.
    const BY_RANK: [Self; 10] = [
        Self::FaultLeftBehind,
        Self::Interrupted,
        Self::NotReady,
        // Never meets another code: a usage error ends the command before anything runs.
        Self::Usage,
        Self::Internal,
        Self::TimedOut,
        Self::WrongElements,
        Self::Inconclusive,
        Self::Failed,
        Self::Pass,
    ];

    /// The process exit status.
    pub fn code(self) -> i32 {
        match self {
            Self::Pass => 0,
            Self::Failed => 1,
            Self::WrongElements => 2,
            Self::Inconclusive => 3,
            Self::NotReady => 4,
            Self::TimedOut => 5,
            Self::FaultLeftBehind => 6,
            Self::Usage => 64,
            Self::Internal => 70,
            Self::Interrupted => 130,
        }
    }

    /// The code with this number.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::BY_RANK.into_iter().find(|exit| exit.code() == code)
    }

    /// The first of `codes` in the contract's order; `Pass` when there is none.
    pub fn worst(codes: impl IntoIterator<Item = Self>) -> Self {
        codes.into_iter().min_by_key(|code| code.rank()).unwrap_or(Self::Pass)
    }

    /// Position in the contract's order; 0 outranks all.
    pub fn rank(self) -> usize {
        Self::BY_RANK.iter().position(|code| *code == self).unwrap_or(Self::BY_RANK.len())
    }
}

/// The verdict in one word, for people and scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Exit code 0.
    Pass,
    /// Exit code 1.
    Fail,
    /// Exit code 2.
    WrongElements,
    /// Exit code 3: the cut missed, or a fault stopped nothing.
    Inconclusive,
    /// Exit code 3, and only because timing was too noisy to judge; everything else holds.
    TimingInconclusive,
    /// Exit code 4.
    NotReady,
    /// Exit code 5.
    TimedOut,
    /// Exit code 6.
    FaultLeftBehind,
    /// Exit code 64.
    Usage,
    /// Exit code 70.
    Internal,
    /// Exit code 130.
    Interrupted,
}

impl Verdict {
    /// How the last line of a run says it.
    pub fn words(self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::Fail => "FAIL",
            Self::WrongElements => "FAIL (wrong elements)",
            Self::Inconclusive => "INCONCLUSIVE",
            Self::TimingInconclusive => "PASS (timing inconclusive)",
            Self::NotReady => "NOT READY",
            Self::TimedOut => "TIMED OUT",
            Self::FaultLeftBehind => "FAULT LEFT BEHIND",
            Self::Usage => "USAGE",
            Self::Internal => "INTERNAL ERROR",
            Self::Interrupted => "INTERRUPTED",
        }
    }
}

/// Judges one run: how it ended (if not by itself), and its checks. What ended a run early is also why its
/// checks cannot tell, so that only figures that are wrong weigh beside it.
pub fn judge(checks: &[CheckResult], ended: Option<ExitCode>) -> (Verdict, ExitCode) {
    let of_checks = checks.iter().map(|check| match (check.status, check.class) {
        (CheckStatus::Fail, CheckClass::Elements) => ExitCode::WrongElements,
        (CheckStatus::Fail, CheckClass::Healed) => ExitCode::FaultLeftBehind,
        (CheckStatus::Fail, _) => ExitCode::Failed,
        (CheckStatus::Inconclusive, _) if ended.is_none() => ExitCode::Inconclusive,
        (CheckStatus::Inconclusive, _) => ExitCode::Pass,
        (CheckStatus::Pass | CheckStatus::Note | CheckStatus::Skipped, _) => ExitCode::Pass,
    });
    let exit = ExitCode::worst(of_checks.chain(ended));
    let only_timing = ended.is_none_or(|code| code == ExitCode::Pass)
        && checks.iter().all(|check| match check.status {
            CheckStatus::Fail => false,
            CheckStatus::Inconclusive => check.class == CheckClass::Timing,
            CheckStatus::Pass | CheckStatus::Note | CheckStatus::Skipped => true,
        });
    let verdict = match exit {
        ExitCode::Pass => Verdict::Pass,
        ExitCode::Failed => Verdict::Fail,
        ExitCode::WrongElements => Verdict::WrongElements,
        ExitCode::Inconclusive if only_timing => Verdict::TimingInconclusive,
        ExitCode::Inconclusive => Verdict::Inconclusive,
        ExitCode::NotReady => Verdict::NotReady,
        ExitCode::TimedOut => Verdict::TimedOut,
        ExitCode::FaultLeftBehind => Verdict::FaultLeftBehind,
        ExitCode::Usage => Verdict::Usage,
        ExitCode::Internal => Verdict::Internal,
        ExitCode::Interrupted => Verdict::Interrupted,
    };
    (verdict, exit)
}
