"""One training step of a job of any size, on a laptop: train.py's own step, on tensors that have shapes and no memory.

    python 06_hybrid/train.py --preset llama2-70b --pp 8 --tp 8 --world 512 --dry-run --seq-len 4096 --batch 1024
A fake process group says it has 512 ranks and returns at once; what is computed and sent is seen by tracker.py. Ranks
are alike but for their pipeline stage, so three are traced: of the first, a middle and the last place on pp. Of many
microbatches a few are traced, twice: each further one adds the same.
"""

import multiprocessing

import torch
import torch.distributed as dist
from parallel import AXES
from torch._subclasses.fake_tensor import FakeTensorMode
from tracker import Tracker

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")


def choose_traces(schedule, num_microbatches, num_stages, pp_size):
    """Returns the counts of microbatches to trace: [all], or two smaller ones that fill the pipeline and more.

    Interleaved schedules take microbatches in rounds of pp_size.
    """
    more = pp_size if schedule in ("interleaved", "zero-bubble") else 1
    counts = [num_stages + more, num_stages + 2 * more]
    return counts if sum(counts) < num_microbatches else [num_microbatches]


def trace_rank(rank, world_size, build, make_job, num_microbatches):
    """Returns {kind: bytes held, (axis, collective): bytes sent} of one training step of a rank.

    build: function(device) -> (mesh, tie group, stages on the meta device). make_job: function of these three, rank=,
    device= and num_microbatches= -> Trainer. Both are called under the fake process group.
    """
    # The backend has no public name; importing it registers it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        device = torch.device("cpu")
        built = mesh, tie_group, _ = build(device)  # a mesh's numbers are read: not under fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            job = make_job(*built, rank=rank, device=device, num_microbatches=num_microbatches)
            job.schedule._warmup_p2p = agree_on_shapes  # its own asks the neighbours, and reads their answer
            for p in job.named.values():
                p.grad = torch.zeros_like(p)
            job.update(0)  # AdamW's states exist from here on, as in every step but the first
            groups = {axis: mesh[axis].get_group() for axis in AXES if mesh[axis].size() > 1}
            groups |= {"tied": tie_group} if tie_group else {}
            with Tracker(groups) as tracker:
                tracker.begin(job.named.values(), job.optimizer)
                text = torch.zeros(num_microbatches * job.args.microbatch, job.args.seq_len + 1, dtype=torch.long)
                job.forward_backward(text)
                held = tracker.held_bytes_by_kind()
                job.update(0)
            return held | tracker.sent
    finally:
        dist.destroy_process_group()


def agree_on_shapes(stages, *_):
    """In the place of the library's vote (torch 2.13) whether all stages know their shapes: they do."""
    from torch.distributed.pipelining.stage import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def dry_run(world_size, pp_size, build, make_job, counts, num_microbatches):
    """Returns {place on pp: {kind: bytes held, (axis, collective): bytes sent}} of the first, a middle, the last place.

    counts: of microbatches to trace; one, or two from which `num_microbatches` follows, as all grows evenly with them.
    Each trace in a process of its own: DTensor remembers the groups of a mesh of these sizes, and would use another's.
    """
    fork, traces, found = multiprocessing.get_context("fork"), [], {}
    for place in sorted({0, pp_size // 2, pp_size - 1}):
        for count in counts:
            receiver, sender = fork.Pipe(duplex=False)

            def trace(place=place, count=count, sender=sender):
                torch.set_num_threads(1)  # nothing computes; and remakes the pool before autograd's threads race to
                sender.send(trace_rank(place * (world_size // pp_size), world_size, build, make_job, count))

            (child := fork.Process(target=trace)).start()
            sender.close()
            traces.append((place, count, receiver, child))
    for place, count, receiver, child in traces:
        try:
            values = receiver.recv()
        except EOFError:
            raise RuntimeError(f"the trace of place {place} on pp failed: its error is above") from None
        child.join()
        if count == counts[0]:
            found[place] = values
        else:
            grown = (num_microbatches - counts[0]) / (count - counts[0])
            for key, value in found[place].items():
                found[place][key] = round(value + grown * (values[key] - value))
    return found


def report_lines(found):
    """Returns the lines of two tables: what a rank holds, and what it sends in a step. found: dry_run's."""
    lines = ["MiB held | " + " | ".join(f"{kind:>11}" for kind in KINDS)]
    for place, values in found.items():
        lines.append(f"pp {place:5} | " + " | ".join(f"{values[kind] / 2**20:11,.1f}" for kind in KINDS))
    names = sorted({key for values in found.values() for key in values if key not in KINDS})
    lines.append("MiB sent | " + " | ".join(f"{axis} {name}" for axis, name in names))
    for place, values in found.items():
        shown = (f"{values.get(key, 0) / 2**20:{len(' '.join(key))},.1f}" for key in names)
        lines.append(f"pp {place:5} | " + " | ".join(shown))
    return lines
