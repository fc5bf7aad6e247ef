"""A backward in two halves: the gradient of a layer's input now, that of its weight when there is nothing else to do.

    whole:   B = dx = dy W, dW = dy^T x       the stage before waits for dx, nobody waits for dW
    apart:   B = dx = dy W   ...   W = dW     W fills the bubbles (Qi et al., Zero Bubble Pipeline Parallelism, 2023)
Until W has run, x and dy of each linear layer are kept. Norms and the embedding are done in B: they cost little.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class InputGradient(Function):
    """y = x W^T; backward computes dx = dy W, and notes (W, x, dy) for dW."""

    @staticmethod
    def forward(ctx, x, weight, noted):
        ctx.weight, ctx.noted = weight, noted
        ctx.save_for_backward(x)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.noted.append((ctx.weight, x.detach(), dy))  # detached: its history must not outlive this backward
        return dy @ ctx.weight.to(dy.dtype), None, None


def linear_apart(x, weight, noted):  # (.., N) -> (.., M), weight (M, N)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return InputGradient.apply(x, weight, noted)


def take_apart(module, noted):
    """Has each linear layer of a module put its (weight, x, dy) on the list `noted`, instead of computing dW."""
    for linear in [m for m in module.modules() if isinstance(m, nn.Linear)]:
        linear.forward = partial(linear_apart, weight=linear.weight, noted=noted)


def add_weight_gradient(weight, x, dy):
    """Adds dW = dy^T x (M, N) to weight.grad."""
    gradient = (dy.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
