//! What a sweep is asked for, by nccl-tests' options. Pure.

use clap::ValueEnum;
use r2cc::{DType, ReduceOp};
use serde::{Deserialize, Serialize};

use super::Collective;

/// How the times of the ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Average {
    /// Rank 0's.
    #[value(name = "0", alias = "rank0")]
    Rank0,
    /// The mean.
    #[default]
    #[value(name = "1", alias = "avg")]
    Mean,
    /// The least.
    #[value(name = "2", alias = "min")]
    Min,
    /// The most.
    #[value(name = "3", alias = "max")]
    Max,
}

/// A sweep. Types and operators by the names of suites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// What is measured.
    pub collective: Collective,
    /// First size, bytes.
    pub min_bytes: u64,
    /// Last size, bytes.
    pub max_bytes: u64,
    /// Each size is so many times the one before; 1: `step_bytes` more.
    pub step_factor: u64,
    /// Bytes from one size to the next.
    pub step_bytes: u64,
    /// Timed iterations.
    pub iterations: u32,
    /// Iterations before them.
    pub warmup: u32,
    /// Iterations whose result is checked, element by element; none: unchecked.
    pub checks: u32,
    /// Every timed iteration is checked too, and starts on all ranks at once.
    pub verify: bool,
    /// Element types.
    pub dtypes: Vec<String>,
    /// Reductions; of a collective that does not reduce, the first says which inputs are used.
    pub ops: Vec<String>,
    /// Roots.
    pub roots: Vec<usize>,
    /// Ranks wait for each other after each iteration.
    pub blocking: bool,
    /// How often the sweep is run; 0: for ever.
    pub cycles: u32,
    /// How the times of the ranks become one.
    pub average: Average,
    /// Times of each iteration are kept and told of.
    pub per_iteration: bool,
}

impl Default for Options {
    /// nccl-tests' defaults.
    fn default() -> Self {
        Self {
            collective: Collective::AllReduce,
            min_bytes: 32 << 20,
            max_bytes: 32 << 20,
            step_factor: 1,
            step_bytes: 1 << 20,
            iterations: 20,
            warmup: 1,
            checks: 1,
            verify: false,
            dtypes: vec!["f32".to_owned()],
            ops: vec!["sum".to_owned()],
            roots: vec![0],
            blocking: false,
            cycles: 1,
            average: Average::Mean,
            per_iteration: false,
        }
    }
}

/// One row of the output: a size with a type, an operator and a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// Asked size, bytes.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Reduction.
    pub op: ReduceOp,
    /// Root.
    pub root: usize,
}

/// Options that make no sweep.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}\n  hint: {hint}")]
pub struct OptionsError {
    /// What is wrong.
    pub what: String,
    /// What would be right.
    pub hint: String,
}

fn refuse<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T, OptionsError> {
    Err(OptionsError { what: what.into(), hint: hint.into() })
}

/// Most sizes of a sweep: a step of a few bytes to gigabytes is a slip.
const SIZES_MAX: u64 = 100_000;

impl Options {
    /// Whether this is a sweep that `world` ranks can run.
    ///
    /// # Errors
    /// If sizes, counts, names or roots make no sense.
    pub fn validate(&self, world: usize) -> Result<(), OptionsError> {
        if self.min_bytes == 0 || self.max_bytes < self.min_bytes {
            let what = format!("sizes from {} to {} bytes", self.min_bytes, self.max_bytes);
            return refuse(what, "-b is at least 1, and -e at least -b");
        }
        if self.step_factor == 0 || (self.step_factor == 1 && self.step_bytes == 0 && self.max_bytes > self.min_bytes) {
            return refuse("sizes that do not grow", "-f from 2, or -i from 1 byte");
        }
        if self.step_factor == 1
            && self.step_bytes > 0
            && (self.max_bytes - self.min_bytes) / self.step_bytes >= SIZES_MAX
        {
            return refuse(format!("more than {SIZES_MAX} sizes"), "a larger -i, or -f for a factor");
        }
        if self.iterations == 0 {
            return refuse("no timed iterations", "-n is at least 1");
        }
        if let Some(root) = self.roots.iter().find(|root| **root >= world) {
            return refuse(format!("root {root} of {world} ranks"), format!("-r is 0 to {}, or -1 for all", world - 1));
        }
        let points = self.points()?;
        // That exact inputs exist is known before anything is built.
        for point in &points {
            let refused = crate::elements::check(&[], point.dtype, point.op, world, 0, 0);
            refused.or_else(|error| refuse(error.to_string(), "fewer ranks, or -c 0"))?;
        }
        Ok(())
    }

    /// Asked sizes, in order.
    pub fn sizes(&self) -> Vec<u64> {
        let mut sizes = Vec::new();
        let mut size = self.min_bytes;
        while size <= self.max_bytes {
            sizes.push(size);
            let next = if self.step_factor > 1 {
                size.checked_mul(self.step_factor)
            } else {
                size.checked_add(self.step_bytes)
            };
            match next {
                Some(next) if next > size => size = next,
                _ => break,
            }
        }
        sizes
    }

