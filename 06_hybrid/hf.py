"""Hugging Face's Llama weights, read straight into shards of any layout, and written from them.

    DIR/config.json                        the sizes
    DIR/model.safetensors                  the weights, or, of a larger model,
    DIR/model-00001-of-00003.safetensors   some of the weights
    DIR/model.safetensors.index.json       which weight is in which file

Reading: a file is mapped into memory, and a rank copies out of it its own part of each weight. No tensor crosses the
network, and no rank ever holds more than its own shards and one slice of a file:
    q_proj.weight (D, D)            o_proj.weight (D, D)
    [ tp 0, dp 0 ]  rows            [ tp 0, dp 0 | tp 1, dp 0 ]  rows of dp, columns of tp
    [ tp 0, dp 1 ]                  [ tp 0, dp 1 | tp 1, dp 1 ]
    [ tp 1, dp 0 ]
    [ tp 1, dp 1 ]
Writing: one weight at a time is put together, and the first rank of each pipeline stage writes those of its stage.
Needs `pip install safetensors`. DIR must be a folder that all nodes share.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch.distributed as dist
from checkpoint import write_aside
from model import RopeScaling
from parallel import own_slices
from torch.distributed.tensor import DTensor, Replicate

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
SIZES = {  # ours: theirs
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocab_size": "vocab_size",
}
BUFFERS = re.compile(r"(.+\.)?rotary_emb\.inv_freq")  # computed from the sizes; older files hold them


def need_safetensors():
    """Refuses on every rank alike where the package is missing; call it before the first collective."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise UsageError("Hugging Face's weights need safetensors: pip install safetensors") from None


