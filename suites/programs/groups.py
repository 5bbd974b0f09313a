"""AllReduce through NIC failures under each of NCCL's algorithms and protocols: a process group for each pair.

Run it by `r2cc-bench launch`; each group makes 33 calls, by which faults can be placed: one to connect, then twice over
each size, the smaller ones three times and 256 MiB once. A pair that NCCL refuses is named and left out. Which algorithm and protocol NCCL took is in its log (`NCCL_DEBUG_SUBSYS`
with TUNING). Exit code 1: an element was wrong.
"""

import os
import time

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = [8] * 3 + [1 << 10] * 3 + [64 << 10] * 3 + [1 << 20] * 3 + [16 << 20] * 3 + [256 << 20]


def pattern(elements, rank, step):
    """`elements` whole numbers below 8192 that differ by position, rank and step."""
    place = torch.arange(elements, device="cuda", dtype=torch.int64)
    return ((place * 2654435761 + rank * 40503 + step * 69069) >> 7).remainder(8191).float()


def run(group, step):
    """Every size twice over; wrong elements and checked ones."""
    wrong = checked = 0
    for size in SIZES * 2:
        step += 1
        elements = size // 4
        mine = pattern(elements, RANK, step)
        expected = sum(pattern(elements, rank, step) for rank in range(WORLD))
        dist.all_reduce(mine, group=group)
        wrong += int((mine != expected).sum())
        checked += elements
    return wrong, checked


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # The default group never calls NCCL: it would add to the calls that faults count.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    total = step = 0
    for algorithm in ["Ring", "Tree"]:
        for protocol in ["Simple", "LL", "LL128"]:
            # NCCL reads both when a communicator is made, which is at the group's first call.
            os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"] = algorithm, protocol
            group = dist.new_group(backend="nccl")
            begin = time.monotonic()
            try:
                dist.all_reduce(torch.ones(2, device="cuda"), group=group)
                torch.cuda.synchronize()
            except dist.DistBackendError as error:
                print(f"{algorithm} {protocol}: refused: {str(error).splitlines()[-1]}", flush=True)
                continue
            wrong, checked = run(group, step)
            step += 1000
            total += wrong
            print(f"{algorithm} {protocol}: checked {checked}, wrong {wrong}, {time.monotonic() - begin:.1f} s", flush=True)
            dist.destroy_process_group(group)
    dist.destroy_process_group()
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    main()
