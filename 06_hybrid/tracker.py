"""What one rank holds and sends during a training step, seen by every operation; on real tensors and on fake ones.

    with Tracker({"tp": tp_group, "pp": pp_group}) as tracker:
        tracker.begin(weights, optimizer)
        ...                                   one step
    tracker.held_bytes_by_kind()              {"parameters": .., "gradients": .., "optimizer": .., ..}
    tracker.sent                              {("tp", "all_reduce"): bytes}, as nccl-tests counts them
Bytes are those of storages: a view costs nothing, and what FSDP2 frees by resizing costs nothing either.
"""

import threading
import weakref
from collections import Counter
from functools import wraps
from itertools import count

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operation of c10d or _c10d_functional -> collective
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
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # others wrap one of these, and have no memory of their own


class Tracker(TorchDispatchMode):
    """Keeps the storages that are alive, and at the moment when they are most, what each was for."""

    def __init__(self, groups):
        """groups: {axis: ProcessGroup}."""
        super().__init__()
        self.axes = {group.group_name: (axis, group.size()) for axis, group in groups.items()}
        self.alive, self.saved, self.sent = {}, set(), Counter()  # by id: reference, bytes and number; numbers; bytes
        self.numbers, self.total, self.peak, self.at_peak = count(), 0, 0, {}  # numbers, for an id may come again
        self.activations = self.most_activations = 0
        self.only_shapes = threading.Lock()  # DTensor holds it while it asks an operation of global size for its shape
        self.weights, self.optimizer = [], None
        self.hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    def __enter__(self):
        def resize(storage, nbytes):  # FSDP2 frees and fills weights this way, which is no operation
            resize.plain(storage, nbytes)
            if id(storage) in self.alive:
                self.change(id(storage), nbytes)

        def enter(hooks):  # what autograd saves passes the innermost hooks alone: checkpoint() has some, too
            pack = hooks.pack_hook
            hooks.pack_hook = wraps(pack)(lambda tensor: self.save(tensor) or pack(tensor))  # with pack's attributes
            return enter.plain(hooks)

        resize.plain, torch.UntypedStorage.resize_ = torch.UntypedStorage.resize_, resize
        enter.plain, saved_tensors_hooks.__enter__ = saved_tensors_hooks.__enter__, enter
        self.plain = resize.plain, enter.plain, ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = self.only_shapes
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        torch.UntypedStorage.resize_, saved_tensors_hooks.__enter__, ShardingPropagator._fake_mode_lock = self.plain

    def begin(self, weights, optimizer):
        """From here on the step counts. What is alive already is seen if it belongs to one of these."""
        self.weights, self.optimizer, self.peak, self.at_peak = list(weights), optimizer, 0, {}
        self.most_activations = 0
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
            if type(tensor) in PLAIN and tensor.device.type != "meta" and not self.only_shapes.locked():
                self.number_of(tensor)

    def number_of(self, tensor):
        """Returns the number of a tensor's storage; from here on it is watched."""
        storage = tensor.untyped_storage()
        if (key := id(storage)) not in self.alive:
            reference = weakref.ref(storage, lambda _: self.change(key, None))
            self.alive[key] = [reference, 0, next(self.numbers)]
            self.change(key, storage.nbytes())
        return self.alive[key][2]

    def change(self, key, nbytes):
        """A storage has another size; None: it is gone."""
        _, before, number = self.alive[key]
        grows = (nbytes or 0) - before
        if grows < 0 and self.total > self.peak:  # what is held falls: that was the most
            self.peak, self.at_peak = self.total, self.rest()
        self.total += grows
        if number in self.saved:
            self.count_activation(grows)
        self.alive[key][1] = nbytes
        if nbytes is None:
            self.saved.discard(number)
            del self.alive[key]

    def count_activation(self, nbytes):
        self.activations += nbytes
        self.most_activations = max(self.most_activations, self.activations)

    def rest(self):
        """Returns the bytes of each storage that autograd has not saved, by number."""
        return {number: nbytes for _, nbytes, number in self.alive.values() if number not in self.saved}

    def save(self, tensor):
        """Autograd keeps a tensor for backward: an activation, unless it is a weight."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return
        while type(tensor) not in PLAIN:  # a DTensor, or one whose collective nobody has waited for yet
            tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        if (number := self.number_of(tensor)) not in self.saved:
            self.saved.add(number)
            self.count_activation(tensor.untyped_storage().nbytes())

    def held_bytes_by_kind(self):
        """Returns bytes: parameters, gradients and optimizer states now, the most activations, the peak of it all.

        Of the peak, buffers are what is none of these: gathered weights, whole gradients that wait to be reduced, what
        operations return and nobody saves. The most activations may be at another moment, so that the sum exceeds the
        peak. Call it before the gradients are gone.
        """
        states, result, known = self.states(), {}, set()
        for kind, tensors in states.items():
            storages = {self.number_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
            result[kind], known = sum(storages.values()), known | storages.keys()
        at_peak = self.at_peak if self.peak >= self.total else self.rest()
        buffers = sum(nbytes for number, nbytes in at_peak.items() if number not in known)
        more = dict(activations=self.most_activations, buffers=buffers, peak=max(self.peak, self.total))
        return result | more

    # ---- communication ----
    def count_sent(self, operation, args):
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
            self.count_sent(func._schema.name.split("::")[1], (args, kwargs))
        self.look(tree_leaves(result))
        return result
