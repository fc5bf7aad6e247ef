"""The rows of compare.py: every script of 02 to 06, its variants, and the layout that each has on so many ranks."""

from typing import NamedTuple

FOLDERS = {
    "02": ("02_ddp", "every rank has the whole model and a part of the batch"),
    "03": ("03_tensor_parallel", "every matrix is split"),
    "04": ("04_pipeline", "the layers are split"),
    "05": ("05_zero", "data parallel, and nothing stored twice"),
    "06": ("06_hybrid", "pipeline x data x tensor parallel"),
}
RANKS = (2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


class Row(NamedTuple):
    folder: str
    script: str
    flags: str  # the technique's own; those of the model are the same in every row
    layout: str
    ranks: int
    deepspeed: bool = False

    @property
    def command(self) -> str:
        return f"{self.folder}/{self.script} {self.flags}".strip()


# ---- rows ----
def mesh_of(**sizes: int) -> str:
    """pp 2 x tp 2, without the axes of size 1."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def choose_rows(ranks: int, folders: list[str], batch: int, layers: int, heads: int) -> list[Row]:
    """The first row is one process, which all others are compared with, and the second DDP, for the ratio of times."""
    if batch % (2 * ranks):
        wanted = batch + -batch % (2 * ranks)
        raise UsageError(f"--batch {batch} is not 2 microbatches on each of {ranks} ranks: use --batch {wanted}")
    found = [Row("02_ddp", "train.py", "", "1 rank", 1), Row("02_ddp", "train.py", "", mesh_of(dp=ranks), ranks)]
    for number in folders:
        found += ROWS_OF[number](ranks, batch, layers, heads)
    return found


def rows_of_02(ranks: int, batch: int, layers: int, heads: int) -> list[Row]:
    twice = f"--microbatch {batch // ranks // 2}"  # gradients of two microbatches, one all_reduce
    variants = [("train.py", twice), ("from_scratch.py", ""), ("from_scratch.py", twice)]
    return [Row("02_ddp", script, flags, mesh_of(dp=ranks), ranks) for script, flags in variants]


def rows_of_03(ranks: int, batch: int, layers: int, heads: int) -> list[Row]:
    tp = max(size for size in (1, *RANKS) if size <= ranks and heads % size == 0)
    if tp == 1:
        raise UsageError(f"--heads {heads} are not divisible by 2 ranks: use --heads 4, or --only 02,04,05")
    one = f"--tp {tp} " if tp < ranks else ""
    variants = [(script, flag) for script in ("train.py", "from_scratch.py") for flag in ("", "--sequence-parallel")]
    layout = mesh_of(dp=ranks // tp, tp=tp)
    return [Row("03_tensor_parallel", script, f"{one}{flags}".strip(), layout, ranks) for script, flags in variants]


def rows_of_04(ranks: int, batch: int, layers: int, heads: int) -> list[Row]:
    found = []
    for script in ("train.py", "from_scratch.py"):
        for schedule in SCHEDULES:
            chunks = 2 if schedule == "interleaved" else 1
            pp = max((size for size in RANKS if size <= ranks and size * chunks <= layers), default=0)
            if not pp:
                way_out = "use --layers 4 or more, or leave 04 out with --only"
                raise UsageError(f"--layers {layers} are fewer than the {2 * chunks} stages of {schedule}: {way_out}")
            flags = f"--pp {pp} " * (pp < ranks) + f"--schedule {schedule}"
            found.append(Row("04_pipeline", script, flags, mesh_of(dp=ranks // pp, pp=pp), ranks))
    return found


def rows_of_05(ranks: int, batch: int, layers: int, heads: int) -> list[Row]:
    layout = mesh_of(dp=ranks)
    found = [Row("05_zero", "train.py", f"--stage {stage}", layout, ranks, deepspeed=True) for stage in range(4)]
    found += [Row("05_zero", "fsdp.py", f"--stage {stage}", layout, ranks) for stage in (1, 2, 3)]
    if ranks > 2:
        found.append(Row("05_zero", "fsdp.py", "--replicas 2", f"{layout}, 2 replicas", ranks))
    return found + [Row("05_zero", "from_scratch.py", f"--stage {stage}", layout, ranks) for stage in (1, 2, 3)]


def rows_of_06(ranks: int, batch: int, layers: int, heads: int) -> list[Row]:
    if heads % 2 or layers < 2:
        raise UsageError(f"--heads {heads} and --layers {layers} must be halved: use 2 or more, or leave 06 out")
    found = [Row("06_hybrid", "train.py", f"--shard {kind}", mesh_of(dp=ranks), ranks) for kind in SHARDS]
    meshes = [(2, 1), (1, 2)] + [(2, 2)] * (ranks > 2)  # pp, tp
    for pp, tp in meshes:
        flags = f"--pp {pp} " * (pp > 1) + f"--tp {tp}" * (tp > 1)
        found.append(Row("06_hybrid", "train.py", flags.strip(), mesh_of(pp=pp, dp=ranks // pp // tp, tp=tp), ranks))
    return found


SHARDS = ("none", "optimizer", "full")
ROWS_OF = {"02": rows_of_02, "03": rows_of_03, "04": rows_of_04, "05": rows_of_05, "06": rows_of_06}
