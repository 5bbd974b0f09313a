//! The plugin between processes, as NCCL uses it. Needs root for the namespaces.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]
