//! What this build can run of what a suite can say: the schema is a contract that is wider than any one build.
//! Pure; asked before anything is started, so that nothing a suite asks for is silently left out.

use r2cc::{DeclaredFault, Settings};
use r2cc_inject::Direction;
use r2cc_inject::fault::Kind;

use crate::run::Cutter;
use crate::suite::{AfterRepair, ClusterKind, MANAGEMENT_NIC, Mode, ScaleRow, Schedule, Suite, Sync, WorkloadKind};

/// Something a suite asks for that this build does not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}: {asked}` cannot be run by this build\n  hint: {hint}")]
pub struct Unsupported {
    /// The key of the suite.
    pub key: String,
    /// What it says.
    pub asked: String,
    /// What can be run instead.
    pub hint: String,
}

/// Everything in `suite` that cannot be run on the backend that `row` names, with ports blocked by `cutter`; empty
/// when all of it can.
pub fn unsupported(suite: &Suite, row: ScaleRow, cutter: Cutter) -> Vec<Unsupported> {
    let mut found = Vec::new();
    let mut refuse = |key: &str, asked: &str, hint: &str| {
        found.push(Unsupported { key: key.to_owned(), asked: asked.to_owned(), hint: hint.to_owned() });
    };
    match suite.cluster.kind {
        ClusterKind::Emulated => {}
        kind @ (ClusterKind::Ssh | ClusterKind::SoftRoce) => {
            refuse("cluster.kind", kind.name(), "it runs emulated clusters on this machine: `kind: emulated`");
        }
    }
    let on_gpu = row == ScaleRow::Nccl;
    if suite.scale(row).is_none() {
        let hint = match row {
            ScaleRow::Host => "the native engine on host memory needs `host: {bytes: .., nic_rate: ..}`",
            ScaleRow::Nccl => "NCCL on a GPU needs `nccl: {bytes: .., nic_rate: .., ranks_per_node: 1}`",
            ScaleRow::Ssh => "it has no clusters over ssh: add `host: {bytes: .., nic_rate: ..}`",
        };
        refuse("scale", &format!("no `{}`", row.name()), hint);
    }
    let kind = match suite.workload.kind {
        WorkloadKind::AllreduceLoop => None,
        WorkloadKind::Perf if !on_gpu => None,
        WorkloadKind::CudaGraph if on_gpu => None,
        WorkloadKind::CudaGraph => Some(("cuda-graph", "graphs are captured on a GPU: `--backend nccl`")),
        WorkloadKind::Perf => Some(("perf", "sweeps run on host memory: `--backend host`")),
        WorkloadKind::Ddp => Some(("ddp", "it runs `kind: allreduce-loop` and `kind: perf`")),
    };
    if let Some((kind, hint)) = kind {
        refuse("workload.kind", kind, hint);
    }
    if suite.workload.sync == Sync::None {
        refuse("workload.sync", "none", "its ranks wait for each other: `sync: each`");
    }
    let mode = match suite.library.mode {
        Mode::Balance => None,
        Mode::R2ccAllreduce | Mode::Weighted if !on_gpu => None,
        Mode::None if on_gpu => None,
        Mode::R2ccAllreduce => Some("r2cc-allreduce"),
        Mode::Weighted => Some("weighted"),
        Mode::None => Some("none"),
        Mode::Off => Some("off"),
        Mode::HotRepair => Some("hot-repair"),
    };
    if let Some(mode) = mode {
        let hint = if on_gpu {
            "under NCCL it repairs by `mode: balance`, or leaves NCCL alone by `mode: none`"
        } else {
            "its native engine repairs by `mode: balance`, `r2cc-allreduce` or `weighted`"
        };
        refuse("library.mode", mode, hint);
    }
    if suite.library.schedule == Schedule::Weighted {
        refuse("library.schedule", "weighted", "it comes with `mode: weighted`");
    }
    let after = match suite.library.after_repair {
        None | Some(AfterRepair::Balance) => None,
        Some(AfterRepair::R2ccAllreduce) => Some("r2cc-allreduce"),
        Some(AfterRepair::Weighted) => Some("weighted"),
    };
    if let Some(after) = after.filter(|_| on_gpu) {
        refuse("library.after_repair", after, "under NCCL it keeps NCCL's ring: `after_repair: balance`");
    }
    if on_gpu && !suite.library.failed.is_empty() {
        refuse("library.failed", &suite.library.failed.join(", "), "under NCCL the library finds out by itself");
    }
    for fault in &suite.faults {
        if cutter == Cutter::Switch && fault.kind == Kind::Drop && fault.direction != Direction::Both {
            let hint = "the switch blocks a port in both directions: use `--cutter xdp`";
            refuse("faults", &fault.to_string(), hint);
        }
        let shapes = matches!(fault.kind, Kind::Rate { .. });
        if shapes && (fault.target.nic == MANAGEMENT_NIC || suite.scale(row).is_some_and(|s| s.nic_rate.is_none())) {
            refuse(
                "faults",
                &fault.to_string(),
                &format!("only a NIC that is shaped, by `scale.{}.nic_rate`, has a rate to change", row.name()),
            );
        }
    }
    found
}

