//! From YAML text to a tree that has the schema's shape, every departure with its place.
//!
//! Walks the document along the JSON Schema that the types themselves generate, so the
//! shape is written once; all problems are collected, not only the first. What the values
//! mean together is `judge`'s work.

use serde_json::Value;

use super::error::{Problem, nearest};
use super::tree::{Content, Entry, Node};
use super::values::{BitRate, Bytes, IterationRange, Percent};
use r2cc_inject::fault::Fault;

/// All departures of `root` from `schema`.
pub(super) fn departures(schema: &Value, root: &Node, source: &str) -> Vec<Problem> {
    let mut walk = Walk { schema, source, problems: Vec::new() };
    walk.node(schema, root, "the suite");
    walk.problems
}

struct Walk<'a> {
    schema: &'a Value,
    source: &'a str,
    problems: Vec<Problem>,
}

impl<'a> Walk<'a> {
    fn node(&mut self, schema: &'a Value, node: &Node, path: &str) {
        if let Some(name) = definition(schema) {
            if self.scalar(name, node, path) {
                return;
            }
            let target = &self.schema["$defs"][name];
            return self.node(target, node, path);
        }
        let is_null = matches!(node.content, Content::Scalar(Value::Null));
        if is_null && allows_null(schema) {
            return;
        }
        if let Some(variants) = schema["anyOf"].as_array() {
            return self.either(variants, node, path);
        }
        if let Some(words) = words(schema) {
            return self.word(&words, node, path);
        }
        match (&node.content, type_name(schema)) {
            (Content::Map(entries), Some("object")) => self.map(schema, node, entries, path),
            (Content::List(nodes), Some("array")) => {
                for (position, item) in nodes.iter().enumerate() {
                    self.node(&schema["items"], item, &format!("{path}[{position}]"));
                }
            }
            (Content::Scalar(value), Some(wanted)) if fits(value, wanted) => self.limits(schema, value, node, path),
            (_, Some(wanted)) => self.wrong_type(wanted, node, path),
            (_, None) => {}
        }
    }

