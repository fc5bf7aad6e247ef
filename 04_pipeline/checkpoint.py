"""One checkpoint for every number of stages: the whole weights in Hugging Face's Llama layout, read again by any stage.

    DIR/model.safetensors             the weights, unsharded: transformers' from_pretrained(DIR) loads them
    DIR/config.json                   the sizes, as transformers wants them
    DIR/optimizer-STEP.safetensors    AdamW's averages by the weights' names

train.py and from_scratch.py share it, so each goes on from the other's. Needs `pip install safetensors`.
"""

import json
import os
import sys
from pathlib import Path

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
