//! A host for the net plugin: two such processes do with it what NCCL does, and check every byte. Driven by
//! lines: a script in JSON as its argument, handles and orders on stdin, answers on stdout.
//!
//! Orders: `handles HEX…` after our own `handles HEX…`; then each process sends and receives on every
//! communicator, answers `progress N` now and then, and `done {…}` or `failed {…}` at the end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a host that cannot go on has failed"
)]

mod plain;
mod plugin;
mod traffic;

use std::collections::BTreeSet;
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plugin::{Plugin, Ptr, WARNINGS};
use serde::Deserialize;
use serde_json::json;
use traffic::{Outcome, Traffic};

/// What to do.
#[derive(Clone, Debug, Deserialize)]
struct Script {
    /// The plugin.
    plugin: String,
    /// Which of its tables.
    version: u32,
    /// Communicators in each direction.
    comms: usize,
    /// Messages of each communicator.
    messages: u64,
    /// Requests of a communicator and direction under way.
    in_flight: usize,
    /// Length of every message; none: from 0 bytes to 4 MiB.
    bytes: Option<usize>,
    /// Fill and check the messages.
    check: bool,
    /// Close with requests under way after this many messages.
    abandon: Option<u64>,
    /// How often to do it all, from loading the plugin to unloading it.
    rounds: usize,
    /// Every receive of this message is posted one byte short.
    #[serde(default)]
    short: Option<u64>,
    /// Send in one direction only.
    #[serde(default)]
    receive_only: bool,
    #[serde(default)]
    send_only: bool,
    /// No plugin: the same messages over plain sockets.
    #[serde(default)]
    plain: bool,
}

/// Threads and descriptors of this process.
fn holdings() -> (usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).map(Iterator::count).unwrap_or(0);
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// What this process has used, the kernel's part of it included.
fn cpu_seconds() -> f64 {
    // SAFETY: a plain C struct of integers, which the call fills.
    let used = unsafe {
        let mut used: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut used);
        used
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(used.ru_utime) + seconds(used.ru_stime)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; 128] {
    let mut out = [0; 128];
    for (place, pair) in out.iter_mut().zip(text.as_bytes().chunks(2)) {
        *place = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    }
    out
}

fn order() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// One comm a context, as NCCL has it: all communicators of a round share one, and there is a second, idle one.
struct Connections {
    sends: Vec<Ptr>,
    receives: Vec<Ptr>,
    listeners: Vec<Ptr>,
}

fn set_up(script: &Script, plugin: Plugin, context: Ptr) -> Result<Connections, i32> {
    let listened: Vec<([u8; 128], Ptr)> =
        (0..script.comms).map(|_| plugin.listen(context)).collect::<Result<_, _>>()?;
    let own: Vec<String> = listened.iter().map(|(handle, _)| hex(handle)).collect();
    println!("handles {}", own.join(" "));
    let line = order();
    let mut handles: Vec<[u8; 128]> = line.split(' ').skip(1).map(unhex).collect();
    assert_eq!(handles.len(), script.comms, "{line}");
    let mut sends = vec![std::ptr::null_mut(); script.comms];
    let mut receives = vec![std::ptr::null_mut(); script.comms];
    // NCCL's service thread asks again and again, for all that is not there yet.
    let mut missing: BTreeSet<usize> = (0..script.comms * 2).collect();
    while !missing.is_empty() {
        let asked_at = Instant::now();
        for i in missing.clone() {
            let at = i / 2;
            let place = if i % 2 == 0 { &mut sends[at] } else { &mut receives[at] };
            *place =
                if i % 2 == 0 { plugin.connect(context, &mut handles[at])? } else { plugin.accept(listened[at].1)? };
            if !place.is_null() {
                missing.remove(&i);
            }
        }
        assert!(asked_at.elapsed() < Duration::from_secs(5), "connect and accept must not block");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Connections { sends, receives, listeners: listened.into_iter().map(|(_, listener)| listener).collect() })
}

fn round(script: &Script) -> Result<serde_json::Value, serde_json::Value> {
    if script.plain {
        return Ok(plain::round(script));
    }
    let plugin = Plugin::load(&script.plugin, script.version);
    assert_eq!(plugin.name(), "R2CC");
    let failed =
        |what: &str, status: i32| json!({"what": what, "status": status, "warnings": *WARNINGS.lock().unwrap()});
    let context = plugin.init(7).map_err(|status| failed("init", status))?;
    let idle = plugin.init(8).map_err(|status| failed("init", status))?;
    plugin.check_device();
    let connections = set_up(script, plugin, context).map_err(|status| failed("connect", status))?;
    // The listeners go as soon as their communicators are there.
    connections.listeners.iter().for_each(|listener| plugin.close_listen(*listener));
    println!("connected");
    let started = Instant::now();
    let over = AtomicBool::new(false);
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        // Registers and deregisters while messages are under way, as the service thread does.
        let (first, over) = (connections.sends[0] as usize, &over);
        scope.spawn(move || {
            let mut memory = vec![0_u8; 4096];
            while !over.load(Ordering::Relaxed) {
                let handle = plugin.reg_mr(first as Ptr, memory.as_mut_ptr(), memory.len());
                plugin.dereg_mr(first as Ptr, handle);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let threads: Vec<_> = (0..script.comms)
            .map(|at| {
                let (send, receive) = (connections.sends[at] as usize, connections.receives[at] as usize);
                scope.spawn(move || Traffic::new(script, plugin, at, send as Ptr, receive as Ptr).run())
            })
            .collect();
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        outcomes
    });
    let seconds = started.elapsed().as_secs_f64();
    let closing = Instant::now();
    connections.sends.iter().for_each(|comm| plugin.close_send(*comm));
    connections.receives.iter().for_each(|comm| plugin.close_recv(*comm));
    let close_ms = closing.elapsed().as_millis() as u64;
    // What is under way was lent until the close; from here on it is ours again, and gets another content.
    let buffers: Vec<Vec<u8>> = outcomes.iter().flat_map(|o| o.under_way.iter().cloned()).collect();
    drop(buffers);
    plugin.finalize(context);
    plugin.finalize(idle);
    plugin.unload();
    let statuses: Vec<i32> = outcomes.iter().filter_map(|outcome| outcome.status).collect();
    let bytes: u64 = outcomes.iter().map(|outcome| outcome.received_bytes).sum();
    let wrong: u64 = outcomes.iter().map(|outcome| outcome.wrong_bytes).sum();
    let report = json!({
        "seconds": seconds, "received_bytes": bytes, "wrong_bytes": wrong, "close_ms": close_ms,
        "statuses": statuses, "warnings": *WARNINGS.lock().unwrap(),
    });
    if statuses.is_empty() { Ok(report) } else { Err(report) }
}

fn main() {
    let script: Script = serde_json::from_str(&std::env::args().nth(1).expect("a script")).expect("a script");
    let mut before = holdings();
    // The event file that the user asks for stays open.
    before.1 += usize::from(std::env::var_os("R2CC_EVENTS").is_some());
    let mut last = json!(null);
    for _ in 0..script.rounds {
        match round(&script) {
            Ok(report) => last = report,
            Err(report) => {
                println!("failed {report}");
                // As a process whose job has been aborted: it lives on for a while.
                order();
                return;
            }
        }
    }
    let waited = Instant::now();
    while holdings() != before && waited.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let after = holdings();
    last["left"] =
        json!({"threads": after.0 as i64 - before.0 as i64, "descriptors": after.1 as i64 - before.1 as i64});
    last["cpu_seconds"] = json!(cpu_seconds());
    println!("done {last}");
    order();
}
