"""Runs scripts on GPUs without an import of torch for each: one line of JSON in, one out.

This process imports torch and never touches CUDA, so that it may fork: each run is a child, which does. pytest's own
process may not: a mere torch.cuda.is_available(), at the top of some test file, makes a fork of it useless for CUDA.
"""

import json
import sys

from runner import run

for line in sys.stdin:
    script, flags, nproc, timeout = json.loads(line)
    print(json.dumps(run(script, *flags, nproc=nproc, timeout=timeout)), flush=True)
