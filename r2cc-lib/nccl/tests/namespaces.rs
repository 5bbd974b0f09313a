//! The plugin between two processes on emulated nodes with three rails, called as NCCL calls it, with real cuts.
//! Needs root for namespaces and BPF.
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod hosts;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hosts::{Host, NICS, cluster, exchange, pair, script, with};
use r2cc_bench::cluster::{ClusterSpec, EmulatedCluster, Fabric, NicSpec, NodeSpec};
use r2cc_inject::{ArmRequest, Direction, Effect, FaultId, Injector, KernelTrigger, PortSpec};
use serde_json::{Value, json};

/// Ends a broken test, decides nothing.
const LEASE: Duration = Duration::from_secs(300);
const INVALID_USAGE: i64 = 5;
const REMOTE_ERROR: i64 = 6;

/// Messages received on any communicator when the host says so next.
fn progress(host: &mut Host) -> u64 {
    host.until(&["progress"]).trim().rsplit(' ').next().unwrap().parse().unwrap()
}

/// Every byte right, and nothing left in the process.
fn assert_clean(host: &mut Host) {
    assert_clean_but(host, json!({"threads": 0, "descriptors": 0}));
}

fn assert_clean_but(host: &mut Host, left: Value) {
    let (done, report) = host.outcome();
    assert!(done, "{report}");
    assert_eq!(report["wrong_bytes"], 0, "{report}");
    assert!(report["received_bytes"].as_u64().unwrap() > 0);
    assert_eq!(report["left"], left, "{report}");
}

/// Ends with an error of this status, told in words that name it.
fn assert_failed(host: &mut Host, status: i64, words: &str) {
    let (done, report) = host.outcome();
    assert!(!done, "{report}");
    let statuses: Vec<i64> = match &report["statuses"] {
        Value::Null => vec![report["status"].as_i64().unwrap()],
        list => list.as_array().unwrap().iter().map(|s| s.as_i64().unwrap()).collect(),
    };
    assert!(statuses.iter().all(|s| *s == status), "{report}");
    let warnings = report["warnings"].as_array().unwrap();
    assert!(warnings.last().unwrap().as_str().unwrap().contains(words), "{words:?} is not what {report} says last");
}

/// Cuts these NICs of node-1, both ways.
fn cut(cluster: &EmulatedCluster, nics: &[&str]) -> (Injector, FaultId) {
    let node = &cluster.nodes()[0];
    let spec = |nic: &&str| PortSpec {
        node: node.name.clone(),
        nic: (*nic).to_owned(),
        netns: Some(node.netns.as_fd()),
        ifname: (*nic).to_owned(),
    };
    let mut injector = Injector::attach(&nics.iter().map(spec).collect::<Vec<_>>()).unwrap();
    let ports = nics.iter().map(|nic| injector.port(&node.name, nic).unwrap()).collect();
    let trigger = KernelTrigger::Now;
    let request =
        ArmRequest { ports, direction: Direction::Both, effect: Effect::Drop, trigger, until: None, lease: LEASE };
    let id = injector.arm(request).unwrap();
    (injector, id)
}

