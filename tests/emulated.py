"""06_hybrid/cluster.py as tests start it, and the mark of those that need what it needs."""

import os
import shutil
import subprocess
import sys

import pytest
from runner import ROOT

CLUSTER = ROOT / "06_hybrid" / "cluster.py"
KINDS = ["-n", "-m", "-p", "-f", "--mount-proc", "--kill-child"]
USER = ["-U", "-r"] if os.geteuid() else []
OUTER = ["unshare", *USER, *KINDS, "true"]


def reason_to_skip():
    where = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [tool for tool in ("ip", "tc", "unshare", "setpriv", "nsenter") if not shutil.which(tool, path=where)]
    if missing:
        return f"{missing[0]} is missing"
    tried = subprocess.run(OUTER, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())


AS_RANK = """export RANK=$NODE_RANK WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=node0 MASTER_PORT=29500
exec "$@"
"""


def one_rank_each(*words):
    """Words for cluster(): a script as one rank on each of two nodes. No torchrun, which imports torch twice more."""
    return ["--each", "--", "sh", "-c", AS_RANK, "sh", sys.executable, *words]


def cluster(*words, timeout=120, env=None):
    command = [str(word) for word in [sys.executable, CLUSTER, *words]]
    env = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)
