//! The grammar of a fault, read word by word; every error points at the word that
//! offends, says what was expected there, and hints at what was probably meant.

use std::{fmt, str::FromStr, time::Duration};

use super::{
    At, BYTE_UNITS, Direction, Fault, Kind, Offset, Op, Position, RATE_UNITS, SPAN_UNITS, Target, Trigger, Until,
};

/// Why a text is no fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// column of the offending word, from 1, in characters
    pub column: usize,
    /// the offending word; empty where the text ends too early
    pub found: String,
    /// what belongs there
    pub expected: String,
    /// what was probably meant
    pub hint: Option<String>,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: expected {}, ", self.column, self.expected)?;
        if self.found.is_empty() {
            f.write_str("but the fault ends here")?;
        } else {
            write!(f, "found \"{}\"", self.found)?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ParseError {}

impl ParseError {
    /// The text with a caret under the offending word, for a terminal.
    #[must_use]
    pub fn pointed(&self, text: &str) -> String {
        let carets = "^".repeat(self.found.chars().count().max(1));
        format!("  {text}\n  {}{carets}", " ".repeat(self.column - 1))
    }
}

/// A piece of the text and where it begins (bytes).
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    start: usize,
}

impl<'a> Word<'a> {
    /// Splits at the first `separator`; the second part is None without one.
    fn split(self, separator: char) -> (Self, Option<Self>) {
        match self.text.find(separator) {
            None => (self, None),
            Some(at) => {
                (Self { text: &self.text[..at], start: self.start }, Some(self.from(at + separator.len_utf8())))
            }
        }
    }

    fn from(self, offset: usize) -> Self {
        Self { text: &self.text[offset..], start: self.start + offset }
    }
}

struct Reader<'a> {
    whole: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Word<'a> {
        let rest = &self.whole[self.at..];
        let start = self.at + (rest.len() - rest.trim_start().len());
        let rest = &self.whole[start..];
        let length = rest.find(char::is_whitespace).unwrap_or(rest.len());
        self.at = start + length;
        Word { text: &rest[..length], start: if length == 0 { self.whole.trim_end().len() } else { start } }
    }

    fn peek(&self) -> Word<'a> {
        Reader { ..*self }.next()
    }

    fn error(&self, word: Word<'_>, expected: impl Into<String>, hint: impl Into<Option<String>>) -> ParseError {
        ParseError {
            column: self.whole[..word.start].chars().count() + 1,
            found: word.text.to_owned(),
            expected: expected.into(),
            hint: hint.into(),
        }
    }

    /// An error about one of a few fixed words, with the nearest as hint.
    fn unknown(&self, word: Word<'_>, what: &str, known: &[&str]) -> ParseError {
        let hint = nearest(word.text, known).map(|near| format!("did you mean \"{near}\"?"));
        self.error(word, format!("{what}: {}", known.join(", ")), hint)
    }
}

fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_lowercase();
    known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, candidate), *candidate))
        .filter(|(distance, candidate)| !word.is_empty() && *distance <= candidate.len().div_ceil(3))
        .min()
        .map(|(_, candidate)| candidate)
}

impl FromStr for Fault {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut reader = Reader { whole: text, at: 0 };
        let (kind, target, direction) = head(&mut reader)?;
        let word = reader.next();
        if word.text != "from" {
            return Err(reader.unknown(word, "the word", &["from"]));
        }
        let from = trigger(&mut reader)?;
        let until = until(&mut reader)?;
        let rest = reader.next();
        if !rest.text.is_empty() {
            return Err(reader.error(rest, "the end of the fault", None));
        }
        Ok(Self { kind, target, direction, from, until })
    }
}

