"""Checkpoints of 02_ddp/train.py: an interrupted job goes on as if nothing had happened, whatever interrupted it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import STEPS
from runner import ROOT, run

TRAIN = "02_ddp/train.py"
FLOAT64 = 1e-9  # another number of ranks adds in another order
STOOD_STILL = 1e-7  # float32's own step at weights of this size; a step of the checkpoint's rate would be 3e-3
DROPOUT = (
    "return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))",
    "return F.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), 0.2)",
)


def resumed(train, script, *flags, nproc=2, nproc_after=None, stop=3):
    """Trains `stop` steps, then in a new job the rest; returns the rows of both."""
    first = train(script, *flags, "--steps", stop, nproc=nproc)
    rest = train(script, *flags, "--resume", first.folder, nproc=nproc_after or nproc)
    return first.rows + rest.rows


def figures(rows):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_resuming_gives_bit_for_bit_the_losses_of_an_uninterrupted_run(dtype, train):
    flags = ["--dtype", dtype, "--microbatch", 2]
    assert figures(resumed(train, TRAIN, *flags)) == figures(train(TRAIN, *flags, nproc=2).rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_restores_the_random_states_of_every_rank(workers, plant, train):
    script = plant(TRAIN, DROPOUT)
    flags = ["--workers", workers]
    whole = figures(train(script, *flags, nproc=2).rows)
    assert figures(resumed(train, script, *flags)) == whole
    assert whole != figures(train(TRAIN, nproc=2).rows), "the planted dropout does nothing"


@pytest.mark.parametrize("nproc_after", [1, 4])
def test_a_checkpoint_resumes_at_another_number_of_ranks(nproc_after, train):
    rows = resumed(train, TRAIN, "--dtype", "float64", nproc=2, nproc_after=nproc_after)
    whole = train(TRAIN, "--dtype", "float64", nproc=2)
    assert [row["step"] for row in rows] == whole.column("step")
    assert [row["loss"] for row in rows] == pytest.approx(whole.column("loss"), rel=FLOAT64)


def test_train_goes_on_from_the_checkpoint_of_from_scratch(train):
    first = train("02_ddp/from_scratch.py", "--dtype", "float64", "--steps", 3, nproc=2)
    rest = train(TRAIN, "--dtype", "float64", "--resume", first.folder, nproc=2)
    whole = train(TRAIN, "--dtype", "float64", nproc=2)
    assert first.column("loss") + rest.column("loss") == pytest.approx(whole.column("loss"), rel=FLOAT64)


def test_the_learning_rate_of_the_flag_wins_over_the_checkpoints(train):
    first = train(TRAIN, "--steps", 3, nproc=1)
    slow = train(TRAIN, "--resume", first.folder, "--lr", 1e-9, nproc=1)
    assert torch.allclose(slow.weights["lm_head.weight"], first.weights["lm_head.weight"], atol=STOOD_STILL, rtol=0)


FAULTS = {
    "the optimizer's state is not restored": ("            part.load_state_dict(state[name])\n",
                                              "            name == 'optimizer' or part.load_state_dict(state[name])\n"),
    "the place in the data is not restored": ("rank, world_size, step, cuda)", "rank, world_size, 0, cuda)"),
    "the random state is not restored": ("(torch.cuda if cuda else torch).set_rng_state", "str"),
    "the loader draws from the model's random state": (", generator=torch.Generator())", ")"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_resume_test_turns_red_when(fault, plant, train):
    script = plant(TRAIN, DROPOUT, FAULTS[fault])
    assert figures(resumed(train, script)) != figures(train(script, nproc=2).rows)


def test_a_job_killed_while_it_writes_leaves_the_last_checkpoint_whole(plant, train, flags, tmp_path):
    killed = plant(TRAIN, (
        "        torch.save(state, file)\n",
        "        torch.save(state, file)\n"
        "        if state['step'] == 4:\n"
        "            file.truncate(file.tell() // 2)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n",
    ))  # fmt: skip
    result = run(killed, *flags, "--save", tmp_path, "--save-every", 2, nproc=1)
    assert result.codes == [-signal.SIGKILL]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    rest = train(TRAIN, "--resume", tmp_path)
    assert figures(rest.rows) == figures(train(TRAIN).rows)[2:]


SIGTERM = (
    "        scaler.unscale_(optimizer)\n",
    "        if step == 3 and rank == 1:\n"
    "            os.kill(os.getpid(), signal.SIGTERM)\n"
    "        scaler.unscale_(optimizer)\n",
)  # fmt: skip


def test_sigterm_to_one_rank_saves_at_one_step_on_all_and_ends(plant, flags, train, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    result = run(plant(TRAIN, SIGTERM), *flags, "--save", tmp_path, "--metrics", metrics, nproc=2)
    assert result.codes == [128 + signal.SIGTERM] * 2, result
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert 3 <= saved < STEPS
    rest, whole = train(TRAIN, "--resume", tmp_path, nproc=2), figures(train(TRAIN, nproc=2).rows)
    assert figures(map(json.loads, metrics.read_text().splitlines())) == whole[:saved]
    assert figures(rest.rows) == whole[saved:]


class Job:
    """`torchrun` with two ranks of train.py, whose ranks can be sent signals."""

    def __init__(self, folder: Path, *flags: object, torchrun: tuple[object, ...] = ()):
        self.metrics = folder / "metrics.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *torchrun]
        command += [ROOT / TRAIN, "--metrics", self.metrics, "--timeout", 60, *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rows(self):
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step):
        deadline = time.monotonic() + 60
        while not any(row["step"] >= step for row in self.rows()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"no step {step} in 60 s"
            time.sleep(0.01)

    def pid(self, rank):
        """The process that torchrun started for this rank."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue  # it ended meanwhile
            if parent == str(self.process.pid) and f"RANK={rank}".encode() in variables:
                return int(entry.name)
        raise AssertionError(f"no process of rank {rank}")

    def end(self):
        output = self.process.communicate(timeout=120)[0]
        return self.process.returncode, output


LONG = ["--steps", 150]  # some seconds: long enough to be hit in the middle


def test_a_rank_killed_in_mid_run_costs_nothing_but_the_steps_since_the_checkpoint(flags, train, tmp_path):
    whole = figures(train(TRAIN, *LONG, nproc=2).rows)
    folder = tmp_path / "checkpoints"
    saving = ["--save", folder, "--resume", folder, "--save-every", 10]
    job = Job(tmp_path, *flags, *LONG, *saving, torchrun=("--max-restarts", 3))
    job.wait_for_step(35)
    os.kill(job.pid(rank=1), signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    steps = [row["step"] for row in job.rows()]
    assert len(steps) > len(whole), "nothing was repeated: the job was not restarted"
    assert sorted(set(steps)) == [step for step, *_ in whole]
    assert set(figures(job.rows())) == set(whole)  # the repeated steps, too, are the same to the last bit
