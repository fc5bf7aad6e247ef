"""What a rank holds under DeepSpeed: bytes of parameters, gradients and optimizer states, read from its own tensors.

Beside the data type's parameters it keeps float32 masters of this rank's part, in float32 as well: with AdamW's two
averages 12 bytes per parameter, the paper's K. With --offload the same tensors are counted, wherever they lie.
"""

import torch


def storage_bytes(tensors, seen=()):
    """Returns {address: bytes} of what the tensors lie in, without what is in `seen`; views count once and whole."""
    storages = {s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}
    return {address: size for address, size in storages.items() if address not in seen}


def watch_gradients(engine, stage):
    """Returns a list that gets, at stages 0 and 1, the bytes of all gradients when backward has made the last of them.

    From stage 2 on they lie in a bucket, which is reduced when it is full: gradient_bytes has what a rank keeps.
    """
    parameters, found = list(engine.module.parameters()), []

    def count(_):  # the embedding's gradient is the last to be ready
        found.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))
        hook.remove()  # one step is like the next

    if stage < 2:
        hook = parameters[0].register_post_accumulate_grad_hook(count)
    return found


def gradient_bytes(engine):
    """Returns the bytes of gradients that this rank holds between backward and step: from stage 1 on, its own part."""
    zero = engine.optimizer
    gradients = [p.grad for p in (*engine.module.parameters(), *masters(zero))]  # stage 0; stages 1 to 3 with --offload
    gradients += [g for group in getattr(zero, "averaged_gradients", {}).values() for g in group or ()]  # stages 1 to 3
    return sum(storage_bytes(g for g in gradients if g is not None).values())


def state_bytes(engine):
    """Returns the bytes of parameters and of optimizer states that this rank holds; after the first step."""
    zero = engine.optimizer
    adam = getattr(zero, "optimizer", zero)  # inside ZeRO's
    states = [t for p in masters(zero) for t in adam.state[p].values() if torch.is_tensor(t)]
    split = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]  # stage 3: this rank's part
    parameters = storage_bytes([*engine.module.parameters(), *split])
    return sum(parameters.values()), sum(storage_bytes([*masters(zero), *states], parameters).values())


def masters(zero):
    """Returns the tensors that AdamW steps: this rank's part of the weights, flat; at stage 0 all of them."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # stage 3; stages 1 and 2
    flat = [t for name in names for t in getattr(zero, name, [])]
    return flat or [p for group in zero.param_groups for p in group["params"]]
