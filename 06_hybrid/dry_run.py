"""One training step of a job of any size, on a laptop: train.py's own step, on tensors that have shapes and no memory.

    python 06_hybrid/train.py --preset llama2-70b --pp 8 --tp 8 --world 512 --dry-run --seq-len 4096 --batch 1024
A fake process group says it has 512 ranks and returns at once; what is computed and sent is seen by tracker.py. Ranks
are alike but for their pipeline stage, so three are traced: of the first, a middle and the last place on pp.
"""

import multiprocessing

import torch
import torch.distributed as dist
from parallel import AXES
from torch._subclasses.fake_tensor import FakeTensorMode
from tracker import Tracker

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")


def trace_rank(rank, world_size, build, make_job, batch):
    """Returns (bytes by kind, {(axis, collective): bytes sent}) of one training step of a rank.

    build: function(device) -> (mesh, tie group, stages on the meta device), make_job: function of these three, rank=
    and device= -> Trainer; both are called under the fake process group. batch: sequences of a replica.
    """
    # The backend has no public name; importing it registers it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        built = mesh, *_ = build(device := torch.device("cpu"))  # a mesh's numbers are read: not under fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            job = make_job(*built, rank=rank, device=device)
            job.schedule._warmup_p2p = agree_on_shapes  # its own asks the neighbours, and reads their answer
            text = torch.zeros(batch, job.args.seq_len + 1, dtype=torch.long)
            job.forward_backward(text)
            job.update(0)  # AdamW's states exist from here on
            groups = {axis: mesh[axis].get_group() for axis in AXES if mesh[axis].size() > 1}
            with Tracker(groups) as tracker:
                tracker.begin(job.named.values(), job.optimizer)
                job.forward_backward(text)
                held = tracker.held_bytes_by_kind()
                job.update(0)
            return held, dict(tracker.sent)
    finally:
        dist.destroy_process_group()


def agree_on_shapes(stages, *_):
    """In the place of the library's vote (torch 2.13) whether all stages know their shapes: they do."""
    from torch.distributed.pipelining.stage import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def dry_run(world_size, pp_size, build, make_job, batch):
    """Yields (place on pp, bytes by kind, bytes sent) of the first, a middle and the last place.

    Each in a process of its own: DTensor remembers the groups of a mesh of these sizes, and would use the last rank's.
    """
    for place in sorted({0, pp_size // 2, pp_size - 1}):
        receiver, sender = (fork := multiprocessing.get_context("fork")).Pipe(duplex=False)

        def trace(place=place, sender=sender):
            sender.send(trace_rank(place * (world_size // pp_size), world_size, build, make_job, batch))

        (child := fork.Process(target=trace)).start()
        sender.close()
        try:
            yield place, *receiver.recv()
        except EOFError:
            raise RuntimeError(f"the trace of place {place} on pp failed: its error is above") from None
        finally:
            child.join()


def report_lines(traces):
    """Returns the lines of two tables: what a rank holds, and what it sends in a step. Units: MiB."""
    traces = list(traces)
    lines = ["MiB held | " + " | ".join(f"{kind:>11}" for kind in KINDS)]
    for place, held, _ in traces:
        lines.append(f"pp {place:5} | " + " | ".join(f"{held[kind] / 2**20:11,.1f}" for kind in KINDS))
    names = sorted({key for _, _, sent in traces for key in sent})
    lines.append("MiB sent | " + " | ".join(f"{axis} {name}" for axis, name in names))
    for place, _, sent in traces:
        shown = (f"{sent.get(key, 0) / 2**20:{len(' '.join(key))},.1f}" for key in names)
        lines.append(f"pp {place:5} | " + " | ".join(shown))
    return lines
