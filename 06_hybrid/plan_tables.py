"""What plan.py knows: models and GPUs from tables/*.csv and from your own files, a layout, and how many bytes and bits.

A row of your own table has the columns of tables/models.csv or tables/gpus.csv; its name takes precedence.
"""

import csv
import json
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).with_name("tables")


class UsageError(ValueError):
    """The user's mistake: one line and exit code 2."""


# ---- model ----
class Family(NamedTuple):
    """What a family's layers have besides their matrices."""

    gated: bool = False  # three matrices in the MLP (SwiGLU), or two
    norms: int = 4  # vectors of the model's width per layer: two LayerNorms have weight and bias each
    last_norm: int = 2  # such vectors behind the layers
    first_norm: int = 0  # ... and behind the embedding
    bias: str = "all"  # of the linear layers: all, mlp, qkv or none
    head_bias: bool = False
    attentions: int = 1  # of a layer; T5's pair of an encoder's and a decoder's layer has three, and two MLPs
    mlps: int = 1
    dropout: bool = False  # trained with dropout: masks are kept for backward


FAMILIES = {  # what is not as in Family
    "gpt": {"dropout": True},
    "mpt": {},
    "llama": {"gated": True, "norms": 2, "last_norm": 1, "bias": "none"},
    "qwen": {"gated": True, "norms": 2, "last_norm": 1, "bias": "qkv"},
    "falcon": {"bias": "none"},
    "bloom": {"first_norm": 2},
    "neox": {},
    "gptj": {"norms": 2, "bias": "mlp", "head_bias": True},
    "palm": {"gated": True, "norms": 1, "last_norm": 1, "bias": "none"},  # arXiv:2204.02311, section 2
    "t5": {"attentions": 3, "mlps": 2, "norms": 5, "last_norm": 2, "bias": "none"},
    "bert": {"last_norm": 0, "first_norm": 2, "dropout": True},
}


class Model(NamedTuple):
    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0  # rows of a learned table of positions; 0: rotary or none
    tied: bool = False
    experts: int = 1
    top_k: int = 1
    source: str = ""

    @property
    def kind(self):
        return Family(**FAMILIES[self.family])

    @property
    def q_dim(self):
        return self.heads * self.head_dim

    @property
    def kv_dim(self):
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self):
        """Elements of the matrices of queries, keys, values and output of one layer."""
        return 2 * self.hidden * (self.q_dim + self.kv_dim)

    @property
    def mlp_params(self):
        """Elements of one MLP, or of one expert."""
        return (3 if self.kind.gated else 2) * self.hidden * self.ffn

    @property
    def layer_params(self):
        """All of one layer, as the paper's 12 h^2 + 13 h for GPT (Narayanan et al., arXiv:2104.04473, eq. 2)."""
        bias = self.kind.bias
        vectors = self.hidden * (2 if self.family == "falcon" and self.kv_heads == 1 else self.kind.norms)
        vectors += (self.q_dim + 2 * self.kv_dim) * (bias in ("all", "qkv")) + self.hidden * (bias == "all")
        if bias in ("all", "mlp"):
            vectors += self.experts * (self.ffn * (1 + self.kind.gated) + self.hidden)
        router = self.hidden * self.experts if self.experts > 1 else 0
        matrices = self.kind.attentions * self.attention_params + self.kind.mlps * self.experts * self.mlp_params
        return matrices + router + vectors

    @property
    def embedding_params(self):
        rows = self.vocab + self.positions + (2 if self.family == "bert" else 0)  # BERT: two segments
        relative = 64 * self.heads if self.family == "t5" else 0  # 32 distances, in encoder and decoder
        return (rows + self.kind.first_norm) * self.hidden + relative

    @property
    def head_params(self):
        """What stands behind the layers, a matrix of its own included: the head, or BERT's pooler."""
        own = 0 if self.tied else self.vocab * self.hidden + self.vocab * self.kind.head_bias
        pooler = self.hidden * self.hidden + self.hidden if self.family == "bert" else 0
        return self.kind.last_norm * self.hidden + own + pooler

    @property
    def params(self):
        return self.layers * self.layer_params + self.embedding_params + self.head_params

    def forward_flops(self, seq_len):
        """FLOPs of a sequence's forward: 2 per element and token, and 4 s q of attention (arXiv:2205.05198, app. A).

        Attention counts whole, though a causal mask hides half of it. Of experts, those that a token meets. Backward
        takes twice as much.
        """
        layer = self.attention_params + self.top_k * self.mlp_params
        return seq_len * (self.layers * (2 * layer + 4 * seq_len * self.q_dim) + 2 * self.vocab * self.hidden)


