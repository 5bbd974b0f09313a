//! Two namespaces joined by veth pairs, and traffic between them. Made with `ip` by the
//! test itself, gone when dropped. Needs root.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::{
    fs::File,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use r2cc_inject::{ArmRequest, Direction, Effect, FaultId, Injector, KernelTrigger, PortId, PortSpec};

/// A lease that no test outlives.
pub(crate) const LONG: Duration = Duration::from_secs(600);

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Namespaces `here` (the ports under test: nic0, nic1, …) and `there` (their peers:
/// far0, far1, …). Addresses 10.88.I.1 and .2; neighbours fixed and IPv6 off, so that
/// not one packet comes but what the test sends.
pub(crate) struct Lab {
    pub(crate) here: String,
    pub(crate) there: String,
    pub(crate) pairs: u32,
}

impl Lab {
    pub(crate) fn new(pairs: u32) -> Self {
        // SAFETY: asks for a number.
        let is_root = unsafe { libc::geteuid() } == 0;
        assert!(is_root, "this test makes network namespaces: run it as root");
        let unique = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let lab = Self { here: format!("r2t{unique}a"), there: format!("r2t{unique}b"), pairs };
        run("ip", &["netns", "add", &lab.here]);
        run("ip", &["netns", "add", &lab.there]);
        for ns in [&lab.here, &lab.there] {
            in_ns(ns, || {
                std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").ok();
            });
        }
        for i in 0..pairs {
            let (near, far) = (format!("nic{i}"), format!("far{i}"));
            let (near_mac, far_mac) = (format!("02:00:00:00:{i:02x}:01"), format!("02:00:00:00:{i:02x}:02"));
            ip(&format!(
                "link add {near} netns {} address {near_mac} type veth peer name {far} netns {} address {far_mac}",
                lab.here, lab.there
            ));
            for (ns, name, host, other, mac) in
                [(&lab.here, &near, 1, 2, &far_mac), (&lab.there, &far, 2, 1, &near_mac)]
            {
                ip(&format!("-n {ns} addr add 10.88.{i}.{host}/24 dev {name}"));
                ip(&format!("-n {ns} link set {name} up"));
                ip(&format!("-n {ns} neigh replace 10.88.{i}.{other} lladdr {mac} dev {name} nud permanent"));
            }
        }
        lab
    }

    pub(crate) fn here_fd(&self) -> File {
        File::open(format!("/run/netns/{}", self.here)).unwrap()
    }

    /// A process inside `here`, for commands that name a namespace by one.
    pub(crate) fn holder(&self) -> Holder {
        let mut command = Command::new("sleep");
        let ns = self.here_fd();
        command.arg("1000").stdin(Stdio::null());
        // SAFETY: between fork and exec only setns is called, which allocates nothing.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                setns(&ns, CloneFlags::CLONE_NEWNET).map_err(Into::into)
            });
        }
        Holder(command.spawn().unwrap())
    }

    /// What `ip` or `tc` prints about `here`.
    pub(crate) fn shown(&self, program: &str, line: &str) -> String {
        let output = Command::new(program).args(["-n", &self.here]).args(line.split(' ')).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A stream that sends for ever from `there` to `here` over pair `i`.
    pub(crate) fn inbound(&self, i: u32) -> Stream {
        Stream::start(&self.there, &self.here, &format!("10.88.{i}.1"))
    }

    /// A stream that sends for ever from `here` to `there` over pair `i`.
    pub(crate) fn outbound(&self, i: u32) -> Stream {
        Stream::start(&self.here, &self.there, &format!("10.88.{i}.2"))
    }

    /// Datagram sockets (sender there, receiver here) over pair `i`.
    pub(crate) fn datagrams(&self, i: u32) -> (UdpSocket, UdpSocket) {
        let receiver = in_ns(&self.here, || UdpSocket::bind(format!("10.88.{i}.1:0")).unwrap());
        let size: libc::c_int = 64 << 20;
        // SAFETY: sets an integer option on a live socket.
        let set = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&receiver),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                (&raw const size).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        let sender = in_ns(&self.there, || UdpSocket::bind(format!("10.88.{i}.2:0")).unwrap());
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for ns in [&self.here, &self.there] {
            Command::new("ip").args(["netns", "del", ns]).status().ok();
        }
    }
}

