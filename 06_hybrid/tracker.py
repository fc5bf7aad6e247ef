"""What one rank holds and sends during a training step, seen by every operation; on real tensors and on fake ones.

    with Tracker({"tp": tp_group, "pp": pp_group}) as tracker:
        tracker.begin(weights, optimizer)
        ...                                   one step
    tracker.held_bytes_by_kind()              {"parameters": .., "gradients": .., "optimizer": .., ..}
    tracker.sent                              {("tp", "all_reduce"): bytes}, as nccl-tests counts them
Bytes are those of storages: a view costs nothing, and what FSDP2 frees by resizing costs nothing either.
"""

import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operation of c10d or _c10d_functional -> (name, which argument has the full size: input, output)
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "send": "send",
}


class Saved:
    """What autograd holds in the place of a tensor, for as long as it needs it."""

    def __init__(self, tensor):
        self.tensor = tensor


class Tracker(TorchDispatchMode):
    """Keeps the storages that are alive, and at the moment when they are most, what each was for."""

    def __init__(self, groups):
        """groups: {axis: ProcessGroup}."""
        super().__init__()
        self.axes = {group.group_name: (axis, group.size()) for axis, group in groups.items()}
        self.alive, self.saved, self.sent = {}, Counter(), Counter()  # by id of the storage: reference and bytes; users
        self.total = self.peak = 0
        self.at_peak, self.weights, self.optimizer = {}, [], None
        self.hooks = saved_tensors_hooks(self.pack, lambda saved: saved.tensor if isinstance(saved, Saved) else saved)

    def __enter__(self):
        plain = torch.UntypedStorage.resize_

        def resize(storage, nbytes):  # FSDP2 frees and fills weights this way, which is no operation
            plain(storage, nbytes)
            if id(storage) in self.alive:
                self.change(id(storage), nbytes)

        self.plain, torch.UntypedStorage.resize_ = plain, resize
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        torch.UntypedStorage.resize_ = self.plain

    def begin(self, weights, optimizer):
        """From here on the step counts. What is alive already is seen if it belongs to one of these."""
        self.weights, self.optimizer, self.peak, self.at_peak = list(weights), optimizer, 0, {}
        self.sent.clear()
        self.look([tensor for tensors in self.states().values() for tensor in tensors])

    def states(self):
        """Returns this rank's tensors of parameters, gradients and optimizer states."""
        values = [value for p in self.weights for value in self.optimizer.state[p].values()]
        kinds = {"parameters": self.weights, "gradients": [p.grad for p in self.weights], "optimizer": values}
        return {
            kind: [t.to_local() if isinstance(t, DTensor) else t for t in kinds[kind] if t is not None]
            for kind in kinds
        }

    # ---- memory ----
    def look(self, values):
        """Sees the storages of new tensors."""
        for tensor in values:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if (key := id(storage)) not in self.alive:
                    self.alive[key] = [weakref.ref(storage, lambda _, key=key: self.change(key, None)), 0]
                    self.change(key, storage.nbytes())

    def change(self, key, nbytes):
        """A storage has another size; None: it is gone."""
        if (nbytes or 0) < self.alive[key][1] and self.total > self.peak:  # what is held falls: that was the most
            self.peak, self.at_peak = self.total, self.kinds()
        self.total += (nbytes or 0) - self.alive[key][1]
        self.alive[key][1] = nbytes
        if nbytes is None:
            del self.alive[key]

    def kinds(self):
        """Returns the bytes of each storage that is alive, and whether autograd has saved it: {id: (bytes, saved)}."""
        return {key: (nbytes, self.saved[key] > 0) for key, (_, nbytes) in self.alive.items()}

    def pack(self, tensor):
        """Autograd saves a tensor for backward: an activation, unless it is a weight."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return tensor
        saved, key = Saved(tensor), id(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        self.saved[key] += 1
        weakref.finalize(saved, self.saved.subtract, [key])
        return saved

    def held_bytes_by_kind(self):
        """Returns the bytes of parameters, gradients and optimizer states now, of activations and buffers at the peak.

        Buffers are all else: gathered weights, whole gradients that wait to be reduced, what an operation returns and
        nobody keeps. Call it before the gradients are gone.
        """
        states, result = self.states(), {}
        for kind, tensors in states.items():
            result[kind] = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
        known = {id(t.untyped_storage()) for tensors in states.values() for t in tensors}
        at_peak = self.at_peak if self.peak >= self.total else self.kinds()
        rest = [(nbytes, saved) for key, (nbytes, saved) in at_peak.items() if key not in known]
        result["activations"] = sum(nbytes for nbytes, saved in rest if saved)
        result["buffers"] = sum(nbytes for nbytes, saved in rest if not saved)
        return result | {"peak": max(self.peak, self.total)}

    # ---- communication ----
    def count(self, operation, args):
        name = COLLECTIVES.get(operation)
        if name is None:
            return
        groups = [arg for arg in tree_leaves(args) if isinstance(arg, str) and arg in self.axes]
        if not groups:
            boxed = [arg for arg in tree_leaves(args) if isinstance(arg, torch.ScriptObject)]
            groups = [dist.ProcessGroup.unbox(arg).group_name for arg in boxed[:1]]
        axis, size = self.axes.get(groups[0], ("all", dist.get_world_size())) if groups else ("all", 1)
        tensors = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
        nbytes = [t.numel() * t.element_size() for t in tensors]
        full = max(nbytes) * (size if operation in ("all_gather_into_tensor", "all_gather_single") else 1)
        factor = {"all_reduce": 2 * (size - 1) / size, "send": 1}.get(name, (size - 1) / size)
        self.sent[axis, name] += full * factor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes first; what it does to local tensors is seen then
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count(func._schema.name.split("::")[1], (args, kwargs))
        self.look(tree_leaves(result))
        return result
