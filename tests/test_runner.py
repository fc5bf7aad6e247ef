"""The runner: a deprecated call in a script fails its run, a stuck rank is killed, each rank is the script itself.
And the suite's workers.
"""

import inspect
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import pytest_xdist_make_scheduler
from runner import run


@pytest.mark.parametrize("kind", ["DeprecationWarning", "FutureWarning"])
def test_deprecated_call_in_a_script_fails_the_run(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import warnings\nwarnings.warn('use the newer name', {kind})\n")
    result = run(script)
    assert result.codes == [1]
    assert f"{kind}: use the newer name" in result.outputs[0]


def test_stuck_rank_is_killed_and_the_others_keep_their_codes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1':\n    signal.pause()\nraise SystemExit(3)\n")
    assert run(script, nproc=2, timeout=1).codes == [3, -signal.SIGKILL]


def test_script_runs_as_main_with_its_flags(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(__name__, sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    assert run(script, "--steps", 3, nproc=2).outputs == [f"__main__ ['--steps', '3'] {rank} 2\n" for rank in range(2)]


def test_worker_keeps_a_file(tmp_path):
    """A session's fixtures are made in each worker: a file whose tests are spread runs its trainings twice."""
    hook = inspect.getsource(pytest_xdist_make_scheduler)
    (tmp_path / "conftest.py").write_text(f"import pytest\nfrom typing import Any\n{hook}")
    for file in ("test_a.py", "test_b.py"):
        (tmp_path / file).write_text("import pytest\n@pytest.mark.parametrize('n', range(8))\ndef test(n): pass\n")
    line = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    ran = re.findall(r"\[(gw\d)\].* PASSED (test_.\.py)", done.stdout)
    assert len(ran) == 16, done.stdout + done.stderr
    assert len(set(ran)) == 2, done.stdout
