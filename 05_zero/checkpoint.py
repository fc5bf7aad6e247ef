"""One checkpoint for every stage and number of ranks: the whole weights in Hugging Face's Llama layout.

    DIR/model.safetensors             the weights, unsharded: transformers' from_pretrained(DIR) loads them
    DIR/config.json                   the sizes, as transformers wants them
    DIR/optimizer-STEP.safetensors    AdamW's averages by the weights' names

from_scratch.py goes on from it; train.py and fsdp.py write the first two. Needs `pip install safetensors`.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from zero import all_gather_single

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it


def require_safetensors():
    """Refuses on every rank alike where the package is missing; call it before the first collective."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise UsageError("--save and --resume need safetensors: pip install safetensors") from None


def write_aside(path, write):
    """Has `write` write beside path, then renames: whenever the job dies, there is the old file or the new one."""
    aside = f"{path}.tmp"
    write(aside)
    with open(aside, "rb+") as file:
        os.fsync(file)
    os.replace(aside, path)


def write_model(folder, run, weights, metadata):
    """Writes {name: tensor} as Hugging Face's LlamaForCausalLM: from_pretrained(folder) loads it. metadata: texts."""
    from safetensors.torch import save_file

    dim, layers, heads, kv_heads, vocab_size = run["sizes"]
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-5, rope_theta=10000.0)
    config |= dict(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads)
    config |= dict(vocab_size=vocab_size, intermediate_size=weights["model.layers.0.mlp.up_proj.weight"].shape[0])
    config |= dict(max_position_embeddings=run["seq_len"], tie_word_embeddings="lm_head.weight" not in weights)
    os.makedirs(folder, exist_ok=True)
    metadata = metadata | {"format": "pt"}  # transformers asks for it
    write_aside(Path(folder, "config.json"), lambda path: Path(path).write_text(json.dumps(config, indent=1)))
    write_aside(Path(folder, "model.safetensors"), lambda path: save_file(weights, path, metadata))


def write_checkpoint(folder, run, step, weights, optimizer, more):
    """Writes whole tensors by name; called by one rank.

    run: dict of what a later run must have in common (sizes, data, seed). weights: {name: tensor} as in Hugging Face's
    LlamaForCausalLM. optimizer: {name: tensor}. more: dict for JSON (the scaler's state, say).
    """
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    states, note = Path(folder, f"optimizer-{step}.safetensors"), dict(step=step, run=run, more=more)
    metadata = {"training": json.dumps(note)}
    write_aside(states, lambda path: save_file(optimizer, path, metadata))
    write_model(folder, run, weights, metadata)  # from here on, the new checkpoint counts
    for old in set(Path(folder).glob("optimizer-*.safetensors")) - {states}:
        old.unlink()


def read_checkpoint(folder, run):
    """Returns (step, weights, optimizer, more). weights and optimizer have keys() and get_tensor(name), which reads one
    tensor at a time. Refuses a torn file, and one whose `run` is another.
    """
    from safetensors import safe_open

    try:
        weights = safe_open(Path(folder, "model.safetensors"), "pt")
        if "training" not in (weights.metadata() or {}):
            raise ValueError("its model.safetensors has no training state: these scripts did not write it")
        note = json.loads(weights.metadata()["training"])
        if note["run"] != run:
            raise ValueError(f"made with {note['run']}, this run has {run}")
        optimizer = safe_open(Path(folder, f"optimizer-{note['step']}.safetensors"), "pt")
    except Exception as error:
        raise UsageError(f"--resume another folder than {folder}: {error!r:.400}".replace("\n", " ")) from None
    return note["step"], weights, optimizer, note["more"]


def save_units(folder, run, step, zero, optimizer, scaler):
    """Puts every unit of zero.py together, one at a time, and has rank 0 write it; all ranks must call this."""
    weights, states = {}, {"step": optimizer.state[zero.masters[0]]["step"].cpu()}
    for unit, master in zip(zero.units, zero.masters):
        for into, prefix, part in (
            (weights, "", master.detach()),
            (states, "exp_avg.", optimizer.state[master]["exp_avg"]),
            (states, "exp_avg_sq.", optimizer.state[master]["exp_avg_sq"]),
        ):
            whole = part.new_empty(zero.parts * len(part)) if zero.parts > 1 else part
            if zero.parts > 1:
                all_gather_single(whole, part)  # all_gather over dp: this rank's slice -> the whole unit
            if dist.get_rank() == 0:
                into |= {prefix + name: view.cpu() for name, view in zip(unit.names, unit.views(whole))}
    if dist.get_rank() == 0:
        write_checkpoint(folder, run, step, weights, states, {"scaler": scaler.state_dict()})


def load_units(folder, run, zero, optimizer, scaler):
    """Takes this rank's slice of every unit, one at a time; returns the step. Any stage and number of ranks will do."""
    step, weights, states, more = read_checkpoint(folder, run)

    def own_slice(unit, file, prefix):
        whole = torch.zeros(unit.flat.numel(), dtype=zero.masters[0].dtype)
        for name, view in zip(unit.names, unit.views(whole)):
            view.copy_(file.get_tensor(prefix + name))
        return whole[unit.slice].clone()  # a view would keep the whole unit

    state = {}
    for number, (unit, master) in enumerate(zip(zero.units, zero.masters)):
        master.detach().copy_(own_slice(unit, weights, ""))
        averages = {kind: own_slice(unit, states, f"{kind}.") for kind in ("exp_avg", "exp_avg_sq")}
        state[number] = {"step": states.get_tensor("step").clone(), **averages}
    groups = optimizer.state_dict()["param_groups"]  # this run's: the flag's learning rate counts
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if more["scaler"]:
        scaler.load_state_dict(more["scaler"])
    zero.publish()
    return step
