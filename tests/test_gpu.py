"""The GPU lane: the scripts under NCCL. `tox -e gpu` runs these, and fails when none of them ran."""

import json
import subprocess
import sys

import pytest
import reference
import torch
from conftest import BATCH, SEQ_LEN, SIZES, STEPS
from runner import ROOT

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="this machine shows no GPU")]

FOLDERS = ["02_ddp", "03_tensor_parallel", "04_pipeline"]
SCRIPTS = [f"{folder}/{name}.py" for folder in FOLDERS for name in ("train", "from_scratch")]
DEEPSPEED = "05_zero/train.py"
SCRIPTS += ["05_zero/from_scratch.py", "05_zero/fsdp.py", DEEPSPEED, "06_hybrid/train.py"]
FLOAT64 = 1e-9  # kernels of the GPU sum in another order
FLOAT32 = 1e-4  # DeepSpeed keeps no float64; a GPU's float32 matmuls sum in another order
BFLOAT16 = 5e-3  # 8 bits a product, averaged over the batch


def layouts(script, nproc):
    """Returns the flags of the script's layouts on so many GPUs; the model has 4 heads and 2 layers."""
    if script.startswith("04"):
        schedules = (["gpipe"], ["1f1b"], ["interleaved", "--chunks", 1], ["zero-bubble"])
        return [["--microbatch", 1, "--pp", min(nproc, 2), "--schedule", *schedule] for schedule in schedules]
    if script.startswith("02"):
        return [["--microbatch", 1]]
    if script.startswith("05"):
        return [["--microbatch", 1, "--stage", stage] for stage in (1, 2, 3)]
    if script.startswith("06"):
        shard = [["--shard", shard] for shard in ("none", "optimizer", "full")]
        return [["--microbatch", 1, "--tp", 2 - nproc % 2, "--pp", 2 if nproc % 4 == 0 else 1, *more] for more in shard]
    sizes = {min(nproc, 4), 2 - nproc % 2}
    return [["--tp", tp, *more] for tp in sizes for more in ([], ["--sequence-parallel"])]


def launch(script, *flags, nproc, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [str(ROOT / script), *map(str, flags), "--device", "cuda", "--metrics", str(metrics)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in metrics.read_text().splitlines()], done.stdout


@pytest.mark.parametrize("nproc", [n for n in (1, 2, 4, 8) if n <= max(NUM_GPUS, 1)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_and_gradient_norms_under_nccl_equal_the_serial_reference(script, nproc, flags, text, tmp_path):
    expected = reference.train(STEPS, BATCH, SEQ_LEN, text, torch.float64, **SIZES)
    dtype, tolerance = ("float32", FLOAT32) if script == DEEPSPEED else ("float64", FLOAT64)
    for layout in layouts(script, nproc):
        rows, output = launch(script, *flags, "--dtype", dtype, *layout, nproc=nproc, tmp_path=tmp_path)
        assert "nccl | cuda" in output
        assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=tolerance)
        assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=tolerance)
        assert all(row["peak_mib"] > row["state_mib"] for row in rows)


@pytest.mark.parametrize("script", SCRIPTS)
def test_bfloat16_follows_the_reference_under_nccl(script, flags, text, tmp_path):
    nproc = min(NUM_GPUS, 2)
    rows, _ = launch(script, *flags, "--dtype", "bfloat16", nproc=nproc, tmp_path=tmp_path)
    expected = reference.train(STEPS, BATCH, SEQ_LEN, text, torch.float32, **SIZES)
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=BFLOAT16)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != DEEPSPEED])  # its engine waits by itself
def test_the_hot_loop_never_makes_the_host_wait_for_the_gpu(script, flags, tmp_path):
    """Synchronising calls are errors while a step is computed; reading the step before waits on an event only."""
    wrapper = tmp_path / "no_sync_allowed.py"
    wrapper.write_text(
        "import os, runpy, sys, torch\n"
        "from torch.optim import AdamW\n"
        "step = AdamW.step\n"
        "def first_step(self, *args, **kwargs):\n"  # set-up may wait; from the first optimizer step on nothing may
        "    torch.cuda.set_sync_debug_mode('error')\n"
        "    return step(self, *args, **kwargs)\n"
        "AdamW.step = first_step\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"  # as `python script` does
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    launch(wrapper, ROOT / script, *flags, "--steps", 20, nproc=1, tmp_path=tmp_path)
