# No target: a release build placed in build/bin and build/lib. See README.md.
CARGO ?= cargo
# Debian packages that the tests use beside Rust, gcc, make and python.
TEST_PACKAGES := iproute2 iperf3 clang-19 llvm-19 libbpf-dev linux-libc-dev chromium fonts-dejavu-core

# What the comparison with other libraries uses.
PEER_PACKAGES := openmpi-bin libopenmpi-dev python3-torch

.PHONY: build demo gpu-demo test test-static test-units asan soak bench compare-peers ebpf doc clean packages

build:
	$(CARGO) build --release --workspace
	mkdir -p build/bin build/lib
	cp target/release/r2cc-bench target/release/r2cc-inject build/bin/
	cp target/release/libr2cc_nccl.so build/lib/
	ln -sf libr2cc_nccl.so build/lib/libnccl-net-r2cc.so

# One command from a fresh clone to the verdict of suite 01.
demo: build
	@build/bin/r2cc-bench run suites/01.yaml --out results/demo; code=$$?; \
	if [ $$code -eq 3 ] && grep -q '"verdict": "timing-inconclusive"' results/demo/summary.json; then code=0; fi; exit $$code

# Unmodified NCCL on a GPU: first without the library, where the cut makes it hang, then with it.
# NCCL=PATH names the library, if it is not libnccl.so.2 of the search path.
gpu-demo: build
	build/bin/r2cc-bench run suites/01.yaml --backend nccl --library none $(NCCL:%=--nccl %) --out results/gpu-demo-none
	build/bin/r2cc-bench run suites/01.yaml --backend nccl $(NCCL:%=--nccl %) --out results/gpu-demo
	build/bin/r2cc-bench run suites/08.yaml $(NCCL:%=--nccl %) --out results/gpu-demo-08

# The per-change set: formatting, lints, docs, unit, property, simulator, namespace and CLI tests,
# then suite 01 with everything but timing enforced.
test: packages test-static test-units build
	build/bin/r2cc-bench run suites/01.yaml --timing advisory --quiet --out results/test-01
	build/bin/r2cc-bench doctor

test-static:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --all-features

# Tests that build clusters and attach programs share two cores: they run one binary after another.
test-units:
	$(CARGO) test --workspace --all-features

# The net plugin and its test host under AddressSanitizer: a build of its own, beside the other. The host exports the
# sanitizer's functions, which the plugin that it loads needs.
asan:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Clink-arg=-Wl,--export-dynamic" ASAN_OPTIONS=detect_leaks=0 $(CARGO) test -p r2cc-nccl \
		--target x86_64-unknown-linux-gnu --target-dir target/asan

# The repeated rows; by hand before an issue is closed. Results go to results/soak/.
soak: build
	.ci/soak

# Throughput without shaping beside plain sockets.
bench: build
	$(CARGO) bench -p r2cc-bench --bench throughput

# Latency, bandwidth and a dead NIC beside Open MPI and Gloo; about half an hour. Figures go to results/peers/.
compare-peers:
	@if ! command -v mpicc.openmpi || ! /usr/bin/python3 -c 'import torch'; then \
		apt-get update -q && apt-get install -y -q --no-install-recommends $(PEER_PACKAGES); fi >/dev/null
	@failed=0; for part in latency bandwidth faults; do \
		$(CARGO) bench -q -p r2cc-bench --bench peers -- $$part --enforce --out $(CURDIR)/results/peers || failed=1; \
	done; exit $$failed

# Rebuilds the kernel side; the object is checked in, so nobody else needs clang.
ebpf:
	r2cc-inject/ebpf/build.sh

doc:
	$(CARGO) doc --workspace --no-deps --open

packages:
	@if ! command -v ip || ! command -v clang-19 || ! command -v llvm-strip-19 \
		|| ! command -v iperf3 || ! command -v chromium || [ ! -e /usr/include/bpf/bpf_helpers.h ]; then \
		apt-get update -q && apt-get install -y -q --no-install-recommends $(TEST_PACKAGES); fi >/dev/null

clean:
	$(CARGO) clean
	rm -rf build
