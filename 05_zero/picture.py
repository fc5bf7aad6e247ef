"""Draws who holds what at each stage of ZeRO: bytes measured on every rank after a step of from_scratch.py's model.

    torchrun --nproc-per-node 4 05_zero/picture.py --save zero.svg
Prints the bytes, one line a stage, and draws them: a lane per rank, a colour per kind of state, the slices in their
places. Needs `pip install matplotlib` for --save. Compare figure 1 of Rajbhandari et al., ZeRO, SC20.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from from_scratch import PARTS, Llama, held_bytes
from units import group_modules
from zero import Zero

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError, process_group  # copied this folder out? copy common/ beside it or into it

COLOURS = ("#56B4E9", "#E69F00", "#009E73")  # Okabe and Ito, Color Universal Design, 2008
STAGES = ("0: nothing split", "1: optimizer states split", "2: and gradients", "3: and parameters")


# ---- config ----
def parse_args():
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--save", help="file to draw to: .svg, .png or .pdf")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the parameters")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args()


def check_picture(args):
    """Refuses what cannot be drawn: on every rank alike, before the first collective."""
    if args.dim < 8 or args.dim % 8 or args.layers < 1:
        raise UsageError(f"--dim {args.dim} must be a multiple of 8, and --layers {args.layers} above 0")
    if not args.save:
        return
    if Path(args.save).suffix not in (".svg", ".png", ".pdf") or not Path(args.save).absolute().parent.is_dir():
        raise UsageError(f"--save {args.save} must end in .svg, .png or .pdf, in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--save needs matplotlib: pip install matplotlib") from None


# ---- measuring ----
def measure_stage(args, stage, device):
    """Returns the bytes of parameters, gradients and optimizer states, for each rank, at the end of a step."""
    with torch.device("meta"):
        model = Llama(args.dim, args.layers, 4, 2)
    zero = Zero(model, group_modules(model, stage, 500_000), stage, 0, getattr(torch, args.dtype), device)
    optimizer = torch.optim.AdamW(zero.masters, fused=True)
    tokens = torch.randint(256, (2, 17), device=device)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    zero.step(optimizer, torch.amp.GradScaler(device.type, enabled=False), 1.0, loss.detach())
    # all_gather over dp: this rank's three numbers -> those of all
    dist.all_gather_object(held := [None] * dist.get_world_size(), held_bytes(zero, optimizer))
    zero.zero_grad()
    for unit in zero.units:
        unit.wait()
    return held


# ---- drawing ----
def draw_states(path, held, title):
    """held: for each stage, for each rank, the bytes of parameters, gradients and optimizer states."""
    import matplotlib
    from matplotlib.figure import Figure

    num_ranks, whole = len(held[0]), held[0][0]  # at stage 0 every rank holds everything
    figure = Figure(figsize=(10, 0.6 + 4 * (0.45 + 0.2 * num_ranks)), layout="constrained")
    figure.suptitle(title)
    for axes, stage, name in zip(figure.subplots(len(held), sharex=True), held, STAGES):
        for rank, parts in enumerate(stage):
            start = 0
            for size, full, colour, label in zip(parts, whole, COLOURS, PARTS):
                place = start if size > 0.99 * full or num_ranks == 1 else start + full * rank / num_ranks
                axes.barh(rank, full / 2**20, 0.8, start / 2**20, color="#EEEEEE")
                axes.barh(rank, size / 2**20, 0.8, place / 2**20, color=colour, label=label if rank == 0 else None)
                start += full
        axes.set_title(f"stage {name} | {sum(stage[0]) / 2**20:.2f} MiB a rank", loc="left", fontsize=10)
        axes.set(yticks=range(num_ranks), yticklabels=[f"rank {rank}" for rank in range(num_ranks)])
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    axes.set_xlabel("MiB; grey: held by other ranks")
    figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside lower left", frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero"}):  # letters as letters, the same file
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


# ---- main ----
def main():
    args = parse_args()
    with process_group(args.device, 600) as (rank, _, world_size, device):
        check_picture(args)
        held = [measure_stage(args, stage, device) for stage in range(4)]
        for stage, parts in enumerate(held if rank == 0 else ()):
            shown = ", ".join(f"{nbytes:,} bytes of {name}" for name, nbytes in zip(PARTS, parts[0]))
            print(f"stage {stage}: {shown}")
        if args.save and rank == 0:
            draw_states(args.save, held, f"ZeRO on {world_size} ranks, {args.dtype}, measured")


if __name__ == "__main__":
    main()
