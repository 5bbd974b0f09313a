//! Element types and reduction operators.
//!
//! Owns the closed lists that every other module matches on, and the marker trait that ties a Rust
//! type to its [`DType`]. Never computes anything: the arithmetic is `collective::kernel`.

use std::fmt;
use std::str::FromStr;

/// Type of the elements of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
}

impl DType {
    /// Every element type, in the order of the enum.
    pub const ALL: [DType; 8] =
        [DType::F32, DType::F64, DType::I32, DType::I64, DType::U32, DType::U64, DType::F16, DType::BF16];

    /// Bytes of one element, which is also its alignment.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// Whether the type is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        }
    }
}

/// How the ranks' elements are combined. Integers wrap; `Avg` is the sum, then one division by the
/// world size (truncating for integers), applied once when the sum is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Least element; a NaN in any operand gives NaN.
    Min,
    /// Greatest element; a NaN in any operand gives NaN.
    Max,
    /// Sum divided by the number of ranks.
    Avg,
}

impl ReduceOp {
    /// Every operator, in the order of the enum.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

    const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no element type or no reduction operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}; hint: one of {}", known.join(", "))]
pub struct UnknownName {
    /// What was being read: "element type" or "reduction operator".
    pub what: &'static str,
    /// The name as given.
    pub name: String,
    /// The names that exist.
    pub known: Vec<&'static str>,
}

impl FromStr for DType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| UnknownName {
            what: "element type",
            name: name.to_owned(),
            known: DType::ALL.map(DType::name).to_vec(),
        })
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| UnknownName {
            what: "reduction operator",
            name: name.to_owned(),
            known: ReduceOp::ALL.map(ReduceOp::name).to_vec(),
        })
    }
}

/// A Rust type whose values are elements of [`Element::DTYPE`].
///
/// # Safety
///
/// Size and alignment must be `DTYPE.size_bytes()`, every bit pattern of that size must be a valid
/// value, and the bits must mean what `DTYPE` says: callers view slices of it as bytes and back.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        const _: () = assert!(
            size_of::<$rust>() == DType::$dtype.size_bytes()
                && align_of::<$rust>() == DType::$dtype.size_bytes()
        );
        // SAFETY: a plain number without padding or invalid bit patterns; its size and alignment
        // are asserted above at compile time.
        unsafe impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32 => F32,
    f64 => F64,
    i32 => I32,
    i64 => I64,
    u32 => U32,
    u64 => U64,
    half::f16 => F16,
    half::bf16 => BF16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_as_itself() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = "float".parse::<DType>().unwrap_err().to_string();
        assert!(error.contains("\"float\"") && error.contains("bf16"), "{error}");
        let error = "SUM".parse::<ReduceOp>().unwrap_err().to_string();
        assert!(error.contains("\"SUM\"") && error.contains("prod"), "{error}");
    }
}
