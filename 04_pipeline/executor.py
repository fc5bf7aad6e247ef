"""Runs one rank's list of pipeline steps: receive, compute, send; nothing is kept longer than the schedule says.

    rank 0   F0 ------ F1 ------ B0 ...        edge 0 -> 1: activations of microbatches 0, 1, ..
               \\         \\      /              edge 1 -> 0: their gradients
    rank 1      F0 B0 --- F1 B1 ...            a send goes on while its rank computes, a receive is posted one ahead
Each directed edge has a process group of its own: its messages stay in order, and none waits behind one that goes the
other way. Sends are not waited for before the end, so no order of the ranks can lock.
Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, section 2.2.
"""

import time
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from schedules import Step, peak_activations
from weight_gradients import add_weight_gradient


# ---- edges ----
class Pipe(NamedTuple):
    """A pipeline as one of its ranks sees it."""

    rank: int  # this one's place in it
    ranks: list[int]  # the ranks' numbers in the world, in order: stage s lies on ranks[s % len(ranks)]
    num_stages: int
    edges: dict[tuple[int, int, str], Any]  # (from, to, "F" or "B"): its process group

    def neighbour(self, step: Step, way: int) -> Step | None:
        """Returns the step that needs this one's output (way 1), or whose output this one needs (way -1)."""
        stage = step.stage + (way if step.kind == "F" else -way)
        return Step(step.kind, stage, step.microbatch) if step.kind != "W" and 0 <= stage < self.num_stages else None

    def edge(self, source: Step, target: Step) -> tuple[int, int, str]:
        return source.stage % len(self.ranks), target.stage % len(self.ranks), source.kind


def connect(schedule, pipelines, num_stages, timeout):
    """Returns this rank's Pipe; all ranks of the world call it. pipelines: each replica's ranks; timeout: timedelta."""
    mine = None
    for ranks in pipelines:
        pipe = Pipe(ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1, ranks, num_stages, {})
        for step in sorted({Step(step.kind, step.stage, 0) for steps in schedule for step in steps}):
            after = pipe.neighbour(step, 1)
            if after and (edge := pipe.edge(step, after))[0] != edge[1] and edge not in pipe.edges:
                pipe.edges[edge] = dist.new_group([ranks[edge[0]], ranks[edge[1]]], timeout=timeout)
        mine = pipe if pipe.rank >= 0 else mine
    return mine


# ---- executor ----
class Executor:
    """Runs the steps of one rank.

    forward(stage, x, microbatch) returns what the stage makes of x, None for the first; of the last stage, the loss.
    finished(stage): called when its gradients are complete. noted: the list that take_apart has filled.
    """

    def __init__(self, steps, pipe, forward, device, dtype, finished=None, noted=None):
        self.steps, self.pipe, self.forward = steps, pipe, forward
        self.device, self.dtype, self.finished, self.noted = device, dtype, finished or (lambda stage: None), noted
        self.last = {step.stage: step for step in steps}
        self.peak, self.apart = peak_activations(steps), any(step.kind == "W" for step in steps)

    def post(self, edge):  # the next receive of an edge
        if self.expected[edge]:
            step = self.expected[edge].popleft()
            buffer = torch.empty(self.shapes[step.microbatch], device=self.device, dtype=self.dtype)
            # recv over pp: activations (B, T, D) of the stage before, or the gradient of the stage behind
            with self.naming("waited for", step, "from", rank := self.pipe.ranks[edge[0]]):
                self.arriving[step] = buffer, dist.irecv(buffer, rank, group=self.pipe.edges[edge])

    def receive(self, step):
        if not (source := self.pipe.neighbour(step, -1)):
            return None
        if (edge := self.pipe.edge(source, step))[0] == edge[1]:
            return self.here.pop(step)
        buffer, work = self.arriving.pop(step)
        with self.naming("waited for", step, "from", self.pipe.ranks[edge[0]]):
            work.wait()
        self.post(edge)
        return buffer

    def send(self, step, tensor):
        target = self.pipe.neighbour(step, 1)
        if target and (edge := self.pipe.edge(step, target))[0] == edge[1]:
            self.here[target] = tensor
        elif target:
            # send over pp: activations (B, T, D) to the stage behind, or the gradient to the stage before
            with self.naming("sent", target, "to", rank := self.pipe.ranks[edge[1]]):
                work = dist.isend(tensor, rank, group=self.pipe.edges[edge])
            self.leaving = [one for one in self.leaving if not one[0].is_completed()] + [(work, tensor, target, rank)]

    @contextmanager
    def naming(self, verb, step, way, rank):  # the backend's own error does not say what failed, nor between whom
        try:
            yield
        except RuntimeError as error:
            what = f"{'input' if step.kind == 'F' else 'gradient'} of microbatch {step.microbatch}, stage {step.stage}"
            told = f"in step {self.number} rank {dist.get_rank()} {verb} the {what}, {way} rank {rank}: {error}"
            raise RuntimeError(told) from error

    def run(self, number, shapes, record=None):
        """Runs all steps for optimizer step `number`. shapes: of what the stages send each other, per microbatch.
        record: a list that gets each (step, start, end), in seconds.
        """
        self.number, self.shapes, self.here, self.arriving, self.leaving = number, shapes, {}, {}, []
        held, later, self.expected = {}, {}, defaultdict(deque)
        for step in self.steps:
            if (source := self.pipe.neighbour(step, -1)) and (edge := self.pipe.edge(source, step))[0] != edge[1]:
                self.expected[edge].append(step)
        for edge in list(self.expected):
            self.post(edge)
        if record is not None:
            dist.barrier()  # the clocks of the ranks begin together
        zero = self.now() if record is not None else 0
        for step in self.steps:
            key, received = (step.stage, step.microbatch), self.receive(step)
            began = self.now() if record is not None else 0
            if step.kind == "F":
                x = received.detach().requires_grad_() if received is not None else None
                y = self.forward(step.stage, x, step.microbatch)
                held[key] = x, y
                out = y.detach()
            elif step.kind == "B":
                x, y = held.pop(key)
                torch.autograd.backward(y, received)
                out = x.grad if x is not None else None
                if self.apart:
                    later[key], self.noted[:] = self.noted[:], []
                del x, y  # or this microbatch's activations would live through the next step
            else:
                for entry in later.pop(key):
                    add_weight_gradient(*entry)
            if record is not None:
                record.append((step, began - zero, self.now() - zero))
            assert len(held.keys() | later.keys()) <= self.peak, f"{step}: more held than {self.peak} microbatches"
            self.send(step, out)  # not of "W", which no other stage waits for
            if step == self.last[step.stage]:
                self.finished(step.stage)
        for work, _, step, rank in self.leaving:
            with self.naming("sent", step, "to", rank):
                work.wait()

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # only where times are recorded
        return time.perf_counter()
