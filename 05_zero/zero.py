"""ZeRO on plain collectives, stages 0 to 3 in one class (Rajbhandari et al., ZeRO, SC20, sections 5 and 7).

A unit is a part of the model in one flat buffer, of which each of n ranks owns one slice. With m microbatches a step:

    stage   parameters   gradients   optimizer states   elements that a rank sends in a step
      0     whole        whole       whole              2Ψ: all_reduce
      1     whole        whole       slice              Ψ: reduce_scatter                    + Ψ: all_gather
      2     whole        slice       slice              mΨ: reduce_scatter, unit by unit     + Ψ: all_gather
      3     slice        slice       slice              mΨ: reduce_scatter                   + 2mΨ: all_gather
At stage 3 a unit is whole only while it computes, forward and again backward.
"""

import torch
import torch.distributed as dist
from torch import nn
from units import Unit

# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Zero:
    """Runs a model whose states are spread over the ranks; gradients are the sum (not the mean) over them."""

    def __init__(self, model, groups, stage, seed, dtype, device):
        """model: on the meta device. groups: the modules of each unit, in the order of the forward pass."""
        self.stage, self.parts = stage, dist.get_world_size() if stage else 1
        self.units, self.reducing, self.last_microbatch, self.num_sent = [], [], True, 0
        names = {p: name for name, p in model.named_parameters()}
        for number, modules in enumerate(groups):  # one by one: at stage 3 no rank ever holds the whole model
            self.units.append(unit := Unit(modules, names, seed, self.parts, dtype, device))
            unit.first.register_forward_pre_hook(lambda *_, number=number: self.use(number, number + 1))
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(lambda _, unit=unit: self.collect(unit))
            if stage == 3:
                unit.last.register_forward_hook(lambda *hooked, number=number: self.after_forward(number, hooked[2]))
                unit.shard = unit.shard.clone()
                unit.free()
        # What AdamW updates: this rank's slices; of 16-bit ones a copy, since most updates are below their last bit.
        high = dtype if dtype.itemsize > 2 else torch.float32
        self.masters = [nn.Parameter(unit.shard.to(high)) for unit in self.units]

    def gather(self, unit):
        # all_gather over dp: each rank's slice -> the whole unit on every rank
        unit.gathering = all_gather_single(unit.flat, unit.shard, async_op=True)
        self.num_sent += unit.flat.numel()

    def use(self, number, following):
        """Waits until a unit is whole; at stage 3 the one that computes next is then on its way."""
        for unit in (self.units[i] for i in (number, following) if self.stage == 3 and 0 <= i < len(self.units)):
            if unit.flat.untyped_storage().size() == 0:
                unit.flat.untyped_storage().resize_(unit.flat.nbytes)
                self.gather(unit)
        self.units[number].wait()

    def after_forward(self, number, output):
        """Stage 3: frees the unit until backward comes to it."""
        self.units[number].free()
        if output.requires_grad:
            output.register_hook(lambda _: self.use(number, number - 1))

    def collect(self, unit):
        """The hook: autograd has just finished a gradient. After the last one of a unit they leave together."""
        unit.missing = (unit.missing or len(unit.parameters)) - 1
        if unit.missing:
            return
        padding = unit.flat.new_zeros(unit.padding)
        flat = torch.cat([*(p.grad.flatten() for p in unit.parameters), padding])
        for p in unit.parameters:
            p.grad = None
        if self.stage == 3:
            unit.free()
        if self.stage < 2:  # the whole gradients are kept here, and reduced once a step
            flat = unit.whole_grad = flat if unit.whole_grad is None else unit.whole_grad.add_(flat)
            if not self.last_microbatch:
                return
        if self.stage == 0:
            # all_reduce over dp: whole gradients of this rank -> of all, while backward goes on
            own, work = flat, dist.all_reduce(flat, async_op=True)
        else:
            own = flat[unit.slice] if self.stage == 1 else torch.empty_like(unit.shard)
            # reduce_scatter over dp: whole gradients of this rank -> this rank's slice of those of all, meanwhile, too
            work = reduce_scatter_single(own, flat, async_op=True)
        self.num_sent += flat.numel() * (1 if self.stage else 2)
        self.reducing.append((unit, own, flat, work))
        self.settle(2)

    def settle(self, in_flight):
        """Waits until only so many units are being reduced: more would fill the memory that the slices save."""
        while len(self.reducing) > in_flight:
            unit, own, _, work = self.reducing.pop(0)
            work.wait()
            unit.grad = own if unit.grad is None else unit.grad.add_(own)

    def step(self, optimizer, scaler, clip, loss):
        """Clips, updates this rank's slices and sends them out. Returns the loss of all ranks and the gradient norm."""
        self.settle(0)
        for unit, master in zip(self.units, self.masters):
            if unit.grad is None:
                raise RuntimeError(f"rank {dist.get_rank()}: no gradient for one or more of {unit.names}")
            master.grad = unit.grad.to(master.dtype)
        # In pieces: on a CPU torch's norm of 8 million float32 elements is off by 2e-4, of 65,536 by 2e-6.
        pieces = [piece for master in self.masters for piece in master.grad.split(2**16)]
        squares = nn.utils.get_total_norm(pieces).square() / (1 if self.stage else dist.get_world_size())
        # all_reduce over dp: this rank's loss and sum of squared gradients -> those of all
        dist.all_reduce(totals := torch.stack((loss, squares)))
        loss, grad_norm = totals[0], totals[1].sqrt()
        self.masters[0].grad[0] += 0 * grad_norm  # an overflow anywhere is a nan everywhere: all ranks skip, or none
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
            grad_norm = grad_norm / scaler.scale(torch.ones_like(grad_norm))
        for master in self.masters:
            master.grad.mul_((clip / (grad_norm + 1e-6)).clamp(max=1))
        scaler.step(optimizer)
        scaler.update()
        self.publish()
        return loss, grad_norm

    def publish(self):
        """Carries new values of the masters over to the parameters."""
        for unit, master in zip(self.units, self.masters):
            if master.dtype != unit.shard.dtype:
                unit.shard.copy_(master.detach())
            if self.stage in (1, 2):
                self.gather(unit)

    def zero_grad(self):
        for unit, master in zip(self.units, self.masters):
            unit.whole_grad = unit.grad = master.grad = None
