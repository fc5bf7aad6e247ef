"""Counts a script's collectives from outside: `count_comm.py OUT script flags...` runs the script as it is, profiled.

Each rank writes OUT.RANK, a JSON list of [operation, number of elements], in the order of the calls. gloo runs each
collective on a thread of its own, under a span with the shapes of its input; the profiler sees them all, those too
that DDP starts from C++. An all_reduce of 10 elements is ["all_reduce", 10].
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
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, contextlib.suppress(SystemExit):
    runpy.run_path(script, run_name="__main__")
calls = [
    (event.time_range.start, event.name.removeprefix("gloo:"), sum(prod(shape) for shape in event.input_shapes))
    for event in profiler.events()
    if event.name.startswith("gloo:")
]
with open(f"{out}.{os.environ['RANK']}", "w") as file:
    json.dump([call[1:] for call in sorted(calls)], file)
