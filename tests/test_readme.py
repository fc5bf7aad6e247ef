"""The commands of every page run, and print what the page shows.

A ```console block holds commands, on lines that begin with `$ `, and below each what it prints on stdout. A line `...`
stands for any number of lines. Numbers differ between machines, except in the loss column: see `same`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from math import isclose
from pathlib import Path

import pytest
from emulated import reason_to_skip
from runner import ROOT, run

NOT_RUN = {  # commands that begin like this are shown, but not run here
    "pip install": "changes the environment that runs the tests",
    "tox": "runs these very tests",
    "git clone": "needs a network",
}
# The text is the standard library's source, which each patch release of Python changes: other windows, another order.
# Over 100 steps of 02_ddp/train.py, the sources of Python 3.10 to 3.13 and of two releases of 3.11 give losses of one
# step that differ by at most 0.34, and norms by at most a factor of 4.3. That both are right is proven elsewhere.
LOSS_TOLERANCE = 0.4
NORM_TOLERANCE = 0.8  # of the larger one: a factor of 5


# ---- reading a README ----
def blocks(text):
    """Returns each ```console block as a list of (command, expected lines)."""
    found = []
    for body in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        block = []
        for line in body.replace("\\\n> ", "").replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                block.append((line[2:], []))
            else:
                block[-1][1].append(line)
        found.append(block)
    return found


def reason_not_to_run(command):
    if "cluster.py" in command and reason_to_skip():
        return reason_to_skip()
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


# ---- running ----
def run_forked(command):
    """Runs `torchrun --nproc-per-node n script flags..`; returns what rank 0 printed.

    Not by torchrun itself, if n is more than two: as many imports of torch would take longer than all else, and other
    commands of the page start the script so.
    """
    nproc, script, *flags = shlex.split(command)[2:]
    return run(Path(script).absolute(), *flags, nproc=int(nproc), timeout=300).check().outputs[0]


def run_in_shell(command):
    """Returns what it printed on stdout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the torchrun beside this python
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    bounded = ["timeout", "--kill-after=10", "300", "bash", "-c", command]  # ends its children, too
    done = subprocess.run(bounded, env=env, capture_output=True, text=True)
    print(done.stderr)  # pytest shows it if the test fails
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


# ---- comparing ----
def masked(text):
    """The text with every number as #, and the blanks that pad it to a column as one."""
    text = re.sub(r"\btorch \d\S*", "torch #", text.strip())  # 2.13.0 or 2.13.0+cpu
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", text))


def same(shown, printed):
    """True if a README's line agrees with a printed one: words exactly, numbers anyhow, but a row
    `step | loss | grad_norm | ...` in its step exactly and in loss and norm within their tolerances."""
    row = re.compile(r"\s*(\d+) \| +([\d.]+) \| +([\d.]+)(?: \||$)")
    if masked(shown) != masked(printed):
        return False
    if not (left := row.match(shown)):
        return True
    (step, loss, norm), (step_2, loss_2, norm_2) = left.groups(), row.match(printed).groups()
    close = isclose(float(loss), float(loss_2), abs_tol=LOSS_TOLERANCE, rel_tol=0)
    return step == step_2 and close and isclose(float(norm), float(norm_2), rel_tol=NORM_TOLERANCE)


def agrees(shown, printed):
    """True if the printed lines are those that a README shows."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(agrees(shown[1:], printed[i:]) for i in range(len(printed) + 1))
    return bool(printed) and same(shown[0], printed[0]) and agrees(shown[1:], printed[1:])


# ---- the tests ----
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("0[1-7]_*/**/*.md")})
READMES = sorted({*ROOT.glob("README.md"), *ROOT.glob("0[1-7]_*/README.md")})
BLOCKS = {  # what several pages show runs once
    str(block): pytest.param(block, id=f"{page.relative_to(ROOT)}: {block[0][0]}")
    for page in PAGES
    for block in blocks(page.read_text())
    if not all(reason_not_to_run(command) for command, _ in block)
}


@pytest.mark.parametrize("block", BLOCKS.values())
def test_commands_print_what_the_readme_shows(block, tmp_path, monkeypatch):
    """The commands of a block run in order, in a copy of the repository: the second may use what the first wrote."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "venv"))
    monkeypatch.chdir(copy)
    for command, shown in block:
        if reason_not_to_run(command):
            continue
        many = re.match(r"torchrun --nproc-per-node [3-9] [^|&>$]*$", command)
        printed = (run_forked if many else run_in_shell)(command).splitlines()
        wanted, got = "\n".join(shown), "\n".join(printed)
        assert agrees(shown, printed), f"$ {command}\n--- README\n{wanted}\n--- printed\n{got}"


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.relative_to(ROOT)))
def test_readme_shows_a_command_that_is_run(readme):
    commands = [command for block in blocks(readme.read_text()) for command, _ in block]
    assert not all(map(reason_not_to_run, commands)), f"{readme} has no ```console block with a command to run"


def anchors(text):
    """The anchors of a page's headings: small letters, digits, _ and -; blanks become -."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there.read_text()), f"{target} has no heading for #{anchor}"


SHOWN = """\
torch 2.13.0+cpu | gloo | cpu | dp 2 | from step 0
 step |   loss | grad_norm | tokens/s
    1 | 5.5452 |    1.2000 |     5789
  100 | 2.9000 |    0.8000 |    26012
823,424 bytes per step
""".splitlines()


def test_same_lines_on_another_machine_agree():
    printed = [
        "torch 2.11.1 | gloo | cpu | dp 2 | from step 0",
        " step |   loss | grad_norm | tokens/s",
        "    1 | 5.5410 |    1.2314 |   126012",
        "  100 | 2.8123 |    0.6123 |      789",
        "823,424 bytes per step",
    ]
    assert agrees(SHOWN, printed)
    assert agrees([*SHOWN[:2], "...", SHOWN[-1]], printed)
    assert agrees(["..."], [])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (0, "torch 2.13.0+cpu | nccl | cuda | dp 2 | from step 0"),
        (1, " step |   loss | tokens/s"),
        (2, "    2 | 5.5452 |    1.2000 |     5789"),
        (2, "    1 | 5.1000 |    1.2000 |     5789"),
        (2, "    1 | 5.5452 |    7.0000 |     5789"),
        (2, "    1 |    nan |    1.2000 |     5789"),
        (3, "  100 | 2.9000 |    0.8000 |    26012 | 4"),
        (4, "823,424 bytes per epoch"),
    ],
)
def test_wrong_line_does_not_agree(line, wrong):
    assert not agrees(SHOWN, [*SHOWN[:line], wrong, *SHOWN[line + 1 :]])


def test_missing_and_added_lines_do_not_agree():
    assert not agrees(SHOWN, SHOWN[:-1])
    assert not agrees(SHOWN, [*SHOWN, "done"])
    assert not agrees([*SHOWN[:2], "...", "never printed"], SHOWN)


def test_console_blocks_are_read_command_by_command():
    text = (
        "# x\n```console\n$ cd a\n$ torchrun --nproc-per-node 2 \\\n>     b.py\none\n\ntwo\n```\n```bash\n$ no\n```\n"
    )
    assert blocks(text) == [[("cd a", []), ("torchrun --nproc-per-node 2     b.py", ["one", "", "two"])]]
