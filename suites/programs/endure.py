"""NCCL's own calls, AllReduce after AllReduce: what an application sees of failures that it survives, or does not.

Run it by `r2cc-bench launch`. With `--expect none` no call may fail and every element has to be right for so many
seconds; with `--expect error` NCCL has to report an error (ncclCommGetAsyncError), and ncclCommAbort to return within
a second. Exit code 1: it went otherwise.
"""

import argparse
import ctypes
import os
import time

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FLOAT, SUM, SUCCESS, IN_PROGRESS = 7, 0, 0, 7


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


# The one that PyTorch has loaded.
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetLastError.restype = ctypes.c_char_p


def check(what, code):
    if code != SUCCESS:
        raise SystemExit(f"{what}: {code}, {nccl.ncclGetLastError(None).decode()}")


def join():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, RANK == 0)
    identity, comm = UniqueId(), ctypes.c_void_p()
    if RANK == 0:
        check("ncclGetUniqueId", nccl.ncclGetUniqueId(ctypes.byref(identity)))
        store.set("id", bytes(identity))
    ctypes.memmove(ctypes.byref(identity), store.get("id"), 128)
    check("ncclCommInitRank", nccl.ncclCommInitRank(ctypes.byref(comm), WORLD, identity, RANK))
    return comm, store


def wait(comm, done):
    """Waits for the GPU; NCCL's error if it reports one first."""
    error = ctypes.c_int()
    while not done.query():
        check("ncclCommGetAsyncError", nccl.ncclCommGetAsyncError(comm, ctypes.byref(error)))
        if error.value not in (SUCCESS, IN_PROGRESS):
            return error.value
        time.sleep(0.001)
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--expect", choices=["none", "error"], required=True)
    asked = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    stream = torch.cuda.Stream()
    comm, store = join()
    place = torch.arange(asked.bytes // 4, device="cuda", dtype=torch.int64)
    wrong = calls = 0
    slowest, begin = 0.0, time.monotonic()
    # All ranks make the same calls: rank 0 says when it is the last one.
    last = None
    while last is None or calls < last:
        calls += 1
        values = [((place * 2654435761 + r * 40503 + calls * 69069) >> 7).remainder(8191).float() for r in range(WORLD)]
        mine, expected = values[RANK], sum(values)
        torch.cuda.synchronize()
        started = time.monotonic()
        at = ctypes.c_void_p(mine.data_ptr())
        count = ctypes.c_size_t(mine.numel())
        check("ncclAllReduce", nccl.ncclAllReduce(at, at, count, FLOAT, SUM, comm, ctypes.c_void_p(stream.cuda_stream)))
        done = torch.cuda.Event()
        done.record(stream)
        error = wait(comm, done)
        took = time.monotonic() - started
        if error is not None:
            text = nccl.ncclGetLastError(None).decode().strip()
            aborting = time.monotonic()
            code = nccl.ncclCommAbort(comm)
            abort_s = time.monotonic() - aborting
            print(f"call {calls}: error {error} after {took:.2f} s; abort returned {code} in {abort_s:.3f} s; {text}", flush=True)
            raise SystemExit(0 if asked.expect == "error" and abort_s < 1.0 else 1)
        wrong += int((mine != expected).sum())
        slowest = max(slowest, took)
        if RANK == 0 and last is None and time.monotonic() - begin >= asked.seconds:
            store.set("last", str(calls + 2))
        if last is None and store.check(["last"]):
            last = int(store.get("last"))
    check("ncclCommDestroy", nccl.ncclCommDestroy(comm))
    print(f"{calls} calls, wrong {wrong}, slowest {slowest:.3f} s", flush=True)
    raise SystemExit(1 if wrong or asked.expect == "error" else 0)


if __name__ == "__main__":
    main()
