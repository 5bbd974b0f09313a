//! Bench orchestrator: builds a cluster, runs a suite, checks every element and every counter.

pub mod check;
pub mod cluster;
pub mod compare;
pub mod doctor;
pub mod elements;
pub mod goodput;
pub mod gpu;
pub mod live;
pub mod perf;
pub mod replay;
pub mod report;
pub mod run;
pub mod simulate;
pub mod suite;
pub mod workload;
