//! Keeps `r2cc_collective_begin` in the binary's dynamic symbols, where a uprobe finds it even after `strip`.

fn main() {
    println!("cargo:rustc-link-arg-bins=-rdynamic");
    println!("cargo:rerun-if-changed=build.rs");
}
