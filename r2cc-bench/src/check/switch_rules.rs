//! Checks of going over to another schedule, from what each rank's event file tells.

use super::record::{FaultRecord, RunRecord, SwitchRecord};
use super::{CheckClass, CheckResult};
use crate::suite::{AfterRepair, Mode, Suite};

/// Where the library changes its schedule after a fault, every rank does so at the same collectives: each is the first
/// that no rank had started when all were frozen.
pub(super) fn switch(suite: &Suite, record: &RunRecord) -> Option<CheckResult> {
    if suite.faults.is_empty() || !changes_schedule(suite) {
        return None;
    }
    let result = CheckResult::new("switch", CheckClass::View, "");
    let expected = "every rank at the same collective, the first that none had started";
    let ranks = suite.cluster.nodes * record.ranks_per_node;
    let mut told = Vec::new();
    for rank in 0..ranks {
        match record.switches.get(&rank) {
            Some(switches) if !switches.is_empty() => told.push(switches),
            _ => return Some(result.judged(false, expected, format!("rank {rank} kept its schedule"))),
        }
    }
    let what = |switches: &[SwitchRecord]| -> Vec<(u64, u64, String)> {
        switches.iter().map(|switch| (switch.epoch, switch.collective, switch.schedule.clone())).collect()
    };
    let words = |switches: &[SwitchRecord]| {
        let each = switches.iter().map(|switch| format!("AllReduce {} ({})", switch.collective, switch.schedule));
        each.collect::<Vec<_>>().join(", ")
    };
    let first = *told.first()?;
    if let Some(rank) = told.iter().position(|switches| what(switches) != what(first)) {
        let actual = format!("{}; rank {rank}: {}", words(first), words(told[rank]));
        return Some(result.judged(false, expected, actual));
    }
    for (position, switch) in first.iter().enumerate() {
        let most = told.iter().map(|switches| switches[position].started).max().unwrap_or(0);
        if switch.collective != most + 1 {
            let actual = format!("AllReduce {}, when {most} had been started", switch.collective);
            return Some(result.judged(false, expected, actual));
        }
    }
    Some(result.judged(true, expected, words(first)))
}

/// That the fault fired while the ranks were frozen: after the first rank of its node froze, before any rank had heard
/// the decision.
pub(super) fn cut_in_freeze(record: &RunRecord, fired: &FaultRecord) -> CheckResult {
    let result = CheckResult::new("cut_in_freeze", CheckClass::Cut, "");
    let expected = "between the freeze and the decision";
    let Some(at_ns) = fired.fired_at_ns.filter(|_| fired.fired) else {
        return result.unknown(expected, "its trigger never came");
    };
    let all = || record.switches.values().flatten();
    let freeze = all().filter(|switch| switch.frozen_ns <= at_ns).max_by_key(|switch| switch.frozen_ns);
    let Some(epoch) = freeze.map(|switch| switch.epoch) else {
        return result.unknown(expected, "it fired before any freeze that led to a switch");
    };
    let decided_ns = all().filter(|switch| switch.epoch == epoch).map(|switch| switch.decided_ns).min().unwrap_or(0);
    let millis = |ns: u64| ns as f64 / 1e6;
    if at_ns <= decided_ns {
        let before = millis(decided_ns - at_ns);
        result
            .judged(true, expected, format!("{before:.2} ms before the decision"))
            .because(format!("proposal {epoch}"))
    } else {
        let after = millis(at_ns - decided_ns);
        result.unknown(expected, format!("it fired {after:.2} ms after the decision of proposal {epoch}"))
    }
}

fn changes_schedule(suite: &Suite) -> bool {
    if !suite.library.failed.is_empty() {
        // The schedule for what is declared holds from the start.
        return false;
    }
    match suite.library.after_repair {
        Some(after) => after != AfterRepair::Balance,
        None => matches!(suite.library.mode, Mode::R2ccAllreduce | Mode::Weighted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::sample;
    use crate::check::{CheckStatus, record::RunRecord};

    const MS: u64 = 1_000_000;

    /// All ranks frozen from 10 ms on, rank r after `started` + r % 2 collectives, and told at 12 ms.
    fn switched(started: u64, collective: u64) -> (Suite, RunRecord) {
        let (mut suite, mut record) = (sample::suite_01(), sample::record_01());
        suite.library.mode = Mode::R2ccAllreduce;
        let of = |rank: u32| SwitchRecord {
            epoch: 1,
            schedule: "r2cc-allreduce".into(),
            collective,
            started: started + u64::from(rank % 2),
            frozen_ns: 10 * MS + u64::from(rank),
            decided_ns: 12 * MS + u64::from(rank),
        };
        record.switches = (0..6).map(|rank| (rank, vec![of(rank)])).collect();
        (suite, record)
    }

    fn status(suite: &Suite, record: &RunRecord) -> CheckStatus {
        switch(suite, record).unwrap().status
    }

    #[test]
    fn ranks_switch_at_the_first_collective_that_none_has_started() {
        let (suite, record) = switched(8, 10);
        assert_eq!(status(&suite, &record), CheckStatus::Pass);
        for wrong in [9, 11] {
            let (suite, record) = switched(8, wrong);
            assert_eq!(status(&suite, &record), CheckStatus::Fail, "{wrong}");
        }
    }

    #[test]
    fn a_rank_that_switches_elsewhere_or_not_at_all_or_once_more_fails() {
        let (suite, mut record) = switched(8, 10);
        record.switches.get_mut(&4).unwrap()[0].collective = 11;
        assert_eq!(status(&suite, &record), CheckStatus::Fail);
        let (suite, mut record) = switched(8, 10);
        record.switches.remove(&4);
        assert_eq!(status(&suite, &record), CheckStatus::Fail);
        let (suite, mut record) = switched(8, 10);
        let again = SwitchRecord { epoch: 2, ..record.switches[&5][0].clone() };
        record.switches.get_mut(&5).unwrap().push(again);
        assert_eq!(status(&suite, &record), CheckStatus::Fail);
    }

    #[test]
    fn a_fault_is_in_the_freeze_until_the_first_rank_hears_the_decision() {
        let (_, record) = switched(8, 10);
        for (at_ns, wanted) in [
            (9 * MS, CheckStatus::Inconclusive),
            (10 * MS, CheckStatus::Pass),
            (12 * MS, CheckStatus::Pass),
            (12 * MS + 1, CheckStatus::Inconclusive),
        ] {
            let fired = FaultRecord { fired: true, fired_at_ns: Some(at_ns), ..FaultRecord::default() };
            assert_eq!(cut_in_freeze(&record, &fired).status, wanted, "{at_ns}");
        }
        assert_eq!(cut_in_freeze(&record, &FaultRecord::default()).status, CheckStatus::Inconclusive);
    }
}
