"""Runs one training script many times in the same processes: `run_many.py SCRIPT FLAGS.json` saves starting anew.

FLAGS.json holds a list of lists of flags. The script has parse_args() and train_..(args, rank, world_size, device).
"""

import importlib.util
import json
import os
import sys

script, cases = sys.argv[1:3]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python script` does
spec = importlib.util.spec_from_file_location("script", script)
assert spec
assert spec.loader
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
(train,) = (function for name, function in vars(module).items() if name.startswith("train_"))
with module.process_group("cpu", 30) as (rank, _, world_size, device), open(cases) as file:
    for flags in json.load(file):
        sys.argv = [script, *flags]
        train(module.parse_args(), rank, world_size, device)
