//! Scalar values of a suite file: sizes, rates, percentages and iteration ranges.
//!
//! Each has one printable form, accepts a bare number where that is unambiguous, and
//! says what it wanted when it refuses. Nothing here knows what the value is used for.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use thiserror::Error;

/// A scalar that does not have the form its key asks for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not {wanted}")]
pub struct ValueError {
    /// What the file says.
    pub text: String,
    /// The accepted forms, in words.
    pub wanted: &'static str,
}

/// A number of bytes: `64MiB`, `4GiB`, `1500kB` or a bare number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A line rate in bits per second: `200Mbit`, `1Gbit`, `500kbit`; decimal units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitRate(pub u64);

/// A fraction written as a percentage: `3%` is 0.03.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Percent(pub f64);

/// Iterations `first` to `last`, both included, counted from 1: `4-10` or `6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IterationRange {
    /// First iteration of the range.
    pub first: u32,
    /// Last iteration of the range, included.
    pub last: u32,
}

impl IterationRange {
    /// Whether iteration `index` lies in the range.
    pub fn contains(&self, index: u32) -> bool {
        (self.first..=self.last).contains(&index)
    }
}

impl Bytes {
    const WANTED: &'static str = "a size such as `64MiB`, `4GiB` or `1048576`";
}

impl BitRate {
    const WANTED: &'static str = "a rate such as `200Mbit`, `1Gbit` or `500kbit`";
}

impl Percent {
    const WANTED: &'static str = "a percentage such as `3%` or `0.5%`";
}

impl IterationRange {
    const WANTED: &'static str = "an iteration such as `6` or a range such as `4-10`";
}

fn refuse<T>(text: &str, wanted: &'static str) -> Result<T, ValueError> {
    Err(ValueError { text: text.to_string(), wanted })
}

impl FromStr for Bytes {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text.trim().parse::<bytesize::ByteSize>() {
            Ok(size) => Ok(Self(size.as_u64())),
            Err(_) => refuse(text, Self::WANTED),
        }
    }
}

impl FromStr for BitRate {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let scale = match unit.trim() {
            "bit" => 1.0,
            "kbit" | "Kbit" => 1e3,
            "Mbit" => 1e6,
            "Gbit" => 1e9,
            _ => return refuse(text, Self::WANTED),
        };
        match number.parse::<f64>() {
            Ok(value) if value * scale >= 1.0 && value * scale < 1e15 => Ok(Self((value * scale).round() as u64)),
            _ => refuse(text, Self::WANTED),
        }
    }
}

impl FromStr for Percent {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let Some(number) = text.trim().strip_suffix('%') else {
            return refuse(text, Self::WANTED);
        };
        match number.trim().parse::<f64>() {
            Ok(value) if (0.0..=1000.0).contains(&value) => Ok(Self(value / 100.0)),
            _ => refuse(text, Self::WANTED),
        }
    }
}

impl FromStr for IterationRange {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (first.trim().parse(), last.trim().parse()),
            None => (text.trim().parse(), text.trim().parse()),
        };
        match (first, last) {
            (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(Self { first, last }),
            _ => refuse(text, Self::WANTED),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (scale, unit) in UNITS {
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return write!(f, "{}{unit}", self.0 / scale);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (scale, unit) in [(1_000_000_000, "Gbit"), (1_000_000, "Mbit"), (1_000, "kbit")] {
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return write!(f, "{}{unit}", self.0 / scale);
            }
        }
        write!(f, "{}bit", self.0)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nine decimals hide the binary fraction, so `3%` prints as it was written.
        let rounded = format!("{:.9}", self.0 * 100.0);
        write!(f, "{}%", rounded.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl fmt::Display for IterationRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// Reads a value from a string or, where `NUMBERS` says so, from a bare whole number.
struct ScalarVisitor<T> {
    wanted: &'static str,
    from_number: Option<fn(u64) -> T>,
}

impl<T> Visitor<'_> for ScalarVisitor<T>
where
    T: FromStr<Err = ValueError>,
{
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.wanted)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        match self.from_number {
            Some(from) if number > 0 => Ok(from(number)),
            _ => Err(E::invalid_value(de::Unexpected::Unsigned(number), &self)),
        }
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
        }
    }
}

macro_rules! scalar {
    ($type:ty, $name:literal, $pattern:literal, $from_number:expr, $numbers:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(ScalarVisitor::<$type> {
                    wanted: Self::WANTED,
                    from_number: $from_number,
                })
            }
        }

        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let text = schemars::json_schema!({"type": "string", "pattern": $pattern});
                if $numbers {
                    schemars::json_schema!({
                        "description": Self::WANTED,
                        "anyOf": [text, {"type": "integer", "minimum": 1}],
                    })
                } else {
                    schemars::json_schema!({
                        "description": Self::WANTED,
                        "type": "string",
                        "pattern": $pattern,
                    })
                }
            }
        }
    };
}

scalar!(Bytes, "Bytes", r"^[0-9.]+ ?([kKMGT]i?)?[bB]?$", Some(Bytes), true);
scalar!(BitRate, "BitRate", r"^[0-9.]+ ?[kKMG]?bit$", None, false);
scalar!(Percent, "Percent", r"^[0-9.]+ ?%$", None, false);
scalar!(
    IterationRange,
    "IterationRange",
    r"^[0-9]+( ?- ?[0-9]+)?$",
    Some(|n| {
        let index = u32::try_from(n).unwrap_or(u32::MAX);
        IterationRange { first: index, last: index }
    }),
    true
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_prints_the_form_it_was_written_in() {
        for text in ["64MiB", "4GiB", "1536KiB", "1001"] {
            assert_eq!(text.parse::<Bytes>().unwrap().to_string(), text);
        }
        for text in ["200Mbit", "1Gbit", "2500Mbit", "500kbit", "999bit"] {
            assert_eq!(text.parse::<BitRate>().unwrap().to_string(), text);
        }
        for text in ["3%", "0.5%", "12.5%", "0%", "100%"] {
            assert_eq!(text.parse::<Percent>().unwrap().to_string(), text);
        }
        for text in ["6", "4-10"] {
            assert_eq!(text.parse::<IterationRange>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn values_are_what_their_units_say() {
        assert_eq!("64MiB".parse::<Bytes>().unwrap().0, 67_108_864);
        assert_eq!("1.5Gbit".parse::<BitRate>().unwrap().0, 1_500_000_000);
        assert!(("3%".parse::<Percent>().unwrap().0 - 0.03).abs() < 1e-12);
        let range: IterationRange = "4 - 10".parse().unwrap();
        assert!(range.contains(4) && range.contains(10));
        assert!(!range.contains(3) && !range.contains(11));
    }

    #[test]
    fn forms_that_could_mean_two_things_are_refused() {
        for text in ["", "sixty", "-1MiB", "64 parsecs"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
        for text in ["200", "200Mb", "200MB/s", "0Mbit", "1.2.3Mbit", ""] {
            assert!(text.parse::<BitRate>().is_err(), "{text}");
        }
        for text in ["3", "%", "-3%", "nan%", "inf%"] {
            assert!(text.parse::<Percent>().is_err(), "{text}");
        }
        for text in ["0", "10-4", "4-", "-4", "a-b", "0-3"] {
            assert!(text.parse::<IterationRange>().is_err(), "{text}");
        }
    }
}
