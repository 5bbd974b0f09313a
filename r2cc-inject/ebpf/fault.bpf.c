// Kernel side of the fault injector: counts every port's traffic, decides at an exact
// call or byte that a fault begins, and drops packets while it lasts.
//
// Packet path: r2cc_rx_N (XDP, ingress) and r2cc_tx_N (TCX, egress), one pair a port;
// a port is a slot because an ifindex is unique only inside one network namespace.
// Call path: r2cc_call (uprobe), the fault and its role in the attach cookie.
// All of them share the maps below, so nothing in user space lies between a trigger
// and the verdict. src/kernel.rs mirrors every struct; each field is 64 bits wide so
// that both sides read and write it without tearing.
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#define MAX_PORTS 64
#define MAX_FAULTS 32

enum { RX, TX };
enum gate { GATE_FREE, GATE_ARMED, GATE_HEALED };
enum effect { EFFECT_MARK, EFFECT_DROP, EFFECT_LOSS, EFFECT_FLAP };
enum trigger { TRIGGER_NOW, TRIGGER_CALL, TRIGGER_WIRE };

struct flow {
	__u64 packets;
	__u64 bytes;
};

// Written here, read by user space. 128 bytes: one cache line a direction.
struct port {
	__u64 rx_arrived_bytes; // passed, dropped and being judged; the base of positions
	struct flow rx_passed;
	struct flow rx_dropped;
	__u64 rx_pad[3];
	struct flow tx_passed;
	struct flow tx_dropped;
	__u64 tx_pad[4];
};

// Written by user space: which faults look at a port, and what the port is called.
struct watch {
	__u64 faults; // bit f: fault f wants to see this port's packets
	char name[120];
};

// Written by user space before the gate opens, then constant.
struct rule {
	__u64 effect;
	__u64 directions; // bit RX, bit TX
	__u64 ports;      // bit p: the effect applies to port p
	__u64 base_port;  // bytes of a position are counted on this port's ingress
	__u64 trigger;
	__u64 bytes;
	__u64 call_n;
	__u64 call_filters_arg0;
	__u64 call_arg0;
	__u64 until_n;
	__u64 until_filters_arg0;
	__u64 until_arg0;
	__u64 loss_ppm;
	__u64 seed;
	__u64 down_ns;
	__u64 up_ns;
};

// Written by user space at any time.
struct control {
	__u64 gate;
	__u64 expires_ns;
	__u64 owner_pid;
	__u64 owner_kind; // 1: the owner ends cleanly when it is sent SIGTERM
	char label[224];
};

// Written here; zeroed by user space before the gate opens. A fault that begins at
// once, or is healed by hand, gets fired_ns, base_bytes and healed_ns from user space.
struct state {
	__u64 calls;
	__u64 until_calls;
	__u64 call_ns;
	__u64 base_bytes;
	__u64 base_set;
	__u64 fired_ns;
	__u64 bytes_before;
	__u64 snapshot_done;
	__u64 first_drop_ns;
	__u64 healed_ns;
	__u64 judged[2]; // packets a loss rule has decided, a direction
	__u64 dropped_packets[2];
	__u64 dropped_bytes[2];
	__u64 passed_expired; // packets that a lapsed lease let through
	__u64 pad;
};

struct snapshot {
	__u64 at_ns;
	struct flow rx_passed;
	struct flow rx_dropped;
	struct flow tx_passed;
	struct flow tx_dropped;
};

#define SHARED_ARRAY(NAME, TYPE, COUNT)                 \
	struct {                                        \
		__uint(type, BPF_MAP_TYPE_ARRAY);       \
		__uint(map_flags, BPF_F_MMAPABLE);      \
		__type(key, __u32);                     \
		__type(value, TYPE);                    \
		__uint(max_entries, COUNT);             \
	} NAME SEC(".maps")

SHARED_ARRAY(r2cc_ports, struct port, MAX_PORTS);
SHARED_ARRAY(r2cc_watch, struct watch, MAX_PORTS);
SHARED_ARRAY(r2cc_rules, struct rule, MAX_FAULTS);
SHARED_ARRAY(r2cc_control, struct control, MAX_FAULTS);
SHARED_ARRAY(r2cc_states, struct state, MAX_FAULTS);
SHARED_ARRAY(r2cc_snapshots, struct snapshot, MAX_FAULTS *MAX_PORTS);

