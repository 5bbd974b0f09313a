//! Plans as data: what each rank sends, receives and reduces, in which order.
//!
//! Owns the plan types ([`plan`]), the builders ([`ring`], [`small`], [`blocks`], [`mod@exchange`], [`mod@r2cc`], [`weighted`],
//! [`mod@barrier`]), where the buffers of a collective lie ([`layout`]),
//! what they know of the network ([`fabric`], [`packing`]), the choice among them ([`cost`]), and the
//! checker that proves a set of plans right ([`mod@check`]). All pure functions of their arguments: no
//! socket, no clock, no buffer. Start at [`plan::RankPlan`], then [`ring::ring_all_reduce`] and
//! [`cost::choose`].

pub mod barrier;
pub mod blocks;
pub mod check;
mod compose;
pub mod cost;
pub mod exchange;
pub mod fabric;
pub mod layout;
mod order;
pub mod packing;
pub mod plan;
pub mod r2cc;
pub mod ring;
pub mod small;
mod symbolic;
#[cfg(test)]
mod testing;
pub mod weighted;

pub use barrier::barrier;
pub use blocks::{chain_reduce, ring_all_gather, ring_reduce_scatter};
pub use check::{PlanError, RankTraffic, Stats, check};
pub use cost::{Policy, Schedule, Wishes, choose};
pub use exchange::{Part, exchange};
pub use fabric::{Fabric, FabricError, FabricNode};
pub use layout::Goal;
pub use packing::{Packing, PairRails, Tree};
pub use plan::{Action, Buffer, Class, RankPlan, Span, Step};
pub use r2cc::{Overlap, R2ccLayout, Shape, r2cc_all_reduce};
pub use ring::{ring_all_reduce, ring_all_reduce_along, ring_broadcast};
pub use small::small_all_reduce;
pub use weighted::{Weighted, weighted_all_reduce};
