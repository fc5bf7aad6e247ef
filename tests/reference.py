"""The serial reference: the training run of all scripts, written once more and plainly, for one process.

It shares no code with the scripts and imports no torch.distributed: attention with its matrix of scores written out,
rotary positions as complex numbers, the mask, the loss, the gradient norm and AdamW by their formulas.
"""

import math
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    drift: dict[str, Tensor]  # by how much each moves, if its gradients are off by their tensor's root mean square


def shapes(
    dim: int, layers: int, heads: int, kv_heads: int, vocab_size: int = 256, tied: int = False
) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of Hugging Face's LlamaForCausalLM by name. tied: the embedding is the head, too."""
    hidden = math.ceil(8 * dim / 3 / 64) * 64
    kv_dim = dim // heads * kv_heads
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, dim)}
    for i in range(layers):
        block = {
            "input_layernorm": (dim,),
            "self_attn.q_proj": (dim, dim),
            "self_attn.k_proj": (kv_dim, dim),
            "self_attn.v_proj": (kv_dim, dim),
            "self_attn.o_proj": (dim, dim),
            "post_attention_layernorm": (dim,),
            "mlp.gate_proj": (hidden, dim),
            "mlp.up_proj": (hidden, dim),
            "mlp.down_proj": (dim, hidden),
        }
        result |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    head = {} if tied else {"lm_head.weight": (vocab_size, dim)}
    return result | {"model.norm.weight": (dim,), **head}


def initial_weights(seed: int, dtype: torch.dtype, **sizes: int) -> dict[str, Tensor]:
    weights = {}
    for name, shape in shapes(**sizes).items():
        draw = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        weights[name] = torch.randn(shape, generator=draw) * 0.02 if len(shape) == 2 else torch.ones(shape)
    return {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """x is (B, T, H, K): the pair (x[i], x[i + K/2]) as a complex number, times exp(i * position * frequency)."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([10000.0 ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float32)
    angle = torch.outer(torch.arange(x.shape[1]).float(), frequency)[:, None, :]  # cos and sin, too, in float32
    turn = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype))
    pair = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((pair.real, pair.imag), -1)


def logits(w: dict[str, Tensor], tokens: Tensor, layers: int, heads: int, kv_heads: int, **_: int) -> Tensor:
    x = w["model.embed_tokens.weight"][tokens]
    batch, length, dim = x.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(layers):
        layer = {name.removeprefix(f"model.layers.{i}."): t for name, t in w.items()}
        h = norm(x, layer["input_layernorm.weight"])
        q = rotate((h @ layer["self_attn.q_proj.weight"].T).view(batch, length, heads, -1))
        k = rotate((h @ layer["self_attn.k_proj.weight"].T).view(batch, length, kv_heads, -1))
        v = (h @ layer["self_attn.v_proj.weight"].T).view(batch, length, kv_heads, -1)
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
        scores = torch.einsum("bqhk,bthk->bhqt", q, k) / math.sqrt(q.shape[-1])
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        out = torch.einsum("bhqt,bthk->bqhk", attention, v).reshape(batch, length, dim)
        x = x + out @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate = h @ layer["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def text_of(path: str | None) -> bytes:
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)


def train(
    steps: int,
    batch: int,
    seq_len: int,
    data: str | None = None,
    dtype: torch.dtype = torch.float64,
    lr: float = 3e-3,
    clip: float = 1.0,
    seed: int = 0,
    lengths: list[int] | None = None,
    **sizes: int,
) -> Run:
    """Trains on the global batches of the scripts and returns loss and gradient norm of each step.

    lengths: of each sequence of the batch; what stands behind is not trained on.
    """
    text = torch.tensor(list(text_of(data)))
    num_windows = (len(text) - 1) // seq_len
    steps_per_epoch = num_windows // batch
    w = initial_weights(seed, dtype, **sizes)
    mean, square, drift = ({name: torch.zeros_like(t) for name, t in w.items()} for _ in range(3))
    losses, grad_norms = [], []
    for step in range(steps):
        epoch, place = divmod(step, steps_per_epoch)
        order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(seed + epoch))
        chosen = order[place * batch : (place + 1) * batch]
        tokens = torch.stack([text[i * seq_len : i * seq_len + seq_len + 1] for i in chosen.tolist()])
        log_p = logits(w, tokens[:, :-1], **sizes).log_softmax(-1)
        counts = torch.arange(seq_len) < torch.tensor(lengths or [seq_len] * batch)[:, None]
        loss = -log_p.gather(-1, tokens[:, 1:, None])[counts].mean()
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values()))))
        grad_norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        losses.append(loss.item())
        grad_norms.append(grad_norm.item())
        with torch.no_grad():
            for name, g in gradients.items():  # Loshchilov and Hutter, Decoupled Weight Decay, algorithm 2
                g = g * min(1.0, clip / (grad_norm.item() + 1e-6))
                mean[name] = 0.9 * mean[name] + 0.1 * g
                square[name] = 0.999 * square[name] + 0.001 * g.square()
                unbiased = mean[name] / (1 - 0.9 ** (step + 1))
                scale = (square[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                w[name] -= lr * (unbiased / scale + 0.01 * w[name])
                drift[name] += (g != 0) * lr * g.square().mean().sqrt() / scale  # large where a gradient is near zero
    return Run(losses, grad_norms, {name: t.detach() for name, t in w.items()}, drift)
