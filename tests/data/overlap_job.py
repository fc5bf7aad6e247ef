"""Steps whose exposed communication is known: an all_reduce alone, then one beside work of known duration.

The link has a known rate, so the duration of both is known, too. Rank 0 writes how long each step took, in seconds.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--work", type=float, help="seconds of the operator beside the second all_reduce")
parser.add_argument("--elements", type=int)
args = parser.parse_args()


@torch.library.custom_op("job::work", mutates_args=())
def work(seconds: float) -> torch.Tensor:
    """An operator that takes a known time whatever else the machine does: it needs no core."""
    time.sleep(seconds)
    return torch.zeros(1)


dist.init_process_group("gloo")
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight])
tensor, steps = torch.ones(args.elements), []
for _ in range(10):
    began = time.perf_counter()
    dist.all_reduce(tensor)
    handle = dist.all_reduce(tensor, async_op=True)
    if args.work:
        work(args.work)
    handle.wait()
    weight.sum().backward()
    optimizer.step()
    steps.append(time.perf_counter() - began)
dist.barrier()
if dist.get_rank() == 0:
    with open(args.out, "w") as file:
        json.dump(steps, file)
dist.destroy_process_group()