    fn map(&mut self, schema: &'a Value, node: &Node, entries: &[Entry], path: &str) {
        let Some(properties) = schema["properties"].as_object() else {
            return;
        };
        let inside = |key: &str| match path {
            "the suite" => key.to_string(),
            _ => format!("{path}.{key}"),
        };
        for entry in entries {
            if let Some(property) = properties.get(&entry.key) {
                self.node(property, &entry.node, &inside(&entry.key));
                continue;
            }
            let mut known: Vec<&str> = properties.keys().map(String::as_str).collect();
            // The order of a JSON map depends on how serde_json was built.
            known.sort_unstable();
            let hint = match nearest(&entry.key, &known) {
                Some(close) => format!("did you mean `{close}`?"),
                None => format!("known keys: {}", known.join(", ")),
            };
            let what = format!("unknown key `{}` in {}", entry.key, shown(path));
            self.problems.push(Problem::at(entry.key_at, self.source, what).hint(hint));
        }
        for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !entries.iter().any(|entry| entry.key == key) {
                let what = format!("{} lacks `{key}`", shown(path));
                let problem = Problem::at(node.at, self.source, what);
                let meaning = properties[key]["description"].as_str().unwrap_or_default();
                self.problems.push(problem.hint(format!("{key}: {meaning}")));
            }
        }
    }

    fn either(&mut self, variants: &'a [Value], node: &Node, path: &str) {
        let wanted = match node.content {
            Content::Map(_) => "object",
            Content::List(_) => "array",
            Content::Scalar(_) => "",
        };
        let mut real = variants.iter().filter(|variant| type_name(variant) != Some("null"));
        let fitting = variants.iter().find(|variant| type_name(self.resolve(variant)) == Some(wanted));
        match (fitting, real.next(), real.next()) {
            (Some(variant), _, _) => self.node(variant, node, path),
            (None, Some(only), None) => self.node(only, node, path),
            _ => self.wrong_type("object", node, path),
        }
    }

    fn resolve(&self, schema: &'a Value) -> &'a Value {
        match definition(schema) {
            Some(name) => self.resolve(&self.schema["$defs"][name]),
            None => schema,
        }
    }

    /// Values with a notation of their own; false when `name` is not one.
    fn scalar(&mut self, name: &str, node: &Node, path: &str) -> bool {
        let value = node.to_value();
        let refused = match name {
            "Bytes" => serde_json::from_value::<Bytes>(value).err(),
            "BitRate" => serde_json::from_value::<BitRate>(value).err(),
            "Percent" => serde_json::from_value::<Percent>(value).err(),
            "IterationRange" => serde_json::from_value::<IterationRange>(value).err(),
            "Fault" => {
                self.fault(node, path);
                None
            }
            _ => return false,
        };
        if let Some(error) = refused {
            let what = format!("`{path}`: {error}");
            self.problems.push(Problem::at(node.at, self.source, what));
        }
        true
    }

    fn fault(&mut self, node: &Node, path: &str) {
        let Content::Scalar(Value::String(text)) = &node.content else {
            return self.wrong_type("string", node, path);
        };
        if let Err(error) = text.parse::<Fault>() {
            let mut at = node.at;
            // The parser counts from the first character; a quote comes before it.
            let quoted = Problem::at(at, self.source, "").starts_with_quote();
            at.column += error.column as u64 - 1 + u64::from(quoted);
            let found = match error.found.as_str() {
                "" => "but the fault ends here".to_string(),
                found => format!("found `{found}`"),
            };
            let what = format!("`{path}` is no fault: expected {}, {found}", error.expected);
            let hint = error.hint.unwrap_or_else(|| format!("a fault reads like `{}`", Fault::EXAMPLE));
            self.problems.push(Problem::at(at, self.source, what).hint(hint));
        }
    }

    fn word(&mut self, words: &[&str], node: &Node, path: &str) {
        let Content::Scalar(Value::String(text)) = &node.content else {
            return self.wrong_type("string", node, path);
        };
        if words.contains(&text.as_str()) {
            return;
        }
        let hint = match nearest(text, words) {
            Some(close) => format!("did you mean `{close}`? known: {}", words.join(", ")),
            None => format!("known: {}", words.join(", ")),
        };
        let what = format!("`{path}` cannot be `{text}`");
        self.problems.push(Problem::at(node.at, self.source, what).hint(hint));
    }

    fn limits(&mut self, schema: &Value, value: &Value, node: &Node, path: &str) {
        let Some(number) = value.as_f64() else {
            return;
        };
        let (least, most) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
        let what = match (least, most) {
            (Some(least), _) if number < least => format!("`{path}` is {value}, at least {least} is needed"),
            (_, Some(most)) if number > most => format!("`{path}` is {value}, at most {most} is possible"),
            _ => return,
        };
        self.problems.push(Problem::at(node.at, self.source, what));
    }

    fn wrong_type(&mut self, wanted: &str, node: &Node, path: &str) {
        let wanted = match wanted {
            "object" => "a map of keys",
            "array" => "a list",
            "integer" => "a whole number",
            "number" => "a number",
            "boolean" => "true or false",
            _ => "a text",
        };
        let found = match &node.content {
            Content::Map(_) => "a map".to_string(),
            Content::List(_) => "a list".to_string(),
            Content::Scalar(Value::Null) => "nothing".to_string(),
            Content::Scalar(value) => format!("`{}`", value.to_string().trim_matches('"')),
        };
        let what = format!("{} must be {wanted}, found {found}", shown(path));
        self.problems.push(Problem::at(node.at, self.source, what));
    }
}

/// A path as messages show it.
fn shown(path: &str) -> String {
    if path == "the suite" { path.to_string() } else { format!("`{path}`") }
}

fn definition(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// The type a schema asks for, null aside.
fn type_name(schema: &Value) -> Option<&str> {
    match &schema["type"] {
        Value::String(name) => Some(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).find(|name| *name != "null"),
        _ => None,
    }
}

fn allows_null(schema: &Value) -> bool {
    let null = Value::from("null");
    schema["type"].as_array().is_some_and(|names| names.contains(&null))
        || schema["anyOf"].as_array().is_some_and(|variants| variants.iter().any(|v| v["type"] == null))
}

/// The words of an enumeration; `None` when the schema is not one.
fn words(schema: &Value) -> Option<Vec<&str>> {
    if let Some(words) = schema["enum"].as_array() {
        return Some(words.iter().filter_map(Value::as_str).collect());
    }
    let mut words = Vec::new();
    for variant in schema["oneOf"].as_array()? {
        match variant["const"].as_str() {
            Some(word) => words.push(word),
            None => words.extend(variant["enum"].as_array()?.iter().filter_map(Value::as_str)),
        }
    }
    Some(words)
}

fn fits(value: &Value, wanted: &str) -> bool {
    match wanted {
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        _ => false,
    }
}
