//! Clusters: where ranks run.
