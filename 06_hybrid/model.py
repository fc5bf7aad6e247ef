"""Llama as one chain of layers of which any stretch is a module: names and shapes are Hugging Face's LlamaForCausalLM.

The sizes of the published models are in PRESETS: Llama 2, arXiv:2307.09288; Llama 3, arXiv:2407.21783, table 3.
Shapes: B sequences, T tokens, D width, M MLP hidden, H heads, G key/value heads, K head width, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


# ---- config ----
class RopeScaling(NamedTuple):
    """Llama 3.1's longer context: positions turn more slowly, where one turn is long. Hugging Face's names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LlamaConfig(NamedTuple):
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int  # width of the MLP
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False  # one weight for embedding and head
    rope_scaling: RopeScaling | None = None


PRESETS = {  # tiny is the model of the other folders
    "tiny": ((128, 4, 4, 2, 384, 256), {}),
    "llama2-7b": ((4096, 32, 32, 32, 11008, 32000), {}),
    "llama2-13b": ((5120, 40, 40, 40, 13824, 32000), {}),
    "llama2-70b": ((8192, 80, 64, 8, 28672, 32000), {}),
    "llama3-8b": ((4096, 32, 32, 8, 14336, 128256), {"rope_theta": 500000.0}),
    "llama3-70b": ((8192, 80, 64, 8, 28672, 128256), {"rope_theta": 500000.0}),
    "llama3-405b": (
        (16384, 126, 128, 8, 53248, 128256), {"rope_theta": 500000.0, "rope_scaling": (8.0, 1.0, 4.0, 8192)}),
}  # fmt: skip


def preset(name):
    """Returns the LlamaConfig of a published model, or of the other folders' one, tiny."""
    sizes, more = PRESETS[name]
    config = LlamaConfig(*sizes, **more)
    return config._replace(rope_scaling=config.rope_scaling and RopeScaling(*config.rope_scaling))


# ---- model ----
def turn_by_position(x, config):  # (B, H, T, K) -> (B, H, T, K)
    """Turns the pair x[i], x[i + K/2] by the angle of its position (Su et al., RoFormer, section 3.2.2)."""
    exponent = torch.arange(0, x.shape[-1], 2, dtype=torch.float32, device=x.device) / x.shape[-1]
    frequency = config.rope_theta**-exponent
    if config.rope_scaling:
        factor, low, high, length = config.rope_scaling
        # What turns more often than `high` times in the old context keeps its speed, less than `low` times: 1 / factor.
        keep = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / factor)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32, device=x.device), frequency).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return (x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()).to(x.dtype)


class GroupedQueryAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim = config, config.dim // config.heads
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x):  # (B, T, D) -> (B, T, D); with tensor parallelism H/tp and G/tp heads
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)  # (B, H or G, T, K)
        q, k = turn_by_position(q, self.config), turn_by_position(k, self.config)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x):  # (B, T, D) -> (B, T, M) -> (B, T, D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = GroupedQueryAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x):  # (B, T, D) -> (B, T, D)
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStage(nn.Module):
    """Layers first .. last - 1, the embedding before them or norm and head behind; names are the whole model's.

    LlamaStage(config, 0, config.layers) is the whole model. With config.tied it has one weight for embedding and head;
    a stage that is only the last has a copy in its head, lm_head.weight.
    """

    def __init__(self, config, first, last):
        super().__init__()
        self.is_first, self.is_last = first == 0, last == config.layers
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        # A ModuleList would number them from 0.
        self.model.layers = nn.ModuleDict({str(i): LlamaLayer(config) for i in range(first, last)})
        if self.is_last:
            self.model.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie(config)

    def tie(self, config):
        """Makes the head the embedding, where both are here; what replaces one of the weights calls this again."""
        self.is_tied_here = config.tied and self.is_first and self.is_last
        if self.is_tied_here:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x):  # (B, T) tokens on the first stage, else (B, T, D) -> (B, T, D), on the last (B, T, V)
        x = self.model.embed_tokens(x) if self.is_first else x
        for layer in self.model.layers.values():
            x = layer(x)
        return self.lm_head(self.model.norm(x)) if self.is_last else x


def whole_shapes(config):
    """Returns {name: shape} of the whole model's parameters, of which none gets memory."""
    with torch.device("meta"):
        return {name: p.shape for name, p in LlamaStage(config, 0, config.layers).named_parameters()}