/// `KIND[:ARG]@NODE/NIC[/rx|/tx]`
fn head(reader: &mut Reader<'_>) -> Result<(Kind, Target, Direction), ParseError> {
    let word = reader.next();
    let (what, place) = word.split('@');
    let kind = kind(reader, what)?;
    let Some(place) = place else {
        let end = word.from(word.text.len());
        let hint = format!("a fault reads like \"{}\"", Fault::EXAMPLE);
        return Err(reader.error(end, "@NODE/NIC after the kind", hint));
    };
    let (node, nic) = place.split('/');
    if node.text.is_empty() {
        return Err(reader.error(node, "the node's name", None));
    }
    let Some(nic) = nic else {
        let end = place.from(place.text.len());
        let hint = format!("{}/mlx5_0, or switch/rail-1 for a whole rail", node.text);
        return Err(reader.error(end, "/NIC after the node", hint));
    };
    let (nic, direction) = nic.split('/');
    if nic.text.is_empty() {
        return Err(reader.error(nic, "the NIC's name", None));
    }
    let direction = match direction {
        None => Direction::Both,
        Some(word) => match word.text {
            "rx" => Direction::Rx,
            "tx" => Direction::Tx,
            _ => {
                let mut error = reader.unknown(word, "a direction", &["rx", "tx"]);
                error.hint = Some("leave it out for both directions".to_owned());
                return Err(error);
            }
        },
    };
    if direction != Direction::Both && matches!(kind, Kind::LinkDown | Kind::Rate { .. }) {
        let (_, tail) = place.split('/');
        let word = tail.map_or(place, |tail| tail.from(nic.text.len() + 1));
        let hint = "drop, loss and flap act on one direction".to_owned();
        return Err(reader.error(word, "no direction with this kind", hint));
    }
    let target = Target { node: node.text.to_owned(), nic: nic.text.to_owned() };
    Ok((kind, target, direction))
}

fn kind(reader: &Reader<'_>, word: Word<'_>) -> Result<Kind, ParseError> {
    let (name, argument) = word.split(':');
    let wanted = |example: &str| {
        let end = name.from(name.text.len());
        reader.error(end, format!("{}:{example}", name.text), None)
    };
    let kind = match name.text {
        "drop" => Kind::Drop,
        "link-down" => Kind::LinkDown,
        "loss" => {
            let argument = argument.ok_or_else(|| wanted("1%"))?;
            let share = percent(reader, argument, 4)?;
            if share == 0 {
                return Err(reader.error(argument, "more than 0%", None));
            }
            Kind::Loss { parts_per_million: share }
        }
        "flap" => {
            let argument = argument.ok_or_else(|| wanted("300ms/1s"))?;
            let (down, up) = argument.split('/');
            let Some(up) = up else {
                let end = argument.from(argument.text.len());
                let hint = "flap:DOWN/UP, for example flap:300ms/1s".to_owned();
                return Err(reader.error(end, "/ and how long the port is up", hint));
            };
            Kind::Flap { down: span(reader, down)?, up: span(reader, up)? }
        }
        "rate" => {
            let argument = argument.ok_or_else(|| wanted("20Mbit"))?;
            let hint = "bits a second: 500kbit, 20Mbit, 1Gbit".to_owned();
            let rate = amount(argument.text, &RATE_UNITS)
                .filter(|rate| *rate > 0)
                .ok_or_else(|| reader.error(argument, "a rate above zero", hint))?;
            Kind::Rate { bits_per_second: rate }
        }
        _ => {
            let known = ["drop", "loss", "flap", "rate", "link-down"];
            return Err(reader.unknown(name, "a kind of fault", &known));
        }
    };
    match (&kind, argument) {
        (Kind::Drop | Kind::LinkDown, Some(argument)) => {
            Err(reader.error(argument, format!("no argument to {}", name.text), None))
        }
        _ => Ok(kind),
    }
}

/// `now | after DURATION | OP#N[+P%|+P%..P%|+BYTES] [at call|at wire]`
fn trigger(reader: &mut Reader<'_>) -> Result<Trigger, ParseError> {
    let word = reader.next();
    match word.text {
        "now" => return Ok(Trigger::Now),
        "after" => {
            let delay = reader.next();
            return Ok(Trigger::After(span(reader, delay)?));
        }
        _ => {}
    }
    let (call, offset_word) = word.split('+');
    if !call.text.contains('#') {
        let mut known = vec!["now", "after"];
        known.extend(Op::ALL.map(Op::name));
        if let Some(op) = Op::ALL.into_iter().find(|op| op.name() == call.text) {
            let end = call.from(call.text.len());
            let hint = format!("{op}#3 is the third call of it after arming");
            return Err(reader.error(end, "# and a number", hint));
        }
        return Err(reader.unknown(word, "now, after DURATION or OP#N with OP one of", &known));
    }
    let (op, n) = numbered(reader, call)?;
    let offset = match offset_word {
        None => Offset::Start,
        Some(word) if word.text.ends_with('%') => match word.text.find("..") {
            None => Offset::share(percent(reader, word, 3)?),
            Some(at) => {
                let (first, second) = (Word { text: &word.text[..at], ..word }, word.from(at + 2));
                let (least, most) = (percent(reader, first, 3)?, percent(reader, second, 3)?);
                match most.checked_sub(least) {
                    None => return Err(reader.error(second, "a share that is not below the first", None)),
                    Some(0) => Offset::share(least),
                    Some(_) => Offset::Between { least, most },
                }
            }
        },
        Some(word) => {
            let hint = "a share like 25%, a range of them like 5%..95%, or bytes like 300KiB, 4MiB, 1500B".to_owned();
            match amount(word.text, &BYTE_UNITS) {
                Some(0) => Offset::Start,
                Some(bytes) => Offset::Bytes(bytes),
                None => return Err(reader.error(word, "how far into the operation", hint)),
            }
        }
    };
    let mut at = At::default();
    if reader.peek().text == "at" {
        reader.next();
        let word = reader.next();
        at = match word.text {
            "call" => At::Call,
            "wire" => At::Wire,
            _ => return Err(reader.unknown(word, "one of", &["call", "wire"])),
        };
    }
    Ok(Trigger::Position(Position { op, n, offset, at }))
}

