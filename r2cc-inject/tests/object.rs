//! The checked-in kernel object is what its source says.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::{path::Path, process::Command};

#[test]
fn the_checked_in_object_is_built_from_the_checked_in_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ebpf");
    let recorded = std::fs::read_to_string(folder.join("clang-version")).unwrap();
    let present = Command::new("clang-19").arg("--version").output();
    let Ok(present) = present.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()) else {
        assert!(std::env::var_os("CI").is_none(), "CI needs clang-19, llvm-19 and libbpf-dev");
        eprintln!("skipped: clang-19 is not installed");
        return;
    };
    let scratch = tempfile::tempdir().unwrap();
    let rebuilt = scratch.path().join("fault.bpf.o");
    let status = Command::new(folder.join("build.sh")).arg(&rebuilt).status();
    assert!(status.unwrap().success());
    if present.lines().next() != Some(recorded.trim()) {
        // Another compiler makes other bytes: that the source builds is all that can be told.
        eprintln!("not compared: the object was made by {}, here is {present}", recorded.trim());
        return;
    }
    assert!(
        std::fs::read(rebuilt).unwrap() == std::fs::read(folder.join("fault.bpf.o")).unwrap(),
        "fault.bpf.o is older than fault.bpf.c: run `make ebpf`"
    );
}
