//! The checked-in kernel object is what its source says.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::{path::Path, process::Command};

#[test]
fn the_checked_in_object_is_built_from_the_checked_in_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ebpf");
    let recorded = std::fs::read_to_string(folder.join("clang-version")).unwrap();
    let present = Command::new("clang-19").arg("--version").output();
    let present = present.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let same = present.as_ref().is_ok_and(|text| text.lines().next() == Some(recorded.trim()));
    if !same {
        // Another compiler makes other bytes; only there the rebuilt object is not comparable.
        assert!(std::env::var_os("CI").is_none(), "CI needs {}", recorded.trim());
        eprintln!("skipped: {} is not installed, found {present:?}", recorded.trim());
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let rebuilt = scratch.path().join("fault.bpf.o");
    let status = Command::new(folder.join("build.sh")).arg(&rebuilt).status();
    assert!(status.unwrap().success());
    assert!(
        std::fs::read(rebuilt).unwrap() == std::fs::read(folder.join("fault.bpf.o")).unwrap(),
        "fault.bpf.o is older than fault.bpf.c: run `make ebpf`"
    );
}
