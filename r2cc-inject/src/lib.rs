//! Fault injector: blocks a NIC of a running job at an exact call or byte, proves what
//! it did, and cannot leave a fault behind.
//!
//! - [`fault`]: a fault as a value with a printed form, shared by suites and logs
//! - [`Injector`]: carries drops, losses and flaps out in the kernel
//! - [`probe`]: finds call points; tells whether a port's traffic bypasses the kernel
//! - [`observe`]: sees and heals the faults of other processes
//!
//! Every fault has a lease that is checked in the packet path, and every attachment dies
//! with the process that made it.

pub mod fault;
mod injector;
mod kernel;
pub mod observe;
pub mod probe;

pub use fault::{Direction, Fault};
pub use injector::{
    ArmRequest, CallPoint, Effect, Error, FaultId, FaultStatus, Flow, Injector, KernelTrigger, PerDirection, Phase,
    PortCounters, PortId, PortSpec,
};
pub use kernel::{loss_drops, monotonic_ns};
pub use probe::rdma_bypass;