fn wait_for_drops(injector: &Injector, id: FaultId) {
    let end = Instant::now() + LEASE;
    while injector.status(id).unwrap().packets_dropped.total() == 0 {
        assert!(Instant::now() < end, "the cut stopped nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn every_version_moves_every_byte_and_leaves_nothing_behind_when_unloaded_and_loaded_again() {
    let cluster = cluster(None);
    for version in 6..=12 {
        let script = with(script(version), json!({"rounds": 2}));
        let mut hosts = pair(&cluster, [&script, &script], &[]);
        exchange(&mut hosts);
        hosts.iter_mut().for_each(assert_clean);
    }
}

#[test]
fn a_nic_dies_among_messages_and_comes_back_and_no_byte_is_wrong() {
    a_nic_dies_and_comes_back(1);
}

#[test]
fn a_nic_dies_among_messages_that_take_turns_on_two_links() {
    a_nic_dies_and_comes_back(2);
}

fn a_nic_dies_and_comes_back(stripes: usize) {
    let cluster = cluster(Some(1_000_000_000));
    let folder = std::env::temp_dir().join(format!("r2cc-nccl-{}-{stripes}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let events = folder.join("events-%p.jsonl");
    let script = with(script(11), json!({"messages": 3000}));
    let sockets = folder.join("status-%p");
    let number = stripes.to_string();
    let variables = [
        ("R2CC_EVENTS", events.to_str().unwrap()),
        ("R2CC_STATUS", sockets.to_str().unwrap()),
        ("R2CC_STRIPES", &number),
    ];
    let mut hosts = pair(&cluster, [&script, &script], &variables);
    while progress(&mut hosts[0]) < 64 {}
    let (mut injector, id) = cut(&cluster, &["mlx5_2"]);
    wait_for_drops(&injector, id);
    let own = folder.join(format!("events-{}.jsonl", hosts[0].child.id()));
    let end = Instant::now() + LEASE;
    while !std::fs::read_to_string(&own).unwrap().contains("\"to\":\"failed\"") {
        assert!(Instant::now() < end, "the cut was never noticed");
        std::thread::sleep(Duration::from_millis(5));
    }
    let socket = folder.join(format!("status-{}", hosts[0].child.id()));
    let status: r2cc::status::ProcessStatus = serde_json::from_str(&r2cc::status::read(&socket).unwrap()).unwrap();
    let links = || status.comms.iter().flat_map(|comm| &comm.links);
    let lost = links().flat_map(|link| &link.paths).find(|path| path.state != "live");
    assert!(lost.is_some_and(|path| path.nic == "mlx5_2" && path.peer_nic == "mlx5_2"), "{status:#?}");
    assert!(status.comms.iter().any(|comm| comm.last_transition.is_some() && comm.payload_bytes > 0), "{status:#?}");
    injector.heal(id).unwrap();
    // Whoever has asked for a status can ask by SIGUSR1 until the process ends: a handler is never taken away.
    hosts.iter_mut().for_each(|host| assert_clean_but(host, json!({"threads": 1, "descriptors": 2})));
    assert!(!socket.exists(), "the socket goes with its last I/O thread");
    let lines: Vec<Value> =
        std::fs::read_to_string(own).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let failed: Vec<&Value> = lines.iter().filter(|l| l["event"] == "path" && l["to"] == "failed").collect();
    assert!(
        !failed.is_empty() && failed.iter().all(|l| l["nic"] == "mlx5_2" && l["peer_nic"] == "mlx5_2"),
        "{failed:?}"
    );
    // Between two nodes either end may be to blame; when the NIC has come back, neither is.
    let views: Vec<&Value> = lines.iter().filter(|l| l["event"] == "view").map(|l| &l["view"]).collect();
    let candidates = json!({"kind": "one-of", "candidates": ["node-1/mlx5_2", "node-2/mlx5_2"]});
    assert_eq!(views.first().unwrap()[0]["component"], candidates, "{views:?}");
    let totals: Vec<&Value> = lines.iter().filter(|l| l["event"] == "totals").collect();
    assert!(
        totals.len() == 2 * stripes && totals.iter().all(|t| t["payload_bytes"].as_u64().unwrap() > 0),
        "{totals:?}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn every_io_thread_has_a_communicator_of_its_own_where_there_are_enough() {
    let cluster = cluster(Some(1_000_000_000));
    let script = with(script(11), json!({"messages": 1000}));
    let mut hosts = pair(&cluster, [&script, &script], &[("R2CC_IO_THREADS", "4")]);
    // Two of each direction; a thread that has none ends after 100 ms.
    hosts[0].until(&["connected"]);
    std::thread::sleep(Duration::from_millis(500));
    let tasks = std::fs::read_dir(format!("/proc/{}/task", hosts[0].child.id())).unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    assert_eq!(names.filter(|name| name.trim() == "r2cc-net").count(), 4);
    hosts.iter_mut().for_each(assert_clean);
}

#[test]
fn with_all_nics_dead_both_ends_get_an_error_that_says_so() {
    let cluster = cluster(Some(1_000_000_000));
    let script = with(script(12), json!({"messages": 100_000}));
    let mut hosts = pair(&cluster, [&script, &script], &[("R2CC_LINK_BOUND_MS", "1500")]);
    while progress(&mut hosts[0]) < 32 {}
    let (injector, id) = cut(&cluster, &NICS);
    wait_for_drops(&injector, id);
    hosts.iter_mut().for_each(|host| assert_failed(host, REMOTE_ERROR, "are down or unreachable"));
}

#[test]
fn a_close_with_requests_under_way_ends_the_other_side_too() {
    let cluster = cluster(None);
    let lasting = with(script(11), json!({"messages": 100_000}));
    let leaving = with(lasting.clone(), json!({"abandon": 40}));
    let mut hosts = pair(&cluster, [&leaving, &lasting], &[]);
    let (done, report) = hosts[0].outcome();
    assert!(done && report["wrong_bytes"] == 0, "{report}");
    assert_eq!(report["left"], json!({"threads": 0, "descriptors": 0}));
    assert_failed(&mut hosts[1], REMOTE_ERROR, "closed the communicator with messages under way");
}

#[test]
fn a_message_longer_than_its_receive_is_an_error_on_both_ends() {
    let cluster = cluster(None);
    let both = with(script(9), json!({"bytes": 100_000, "comms": 1, "messages": 1000}));
    let fair = with(both.clone(), json!({"send_only": true}));
    let short = with(both, json!({"receive_only": true, "short": 40}));
    let mut hosts = pair(&cluster, [&short, &fair], &[]);
    assert_failed(&mut hosts[0], INVALID_USAGE, "message_bytes: 100000 } of a message that should have 99999 bytes");
    assert_failed(&mut hosts[1], REMOTE_ERROR, "the other end failed");
}

#[test]
fn nodes_with_other_names_numbers_and_orders_of_nics_use_the_rails_that_they_share() {
    let nic = |name: &str, rail| NicSpec { name: name.into(), rail, rate_bits_s: None };
    let nodes = vec![
        NodeSpec { name: "node-1".into(), nics: vec![nic("mlx5_0", 0), nic("mlx5_2", 1), nic("mlx5_3", 2)] },
        NodeSpec { name: "node-2".into(), nics: vec![nic("ens9", 2), nic("ens4", 1)] },
    ];
    let cluster = EmulatedCluster::build(&ClusterSpec { nodes, fabric: Fabric::Rails }).unwrap();
    let script = script(10);
    let mut hosts = pair(&cluster, [&script, &script], &[]);
    hosts.iter_mut().for_each(assert_clean);
    let counters = cluster.counters().unwrap();
    for (nic, used) in [("mlx5_0", false), ("mlx5_2", true), ("mlx5_3", true), ("ens9", true), ("ens4", true)] {
        let bytes = counters.iter().find(|c| c.nic == nic).unwrap().tx_bytes;
        assert_eq!(bytes > 1_000_000, used, "{nic} sent {bytes} bytes");
    }
}

#[test]
fn foreign_handles_and_unknown_nics_are_refused_with_the_reason() {
    let cluster = cluster(None);
    let script = script(8);
    let mut host = Host::start(&cluster, "node-1", &script, &[]);
    let handles = host.until(&["handles"]);
    // Another plugin's magic.
    host.tell(&handles.replace(" 52324e50", " 00000000"));
    assert_failed(&mut host, INVALID_USAGE, "not of this plugin");
    let mut lost = Host::start(&cluster, "node-1", &script, &[("R2CC_IFNAME", "ib")]);
    assert_failed(&mut lost, INVALID_USAGE, "mlx5_0, mlx5_2, mlx5_3");
}
