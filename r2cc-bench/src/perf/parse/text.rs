//! The text form: column heads, pieces of rows, footer.

use super::{Check, ReadError, ReadHalf, ReadRow, ReadSweep};

/// The columns that a header has named.
#[derive(Debug, Clone)]
struct Columns {
    /// Of the row, up to the first time.
    row: Vec<String>,
    /// Of each half.
    half: Vec<String>,
    halves: usize,
}

impl Default for Columns {
    /// Those of today, for output whose header is missing.
    fn default() -> Self {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self {
            row: owned(&["size", "count", "type", "redop", "root"]),
            half: owned(&["time", "algbw", "busbw", "#wrong"]),
            halves: 2,
        }
    }
}

impl Columns {
    fn of_header(words: &[&str]) -> Option<Self> {
        let first = words.iter().position(|word| *word == "time")?;
        if !words[..first].contains(&"size") {
            return None;
        }
        let halves = words.iter().filter(|word| **word == "time").count();
        let all = words.len() - first;
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let half = all / halves;
        all.is_multiple_of(halves).then(|| Self {
            row: owned(&words[..first]),
            half: owned(&words[first..first + half]),
            halves,
        })
    }
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic()) && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A number as nccl-tests prints it; `Some(None)` for `N/A`.
fn number(word: &str) -> Option<Option<f64>> {
    if word.eq_ignore_ascii_case("n/a") {
        return Some(None);
    }
    // What Rust reads beyond that is no number here: `inf`, `infinity`.
    let plain =
        word.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.') || word.eq_ignore_ascii_case("nan");
    if plain { word.parse().ok().map(Some) } else { None }
}

/// A row that has begun.
struct Open {
    row: ReadRow,
    halves: usize,
}

struct Reader {
    columns: Columns,
    open: Option<Open>,
    sweep: ReadSweep,
}

impl Reader {
    /// The piece from size to root at the start of `words`, and how many words it takes.
    fn beginning(&self, words: &[&str]) -> Option<(ReadRow, usize)> {
        let mut row = ReadRow {
            size: 0,
            count: 0,
            dtype: String::new(),
            op: None,
            root: None,
            out_of_place: None,
            in_place: None,
        };
        let mut at = 0;
        for name in &self.columns.row {
            let word = words.get(at)?;
            match name.as_str() {
                "size" => row.size = word.parse().ok()?,
                "count" => row.count = word.parse().ok()?,
                "type" if is_name(word) => row.dtype = (*word).to_owned(),
                "redop" if is_name(word) => row.op = Some((*word).to_owned()),
                "root" => row.root = Some(word.parse().ok()?),
                "type" | "redop" => return None,
                // A time of day, in one word or two: date and time.
                "timestamp" if word.contains('-') && words.get(at + 1).is_some_and(|w| w.contains(':')) => at += 1,
                _ => {}
            }
            at += 1;
        }
        Some((row, at))
    }

    /// The half at the start of `words`; `Some(None)` where it is not defined.
    fn half(&self, words: &[&str]) -> Option<Option<ReadHalf>> {
        let words = words.get(..self.columns.half.len())?;
        let (mut time, mut alg, mut bus, mut check) = (None, None, None, Check::Unchecked);
        let mut more = Vec::new();
        for (name, word) in self.columns.half.iter().zip(words) {
            let value = number(word)?;
            match name.as_str() {
                "time" => time = value,
                "algbw" => alg = value,
                "busbw" => bus = value,
                "#wrong" => {
                    if let Some(wrong) = value {
                        // It may be printed as a power of ten too.
                        (wrong >= 0.0 && wrong.fract() == 0.0).then_some(())?;
                        check = Check::Wrong(wrong as u64);
                    }
                }
                "error" => check = value.map_or(Check::Unchecked, Check::Deviation),
                _ => more.push((name.clone(), value)),
            }
        }
        let Some(time_us) = time else { return Some(None) };
        Some(Some(ReadHalf { time_us, alg_bw: alg.unwrap_or(0.0), bus_bw: bus.unwrap_or(0.0), check, more }))
    }

