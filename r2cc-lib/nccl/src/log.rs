//! Lines to NCCL's log, under NCCL's own levels; before it has given us its log, to tracing alone.

use std::ffi::CString;
use std::sync::{PoisonError, RwLock};

use crate::abi::{LOG_FLAGS, Level, LogFn};

static LOG: RwLock<Option<LogFn>> = RwLock::new(None);

/// Takes NCCL's log function.
pub(crate) fn install(function: Option<LogFn>) {
    if function.is_some() {
        *LOG.write().unwrap_or_else(PoisonError::into_inner) = function;
    }
    static TRACING: std::sync::Once = std::sync::Once::new();
    TRACING.call_once(|| {
        if let Ok(filter) = tracing_subscriber::EnvFilter::try_from_env("R2CC_LOG") {
            // Fails only if there is a subscriber already.
            let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
        }
    });
}

fn line(level: Level, text: &str) {
    let function = *LOG.read().unwrap_or_else(PoisonError::into_inner);
    let Some(function) = function else { return };
    // A text with a zero in it cannot be a C string; ours have none.
    let Ok(text) = CString::new(text) else { return };
    // SAFETY: NCCL's logger is a printf: the format takes the one string that is passed.
    unsafe { function(level as i32, LOG_FLAGS, c"r2cc".as_ptr(), 0, c"R2CC: %s".as_ptr(), text.as_ptr()) };
}

/// What the user must read: the last such line is the text of `ncclGetLastError`.
pub(crate) fn warn(text: &str) {
    tracing::warn!("{text}");
    line(Level::Warn, text);
}

/// What helps to understand a run.
pub(crate) fn info(text: &str) {
    tracing::info!("{text}");
    line(Level::Info, text);
}