# ---- config.json ----
def read_hf_config(folder):
    """Returns what model.py's LlamaConfig takes; UsageError with the reason if it cannot compute this model.

    {dim, layers, heads, kv_heads, hidden, vocab_size: int, rope_theta, norm_eps: float, tied: bool (the embedding is
    the head, too), rope_scaling: None or a RopeScaling, of rope_type llama3}
    """
    path = Path(folder, "config.json")

    def refuse(why):
        raise UsageError(f"{path}: {why}")

    try:
        config = json.loads(path.read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # newer files have the first
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
    except OSError as error:
        refuse(error.strerror)
    except (ValueError, AttributeError, TypeError) as error:
        refuse(f"not the JSON object of a model ({error})")
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if config.get("model_type") != "llama" or architectures != ["LlamaForCausalLM"]:
        refuse(f"{architectures} of type {config.get('model_type')!r}: only LlamaForCausalLM of type 'llama' is read")
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config.get("num_attention_heads")
    found = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    for ours, size in found.items():
        if type(size) is not int or size < 1:
            refuse(f"{SIZES[ours]} is {size!r}, not a whole number above 0")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(key):
            refuse(f"{key} is {config[key]!s:.60}: only plain weights without biases are read")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act is {config['hidden_act']!r}: only 'silu' is read")
    dim, heads = found["dim"], found["heads"]
    if dim % heads or (config.get("head_dim") or dim // heads) != dim // heads:
        refuse(f"head_dim is {config.get('head_dim')}: only hidden_size {dim} / {heads} heads is read")
    if kind not in ("default", "llama3") or (rope.get("partial_rotary_factor") or 1) != 1:
        refuse(f"rotary positions {rope}: only rope_type 'default' and 'llama3', of the whole head, are read")
    if kind == "llama3" and (missing := [key for key in RopeScaling._fields if key not in rope]):
        refuse(f"rotary positions of type 'llama3' lack {missing[0]!r}")
    scaling = RopeScaling(*(rope[key] for key in RopeScaling._fields)) if kind == "llama3" else None
    more = dict(rope_theta=theta, norm_eps=config.get("rms_norm_eps", 1e-6), rope_scaling=scaling)
    return found | more | dict(tied=bool(config.get("tie_word_embeddings")))


def config_json(config, like, dtype):
    """Returns the content of config.json for a LlamaConfig; transformers 4 and 5 read it. like: as for save_hf."""
    content = json.loads(Path(like, "config.json").read_text()) if like else {}
    for key in ("rope_parameters", "rope_scaling", "dtype"):  # a newer name would count more than the older one below
        content.pop(key, None)
    content |= dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu")
    content |= {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    content |= dict(rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta, tie_word_embeddings=config.tied)
    if config.rope_scaling:
        content["rope_scaling"] = {"rope_type": "llama3"} | config.rope_scaling._asdict()
    return content | dict(torch_dtype=str(dtype).removeprefix("torch."))


# ---- files to shards ----
def own_part(weight):
    """Returns (this rank's part of a weight, the slices of the whole that it is)."""
    if isinstance(weight, DTensor):
        return weight.detach().to_local(), own_slices(weight)
    return weight.detach(), tuple(slice(0, size) for size in weight.shape)


def files_by_name(folder):
    """Returns {name of a tensor in the folder: path of its file}; of both layouts the single file counts."""
    from safetensors import safe_open

    one, index = Path(folder, ONE), Path(folder, INDEX)
    if one.exists():
        with safe_open(one, "pt") as file:
            return dict.fromkeys(file.keys(), one)
    if not index.exists():
        raise UsageError(f"{folder} has neither {ONE} nor {INDEX}: convert other formats with transformers first")
    return {name: Path(folder, file) for name, file in json.loads(index.read_text())["weight_map"].items()}


def read_parts(folder, weights, everything):
    """Copies this rank's parts out of the files. everything: the names of all ranks' weights, the whole model's."""
    from safetensors import safe_open

    tied, files = read_hf_config(folder)["tied"], files_by_name(folder)
    if missing := sorted(everything - files.keys()):
        raise UsageError(f"{folder} lacks {missing[0]}, and {len(missing) - 1} more of {len(everything)} tensors")
    surplus = files.keys() - everything - ({HEAD} if tied else set())  # a tied head in the files is the embedding
    if surplus := sorted(name for name in surplus if not BUFFERS.fullmatch(name)):
        raise UsageError(f"{folder} has {surplus[0]}, and {len(surplus) - 1} more tensors that this model lacks")
    for path in sorted({files[name] for name in weights}):
        if not path.exists():
            raise UsageError(f"{path} is missing: {INDEX} names it")
        with safe_open(path, "pt") as file:
            there = set(file.keys())
            for name in [name for name in weights if files[name] == path]:
                if name not in there:
                    raise UsageError(f"{path} lacks {name}: {INDEX} says that it is there")
                whole, shape = file.get_slice(name), tuple(weights[name].shape)
                if tuple(whole.get_shape()) != shape:
                    raise UsageError(f"{path}: {name} is {tuple(whole.get_shape())}, this model has {shape}")
                if whole.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise UsageError(f"{path}: {name} is of type {whole.get_dtype()}: not plain weights")
                part, where = own_part(weights[name])
                if part.numel():  # of few rows the last ranks have none
                    part.copy_(whole[where])  # a view of the mapped file: copied once, cast on the way


def load_hf(folder, weights):
    """Reads each rank's parts of a Llama from Hugging Face's files, in place, cast to the parameters' type.

    weights: {name in the whole model: parameter}, of all stages of this rank, with memory; all ranks must call this.
    Of a tied model with the embedding on one stage and the head on another, both come under the embedding's name.
    UsageError, on all ranks alike, if a file or a tensor is missing, of another shape, or of no use in this model.
    """
    need_safetensors()
    from safetensors import SafetensorError

    # all_gather over all ranks: the names of this rank's stages -> those of the whole model
    dist.all_gather_object(names := [None] * dist.get_world_size(), list(weights))
    problem = None
    try:
        read_parts(folder, weights, {name for some in names for name in some})
    except UsageError as error:
        problem = str(error)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        problem = f"{folder} cannot be read: {error!r:.400}".replace("\n", " ")
    # all_gather over all ranks: what went wrong on this one -> on any: a rank that goes on alone would wait for ever
    dist.all_gather_object(problems := [None] * dist.get_world_size(), problem)
    if found := [problem for problem in problems if problem]:
        raise UsageError(found[0])


# ---- shards to files ----
def plan_files(sizes, max_bytes):
    """Returns a list of files, [rank that writes it, names in it, bytes]. sizes: of each rank, {name: bytes}.

    A name is written by the first rank that has it: that of its pipeline stage. A new file begins when the next tensor
    would not fit; one that is larger than that by itself fills a file.
    """
    writer, files = {}, []
    for rank, mine in enumerate(sizes):
        for name in mine:
            writer.setdefault(name, rank)
    for rank, mine in enumerate(sizes):
        for name in (name for name in mine if writer[name] == rank):
            if not files or files[-1][0] != rank or files[-1][2] + mine[name] > max_bytes:
                files.append([rank, [], 0])
            files[-1][1].append(name)
            files[-1][2] += mine[name]
    return files


def gather_whole(weight, dtype):
    """Returns the whole of a weight as `dtype`, on every rank that has a part of it; all of them must call this."""
    weight = weight.detach().to(dtype)
    if not isinstance(weight, DTensor):
        return weight
    # all_gather over dp_shard, then over tp, the order that undoes both cuts: this rank's part -> the whole
    rows = [Replicate()] * (weight.device_mesh.ndim - 1)
    return weight.redistribute(placements=[*rows, weight.placements[-1]]).full_tensor()


def put_in_place(folder, names, index):
    """Gives the files NAME.tmp their names. Between old and new the folder may have no model, but never a mix."""
    folder = Path(folder)
    if len(names) > 1:
        for old in (ONE, INDEX):
            (folder / old).unlink(missing_ok=True)
    for name in names:
        os.replace(folder / f"{name}.tmp", folder / name)
    if len(names) > 1:
        write_aside(folder / INDEX, lambda path: Path(path).write_text(json.dumps(index, indent=1)))
    else:
        (folder / INDEX).unlink(missing_ok=True)  # the single file counts already
    for old in set(folder.glob("model-*-of-*.safetensors*")) - {folder / name for name in names}:
        old.unlink()


def save_hf(folder, weights, config, like=None, dtype=None, max_shard_bytes=5_000_000_000):
    """Writes the weights of all ranks as Hugging Face's LlamaForCausalLM: from_pretrained(folder) loads them.

    weights: as for load_hf; all ranks must call this. config: a LlamaConfig. like: folder of a model; what else its
    config.json says (context length, token numbers) stays. dtype: of the files; default: the parameters'.
    max_shard_bytes: of a file, and so of what a writing rank collects in host memory; a model of one stage that is no
    larger becomes one file.
    """
    need_safetensors()
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    types = {name: dtype or weight.dtype for name, weight in weights.items()}
    sizes = {name: weight.numel() * types[name].itemsize for name, weight in weights.items()}
    # all_gather over all ranks: the sizes of this rank's stages -> those of the whole model, in the order of the ranks
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), sizes)
    files = plan_files(everyones, max_shard_bytes)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [ONE]
    for file, (writer, members, _) in zip(names, files):
        collected = {}
        for name in (name for name in members if name in weights):  # other stages go on with their own files
            whole = gather_whole(weights[name], types[name])
            if dist.get_rank() == writer:
                collected[name] = whole.to("cpu", copy=True).contiguous()
        if collected:
            save_file(collected, aside := Path(folder, f"{file}.tmp"), {"format": "pt"})  # transformers asks for it
            with open(aside, "rb+") as opened:
                os.fsync(opened)
    dist.barrier()  # over all ranks: every file is written, under another name
    if dist.get_rank() == 0:
        content = json.dumps(config_json(config, like, next(iter(types.values()))), indent=1)
        write_aside(Path(folder, "config.json"), lambda path: Path(path).write_text(content))
        weight_map = {name: file for file, (_, members, _) in zip(names, files) for name in members}
        index = dict(metadata=dict(total_size=sum(size for *_, size in files)), weight_map=weight_map)
        put_in_place(folder, names, index)
    dist.barrier()  # over all ranks: nobody reads before it is there
