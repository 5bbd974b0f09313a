//! The JSON form. Fields are taken as they come: booleans as words, roots as text, NaN as "nan", and what a partial
//! file does not have yet is missing.

use serde_json::Value;

use super::{Check, ReadError, ReadHalf, ReadRow, ReadSweep};

fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) if text.eq_ignore_ascii_case("nan") => Some(f64::NAN),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

fn truth(value: &Value) -> bool {
    value.as_bool().unwrap_or_else(|| value.as_str() == Some("true"))
}

fn half(value: &Value) -> Result<Option<ReadHalf>, String> {
    if value.is_null() {
        return Ok(None);
    }
    let field = |names: &[&str]| {
        let found = names.iter().find_map(|name| float(&value[*name]));
        found.ok_or_else(|| format!("a half without `{}`", names[0]))
    };
    let check = match &value["nwrong"] {
        Value::Number(wrong) => Check::Wrong(wrong.as_f64().unwrap_or(0.0) as u64),
        Value::String(text) => text.parse().map_or(Check::Unchecked, Check::Wrong),
        _ => Check::Unchecked,
    };
    let (time_us, alg_bw) = (field(&["time", "cpu_time"])?, field(&["alg_bw"])?);
    Ok(Some(ReadHalf { time_us, alg_bw, bus_bw: field(&["bus_bw"])?, check, more: Vec::new() }))
}

fn row(value: &Value) -> Result<ReadRow, String> {
    let number = |name: &str| value[name].as_u64().ok_or_else(|| format!("a result without `{name}`"));
    let root = value["root"].as_i64().or_else(|| value["root"].as_str().and_then(|text| text.parse().ok()));
    Ok(ReadRow {
        size: number("size")?,
        count: number("count")?,
        dtype: value["type"].as_str().ok_or("a result without `type`")?.to_owned(),
        op: value["redop"].as_str().map(str::to_owned),
        root,
        out_of_place: half(&value["out_of_place"])?,
        in_place: half(&value["in_place"])?,
    })
}

pub(super) fn read(output: &str) -> Result<ReadSweep, ReadError> {
    let document: Value = serde_json::from_str(output).map_err(|error| ReadError::Json(error.to_string()))?;
    let results = document["results"].as_array().ok_or_else(|| ReadError::Json("no `results`".to_owned()))?;
    let rows: Result<Vec<ReadRow>, String> = results.iter().map(row).collect();
    let bounds = &document["out_of_bounds"];
    Ok(ReadSweep {
        program: document["program"].as_str().map(str::to_owned),
        rows: rows.map_err(ReadError::Json)?,
        unfinished: 0,
        out_of_bounds: bounds["count"].as_u64().map(|count| (count, truth(&bounds["okay"]))),
        average_bus_bw: float(&document["average_bus_bandwidth"]["bandwidth"]),
        concluded: !document["end_time"].is_null(),
        foreign: 0,
    })
}
