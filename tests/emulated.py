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


def cluster(*words, timeout=60, env=None):
    command = [str(word) for word in [sys.executable, CLUSTER, *words]]
    env = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)
