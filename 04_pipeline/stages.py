"""The stages of a model: which layers lie where, tied weights, and one checkpoint of all of them."""

import torch.distributed as dist
from checkpoint import read_checkpoint, write_checkpoint
from torch import nn
from torch.utils import checkpoint

AVERAGES = ("exp_avg", "exp_avg_sq")  # AdamW's


# ---- stages ----
class Stage(nn.Module):
    """Layers first .. last - 1 of a Llama, with the embedding before or norm and head behind; names as in the whole.

    x: tokens (B, T) for the first stage, else (B, T, D) -> (B, T, D), or the last stage's logits (B, T, V).
    """

    def __init__(self, whole, first, last):
        super().__init__()
        self.model = nn.Module()
        if first == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in range(first, last)})
        if last == len(whole.model.layers):
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

    def forward(self, x):
        x = self.model.embed_tokens(x) if hasattr(self.model, "embed_tokens") else x
        for layer in self.model.layers.values():
            x = layer(x)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


def build_stages(whole, counts, mine, device, dtype, recompute):
    """Returns {number: Stage} of the numbers in `mine`, without values yet; the others never leave the meta device.

    whole: the model on the meta device. counts: layers per stage. recompute: keep only each layer's input for backward.
    """
    stages = {s: Stage(whole, sum(counts[:s]), sum(counts[: s + 1])) for s in mine}
    for stage in stages.values():
        stage.to(dtype).to_empty(device=device)
        for layer in stage.model.layers.values() if recompute else ():
            layer.forward = lambda x, block=layer.forward: checkpoint.checkpoint(block, x, use_reentrant=False)
    return stages


def tie_weights(stages, num_stages, pipelines, timeout, seed, init):
    """Makes the head the embedding: one matrix if one rank has both, else a copy that starts and stays equal.

    Returns (this rank's end of the tie, group of both ends): the end's gradient is a term of the whole. (None, None) if
    the rank has no end, or both. pipelines: the ranks of each replica's; every rank of the world must call this.
    """
    groups = [dist.new_group(sorted({ranks[0], ranks[-1]}), timeout) for ranks in pipelines]
    mine = next(group for ranks, group in zip(pipelines, groups) if dist.get_rank() in ranks)
    first, last = stages.get(0), stages.get(num_stages - 1)
    if first and last:
        last.lm_head.weight = first.model.embed_tokens.weight
    elif last:
        twin = nn.Module()  # with the embedding's name, from which its values are drawn
        twin.model = nn.Module()
        twin.model.embed_tokens = last.lm_head
        init(twin, seed)
        return last.lm_head.weight, mine
    return (first.model.embed_tokens.weight, mine) if first and not last else (None, None)


def name_weights(stages):
    """Returns {name in the whole model: parameter} of a rank's stages, each parameter once."""
    found = {}
    for stage in stages.values():
        found |= {name: w for name, w in stage.named_parameters() if all(w is not other for other in found.values())}
    return found


# ---- checkpoint ----
def save_stages(folder, run, step, weights, optimizer, scaler, ranks):
    """Has rank 0 collect every tensor from the stages of its pipeline and write them; all ranks must call this.

    weights: {name in the whole model: parameter} of this rank, each once. ranks: rank 0's pipeline.
    """
    here, whole, states = dist.get_rank(), {}, {}
    # all_gather over all ranks: names and shapes of this rank's weights -> those of all
    shapes = [(name, w.shape) for name, w in weights.items()]
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), shapes)
    like = next(iter(weights.values()))
    for rank in ranks:
        for name, shape in everyones[rank]:
            if here == rank:
                state = optimizer.state[weights[name]]
                tensors = [weights[name].detach(), *(state[average] for average in AVERAGES)]
            else:
                tensors = [like.new_empty(shape) for _ in range(3)] if here == 0 else []
            for tensor in tensors if rank else ():
                # send over pp: a weight or an average of AdamW's, from its stage to rank 0
                dist.recv(tensor, rank) if here == 0 else dist.send(tensor.contiguous(), 0)
            if here == 0:
                whole[name], states[f"exp_avg.{name}"], states[f"exp_avg_sq.{name}"] = (t.cpu() for t in tensors)
    if here == 0:
        states["step"] = optimizer.state[like]["step"].cpu()
        write_checkpoint(folder, run, step, whole, states, {"scaler": scaler.state_dict()})


def load_stages(folder, run, weights, optimizer, scaler):
    """Takes this rank's tensors, one at a time; returns the step. weights: {name: parameter}, as the optimizer's."""
    step, whole, states, more = read_checkpoint(folder, run)
    state = []
    for name, weight in weights.items():
        source = "model.embed_tokens.weight" if run["tied"] and name == "lm_head.weight" else name
        weight.data.copy_(whole.get_tensor(source))
        averages = {average: states.get_tensor(f"{average}.{source}").clone() for average in AVERAGES}
        state.append(averages | {"step": states.get_tensor("step").clone()})  # clones: else the file's own memory
    groups = optimizer.state_dict()["param_groups"]  # this run's: the flag's learning rate counts
    optimizer.load_state_dict({"state": dict(enumerate(state)), "param_groups": groups})
    if more["scaler"]:
        scaler.load_state_dict(more["scaler"])
    return step
