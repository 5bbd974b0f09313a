//! Plans as data: what each rank sends, receives and reduces, in which order.
//!
//! Owns the plan types ([`plan`]), the builders ([`ring`], [`mod@barrier`]) and the checker that
//! proves a set of plans right ([`mod@check`]). All pure functions of their arguments: no socket,
//! no clock, no buffer. Start at [`plan::RankPlan`], then [`ring::ring_all_reduce`].

pub mod barrier;
pub mod check;
mod order;
pub mod plan;
pub mod ring;
mod symbolic;

pub use barrier::barrier;
pub use check::{Goal, PlanError, RankTraffic, Stats, check};
pub use plan::{Action, Buffer, RankPlan, Span, Step};
pub use ring::{ring_all_reduce, ring_broadcast};
