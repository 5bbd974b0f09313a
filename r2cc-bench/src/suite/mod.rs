//! Suite files.
