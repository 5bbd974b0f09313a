//! A fault as a value: what happens to which port, from when, until when.
//!
//! Its printed form, `drop@node-1/mlx5_2 from allreduce#3+25% for run`, is the one that
//! suites, the command line and logs share; printing and parsing are inverse. Says
//! nothing about how a fault is carried out. Start at [`Fault`]; the grammar is
//! [`Fault::GRAMMAR`].

mod parse;
#[cfg(test)]
mod tests;

use std::{borrow::Cow, fmt, time::Duration};

pub use parse::ParseError;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fault {
    /// what happens
    pub kind: Kind,
    /// to which port or rail
    pub target: Target,
    /// to which of its directions
    pub direction: Direction,
    /// when it begins
    pub from: Trigger,
    /// when it ends
    pub until: Until,
}

/// What happens to a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every packet is dropped.
    Drop,
    /// A seeded fraction of the packets is dropped.
    Loss {
        /// packets dropped out of a million, 1 to 1,000,000
        parts_per_million: u32,
    },
    /// The port is dead for `down`, alive for `up`, and so on.
    Flap {
        /// how long it is dead, at first and then again and again
        down: Duration,
        /// how long it is alive in between
        up: Duration,
    },
    /// The port is shaped to this rate.
    Rate {
        /// bits a second
        bits_per_second: u64,
    },
    /// The interface is set down.
    LinkDown,
}

/// A NIC of a node, or a rail of the switch (node `switch`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// the node's name, or `switch`
    pub node: String,
    /// the NIC's name, or the rail's
    pub nic: String,
}

impl Target {
    /// The node name under which rails are cut.
    pub const SWITCH: &'static str = "switch";

    /// Whether this is a rail of the switch and not a NIC of a node.
    #[must_use]
    pub fn is_rail(&self) -> bool {
        self.node == Self::SWITCH
    }
}

/// Which packets of a port: those it receives, those it sends, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Direction {
    /// both, as in a dead NIC
    #[default]
    Both,
    /// those it receives
    Rx,
    /// those it sends
    Tx,
}

/// When a fault begins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Trigger {
    /// As soon as it is armed.
    Now,
    /// So long after it is armed.
    After(Duration),
    /// At a position of the job.
    Position(Position),
}

/// A position: so many bytes into the n-th call of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Position {
    /// the operation
    pub op: Op,
    /// which call of it since the fault was armed, from 1
    pub n: u64,
    /// how far into it
    pub offset: Offset,
    /// what ties the position to the packets
    pub at: At,
}

/// How far into a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Offset {
    /// at its very begin
    Start,
    /// after a share of the bytes that the port receives in one such collective, in
    /// thousandths of a percent (25% is 25,000)
    MilliPercent(u32),
    /// after a share between these two, both included, that the run's seed chooses: see
    /// [`Fault::drawn`]
    Between {
        /// the least, in thousandths of a percent
        least: u32,
        /// the most
        most: u32,
    },
    /// after so many bytes received by the port
    Bytes(u64),
}

impl Offset {
    /// After this share, in thousandths of a percent.
    fn share(milli_percent: u32) -> Self {
        if milli_percent == 0 { Self::Start } else { Self::MilliPercent(milli_percent) }
    }
}

/// What ties a position to the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum At {
    /// bytes are counted from the n-th call (the job finishes one before it calls the
    /// next)
    #[default]
    Call,
    /// bytes are counted from the moment of arming; n-1 whole collectives come first
    Wire,
}

/// When a fault ends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Until {
    /// at the end of the run
    Run,
    /// so long after it began
    For(Duration),
    /// at the n-th call of an operation
    Call {
        /// the operation
        op: Op,
        /// which call of it since the fault was armed, from 1
        n: u64,
    },
}

/// An operation that a job calls, or a step of the library that tracers can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are the operations' own")]
pub enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    SendRecv,
    AllToAll,
    GraphLaunch,
    /// The library starts no more collectives until all ranks know which is the first of another schedule.
    SwitchFreeze,
}

