"""Which ranks share a node, and what that means for a mesh: pure functions of sizes and node numbers, and a picture.

sizes is {axis: size}, outermost first, as in {"pp": 2, "dp": 2, "tp": 4}: rank = (pp * 2 + dp) * 4 + tp. torchrun gives
neighbouring ranks to a node, so the innermost axis lies inside a node as long as its size divides the node's ranks.
"""

import os
import socket
import sys
from math import prod
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it

# What each axis moves, and how often: the most talkative belongs on the fastest links.
TRAFFIC = {
    "pp": "activations of each microbatch from stage to stage",
    "dp": "gradients once a step, and the weights of sharded layers",
    "dp_replicate": "gradients of the shards, once a step",
    "dp_shard": "gradients once a step, and the weights of sharded layers",
    "tp": "activations, four times a layer and microbatch",
}


def identify_node():
    """Returns what tells this node from others: host name, kernel boot, network namespace (a container counts)."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
    parts = socket.gethostname(), boot.read_text().strip() if boot.exists() else ""
    return "/".join((*parts, os.readlink(network) if os.path.islink(network) else ""))


def number_nodes(identities):
    """Returns (node number of each rank, [host name of each node]); nodes count in the order of their first rank."""
    order = list(dict.fromkeys(identities))
    return [order.index(identity) for identity in identities], [identity.split("/")[0] for identity in order]


def groups_along(sizes, axis):
    """Returns the lists of ranks that differ only in their place on that axis."""
    names = list(sizes)
    step = prod(sizes[name] for name in names[names.index(axis) + 1 :])
    starts = [rank for rank in range(prod(sizes.values())) if rank // step % sizes[axis] == 0]
    return [[start + i * step for i in range(sizes[axis])] for start in starts]


def crossing(sizes, axis, nodes):
    """Returns those groups along an axis that have ranks on more than one node. nodes: the node number of each rank."""
    return [group for group in groups_along(sizes, axis) if len({nodes[rank] for rank in group}) > 1]


def check_nodes(sizes, nodes, hosts):
    """Refuses a tp group on more than one node: each layer would wait for the network between them four times."""
    crossed = crossing(sizes, "tp", nodes)
    if not crossed:
        return
    ranks, tp_size = crossed[0], sizes["tp"]
    on = list(dict.fromkeys(nodes[rank] for rank in ranks))
    fits = max(
        size
        for size in range(1, tp_size)
        if tp_size % size == 0 and not crossing({"rest": len(nodes) // size, "tp": size}, "tp", nodes)
    )
    where = f"ranks {ranks[0]} to {ranks[-1]}, one of {len(crossed)} groups, are on {len(on)} nodes"
    names = ", ".join(hosts[node] for node in on[:4]) + (", .." if len(on) > 4 else "")
    raise UsageError(f"--tp {tp_size}: {where} ({names}): use --tp {fits}, or --allow-cross-node-tp")


def elide(items, limit):
    """Returns at most `limit` of the items: the first ones, None for those left out, and the last."""
    return items if len(items) <= limit else [*items[: limit - 2], None, items[-1]]


def draw_mesh(sizes, nodes, hosts, limit=6):
    """Returns the mesh as lines of text: a row per pipeline stage, a column per replica, in each the tp group's ranks.

          dp 0    dp 1
    pp 0  0-1 @0  2-3 @0
    pp 1  4-5 @1  6-7 @1
    """
    pp_size, tp_size = sizes["pp"], sizes["tp"]
    dp_size = prod(sizes.values()) // pp_size // tp_size

    def cell(stage, replica):
        first = (stage * dp_size + replica) * tp_size
        last = first + tp_size - 1
        on = sorted({nodes[rank] for rank in range(first, last + 1)})
        ranks = str(first) if tp_size == 1 else f"{first}-{last}"
        return f"{ranks} @{on[0]}" if len(on) == 1 else f"{ranks} @{on[0]}..{on[-1]}"

    stages, replicas = elide(list(range(pp_size)), limit), elide(list(range(dp_size)), limit)
    table = [["", *("" if replica is None else f"dp {replica}" for replica in replicas)]]
    for stage in stages:
        if stage is None:
            table.append(["..", *("" for _ in replicas)])
        else:
            table.append([f"pp {stage}", *(".." if r is None else cell(stage, r) for r in replicas)])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in table]
    for node in elide(list(range(len(hosts))), limit):
        if node is None:
            lines.append("..")
            continue
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        in_a_row = ranks[-1] - ranks[0] + 1 == len(ranks) > 1
        words = [".." if rank is None else str(rank) for rank in elide(ranks, limit)]
        which = f"{ranks[0]} to {ranks[-1]}" if in_a_row else ", ".join(words)
        lines.append(f"@{node} is {hosts[node]}: {len(ranks)} rank{'s' * (len(ranks) > 1)}, {which}")
    for axis, size in reversed(sizes.items()):
        if size > 1:
            crossed, groups = len(crossing(sizes, axis, nodes)), prod(sizes.values()) // size
            where = f"{crossed} of {groups} groups cross nodes" if crossed else "inside a node"
            lines.append(f"{axis} {size}, {where}: {TRAFFIC[axis]}")
    return lines
