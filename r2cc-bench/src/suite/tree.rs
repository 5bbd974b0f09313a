//! A YAML document as a tree in which every key and value knows its place.
//!
//! Only what error messages need: the typed suite is read from the same tree, so that a
//! place can be given for whatever turns out wrong later. Knows nothing of suites.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_yaml::Spanned;

/// Where a node begins; lines and columns count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) line: u64,
    pub(super) column: u64,
}

/// One key of a map with its value.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_at: Place,
    pub(super) node: Node,
}

/// A value and its place.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) at: Place,
    pub(super) content: Content,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Scalar(Value),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// Reads one document.
pub(super) fn read(text: &str) -> Result<Node, serde_yaml::Error> {
    // As YAML 1.2 has it: `off` is a word, which names a library mode, and no boolean.
    serde_yaml::from_str_with_options(text, serde_yaml::options! { strict_booleans: true })
}

impl Node {
    /// The value without its places.
    pub(super) fn to_value(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::List(nodes) => Value::Array(nodes.iter().map(Self::to_value).collect()),
            Content::Map(entries) => {
                Value::Object(entries.iter().map(|entry| (entry.key.clone(), entry.node.to_value())).collect())
            }
        }
    }

    /// The node under `steps`: keys, or list positions in decimal. Where the path leaves the
    /// document, the deepest node that exists.
    pub(super) fn find(&self, steps: &[&str]) -> &Self {
        let Some((step, rest)) = steps.split_first() else {
            return self;
        };
        let child = match &self.content {
            Content::Map(entries) => entries.iter().find(|entry| entry.key == *step).map(|entry| &entry.node),
            Content::List(nodes) => step.parse::<usize>().ok().and_then(|n| nodes.get(n)),
            Content::Scalar(_) => None,
        };
        child.map_or(self, |node| node.find(rest))
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self { at: place(&spanned), content: spanned.value })
    }
}

fn place<T>(spanned: &Spanned<T>) -> Place {
    Place { line: spanned.referenced.line(), column: spanned.referenced.column() }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Content, E> {
        Ok(Content::Scalar(value.into()))
    }

    fn visit_unit<E>(self) -> Result<Content, E> {
        Ok(Content::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Content, E> {
        Ok(Content::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = seq.next_element()? {
            nodes.push(node);
        }
        Ok(Content::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let node = map.next_value()?;
            entries.push(Entry { key_at: place(&key), key: key.value, node });
        }
        Ok(Content::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(node: &Node) -> (u64, u64) {
        (node.at.line, node.at.column)
    }

    #[test]
    fn keys_and_values_know_their_line_and_column() {
        let root = read("a: 1\nb:\n  - {c: x, dd: 2.5}\n  - y\n").unwrap();
        assert_eq!(at(root.find(&["a"])), (1, 4));
        assert_eq!(at(root.find(&["b", "0", "dd"])), (3, 16));
        assert_eq!(at(root.find(&["b", "1"])), (4, 5));
        let Content::Map(entries) = &root.find(&["b", "0"]).content else {
            panic!("not a map");
        };
        assert_eq!((entries[1].key_at.line, entries[1].key_at.column), (3, 12));
    }

    #[test]
    fn a_path_that_leaves_the_document_ends_at_the_deepest_node() {
        let root = read("a:\n  b: 1\n").unwrap();
        assert_eq!(at(root.find(&["a", "nowhere", "deeper"])), at(root.find(&["a"])));
    }

    #[test]
    fn the_value_is_the_documents() {
        let root = read("a: [1, x, true, null, 0.5]\n").unwrap();
        assert_eq!(root.to_value(), serde_json::json!({"a": [1, "x", true, null, 0.5]}));
    }
}