impl Op {
    /// All operations.
    pub const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::SendRecv,
        Self::AllToAll,
        Self::GraphLaunch,
        Self::SwitchFreeze,
    ];

    /// The word used in a fault.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "allreduce",
            Self::AllGather => "allgather",
            Self::ReduceScatter => "reducescatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::SendRecv => "sendrecv",
            Self::AllToAll => "alltoall",
            Self::GraphLaunch => "graph-launch",
            Self::SwitchFreeze => "switch-freeze",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Fault {
    /// The grammar in one line, for help texts and schemas.
    pub const GRAMMAR: &'static str = "KIND[:ARG]@NODE/NIC[/rx|/tx] \
        from (now | after DURATION | OP#N[+P%|+P%..P%|+BYTES] [at call|at wire]) \
        (for run | for DURATION | until OP#N)";

    /// An example of the grammar.
    pub const EXAMPLE: &'static str = "drop@node-1/mlx5_2 from allreduce#3+25% for run";

    /// The fault with a share that `seed` chooses in place of a range of them; any other fault as it is. The same
    /// seed chooses the same share, and neighbouring seeds ones that have nothing to do with each other.
    #[must_use]
    pub fn drawn(&self, seed: u64) -> Self {
        let mut fault = self.clone();
        if let Trigger::Position(position) = &mut fault.from
            && let Offset::Between { least, most } = position.offset
        {
            let choices = u64::from(most.saturating_sub(least)) + 1;
            let share = u64::from(least) + splitmix(seed) % choices;
            position.offset = Offset::share(u32::try_from(share).unwrap_or(most));
        }
        fault
    }
}

/// One step of the SplitMix64 generator.
fn splitmix(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}{}", self.kind, self.target, self.direction)?;
        write!(f, " from {} {}", self.from, self.until)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.write_str("drop"),
            Self::Loss { parts_per_million } => {
                f.write_str("loss:")?;
                // one percent is 10,000 parts per million
                write_decimal(f, u64::from(*parts_per_million), 4)?;
                f.write_str("%")
            }
            Self::Flap { down, up } => write!(f, "flap:{}/{}", Span(*down), Span(*up)),
            Self::Rate { bits_per_second } => {
                let (value, unit) = scaled(*bits_per_second, &RATE_UNITS);
                write!(f, "rate:{value}{unit}")
            }
            Self::LinkDown => f.write_str("link-down"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.nic)
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "",
            Self::Rx => "/rx",
            Self::Tx => "/tx",
        })
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now => f.write_str("now"),
            Self::After(delay) => write!(f, "after {}", Span(*delay)),
            Self::Position(position) => position.fmt(f),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.op, self.n)?;
        match self.offset {
            Offset::Start => {}
            Offset::MilliPercent(share) => {
                f.write_str("+")?;
                write_decimal(f, u64::from(share), 3)?;
                f.write_str("%")?;
            }
            Offset::Between { least, most } => {
                f.write_str("+")?;
                write_decimal(f, u64::from(least), 3)?;
                f.write_str("%..")?;
                write_decimal(f, u64::from(most), 3)?;
                f.write_str("%")?;
            }
            Offset::Bytes(bytes) => {
                let (value, unit) = scaled(bytes, &BYTE_UNITS);
                write!(f, "+{value}{unit}")?;
            }
        }
        match self.at {
            At::Call => Ok(()),
            At::Wire => f.write_str(" at wire"),
        }
    }
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run => f.write_str("for run"),
            Self::For(span) => write!(f, "for {}", Span(*span)),
            Self::Call { op, n } => write!(f, "until {op}#{n}"),
        }
    }
}

const RATE_UNITS: [(&str, u64); 4] = [("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];

const BYTE_UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

const SPAN_UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("min", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// The value in the largest unit that divides it.
fn scaled<'a>(value: u64, units: &[(&'a str, u64)]) -> (u64, &'a str) {
    for (unit, size) in units {
        if value != 0 && value.is_multiple_of(*size) {
            return (value / size, unit);
        }
    }
    (value, units[units.len() - 1].0)
}

/// A duration in the largest unit that divides it, as the parser reads it.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A parsed duration fits (checked there); a longer one prints its maximum.
        let nanos = u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX);
        let (value, unit) = scaled(nanos, &SPAN_UNITS);
        write!(f, "{value}{unit}")
    }
}

/// `value` / 10^`places`, without trailing zeros.
fn write_decimal(f: &mut fmt::Formatter<'_>, value: u64, places: usize) -> fmt::Result {
    let one = 10_u64.pow(u32::try_from(places).unwrap_or(0));
    write!(f, "{}", value / one)?;
    let rest = value % one;
    if rest != 0 {
        let digits = format!("{rest:0places$}");
        write!(f, ".{}", digits.trim_end_matches('0'))?;
    }
    Ok(())
}

impl Serialize for Fault {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Fault {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(|error: ParseError| de::Error::custom(format!("{error}\n{}", error.pointed(&text))))
    }
}

impl schemars::JsonSchema for Fault {
    fn schema_name() -> Cow<'static, str> {
        "Fault".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "description": format!("A fault: {}", Self::GRAMMAR),
            "examples": [Self::EXAMPLE],
            "pattern": r"^(drop|loss:|flap:|rate:|link-down)[^@]*@[^/ ]+/[^/ ]+(/rx|/tx)? +from .+ +(for|until) .+$",
        })
    }
}
