//! Functions that do nothing but be called: tracers put uprobes on them.

/// Defines a mark of two numbers, exported under its own name.
///
/// It is a naked function that starts with a push, which the kernel emulates instead of single-stepping, so that a
/// uprobe on it costs well under a microsecond. Elsewhere than on x86-64 an ordinary one that is never inlined.
macro_rules! mark {
    ($(#[$doc:meta])* $name:ident($first:ident, $second:ident)) => {
        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($first: u64, $second: u64) {
            core::arch::naked_asm!("push rbp", "mov rbp, rsp", "pop rbp", "ret")
        }

        $(#[$doc])*
        #[cfg(not(target_arch = "x86_64"))]
        #[inline(never)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($first: u64, $second: u64) {
            std::hint::black_box(($first, $second));
        }
    };
}
pub(crate) use mark;
