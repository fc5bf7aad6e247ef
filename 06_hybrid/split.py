"""Splits layers into pipeline stages: contiguous, any counts, the most expensive stage as cheap as it can be.

    split_layers([1] * 10, 4)          -> [2, 2, 3, 3]
    split_layers([1] * 10, 4, last=2)  -> [3, 3, 3, 1]     the head costs as much as two layers
All stages run at the pace of the most expensive one.
"""

import math
from fractions import Fraction
from itertools import accumulate


def split_layers(costs, num_stages, first=0, last=0):
    """Returns how many layers each stage gets. Exact: no other split has a cheaper most expensive stage.

    costs: of each layer, in any unit; first, last: what the first and the last stage have to do besides (embedding,
    head). Every stage gets at least one layer, unless there are fewer layers than stages: then some get none.
    Of several such splits, the most even one: the smallest sum of the stages' squared costs. Of several of these, the
    one with the fewest layers in stage 0, then in stage 1, and so on: an earlier stage holds more microbatches (rank r
    of p, in 1F1B: p - r), so that a layer takes the most memory there.
    Raises ValueError for a negative cost, and for no stage.
    """
    if num_stages < 1 or min([*costs, first, last]) < 0:
        raise ValueError(f"{num_stages} stages must be 1 or more, and costs {[first, *costs, last]} 0 or more")
    exact = [Fraction(cost) for cost in (first, *costs, last)]
    scale = math.lcm(*(cost.denominator for cost in exact))
    first, *costs, last = (int(cost * scale) for cost in exact)  # whole numbers: sums of equal costs are equal
    sums, num_layers, least = [0, *accumulate(costs)], len(costs), int(len(costs) >= num_stages)

    def best(join, limit):
        """Returns (price, counts). join(a stage's cost, the price of those behind) is a price; no stage above limit."""
        table = {num_layers: (0, [])}  # the best of the stages behind, by the layer with which they begin
        for stage in reversed(range(num_stages)):
            extra, behind, table = first * (stage == 0) + last * (stage == num_stages - 1), table, {}
            for start in range(num_layers + 1):
                ends = [end for end in behind if start + least <= end and sums[end] - sums[start] + extra <= limit]
                splits = [(join(sums[end] - sums[start] + extra, behind[end][0]), end) for end in ends]
                if splits:
                    price, end = min(splits)  # of equal prices the smallest end, so the fewest layers in this stage
                    table[start] = price, [end - start, *behind[end][1]]
        return table[0]

    cheapest, _ = best(max, math.inf)
    return best(lambda cost, price: cost**2 + price, cheapest)[1]


def layer_costs(dim, seq_len, heads, kv_heads, hidden, vocab_size):
    """Returns estimates of (a layer's, the embedding's, the head's) FLOPs per token of one forward, as whole numbers.

    A multiplication with an (n, m) matrix is 2 n m FLOPs per token. A layer: queries and output (D, D), keys and values
    (D, D kv_heads / heads), three (D, hidden) of SwiGLU; and scores and weighted values, 2 D each per pair of tokens,
    of which causal attention has (seq_len + 1) / 2 per token. The embedding looks up a row: 0. The head: (D, V).
    Left out: norms, rotary positions, softmax, loss, and bytes moved, which a small model may spend more time on. The
    backward takes twice as much of each matrix, and so leaves the proportions as they are.
    """
    matrices = 2 * dim * dim + 2 * dim * (dim * kv_heads // heads) + 3 * dim * hidden
    return 2 * matrices + 2 * dim * (seq_len + 1), 0, 2 * dim * vocab_size
