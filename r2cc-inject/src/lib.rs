//! Fault injector: blocks a NIC of a running job at an exact call or byte, proves what
//! it did, and cannot leave a fault behind.
//!
//! - [`fault`]: a fault as a value with a printed form, shared by suites and logs
//! - [`Injector`]: carries drops, losses and flaps out in the kernel
//! - [`probe`]: finds call points; tells whether a port's traffic bypasses the kernel
//! - [`observe`]: sees and heals the faults of other processes
//! - [`change`], [`watcher`]: link down and rate, undone by a process of their own
//! - [`policy`]: which interfaces may be touched; [`audit`]: who touched which
//!
//! Every fault has a lease that is checked in the packet path, and every attachment dies
//! with the process that made it.

pub mod audit;
pub mod change;
pub mod fault;
mod injector;
mod kernel;
pub mod netlink;
pub mod netns;
pub mod observe;
pub mod policy;
pub mod probe;
pub mod process;
pub mod watcher;

pub use fault::{Direction, Fault};
pub use injector::{
    ArmRequest, CallPoint, Effect, Error, FaultId, FaultStatus, Flow, Injector, KernelTrigger, PerDirection, Phase,
    PortCounters, PortId, PortSpec,
};
pub use kernel::{loss_drops, monotonic_ns};
pub use probe::rdma_bypass;