/// What the suite asks of the library, for the native engine.
pub fn settings(suite: &Suite) -> Settings {
    let mode = match suite.library.mode {
        Mode::R2ccAllreduce => r2cc::Mode::R2ccAllReduce,
        Mode::Weighted => r2cc::Mode::Weighted,
        Mode::None | Mode::Off | Mode::HotRepair | Mode::Balance => r2cc::Mode::Balance,
    };
    let after_repair = suite.library.after_repair.map(|after| match after {
        AfterRepair::Balance => r2cc::Mode::Balance,
        AfterRepair::R2ccAllreduce => r2cc::Mode::R2ccAllReduce,
        AfterRepair::Weighted => r2cc::Mode::Weighted,
    });
    let failed = suite.library.failed.iter().filter_map(|place| place.split_once('/'));
    let nics: Vec<String> = failed.clone().map(|(_, nic)| nic.to_owned()).collect();
    let node = failed.map(|(node, _)| node.to_owned()).next();
    let declared = node.map(|node| DeclaredFault { node, nics, count: 0 });
    let unasked = Settings::default();
    let chunks = suite.library.stage2_chunks.map_or(unasked.chunks, |chunks| chunks as usize);
    Settings { mode, after_repair, declared, chunks, ..unasked }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(bend: impl FnOnce(&mut Suite)) -> Suite {
        let mut suite = Suite::parse(include_str!("../../../suites/01.yaml"), "suites/01.yaml").unwrap();
        bend(&mut suite);
        suite
    }

    fn refused(bend: impl FnOnce(&mut Suite)) -> Vec<(String, String)> {
        unsupported(&suite(bend), ScaleRow::Host, Cutter::Xdp).into_iter().map(|u| (u.key, u.asked)).collect()
    }

    #[test]
    fn suite_01_is_run_whole() {
        assert_eq!(refused(|_| {}), []);
        assert_eq!(refused(|s| s.library.after_repair = Some(AfterRepair::Balance)), []);
    }

    #[test]
    fn whatever_the_engine_does_not_do_is_refused_by_its_key() {
        let one = |key: &str, asked: &str| vec![(key.to_owned(), asked.to_owned())];
        for (kind, name) in [(WorkloadKind::CudaGraph, "cuda-graph"), (WorkloadKind::Ddp, "ddp")] {
            assert_eq!(refused(|s| s.workload.kind = kind), one("workload.kind", name));
        }
        for (mode, name) in [(Mode::None, "none"), (Mode::Off, "off"), (Mode::HotRepair, "hot-repair")] {
            assert_eq!(refused(|s| s.library.mode = mode), one("library.mode", name));
        }
        for (kind, name) in [(ClusterKind::Ssh, "ssh"), (ClusterKind::SoftRoce, "soft-roce")] {
            assert_eq!(refused(|s| s.cluster.kind = kind), one("cluster.kind", name));
        }
        assert_eq!(refused(|s| s.scale.host = None), one("scale", "no `host`"));
        assert_eq!(refused(|s| s.workload.sync = Sync::None), one("workload.sync", "none"));
        assert_eq!(refused(|s| s.library.schedule = Schedule::Weighted), one("library.schedule", "weighted"));
    }

    #[test]
    fn the_library_is_asked_for_what_the_suite_says() {
        let asked = |mode, after| {
            let settings = settings(&suite(|s| (s.library.mode, s.library.after_repair) = (mode, after)));
            (settings.mode, settings.after_repair)
        };
        assert_eq!(asked(Mode::Balance, None), (r2cc::Mode::Balance, None));
        assert_eq!(asked(Mode::R2ccAllreduce, None), (r2cc::Mode::R2ccAllReduce, None));
        let weighted = Some(AfterRepair::Weighted);
        assert_eq!(asked(Mode::Balance, weighted), (r2cc::Mode::Balance, Some(r2cc::Mode::Weighted)));
    }

    #[test]
    fn on_a_gpu_graphs_and_plain_nccl_are_run_too() {
        let on_gpu = |bend: fn(&mut Suite)| -> Vec<String> {
            unsupported(&suite(bend), ScaleRow::Nccl, Cutter::Xdp).into_iter().map(|u| u.key).collect()
        };
        assert!(on_gpu(|_| {}).is_empty());
        assert!(on_gpu(|s| s.workload.kind = WorkloadKind::CudaGraph).is_empty());
        assert!(on_gpu(|s| s.library.mode = Mode::None).is_empty());
        assert_eq!(on_gpu(|s| s.library.mode = Mode::Weighted), ["library.mode"]);
        assert_eq!(on_gpu(|s| s.scale.nccl = None), ["scale"]);
    }

    #[test]
    fn a_fault_that_would_do_something_else_than_it_says_is_refused() {
        let half = suite(|s| s.faults = vec!["drop@node-1/mlx5_2/rx from allreduce#3 for run".parse().unwrap()]);
        assert_eq!(unsupported(&half, ScaleRow::Host, Cutter::Xdp), []);
        assert_eq!(unsupported(&half, ScaleRow::Host, Cutter::Switch).len(), 1);
        let rate = |place: &str| vec![format!("rate:20Mbit@{place} from allreduce#3 for run").parse().unwrap()];
        assert_eq!(refused(|s| s.faults = rate("node-1/mlx5_2")), []);
        assert_eq!(refused(|s| s.faults = rate("node-1/mgmt0")).len(), 1);
    }
}