    /// Takes the next piece from the start of `words`; answers with how many words it took, none if there is none.
    fn piece(&mut self, words: &[&str]) -> Option<usize> {
        if let Some(open) = &self.open
            && let Some(half) = self.half(words)
        {
            let done = open.halves + 1;
            let is_last = done == self.columns.halves;
            if let Some(open) = &mut self.open {
                open.halves = done;
                if done == 1 { open.row.out_of_place = half } else { open.row.in_place = half }
            }
            if is_last && let Some(open) = self.open.take() {
                self.sweep.rows.push(open.row);
            }
            return Some(self.columns.half.len());
        }
        let (row, taken) = self.beginning(words)?;
        if self.open.replace(Open { row, halves: 0 }).is_some() {
            self.sweep.unfinished += 1;
        }
        Some(taken)
    }

    /// Pieces from the start of a line; what follows them is a log's.
    fn line(&mut self, words: &[&str]) {
        let mut at = 0;
        while at < words.len()
            && let Some(taken) = self.piece(&words[at..])
        {
            at += taken;
        }
        if at == words.len() {
            return;
        }
        self.sweep.foreign += 1;
        // A log that did not end its line has a row's beginning behind it.
        if let Some(start) = (at + 1..words.len()).find(|start| {
            let rest = &words[*start..];
            self.beginning(rest).is_some_and(|(_, taken)| {
                let rest = &rest[taken..];
                rest.is_empty() || self.half(rest).is_some()
            })
        }) {
            let mut at = start;
            while at < words.len()
                && let Some(taken) = self.piece(&words[at..])
            {
                at += taken;
            }
        }
    }

    fn comment(&mut self, text: &str) {
        let words: Vec<&str> = text.split_whitespace().collect();
        if let Some(columns) = Columns::of_header(&words) {
            self.columns = columns;
            return;
        }
        let after = |key: &str| text.trim().strip_prefix(key).map(|rest| rest.trim_start_matches([' ', ':']));
        if let Some(rest) = after("Out of bounds values") {
            let mut words = rest.split_whitespace();
            let count = words.next().and_then(|n| n.parse().ok());
            self.sweep.out_of_bounds = count.map(|count| (count, words.next() == Some("OK")));
        } else if let Some(rest) = after("Avg bus bandwidth") {
            self.sweep.average_bus_bw = rest.split_whitespace().next().and_then(|n| n.parse().ok());
        } else if let Some(rest) = after("Collective test concluded") {
            self.sweep.concluded = true;
            self.sweep.program = Some(rest.to_owned()).filter(|name| !name.is_empty()).or(self.sweep.program.take());
        } else if let Some(rest) = after("Collective test starting") {
            self.sweep.program = Some(rest.to_owned()).filter(|name| !name.is_empty());
        }
    }
}

pub(super) fn read(output: &str) -> Result<ReadSweep, ReadError> {
    let mut reader = Reader { columns: Columns::default(), open: None, sweep: ReadSweep::default() };
    let mut has_header = false;
    for line in output.lines() {
        match line.trim_start().strip_prefix('#') {
            // `#wrong` begins no line.
            Some(comment) => {
                has_header |= Columns::of_header(&comment.split_whitespace().collect::<Vec<_>>()).is_some();
                reader.comment(comment);
            }
            None => reader.line(&line.split_whitespace().collect::<Vec<_>>()),
        }
    }
    let mut sweep = reader.sweep;
    sweep.unfinished += usize::from(reader.open.is_some());
    if sweep.rows.is_empty() && sweep.unfinished == 0 && !has_header {
        return Err(ReadError::NoRows { lines: output.lines().count() });
    }
    sweep.concluded |= sweep.average_bus_bw.is_some();
    Ok(sweep)
}
