//! Command line of the fault injector.
fn main() {}
