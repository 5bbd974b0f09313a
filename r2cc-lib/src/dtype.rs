//! Element types and reduction operators.
