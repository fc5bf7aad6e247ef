"""Counts a script's collectives from outside: `count_comm.py OUT script flags...` runs the script as it is, profiled.

Each rank writes OUT.RANK, a JSON list of [operation, number of elements], in the order of the calls. gloo runs each
collective on a thread of its own, under a span with the shapes of its input; the profiler sees them all, those too
that DDP starts from C++. An all_reduce of 10 elements is ["all_reduce", 10], an all_gather counts what one rank gives.
gloo's reduce_scatter is an all_reduce inside; it is told apart by the call, and stands at the end of the list.
"""

import contextlib
import json
import os
import runpy
import sys
from math import prod

from torch.profiler import ProfilerActivity, profile

out, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
assert profiler.profiler
# The raw events: profiler.events() would make a tree of them all, which takes longer than the run.
events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
calls = [
    [event.name().removeprefix("gloo:"), sum(prod(shape) for shape in event.shapes())]
    for event in events
    if event.name().startswith("gloo:")
]
for event in events:
    if event.name() == "c10d::_reduce_scatter_base_":
        elements = prod(event.shapes()[1])
        calls.remove(["all_reduce", elements])
        calls.append(["reduce_scatter", elements])
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    json.dump(calls, file)