# ---- hardware ----
class Gpu(NamedTuple):
    name: str
    memory_gib: float  # what torch sees
    hbm_gb_s: float
    bf16_tflops: float  # dense peaks; float16 is the same
    fp8_tflops: float | None
    fp4_tflops: float | None
    matmul_fraction: float  # of the peak that a large matmul reaches, measured
    attention_fraction: float | None  # of the 16-bit peak, flash attention's; None: before Ampere, no bf16 either
    link: str
    link_gb_s: float  # one direction, of one GPU to those beside it
    link_gpus: int  # how many it joins
    pcie_gb_s: float  # to the host, one direction
    nic_gb_s: float  # of one GPU to other nodes, one direction
    source: str = ""

    @property
    def memory_bytes(self):
        return self.memory_gib * 2**30

    def peak_flops(self, precision):
        """Peak of the matmuls in FLOP/s; precision: bf16, fp16, fp8, fp4 or fp32 (through the cores of TF32)."""
        tflops = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops, "fp32": self.bf16_tflops / 2}
        value = tflops.get(precision, self.bf16_tflops)
        if value is None:
            raise UsageError(f"--precision {precision}: {self.name} has none; use bf16")
        return value * 1e12


# ---- what is asked, and a layout ----
# Bytes per parameter of weights, gradients and optimizer states of each recipe, and what they are.
RECIPES = {
    "16": (2, 2, 12),  # 16-bit weights and gradients; float32 weights, momentum, variance: arXiv:1910.02054, sec. 3.1
    # ... and FSDP's float32 weights, gradients and states, with 16-bit copies where they are used: as many bytes
    "18": (2, 4, 12),  # float32 gradients: Megatron-LM with bf16, docs/user-guide/features/dist_optimizer.md
    "20": (2, 2, 16),  # both: Megatron-LM with fp16; DeepSpeed's 2 + 18/N (runtime/zero/stage_1_and_2.py)
    "8": (2, 2, 4),  # all in 16 bits
    "fp32": (4, 4, 8),  # all in float32
}


class Job(NamedTuple):
    """What is to be trained, and on what. gpus_per_node: of one machine; node_gpus: joined by the fast link."""

    model: Model
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    seq_len: int
    batch: int  # sequences per optimizer step
    precision: str = "bf16"
    recipe: str = "18"
    flash: bool = True  # attention whose scores never reach memory (arXiv:2205.14135)
    fused: bool = True  # norms, rotary positions and activation functions in one kernel each (Megatron-LM, compile)
    fused_loss: bool = True  # a cross-entropy that keeps one float32 copy of the logits; PyTorch's own keeps more
    overlap: bool = True  # collectives of dp behind backward, of tp behind matmuls, as frameworks since 2022 do
    efficiency: float = 1.0  # of a cluster and framework: predicted over measured time of one run, for all layouts
    links: tuple = ()  # (axis or link, seconds of latency, bytes per second of bus bandwidth), measured

    @property
    def node_gpus(self):
        return max(self.gpu.link_gpus if self.gpu.link_gpus > 8 else 1, self.gpus_per_node)


