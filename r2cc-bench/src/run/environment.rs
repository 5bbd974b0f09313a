//! Where a run was made: whatever may explain a figure.

use std::collections::BTreeMap;
use std::fs;

/// Kernel, processors, load, versions.
pub(super) fn describe() -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            facts.insert(name.to_owned(), value);
        }
    };
    let first_line = |path: &str| fs::read_to_string(path).ok().and_then(|t| t.lines().next().map(str::to_owned));
    fact("r2cc", Some(env!("CARGO_PKG_VERSION").to_owned()));
    fact("build", Some(if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned()));
    fact("kernel", first_line("/proc/sys/kernel/osrelease"));
    fact("load_average", first_line("/proc/loadavg"));
    fact("processors", std::thread::available_parallelism().ok().map(|n| n.to_string()));
    let cpu = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        line.split(':').nth(1).map(|name| name.trim().to_owned())
    });
    fact("processor", cpu);
    fact("clock_source", first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource"));
    facts
}
