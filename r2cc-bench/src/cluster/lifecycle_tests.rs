//! What is left of a cluster when its bench goes: real processes, really killed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use super::state::{start_time, survey_in, sweep_in};
use super::*;

const HOLDER: &str = "R2CC_TEST_HOLDER_SCRIPT";
const ENTRANT: &str = "R2CC_TEST_ENTRANT_CLUSTER";
/// Long enough for a busy machine; nothing is measured with it.
const PATIENCE: Duration = Duration::from_secs(20);

fn small() -> ClusterSpec {
    ClusterSpec::uniform(2, &["mlx5_0"], Some(100_000_000), Fabric::Rails)
}

#[test]
#[ignore = "the bench that the tests below start and kill"]
fn holder() {
    let Some(script) = env::var_os(HOLDER) else {
        return;
    };
    let cluster = EmulatedCluster::build(&small()).unwrap();
    let mut command = cluster.command("node-1", Path::new("/bin/sh")).unwrap();
    let mut worker = command.arg("-c").arg(script).spawn().unwrap();
    worker.wait().unwrap();
}

#[test]
#[ignore = "the process that a test below lets into a node"]
fn entrant() {
    let Some(cluster) = env::var(ENTRANT).ok() else {
        return;
    };
    let script = "echo \"host=$(cat /proc/sys/kernel/hostname)\"; cat /proc/self/net/dev";
    let argv = ["/bin/sh", "-c", script].map(str::to_owned);
    let error = enter("node-2", Some(&cluster), &argv).unwrap_err();
    panic!("{error}");
}

fn myself(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([&format!("cluster::lifecycle_tests::{test}"), "--exact", "--ignored", "--nocapture"])
        .stdin(Stdio::null());
    command
}

/// Starts a bench that holds a cluster and runs `script` in its node-1.
fn start_holder(script: &str) -> (Child, ClusterState) {
    let child = myself("holder").env(HOLDER, script).stdout(Stdio::null()).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let state = eventually("the holder writes its state file", || {
        let running = survey().unwrap().running;
        running.into_iter().find(|state| state.pid == pid)
    });
    (child, state)
}

fn eventually<T>(claim: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "never: {claim}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Every process inside one of the namespaces, and every descriptor open on one.
fn users_of(inodes: &[u64]) -> Vec<PathBuf> {
    let mut users = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let mut paths = vec![process.path().join("ns/net")];
        if let Ok(descriptors) = fs::read_dir(process.path().join("fd")) {
            paths.extend(descriptors.flatten().map(|descriptor| descriptor.path()));
        }
        users.extend(paths.into_iter().filter(|path| {
            let is_namespace = fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("net:["));
            is_namespace && fs::metadata(path).is_ok_and(|found| inodes.contains(&found.ino()))
        }));
    }
    users
}

fn inodes(state: &ClusterState) -> Vec<u64> {
    let nodes = state.nodes.iter().map(|node| node.netns_inode);
    nodes.chain([state.switch.netns_inode]).collect()
}

fn file_of(state: &ClusterState) -> PathBuf {
    PathBuf::from(format!("/run/r2cc/cluster-{}.json", state.id))
}

#[test]
fn a_killed_bench_leaves_no_namespace_and_no_worker() {
    let (mut bench, state) = start_holder("exec sleep 60");
    let inodes = inodes(&state);
    eventually("the worker is in its node", || {
        let inside = users_of(&inodes[..1]);
        inside.iter().any(|path| path.ends_with("ns/net")).then_some(())
    });
    assert!(users_of(&inodes).len() >= 4, "descriptors and a worker");

    bench.kill().unwrap();
    bench.wait().unwrap();
    eventually("every user of the namespaces is gone", || users_of(&inodes).is_empty().then_some(()));
    sweep().unwrap();
    assert!(!file_of(&state).exists());
}