// Set by the loader. FIRST_ARG_WORD: where the first integer argument lies in the
// probed process's registers, in 8-byte words (x86-64: rdi, 14; aarch64: x0, 0).
const volatile __u32 PORT_COUNT = MAX_PORTS;
const volatile __u32 FIRST_ARG_WORD = 14;

static __always_inline __u64 splitmix(__u64 x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

// Begins the fault, once: who wins the exchange takes the snapshot of all ports.
__noinline int r2cc_fire(__u32 fault, __u64 now, __u64 bytes_before)
{
	struct state *s = bpf_map_lookup_elem(&r2cc_states, &fault);
	if (!s)
		return 0;
	if (__sync_val_compare_and_swap(&s->fired_ns, 0, now) != 0)
		return 0;
	s->bytes_before = bytes_before;
	for (__u32 i = 0; i < MAX_PORTS; i++) {
		if (i >= PORT_COUNT)
			break;
		__u32 cell = fault * MAX_PORTS + i, port = i;
		struct port *p = bpf_map_lookup_elem(&r2cc_ports, &port);
		struct snapshot *snap = bpf_map_lookup_elem(&r2cc_snapshots, &cell);
		if (!p || !snap)
			break;
		snap->rx_passed = p->rx_passed;
		snap->rx_dropped = p->rx_dropped;
		snap->tx_passed = p->tx_passed;
		snap->tx_dropped = p->tx_dropped;
		snap->at_ns = bpf_ktime_get_ns();
	}
	// The exchange is also the barrier that orders the snapshot before its flag.
	__sync_lock_test_and_set(&s->snapshot_done, 1);
	return 1;
}

// One fault's verdict on one packet: 1 drop, 0 pass. `before`: bytes that had arrived
// on this port before this packet (ingress only).
__noinline int r2cc_judge(__u32 fault, __u32 port, __u32 direction, __u64 len, __u64 before)
{
	struct control *c = bpf_map_lookup_elem(&r2cc_control, &fault);
	struct rule *r = bpf_map_lookup_elem(&r2cc_rules, &fault);
	struct state *s = bpf_map_lookup_elem(&r2cc_states, &fault);
	if (!c || !r || !s || direction > TX || port >= MAX_PORTS)
		return 0;
	if (*(volatile __u64 *)&c->gate != GATE_ARMED || *(volatile __u64 *)&s->healed_ns)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	__u64 fired = *(volatile __u64 *)&s->fired_ns;
	if (*(volatile __u64 *)&c->expires_ns <= now) {
		if (fired)
			__sync_fetch_and_add(&s->passed_expired, 1);
		return 0;
	}
	if (!fired) {
		if (direction != RX || port != r->base_port || !r->bytes ||
		    !*(volatile __u64 *)&s->base_set)
			return 0;
		__u64 base = *(volatile __u64 *)&s->base_bytes;
		if (before + len < base + r->bytes)
			return 0;
		r2cc_fire(fault, now, before + len - base);
		fired = now;
	}
	if (!(r->ports >> port & 1) || !(r->directions >> direction & 1))
		return 0;

	int drop = 0;
	switch (r->effect) {
	case EFFECT_DROP:
		drop = 1;
		break;
	case EFFECT_LOSS: {
		__u64 index = __sync_fetch_and_add(&s->judged[direction], 1);
		__u64 draw = splitmix(r->seed ^ splitmix(index * 2 + direction)) >> 32;
		drop = draw * 1000000 >> 32 < r->loss_ppm;
		break;
	}
	case EFFECT_FLAP: {
		__u64 period = r->down_ns + r->up_ns;
		// Another CPU may have fired a moment after this one read the clock.
		__u64 since = now > fired ? now - fired : 0;
		drop = period && since % period < r->down_ns;
		break;
	}
	}
	if (drop) {
		__sync_fetch_and_add(&s->dropped_packets[direction], 1);
		__sync_fetch_and_add(&s->dropped_bytes[direction], len);
		__sync_val_compare_and_swap(&s->first_drop_ns, 0, now);
	}
	return drop;
}

__noinline int r2cc_verdict(__u32 port, __u32 direction, __u64 len)
{
	struct port *p = bpf_map_lookup_elem(&r2cc_ports, &port);
	struct watch *w = bpf_map_lookup_elem(&r2cc_watch, &port);
	if (!p || !w)
		return 0;
	__u64 before = 0;
	if (direction == RX)
		before = __sync_fetch_and_add(&p->rx_arrived_bytes, len);
	int drop = 0;
	__u64 faults = *(volatile __u64 *)&w->faults;
	if (faults) {
		for (__u32 f = 0; f < MAX_FAULTS; f++)
			if (faults >> f & 1)
				drop |= r2cc_judge(f, port, direction, len, before);
	}
	struct flow *flow = direction == RX ? (drop ? &p->rx_dropped : &p->rx_passed)
					    : (drop ? &p->tx_dropped : &p->tx_passed);
	__sync_fetch_and_add(&flow->packets, 1);
	__sync_fetch_and_add(&flow->bytes, len);
	return drop;
}

SEC("uprobe")
int r2cc_call(__u64 *registers)
{
	__u64 cookie = bpf_get_attach_cookie(registers);
	__u32 fault = cookie & 0xff;
	int is_until = cookie >> 8 & 1;
	struct control *c = bpf_map_lookup_elem(&r2cc_control, &fault);
	struct rule *r = bpf_map_lookup_elem(&r2cc_rules, &fault);
	struct state *s = bpf_map_lookup_elem(&r2cc_states, &fault);
	if (!c || !r || !s || *(volatile __u64 *)&c->gate != GATE_ARMED)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	if (*(volatile __u64 *)&c->expires_ns <= now)
		return 0;
	// Both are loaded, at fixed offsets: the verifier refuses a computed one.
	volatile __u64 *words = registers;
	__u64 x0 = words[0], rdi = words[14];
	__u64 arg0 = FIRST_ARG_WORD == 14 ? rdi : x0;

	if (is_until) {
		if (r->until_filters_arg0 && arg0 != r->until_arg0)
			return 0;
		if (__sync_fetch_and_add(&s->until_calls, 1) + 1 == r->until_n)
			__sync_val_compare_and_swap(&s->healed_ns, 0, now);
		return 0;
	}
	if (r->call_filters_arg0 && arg0 != r->call_arg0)
		return 0;
	if (__sync_fetch_and_add(&s->calls, 1) + 1 != r->call_n)
		return 0;
	__u32 base_port = r->base_port;
	struct port *p = bpf_map_lookup_elem(&r2cc_ports, &base_port);
	if (!p)
		return 0;
	s->call_ns = now;
	s->base_bytes = *(volatile __u64 *)&p->rx_arrived_bytes;
	__sync_lock_test_and_set(&s->base_set, 1);
	if (!r->bytes && !*(volatile __u64 *)&s->healed_ns)
		r2cc_fire(fault, now, 0);
	return 0;
}

// Which slot a packet belongs to is known only by the program that sees it.
#define PORT(N)                                                               \
	SEC("xdp") int r2cc_rx_##N(struct xdp_md *ctx)                        \
	{                                                                     \
		return r2cc_verdict(N, RX, ctx->data_end - ctx->data) ? XDP_DROP   \
								 : XDP_PASS;  \
	}                                                                     \
	SEC("classifier") int r2cc_tx_##N(struct __sk_buff *skb)              \
	{                                                                     \
		/* UNSPEC is TCX_NEXT: other programs and the qdisc go on */  \
		return r2cc_verdict(N, TX, skb->len) ? TC_ACT_SHOT : TC_ACT_UNSPEC; \
	}
#define PORTS8(A, B, C, D, E, F, G, H) \
	PORT(A) PORT(B) PORT(C) PORT(D) PORT(E) PORT(F) PORT(G) PORT(H)

PORTS8(0, 1, 2, 3, 4, 5, 6, 7)
PORTS8(8, 9, 10, 11, 12, 13, 14, 15)
PORTS8(16, 17, 18, 19, 20, 21, 22, 23)
PORTS8(24, 25, 26, 27, 28, 29, 30, 31)
PORTS8(32, 33, 34, 35, 36, 37, 38, 39)
PORTS8(40, 41, 42, 43, 44, 45, 46, 47)
PORTS8(48, 49, 50, 51, 52, 53, 54, 55)
PORTS8(56, 57, 58, 59, 60, 61, 62, 63)

// The helpers for maps and cookies are open to GPL-compatible programs only.
char LICENSE[] SEC("license") = "GPL";