class Layout(NamedTuple):
    """One way to split the job: over dp x cp x tp x pp GPUs."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1  # virtual stages of a rank
    zero: int = 0  # 1: optimizer states, 2: gradients, 3: weights are split over dp; FSDP is 3
    replicas: int = 1  # HSDP: the split is over dp / replicas
    microbatch: int = 1
    recompute: str = "none"  # none, selective (the scores; with flash attention every second matmul), full
    sequence_parallel: bool = False
    offload: str = "none"  # none, optimizer, all (weights, too): to the host's memory

    @property
    def size(self):
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self):
        """Ranks over which ZeRO splits: context-parallel ranks hold the same weights, and count."""
        return max(1, self.dp * self.cp // self.replicas)

    def microbatches(self, batch):
        return batch // (self.dp * self.microbatch)


# ---- reading ----
def read_table(kind, path, make):
    """Returns {name: row} of a CSV file; kind and path are named where a row is wrong."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{kind} {path}: {error}; give a CSV file with the columns of {TABLES}") from None
    table = {}
    for number, row in enumerate(rows, 2):
        try:
            made = make(row)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{kind} {path}, line {number}: {error!r}; its columns are those of {TABLES}") from None
        table[made.name] = made
    return table


def make_model(row):
    sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    more = {name: int(row.get(name) or default) for name, default in (("positions", 0), ("experts", 1), ("top_k", 1))}
    if min(sizes.values()) < 1 or sizes["heads"] % sizes["kv_heads"]:
        raise ValueError("sizes must be above 0, and kv_heads divide heads")
    if row["family"] not in FAMILIES:
        raise ValueError(f"family {row['family']!r} is none of {', '.join(FAMILIES)}")
    tied = row.get("tied") in ("1", "True", "true", "yes")
    return Model(row["name"], row["family"], **sizes, **more, tied=tied, source=row.get("source") or "")


def make_gpu(row):
    numbers = [name for name in Gpu._fields if name not in ("name", "link", "source")]
    number = {name: float(row[name]) if row.get(name) else None for name in numbers}
    needed = [name for name, value in number.items() if value is None and name.split("_")[0] not in ("fp8", "fp4")]
    if [name for name in needed if name != "attention_fraction"] or min(v for v in number.values() if v) <= 0:
        raise ValueError(f"these must be numbers above 0: {', '.join(needed) or 'all'}")
    number["link_gpus"] = int(number["link_gpus"])
    return Gpu(row["name"], link=row["link"], source=row.get("source") or "", **number)


def load_tables(models=None, hardware=None):
    """Returns ({name: Model}, {name: Gpu}): the folder's tables and, over them, files of the same columns."""
    known = read_table("models", TABLES / "models.csv", make_model)
    gpus = read_table("hardware", TABLES / "gpus.csv", make_gpu)
    known |= read_table("--models", models, make_model) if models else {}
    return known, gpus | (read_table("--hardware", hardware, make_gpu) if hardware else {})


def read_links(path):
    """Returns ((axis or link, latency in seconds, bytes per second), ...) of a file [{"axis": "tp", ..}, ..].

    Each entry has "axis" (tp, dp, pp, cp) or "link" (node: inside a node, network: between nodes, host: to the CPU),
    "alpha_us", microseconds that the smallest message takes, and "busbw_gb_s", nccl-tests' bus bandwidth.
    """
    way_out = 'give [{"link": "node", "alpha_us": 20, "busbw_gb_s": 230}, ..]; or "axis": tp, dp, pp, cp'
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        links = tuple(
            (entry.get("axis") or entry["link"], float(entry["alpha_us"]) / 1e6, float(entry["busbw_gb_s"]) * 1e9)
            for entry in entries
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--links {path}: {error!r}; {way_out}") from None
    names = ("tp", "dp", "pp", "cp", "node", "network", "host")
    if bad := [link for link in links if link[0] not in names or link[1] < 0 or link[2] <= 0]:
        raise UsageError(f"--links {path}: {bad[0][0]!r}, latency {bad[0][1]}, {bad[0][2]} bytes/s; {way_out}")
    return links
