//! Link arguments of the shared object: the name under which NCCL looks for it, and no unloading.

fn main() {
    // NCCL's own dlopen of `libnccl-net-r2cc.so` finds the copy that is loaded already, under whatever file name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-r2cc.so");
    // NCCL unloads a plugin with the last communicator; a driver thread may be on its way out then.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