    /// Every row of one cycle, in order: types, operators, roots, and for each all sizes.
    ///
    /// # Errors
    /// If a type or operator has no such name.
    pub fn points(&self) -> Result<Vec<Point>, OptionsError> {
        let unknown = |error: r2cc::dtype::UnknownName| OptionsError {
            what: format!("unknown {} {:?}", error.what, error.name),
            hint: format!("one of {}, or all", error.known.join(", ")),
        };
        let dtypes: Vec<DType> = self.dtypes.iter().map(|d| d.parse()).collect::<Result<_, _>>().map_err(unknown)?;
        let ops: Vec<ReduceOp> = self.ops.iter().map(|op| op.parse()).collect::<Result<_, _>>().map_err(unknown)?;
        let ops = if self.collective.reduces() { &ops[..] } else { &ops[..ops.len().min(1)] };
        let roots = if self.collective.has_root() { &self.roots[..] } else { &[0] };
        let mut points = Vec::new();
        for (dtype, op, root) in
            dtypes.iter().flat_map(|d| ops.iter().flat_map(move |op| roots.iter().map(move |root| (*d, *op, *root))))
        {
            points.extend(self.sizes().into_iter().map(|bytes| Point { bytes, dtype, op, root }));
        }
        Ok(points)
    }
}

/// nccl-tests' name of an element type.
pub fn nccl_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 => "half",
        DType::BF16 => "bfloat16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::U32 => "uint32",
        DType::U64 => "uint64",
    }
}

/// Our names of the types that an argument names, by either name; `all`: every type.
///
/// # Errors
/// If there is no such type.
pub fn dtypes_of(name: &str) -> Result<Vec<String>, String> {
    if name == "all" {
        return Ok(DType::ALL.iter().map(ToString::to_string).collect());
    }
    let found = DType::ALL.into_iter().find(|d| nccl_name(*d) == name || d.to_string() == name);
    let known = || DType::ALL.map(nccl_name).join(", ");
    let found = found.ok_or_else(|| format!("unknown element type; one of {}, or all", known()))?;
    Ok(vec![found.to_string()])
}

/// The operators that an argument names; `all`: every one.
///
/// # Errors
/// If there is no such operator.
pub fn ops_of(name: &str) -> Result<Vec<String>, String> {
    if name == "all" {
        return Ok(ReduceOp::ALL.iter().map(ToString::to_string).collect());
    }
    let op: ReduceOp =
        name.parse().map_err(|e: r2cc::dtype::UnknownName| format!("one of {}, or all", e.known.join(", ")))?;
    Ok(vec![op.to_string()])
}

/// Bytes of an argument as nccl-tests reads it: K, M, G are powers of 1024.
///
/// # Errors
/// If it is no size.
pub fn bytes_of(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return Err(format!("{unit:?} is no unit of bytes; for example 8, 64K, 1M, 4G")),
    };
    match number.parse::<f64>() {
        Ok(value) if value * (scale as f64) < 1e18 => Ok((value * scale as f64) as u64),
        _ => Err("it is no size; for example 8, 64K, 1M, 4G".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(min: u64, max: u64, factor: u64, step: u64) -> Options {
        Options { min_bytes: min, max_bytes: max, step_factor: factor, step_bytes: step, ..Options::default() }
    }

    #[test]
    fn sizes_grow_by_the_factor_or_by_the_step_to_the_last_that_fits() {
        assert_eq!(sweep(8, 64, 2, 0).sizes(), [8, 16, 32, 64]);
        assert_eq!(sweep(8, 63, 2, 0).sizes(), [8, 16, 32]);
        assert_eq!(sweep(10, 30, 1, 10).sizes(), [10, 20, 30]);
        assert_eq!(sweep(8, 8, 1, 0).sizes(), [8]);
        assert_eq!(sweep(1 << 62, u64::MAX, 4, 0).sizes(), [1 << 62], "no overflow");
    }

    #[test]
    fn what_makes_no_sweep_is_refused_with_a_hint() {
        let bad = [
            sweep(0, 8, 2, 0),
            sweep(16, 8, 2, 0),
            sweep(8, 16, 1, 0),
            sweep(8, 16, 0, 1),
            sweep(1, 1 << 40, 1, 1),
            Options { iterations: 0, ..Options::default() },
            Options { roots: vec![3], ..Options::default() },
            Options { dtypes: vec!["f33".into()], ..Options::default() },
        ];
        for options in bad {
            let error = options.validate(3).unwrap_err().to_string();
            assert!(error.contains("hint: "), "{error}");
        }
        Options::default().validate(3).unwrap();
    }

    #[test]
    fn only_what_matters_to_the_collective_is_varied() {
        let options = |collective| Options {
            collective,
            ops: vec!["sum".into(), "max".into()],
            roots: vec![0, 1, 2],
            dtypes: vec!["f32".into(), "bf16".into()],
            ..Options::default()
        };
        let rows = |collective| options(collective).points().unwrap().len();
        assert_eq!(rows(Collective::AllReduce), 4);
        assert_eq!(rows(Collective::Reduce), 12);
        assert_eq!(rows(Collective::Broadcast), 6);
        assert_eq!(rows(Collective::AllGather), 2);
    }

    #[test]
    fn arguments_are_read_as_nccl_tests_reads_them() {
        assert_eq!(bytes_of("64M"), Ok(64 << 20));
        assert_eq!(bytes_of("8"), Ok(8));
        assert_eq!(bytes_of("1.5K"), Ok(1536));
        assert!(bytes_of("1X").is_err() && bytes_of("").is_err() && bytes_of("M").is_err());
        assert_eq!(dtypes_of("float"), Ok(vec!["f32".to_owned()]));
        assert_eq!(dtypes_of("bf16"), dtypes_of("bfloat16"));
        assert_eq!(dtypes_of("all").map(|d| d.len()), Ok(8));
        assert!(dtypes_of("int8").is_err());
        assert_eq!(ops_of("all").map(|d| d.len()), Ok(5));
    }
}