/// A process that only is; ends when dropped.
pub(crate) struct Holder(pub(crate) std::process::Child);

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Runs `work` on a thread inside the namespace.
pub(crate) fn in_ns<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
    let ns = File::open(format!("/run/netns/{name}")).unwrap();
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                setns(ns.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
                work()
            })
            .join()
            .unwrap()
    })
}

pub(crate) fn ip(line: &str) {
    run("ip", &line.split(' ').collect::<Vec<_>>());
}

pub(crate) fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
}

/// What `ip` and `tc` say about the ports, for tests that nothing is left.
pub(crate) fn traces(lab: &Lab) -> String {
    let mut text = String::new();
    for (program, arguments) in
        [("ip", vec!["-n", &lab.here, "-d", "link", "show"]), ("tc", vec!["-n", &lab.here, "qdisc", "show"])]
    {
        let output = Command::new(program).args(&arguments).output().unwrap();
        assert!(output.status.success());
        text.push_str(&String::from_utf8_lossy(&output.stdout));
    }
    text
}

/// Waits until `condition` holds; the bound is only there to end a broken test.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < end, "waited 30 s in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A TCP stream that sends as fast as it may, 2 MB/s or so.
pub(crate) struct Stream {
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    fn start(from: &str, to: &str, address: &str) -> Self {
        let listener = in_ns(to, || TcpListener::bind((address, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let mut sender = in_ns(from, || TcpStream::connect(address).unwrap());
        let (mut receiver, _) = listener.accept().unwrap();
        let (received, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let tick = Some(Duration::from_millis(50));
        sender.set_write_timeout(tick).unwrap();
        receiver.set_read_timeout(tick).unwrap();
        let threads = vec![
            std::thread::spawn({
                let stop = stop.clone();
                move || {
                    let block = [7; 4096];
                    while !stop.load(Relaxed) {
                        let _unsent = sender.write(&block);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }),
            std::thread::spawn({
                let (stop, received) = (stop.clone(), received.clone());
                move || {
                    let mut block = [0; 65536];
                    while !stop.load(Relaxed) {
                        if let Ok(n) = receiver.read(&mut block) {
                            received.fetch_add(n as u64, Relaxed);
                        }
                    }
                }
            }),
        ];
        let stream = Self { received, stop, threads };
        stream.wait_for_more();
        stream
    }

    pub(crate) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Waits until bytes arrive (again).
    pub(crate) fn wait_for_more(&self) {
        let before = self.received();
        wait_until("the stream moves", || self.received() > before + 8192);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}

pub(crate) fn attach(lab: &Lab) -> (Injector, PortId) {
    let netns = lab.here_fd();
    let specs: Vec<PortSpec<'_>> = (0..lab.pairs)
        .map(|i| PortSpec {
            node: "node-1".to_owned(),
            nic: format!("mlx5_{i}"),
            netns: Some(netns.as_fd()),
            ifname: format!("nic{i}"),
        })
        .collect();
    let injector = Injector::attach(&specs).unwrap();
    let port = injector.port("node-1", "mlx5_0").unwrap();
    assert_eq!(injector.port("node-1", "mlx5_99"), None);
    (injector, port)
}

pub(crate) fn request(port: PortId, effect: Effect) -> ArmRequest {
    ArmRequest {
        ports: vec![port],
        direction: Direction::Both,
        effect,
        trigger: KernelTrigger::Now,
        until: None,
        lease: LONG,
    }
}

/// Waits for the fault's first drop, then sees that not one more packet passes.
pub(crate) fn assert_dead(injector: &Injector, id: FaultId) {
    wait_until("a packet is dropped", || injector.status(id).unwrap().packets_dropped.total() > 0);
    let before = &injector.counters().unwrap()[0];
    let dropped = injector.status(id).unwrap().packets_dropped.total();
    wait_until("more packets are dropped", || injector.status(id).unwrap().packets_dropped.total() > dropped);
    let after = &injector.counters().unwrap()[0];
    assert_eq!(after.rx_passed, before.rx_passed);
    assert_eq!(after.tx_passed, before.tx_passed);
}