#[test]
fn an_escaped_process_is_reported_until_it_ends_and_never_killed() {
    // A grandchild does not inherit the parent-death signal.
    let (mut bench, state) = start_holder("sleep 60 & wait");
    let escaped = eventually("the grandchild runs in its node", || {
        let inside = users_of(&inodes(&state)[..1]);
        inside.iter().find_map(|path| {
            let pid = path.strip_prefix("/proc").ok()?.iter().next()?.to_str()?;
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            (comm == "sleep\n").then(|| pid.parse::<i32>().unwrap())
        })
    });
    bench.kill().unwrap();
    bench.wait().unwrap();
    let survey = eventually("only the grandchild is left", || {
        let mut survey = sweep().unwrap();
        survey.orphans.retain(|orphan| orphan.cluster == state.id);
        (survey.orphans.len() == 1).then_some(survey)
    });
    let expected =
        Orphan { cluster: state.id.clone(), node: "node-1".to_owned(), pid: escaped, command: "sleep".to_owned() };
    assert_eq!(survey.orphans, [expected]);
    assert!(file_of(&state).exists(), "the file is what finds it again");

    let escaped = nix::unistd::Pid::from_raw(escaped);
    nix::sys::signal::kill(escaped, nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("the file goes with the orphan", || {
        sweep().unwrap();
        (!file_of(&state).exists()).then_some(())
    });
}

#[test]
fn a_cluster_takes_its_state_file_with_it() {
    let cluster = EmulatedCluster::build(&small()).unwrap();
    let id = cluster.id().to_owned();
    let known = |id: &str| survey().unwrap().running.into_iter().find(|s| s.id == id);
    let state = known(&id).unwrap();
    assert_eq!(state.nodes[1].nics[0].addr, "10.77.1.2/24");
    assert_eq!(state.nodes[1].nics[0].rail, "rail-1");
    let inode = fs::metadata(&state.nodes[0].netns).unwrap().ino();
    assert_eq!(inode, state.nodes[0].netns_inode);
    drop(cluster);
    assert_eq!(known(&id), None);
    assert!(!file_of(&state).exists());
}

#[test]
fn a_process_enters_a_node_of_a_running_cluster() {
    let cluster = EmulatedCluster::build(&small()).unwrap();
    let output = myself("entrant").env(ENTRANT, cluster.id()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("host=node-2"), "{text}");
    assert!(text.contains("mlx5_0:") && text.contains("mgmt0:"), "{text}");

    let argv = ["true".to_owned()];
    let error = enter("node-7", Some(cluster.id()), &argv).unwrap_err();
    assert!(error.to_string().contains("node-1, node-2"), "{error}");
    let error = enter("node-1", Some("no-such"), &argv).unwrap_err();
    assert!(matches!(error, ClusterError::NotRunning { .. }), "{error}");
    let error = enter("node-1", Some(cluster.id()), &[]).unwrap_err();
    assert!(matches!(error, ClusterError::Spec { .. }), "{error}");
}

#[test]
fn only_files_of_dead_writers_are_swept() {
    let directory = tempfile::tempdir().unwrap();
    let me = i32::try_from(std::process::id()).unwrap();
    let mut child = Command::new("/bin/true").spawn().unwrap();
    let dead = i32::try_from(child.id()).unwrap();
    child.wait().unwrap();
    let mine = start_time(me).unwrap();
    let state = |id: &str, pid, start_time| ClusterState {
        id: id.to_owned(),
        pid,
        start_time,
        nodes: Vec::new(),
        switch: SwitchState { netns: PathBuf::new(), netns_inode: 0 },
    };
    let put = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    for state in [state("alive", me, mine), state("reused-pid", me, mine + 1), state("dead", dead, mine)] {
        let text = serde_json::to_string(&state).unwrap();
        put(&format!("cluster-{}.json", state.id), &text);
    }
    put(&format!("cluster-{me}-7.partial"), "{");
    put(&format!("cluster-{dead}-7.partial"), "{");
    put("somebody-elses.json", "{}");

    let survey = sweep_in(directory.path()).unwrap();
    assert_eq!(survey.running.len(), 1);
    assert_eq!(survey.stale.len(), 3, "{survey:?}");
    let mut left: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let partial = format!("cluster-{me}-7.partial");
    assert_eq!(left, [&partial, "cluster-alive.json", "somebody-elses.json"]);
    assert!(survey_in(&directory.path().join("absent")).unwrap().stale.is_empty());
}