/// `for run | for DURATION | until OP#N`
fn until(reader: &mut Reader<'_>) -> Result<Until, ParseError> {
    let word = reader.next();
    match word.text {
        "for" => {
            let word = reader.next();
            if word.text == "run" {
                return Ok(Until::Run);
            }
            if word.text == "until" {
                return call_end(reader);
            }
            let hint = if word.text.starts_with(|first: char| first.is_ascii_digit()) {
                SPAN_HINT.to_owned()
            } else {
                "\"for run\", \"for 500ms\" or \"until allreduce#6\"".to_owned()
            };
            amount(word.text, &SPAN_UNITS)
                .filter(|nanos| *nanos > 0)
                .map(|nanos| Until::For(Duration::from_nanos(nanos)))
                .ok_or_else(|| reader.error(word, "run or a duration above zero", hint))
        }
        "until" => call_end(reader),
        _ => Err(reader.unknown(word, "how long the fault lasts", &["for", "until"])),
    }
}

fn call_end(reader: &mut Reader<'_>) -> Result<Until, ParseError> {
    let word = reader.next();
    if word.text.is_empty() {
        return Err(reader.error(word, "OP#N", "until allreduce#6".to_owned()));
    }
    let (op, n) = numbered(reader, word)?;
    Ok(Until::Call { op, n })
}

/// `OP#N`
fn numbered(reader: &Reader<'_>, word: Word<'_>) -> Result<(Op, u64), ParseError> {
    let (name, number) = word.split('#');
    let Some(op) = Op::ALL.into_iter().find(|op| op.name() == name.text) else {
        return Err(reader.unknown(name, "an operation", &Op::ALL.map(Op::name)));
    };
    let hint = format!("{op}#1 is the first call of it after arming");
    let Some(number) = number else {
        let end = word.from(word.text.len());
        return Err(reader.error(end, "# and a number", hint));
    };
    match whole(number.text) {
        Some(n) if n > 0 => Ok((op, n)),
        _ => Err(reader.error(number, "a call number from 1", hint)),
    }
}

const SPAN_HINT: &str = "a whole number and a unit: 300ms, 1s, 5min, 1h";

fn span(reader: &Reader<'_>, word: Word<'_>) -> Result<Duration, ParseError> {
    amount(word.text, &SPAN_UNITS)
        .filter(|nanos| *nanos > 0)
        .map(Duration::from_nanos)
        .ok_or_else(|| reader.error(word, "a duration above zero", SPAN_HINT.to_owned()))
}

/// A whole number, digits only.
fn whole(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// A whole number and a unit.
fn amount(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (_, size) = units.iter().find(|(unit, _)| *unit == &text[digits..])?;
    whole(&text[..digits])?.checked_mul(*size)
}

/// `P%`, up to 100, with up to `places` decimals, in units of the last of them.
fn percent(reader: &Reader<'_>, word: Word<'_>, places: usize) -> Result<u32, ParseError> {
    let hint = format!("a number up to 100 with at most {places} decimals, then %: 1%, 0.25%");
    let read = || {
        let text = word.text.strip_suffix('%')?;
        let (ones, decimals) = text.split_once('.').unwrap_or((text, "0"));
        if decimals.len() > places {
            return None;
        }
        let one = 10_u64.pow(u32::try_from(places).ok()?);
        let value = whole(ones)?.checked_mul(one)? + whole(&format!("{decimals:0<places$}"))?;
        u32::try_from(value).ok().filter(|_| value <= 100 * one)
    };
    read().ok_or_else(|| reader.error(word, "a percentage", hint))
}
