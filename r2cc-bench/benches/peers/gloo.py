"""AllReduce of float32 sums with Gloo, in place, in three parts at once: one operation uses one interface.

gloo.py RANK WORLD ADDRESS BYTES:WARMUP:COUNT...   one line of JSON for each size; the results of the calls before are checked
gloo.py RANK WORLD ADDRESS loop BYTES              one line for each call, until it is killed
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist

rank, world, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)


def say(line):
    print(json.dumps(line), flush=True)


class Buffer:
    def __init__(self, size):
        self.pattern = (torch.arange(size // 4) % 13).float()
        self.elements = torch.empty_like(self.pattern)

    def all_reduce(self):
        start = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in self.elements.chunk(3)]:
            work.wait()
        return time.perf_counter() - start

    def fill(self):
        torch.mul(self.pattern, rank + 1, out=self.elements)

    def wrong(self):
        return int((self.elements != self.pattern * (world * (world + 1) // 2)).sum())


if sys.argv[4] == "loop":
    buffer = Buffer(int(sys.argv[5]))
    while True:
        buffer.fill()
        seconds = buffer.all_reduce()
        wrong = buffer.wrong()
        if rank == 0 or wrong:
            say({"seconds": seconds, "wrong": wrong})

for size, warmup, count in (map(int, word.split(":")) for word in sys.argv[4:]):
    buffer, nanos, wrong = Buffer(size), [], 0
    for _ in range(warmup):
        buffer.fill()
        buffer.all_reduce()
        wrong += buffer.wrong()
    # Sums of zeros: what is timed is the calls, and what the processors do is theirs.
    buffer.elements.zero_()
    dist.barrier()
    say({"begin": size})
    for _ in range(count):
        dist.barrier()
        nanos.append(int(buffer.all_reduce() * 1e9))
    say({"bytes": size, "wrong": wrong, "nanos": nanos})
dist.barrier()
os._exit(0)
