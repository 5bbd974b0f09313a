//! R2CC under unmodified NCCL: a network plugin whose communicators own paths over every NIC and outlive the
//! loss of any of them, on the repair machines and the TCP driver of the native engine.
//!
//! NCCL finds the tables of `exports`, one a version of its interface, and calls them from its proxy threads.
//! `hub` is the process's one state: NICs, contexts, objects. `worker` threads own the sockets; `comm` is
//! what both sides share of a communicator, `view` what all processes know of the job's NICs. Nothing here needs CUDA, NCCL or ibverbs to be loaded.

mod abi;
mod comm;
mod events;
mod exports;
mod handle;
mod hub;
mod log;
mod nics;
mod view;
mod worker;

/// Name of the network, of `NCCL_NET` and, in lower case, of `NCCL_NET_PLUGIN`.
const NAME: &std::ffi::CStr = c"R2CC";

/// Makes NCCL load this plugin and no other network, unless the user said otherwise; nothing else.
extern "C" fn choose_ourselves() {
    let choices = [(c"NCCL_NET_PLUGIN", c"r2cc"), (c"NCCL_NET", NAME), (c"NCCL_NET_PLUGIN_REF_COUNT", c"1")];
    for (name, value) in choices {
        // SAFETY: both are C strings; the loader runs this before anything of this object is used, and what
        // the user has set stays.
        unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 0) };
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = choose_ourselves;
