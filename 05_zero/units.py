"""Units: parts of a model in flat buffers, shared out in equal slices whatever the shapes of the parameters are."""

import zlib

import torch
import torch.distributed as dist
from torch import nn


def group_modules(model, stage, bucket_size):
    """Returns the modules of each unit: a block at stage 3; below, as many as have bucket_size elements together."""
    parts = [[model.model.embed_tokens], *([layer] for layer in model.model.layers), [model.model.norm, model.lm_head]]
    groups, room = [], 0
    for modules in reversed(parts):  # the order in which gradients come
        numel = sum(p.numel() for module in modules for p in module.parameters())
        if stage == 3 or numel > room:
            groups, room = [[], *groups], bucket_size
        groups[0] = modules + groups[0]
        room -= numel
    return groups


class Unit:
    """The parameters of some modules, as views of one flat buffer; shard: the slice of it that this rank owns."""

    def __init__(self, modules, names, seed, parts, dtype, device):
        """modules: on the meta device, in the order of the forward pass. names: {parameter: its name in the model}."""
        owners = [(m, key, p) for top in modules for m in top.modules() for key, p in m.named_parameters(recurse=False)]
        self.first, self.last, self.parameters = modules[0], modules[-1], []
        self.names, self.shapes = [names[p] for _, _, p in owners], [p.shape for _, _, p in owners]
        self.numel = sum(shape.numel() for shape in self.shapes)
        length = -(-self.numel // parts)  # of a slice; the last one is padded with zeros
        self.padding = length * parts - self.numel
        self.flat = torch.zeros(length * parts, dtype=dtype, device=device)
        for (module, key, _), name, view in zip(owners, self.names, self.views(self.flat)):
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))  # as init_weights does
            view.copy_(0.02 * torch.randn(view.shape, generator=generator) if view.dim() > 1 else torch.ones(1))
            # .data: a gather into the buffer is no change of the weights that autograd has saved for backward.
            setattr(module, key, nn.Parameter(view.data))
            self.parameters.append(getattr(module, key))
        self.slice = slice((start := dist.get_rank() % parts * length), start + length)
        self.shard = self.flat[self.slice]
        self.missing, self.gathering, self.whole_grad, self.grad = len(owners), None, None, None

    def views(self, flat):
        """Splits a buffer like self.flat into tensors of the parameters' shapes."""
        parts = flat[: self.numel].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def free(self):
        """Leaves only the slice; what autograd has saved of the unit is filled again before backward."""
        self.flat.untyped_storage().resize_(0)

    def wait(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
