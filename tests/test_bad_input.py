"""Wrong invocations: every rank ends soon with exit code 2 and one line that names the numbers and the way out."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runner import ROOT, run
from safetensors.torch import save_file

TRAIN, FROM_SCRATCH = "02_ddp/train.py", "02_ddp/from_scratch.py"
BOTH = (TRAIN, FROM_SCRATCH)
PP = ("04_pipeline/train.py", "04_pipeline/from_scratch.py")
ZERO, PICTURE = "05_zero/from_scratch.py", "05_zero/picture.py"
TP = ("03_tensor_parallel/train.py", "03_tensor_parallel/from_scratch.py")
SMALL = "--steps 1 --batch 4 --seq-len 8 --dim 16 --layers 2 --heads 2 --kv-heads 1"

CASES = [  # scripts, ranks, flags ({files}: the folder made below), the line
    (BOTH, 3, "--batch 64", "--batch 64 is not divisible by 3 data-parallel ranks: use 3 x n"),
    (BOTH, 2, "--batch 1", "--batch 1 is not divisible by 2 data-parallel ranks: use 2 x n"),
    (BOTH, 1, "--batch 0", "--batch 0 must be above 0"),
    (BOTH, 1, "--batch 8.5", "argument --batch: invalid int value: '8.5'"),
    (BOTH, 2, "--batch 32 --microbatch 3", "--microbatch 3 must divide a rank's 16: use 1"),
    (BOTH, 2, "--batch 32 --microbatch -1", "--microbatch -1 must divide a rank's 16: use 1"),
    (BOTH, 2, "--batch 32 --microbatch 0", "--microbatch 0 must divide a rank's 16: use 1"),
    (BOTH, 2, "--metrics {files}/nowhere/log.jsonl", "--metrics .*nowhere/log.jsonl needs a folder that exists"),
    (BOTH, 2, "--save {files}/short.txt", "--save .*short.txt must be a folder"),
    (BOTH, 2, "--heads 3", "3 heads must divide --dim 128 / 2"),
    (BOTH, 2, "--kv-heads 3", "3 kv-heads the heads"),
    (BOTH, 1, "--kv-heads 0", "--kv-heads 0 must be above 0"),
    (BOTH, 1, "--dim 12 --heads 4", "4 heads must divide --dim 12 / 2"),  # 3 wide, rotary positions turn pairs
    (BOTH, 1, "--seq-len 0", "--seq-len 0 must be above 0"),
    (BOTH, 1, "--steps 0", "--steps 0 must be above 0"),
    (BOTH, 1, "--layers -2", "--layers -2 must be above 0"),
    (BOTH, 1, "--lr -1", "--lr -1.0 must be above 0"),
    (BOTH, 1, "--lr nan", "--lr nan must be above 0"),
    (BOTH, 1, "--clip 0", "--clip 0.0 must be above 0"),
    (BOTH, 2, "--dtype float8", "--dtype: invalid choice: 'float8'.*float32"),
    (BOTH, 2, "--device gpu", "--device: invalid choice: 'gpu'.*cuda"),
    (BOTH, 2, "--stepz 5", "unrecognized arguments: --stepz 5"),
    (TRAIN, 1, "--step 5", "unrecognized arguments: --step 5"),  # an abbreviation, which each parser would take
    (FROM_SCRATCH, 1, "--step 5", "unrecognized arguments: --step 5"),
    (BOTH, 1, "5", "unrecognized arguments: 5"),
    (BOTH, 2, "--data {files}/short.txt", "short.txt has 9 bytes of text, a batch takes 4097: use more --data"),
    (BOTH, 2, "--data {files}/empty", "empty has 0 bytes of text, a batch takes 4097: use more --data"),
    (BOTH, 2, "--data {files}/nowhere", "nowhere has 0 bytes of text, a batch takes 4097: use more --data"),
    (FROM_SCRATCH, 1, "--resume {files}", "unrecognized arguments: --resume"),  # it cannot, and does not pretend
    (TRAIN, 2, "--batch 32 --microbatch 4 --static-graph", "--static-graph .*: no --microbatch beside it"),
    (TRAIN, 2, "--resume {files}/empty", "--resume another folder than .*empty: .*No such file"),
    (TRAIN, 2, "--resume {files}/torn", "--resume another folder than .*torn: "),
    (TRAIN, 2, "--resume {files}/flipped", "--resume another folder than .*flipped: .*damaged"),
    (TRAIN, 2, "--resume {files}/text", "--resume another folder than .*text: "),
    (TRAIN, 2, "--resume {files}/foreign", "--resume another folder than .*foreign: .*run"),
    (TRAIN, 2, "--resume {files}/pickle", "--resume another folder than .*pickle: .*[Ww]eights"),
    (TRAIN, 2, "--resume {files}/good --dim 32", r"made with .*\[16, 2, 2, 1\].*this run has .*\[32, 2, 2, 1\]"),
    (TRAIN, 2, "--resume {files}/good --batch 8", "made with .*'batch': 4.*this run has .*'batch': 8"),
    (TRAIN, 2, "--resume {files}/good --seed 7", "made with .*'seed': 0.*this run has .*'seed': 7"),
    (TP, 3, "--tp 2", "world size 3 is not a multiple of {'tp': 2}: use 2 processes"),
    (TP, 2, "--tp 0", "--tp 0 must be above 0"),
    (TP, 2, "--tp -2", "--tp -2 must be above 0"),
    (TP, 2, "--tp 4", "world size 2 is not a multiple of {'tp': 4}: use 4 processes"),
    (TP, 4, "--heads 2", "--heads 2 is not divisible by --tp 4: use --tp 2"),
    (TP, 2, "--heads 1 --kv-heads 1", "--heads 1 is not divisible by --tp 2: use --tp 1"),
    (TP, 4, "--heads 12 --kv-heads 6 --dim 96", "--kv-heads 6 and --tp 4: one must divide the other; use --tp 2"),
    (TP, 3, "--heads 6 --kv-heads 3 --dim 48 --batch 3", "MLP width 128 is not divisible by --tp 3: use --tp 1"),
    (TP, 2, "--sequence-parallel --seq-len 31", "--seq-len 31 is not divisible by --tp 2: use --tp 1"),
    (TP, 2, "--vocab-size 255", "--vocab-size 255 is less than the 256 values of a byte: use 256 or more"),
    (TP, 2, "--dropout 1", "--dropout 1.0 must be at least 0 and below 1"),
    (TP, 2, "--dropout -0.1", "--dropout -0.1 must be at least 0 and below 1"),
    (TP, 2, "--dropout nan", "--dropout nan must be at least 0 and below 1"),
    (TP, 4, "--tp 2 --batch 3", "--batch 3 is not divisible by 2 data-parallel ranks: use 2 x n"),
    (TP, 4, "--tp 2 --batch 8 --microbatch 3", "--microbatch 3 must divide a rank's 4: use 1"),
    (TP, 2, "--kv-heads 0", "--kv-heads 0 must be above 0"),
    (TP, 2, "--dim 12 --heads 4", "4 heads must divide --dim 12 / 2"),
    (TP[0], 2, "--data {files}/short.txt", "short.txt has 9 bytes of text, a batch takes 4097: use more --data"),
    (TP[1], 2, "--data {files}/empty", "empty has 0 bytes of text, a batch takes 4097: use more --data"),
    (TP, 2, "--metrics {files}/nowhere/log.jsonl", "--metrics .*nowhere/log.jsonl needs a folder that exists"),
    (TP, 2, "--stepz 5", "unrecognized arguments: --stepz 5"),
    (TP, 2, "--resume {files}/empty", "--resume another folder than .*empty: .*No such file"),
    (TP, 2, "--resume {files}/torn_tp", "--resume another folder than .*torn_tp: .*[Ii]ncomplete"),
    (TP, 2, "--resume {files}/torn_states", "--resume another folder than .*torn_states: .*[Ii]ncomplete"),
    (TP, 2, "--resume {files}/no_states", "--resume another folder than .*no_states: .*No such file"),
    (TP, 2, "--resume {files}/foreign_tp", "--resume another folder than .*foreign_tp: .*no training state"),
    (
        TP,
        2,
        "--resume {files}/good_tp --dim 32",
        r"made with .*\[16, 2, 2, 1, 256\].*this run has .*\[32, 2, 2, 1, 256\]",
    ),
    (
        TP,
        2,
        "--resume {files}/good_tp --vocab-size 300",
        r"made with .*\[16, 2, 2, 1, 256\].*has .*\[16, 2, 2, 1, 300\]",
    ),
    (TP, 2, "--resume {files}/good_tp --seed 7", "made with .*'seed': 0.*this run has .*'seed': 7"),
    (TP[0], 28, "--heads 28 --kv-heads 28 --dim 168", "--vocab-size 256 leaves one of 28 ranks no row: use a smaller"),
    (
        TP[0],
        2,
        "--compile aot_eager --dropout 0.1",
        "--compile aot_eager cannot trace --dropout 0.1's generators: leave out one",
    ),
    (PP, 3, "--pp 2", "world size 3 is not a multiple of {'pp': 2}: use 2 processes"),
    (PP, 2, "--pp 0", "--pp 0 must be above 0"),
    (PP, 4, "--layers 3", "--layers 3 are fewer than 4 ranks x 1 = 4 stages: use --layers 4 or fewer ranks"),
    (PP, 2, "--schedule interleaved --chunks 3", "--layers 4 are fewer than 2 ranks x 3 = 6 stages"),
    (PP, 2, "--chunks 2", "--chunks 2 does not go with --schedule 1f1b on 2 ranks: use 1 or more with interleaved"),
    (PP, 2, "--schedule interleaved --chunks -1", "--chunks -1 does not go with .*: use 1 or more with interleaved"),
    (PP, 2, "--split 2,3", "--split 2,3 sums to 5 in 2 stages: use 2 numbers of 1 and more that sum to --layers 4"),
    (PP, 2, "--split 4,0", "--split 4,0 sums to 4 in 2 stages: use 2 numbers of 1 and more that sum to --layers 4"),
    (PP, 2, "--split 1,2,1", "--split 1,2,1 sums to 4 in 3 stages: use 2 numbers"),
    (PP, 2, "--split a,b", "--split a,b must be 2 numbers of layers, as in 3,5"),
    (PP, 2, "--schedule dualpipe", "--schedule: invalid choice: 'dualpipe'.*1f1b"),
    (PP, 2, "--batch 32 --microbatch 3", "--microbatch 3 must divide a rank's 32: use 1"),
    (PP, 4, "--pp 2 --batch 3", "--batch 3 is not divisible by 2 data-parallel ranks: use 2 x n"),
    (PP[1], 2, "--timeline {files}/picture.gif", "--timeline .*picture.gif must end in .svg or .png"),
    (PP[1], 2, "--timeline {files}/nowhere/picture.svg", "--timeline .*picture.svg needs a folder that exists"),
    (PP[1], 2, "--simulate 1,2", "--simulate 1,2 must be four costs F,B,W,SEND"),
    (PP[1], 2, "--simulate 0,1,1,0", "--simulate 0,1,1,0 must be four costs F,B,W,SEND, F and B above 0"),
    (PP, 2, "--resume {files}/torn_tp", "--resume another folder than .*torn_tp: .*[Ii]ncomplete"),
    (PP, 2, "--resume {files}/good_tp", "made with .*this run has .*'tied': False"),
    (PP[0], 4, "--microbatch 16", "--schedule 1f1b with 2 microbatches, not 4 or more: use --microbatch 4, or gpipe"),
    (
        PP[0],
        2,
        "--batch 9 --microbatch 1 --schedule zero-bubble",
        "zero-bubble with 9 microbatches, not a multiple of 4",
    ),
    (ZERO, 3, "--batch 64", "--batch 64 is not divisible by 3 data-parallel ranks: use 3 x n"),
    (ZERO, 2, "--stage 4", "--stage: invalid choice: 4"),
    (ZERO, 2, "--bucket-size 0", "--bucket-size 0 must be at least 1 element: use 500000"),
    (ZERO, 2, "--batch 32 --microbatch 3", "--microbatch 3 must divide a rank's 16: use 1"),
    (ZERO, 2, "--data {files}/short.txt", "short.txt has 9 bytes of text, a batch takes 4097: use more --data"),
    (ZERO, 2, "--resume {files}/no_states", "--resume another folder than .*no_states: .*No such file"),
    (ZERO, 2, "--resume {files}/foreign_tp", "--resume another folder than .*foreign_tp: .*no training state"),
    (ZERO, 2, "--resume {files}/good_tp --dim 32", r"made with .*\[16, 2, 2, 1, 256\].*has .*\[32, 2, 2, 1, 256\]"),
    (PICTURE, 2, "--dim 12", "--dim 12 must be a multiple of 8, and --layers 4 above 0"),
    (PICTURE, 2, "--save {files}/picture.gif", "--save .*picture.gif must end in .svg, .png or .pdf"),
    (TP[1], 2, "--regather", "--regather goes with --sequence-parallel, and without --no-overlap"),
    (TP[1], 2, "--regather --sequence-parallel --no-overlap", "--regather goes with --sequence-parallel, and without"),
]
# What refuses is the same code in the scripts of a pair (tests/test_style.py): they take turns, and each shows several
# times that it is asked.
ROWS = [
    pytest.param(script, *case, id=f"{script[:2]} {Path(script).stem} {case[1]}".replace("{files}/", ""))
    for turn, (scripts, *case) in enumerate(CASES)
    for script in [scripts if isinstance(scripts, str) else scripts[turn % 2]]
]


class Bomb:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of texts and checkpoints: one good, the others not."""
    files = tmp_path_factory.mktemp("files")
    run(TRAIN, *SMALL.split(), "--save", files / "good").check()
    good = (files / "good" / "checkpoint.pt").read_bytes()
    for name in ("empty", "torn", "flipped", "text", "foreign", "pickle"):
        (files / name).mkdir()
    (files / "short.txt").write_bytes(b"too short")
    (files / "torn" / "checkpoint.pt").write_bytes(good[: len(good) // 2])
    weight = torch.load(files / "good" / "checkpoint.pt", weights_only=True)["model"]["lm_head.weight"]
    place = good.index(weight.numpy().tobytes()) + 40
    flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    (files / "flipped" / "checkpoint.pt").write_bytes(flipped)
    (files / "text" / "checkpoint.pt").write_text("not a checkpoint\n" * 99)
    torch.save({"epoch": 3, "state_dict": {"weight": torch.ones(2)}}, files / "foreign" / "checkpoint.pt")
    torch.save(Bomb(files / "exploded"), files / "pickle" / "checkpoint.pt")
    run(TP[1], *SMALL.split(), "--save", files / "good_tp").check()
    for name in ("torn_tp", "torn_states", "no_states", "foreign_tp"):
        shutil.copytree(files / "good_tp", files / name)
    for torn in (files / "torn_tp" / "model.safetensors", files / "torn_states" / "optimizer-1.safetensors"):
        torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    (files / "no_states" / "optimizer-1.safetensors").unlink()
    save_file({"weight": torch.ones(2)}, files / "foreign_tp" / "model.safetensors", {"format": "pt"})
    return files


def check_one_line(result, expected):
    """Every rank: exit code 2, one line with an error, in which `expected` is found, and no traceback."""
    assert set(result.codes) == {2}, result
    for rank, output in enumerate(result.outputs):
        (line,) = [line for line in output.splitlines() if re.search("[Ee]rror|Traceback", line)]
        assert re.search(expected, line), output
        assert re.match(rf"\[rank{rank}\] error: |\w+\.py: error: ", line), output  # by the script, or by argparse


@pytest.mark.parametrize(("script", "nproc", "flags", "expected"), ROWS)
def test_wrong_invocation_ends_on_every_rank_in_one_line(script, nproc, flags, expected, files):
    flags = flags.format(files=files).split()
    small = SMALL.split() if "--resume" in flags else []  # else the defaults, whose numbers the lines above show
    check_one_line(run(script, *small, *flags, nproc=nproc, timeout=20), expected)
    assert not (files / "exploded").exists()  # no code from a checkpoint ran


@pytest.mark.parametrize(("script", "folder"), [(TRAIN, "good"), (TP[0], "good_tp"), (TP[1], "good_tp")])
def test_good_checkpoint_resumes(script, folder, files):
    """Without this, the refusals above might have another cause."""
    run(script, *SMALL.split(), "--steps", 2, "--resume", files / folder, nproc=2).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the case is a machine without a GPU, and this one has one")
@pytest.mark.parametrize("script", [*BOTH, *TP])
def test_cuda_on_a_machine_without_gpu_ends_in_one_line(script):
    result = run(script, "--device", "cuda", nproc=2, timeout=20)
    check_one_line(result, "2 local ranks need as many GPUs, this node shows 0: use --device cpu")


@pytest.mark.parametrize("script", [*BOTH, *TP])
def test_half_set_environment_ends_in_one_line(script):
    result = run(script, env={"WORLD_SIZE": ""}, timeout=20)
    check_one_line(result, "RANK, MASTER_ADDR, MASTER_PORT set without WORLD_SIZE: start with torchrun, or unset them")


def test_torchrun_itself_fails_when_the_script_refuses():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAIN]
    done = subprocess.run([*command, "--batch", "63"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "error: --batch 63 is not divisible by 2 data-parallel ranks: use 2 x n\n" in done.stderr
