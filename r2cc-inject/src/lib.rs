//! Fault injector: blocks NICs at exact collective iterations.
