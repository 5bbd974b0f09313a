"""PyTorch through a NIC failure: every kind of collective on two process groups, one of them destroyed and made again.

Run it by `r2cc-bench launch`, with a cut and a heal in the middle. Inputs are whole numbers small enough that any
order of summation is exact; every element of every output is compared, and the outputs' SHA-256 is printed, which is
the same whatever carried the bytes. Exit code 1: an element was wrong.
"""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def pattern(elements, rank, step):
    """`elements` whole numbers below 8192 that differ by position, rank and step."""
    place = torch.arange(elements, device="cuda", dtype=torch.int64)
    return ((place * 2654435761 + rank * 40503 + step * 69069) >> 7).remainder(8191).float()


class Outputs:
    def __init__(self):
        self.sha, self.checked, self.wrong = hashlib.sha256(), 0, 0

    def take(self, got, expected):
        self.checked += got.numel()
        self.wrong += int((got != expected).sum())
        self.sha.update(got.cpu().numpy().tobytes())


def once(group, elements, step, outputs):
    """One of each, `elements` a rank, on `group`."""
    inputs = [pattern(elements * WORLD, rank, step) for rank in range(WORLD)]
    total = torch.stack(inputs).sum(0)

    reduced = inputs[RANK].clone()
    dist.all_reduce(reduced, group=group)
    outputs.take(reduced, total)

    gathered = torch.empty_like(total)
    dist.all_gather_into_tensor(gathered, inputs[RANK][:elements].contiguous(), group=group)
    outputs.take(gathered, torch.cat([one[:elements] for one in inputs]))

    scattered = torch.empty(elements, device="cuda")
    dist.reduce_scatter_tensor(scattered, inputs[RANK].clone(), group=group)
    outputs.take(scattered, total[RANK * elements : (RANK + 1) * elements])

    root = step % WORLD
    sent = inputs[RANK].clone()
    dist.broadcast(sent, src=root, group=group)
    outputs.take(sent, inputs[root])

    from_left = torch.empty_like(total)
    left, right = (RANK - 1) % WORLD, (RANK + 1) % WORLD
    both = [
        dist.P2POp(dist.isend, inputs[RANK], right, group=group),
        dist.P2POp(dist.irecv, from_left, left, group=group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    outputs.take(from_left, inputs[left])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=16 << 20, help="bytes a rank gives to an all-gather")
    asked = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    first, second = dist.group.WORLD, dist.new_group()
    outputs = Outputs()
    begin = time.monotonic()
    for step in range(asked.steps):
        if step == asked.steps // 2:
            dist.destroy_process_group(second)
            second = dist.new_group()
        once(first, asked.bytes // 4, step, outputs)
        once(second, asked.bytes // 4, step + 1000, outputs)
        if RANK == 0:
            print(f"step {step}: {time.monotonic() - begin:.2f} s, wrong {outputs.wrong}", flush=True)
    dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"NCCL {version}: checked {outputs.checked}, wrong {outputs.wrong}, sha256 {outputs.sha.hexdigest()}", flush=True)
    raise SystemExit(1 if outputs.wrong else 0)


if __name__ == "__main__":
    main()
