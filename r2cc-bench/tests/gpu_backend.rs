//! The backend nccl where there is no GPU: it says what is missing, and leaves nothing behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails by its panic")]

use assert_cmd::Command;

/// The bench with every GPU hidden, so that the test says the same on a machine that has one.
fn bench(out: &std::path::Path, more: &[&str]) -> (i32, String) {
    let mut command = Command::cargo_bin("r2cc-bench").unwrap();
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.env("CUDA_VISIBLE_DEVICES", "").args(["run", "--quiet", "--out"]).arg(out).args(more);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().unwrap(), text)
}

#[test]
fn without_a_gpu_the_environment_is_not_ready_and_the_reason_is_told() {
    let out = tempfile::tempdir().unwrap();
    let (code, text) = bench(out.path(), &["suites/01.yaml", "--backend", "nccl", "--library", "none"]);
    assert_eq!(code, 4, "{text}");
    assert!(text.contains("the CUDA driver: ") || text.contains("a GPU: "), "{text}");
    assert!(text.contains("hint: "), "{text}");
    let summary = std::fs::read_to_string(out.path().join("summary.json")).unwrap();
    assert!(summary.contains("\"backend\": \"nccl\"") && summary.contains("\"verdict\": \"not-ready\""), "{summary}");
}

#[test]
fn a_suite_of_graphs_takes_the_backend_that_can_run_it() {
    let out = tempfile::tempdir().unwrap();
    assert_eq!(bench(out.path(), &["suites/08.yaml", "--library", "none"]).0, 4);
    let (code, text) = bench(out.path(), &["suites/08.yaml", "--backend", "host"]);
    assert_eq!(code, 64, "{text}");
    assert!(text.contains("--backend nccl"), "{text}");
}
