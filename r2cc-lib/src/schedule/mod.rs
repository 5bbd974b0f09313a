//! Plans as data: what each rank sends, receives and reduces, in which order.
//!
//! Owns the plan types ([`plan`]), and the builders ([`ring`], [`mod@barrier`]). All pure functions of their arguments: no socket, no clock, no
//! buffer. Start at [`plan::RankPlan`], then [`ring::ring_all_reduce`].

pub mod barrier;
pub mod plan;
pub mod ring;

pub use barrier::barrier;
pub use plan::{Action, Buffer, RankPlan, Span, Step};
pub use ring::{ring_all_reduce, ring_broadcast};
