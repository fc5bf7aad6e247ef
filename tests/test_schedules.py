"""04_pipeline/schedules.py and split.py: complete, in order, without deadlock, of the stated memory; best splits."""

import itertools
import math
import random
import sys
from collections import Counter, defaultdict, deque
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import ROOT

sys.path.append(str(ROOT / "04_pipeline"))
from schedules import (
    SCHEDULES,
    Step,
    bubble_formula,
    check_schedule,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    peak_activations,
    zero_bubble,
)
from split import layer_costs, split_layers

sys.path.pop()
del sys.modules["schedules"], sys.modules["split"]  # a script that is forked later loads its own, with a planted fault

RANKS, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 20), st.integers(1, 4)
fast = settings(deadline=None, max_examples=60)
each_name = pytest.mark.parametrize("name", SCHEDULES)


def make(name, p, m, v):
    return make_schedule(name, p, m, v if name == "interleaved" else 1)


# ---- the schedules ----
def run_as_executor(schedule, num_stages):
    """Runs the lists as executor.py does, with FIFO channels and no knowledge of schedules.py; asserts all the rest.

    A message is the step that it is for; a rank takes the next one of its channel, whatever that is.
    """
    num_ranks = len(schedule)
    channels, done, lists = defaultdict(deque), set(), [deque(steps) for steps in schedule]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(lists):
            while steps:
                kind, stage, i = steps[0]
                assert stage % num_ranks == rank
                way = {"F": -1, "B": 1, "W": 0}[kind]
                source = stage + way
                if way and 0 <= source < num_stages:
                    if source % num_ranks == rank:
                        assert (kind, source, i) in done
                    elif not (channel := channels[source % num_ranks, rank, kind]):
                        break
                    else:
                        assert channel.popleft() == (stage, i)
                if kind != "F":
                    assert ({"B": "F", "W": "B"}[kind], stage, i) in done
                target = stage - way
                if way and 0 <= target < num_stages and target % num_ranks != rank:
                    channels[rank, target % num_ranks, kind].append((target, i))
                done.add(tuple(steps.popleft()))
                moved = True
    assert not any(lists), "deadlock"
    assert not any(channels.values()), "a message that nobody takes"


@each_name
@fast
@given(p=RANKS, m=MICROBATCHES, v=CHUNKS)
def test_schedule_is_complete_and_runs_to_its_end(name, p, m, v):
    schedule = make(name, p, m, v)
    num_stages = p * (v if name == "interleaved" else 1)
    kinds = "FBW" if name == "zero-bubble" else "FB"
    assert Counter(step for steps in schedule for step in steps) == Counter(
        itertools.product(kinds, range(num_stages), range(m))
    )
    run_as_executor(schedule, num_stages)
    check_schedule(schedule, m)


@each_name
@fast
@given(p=RANKS, m=MICROBATCHES, v=CHUNKS)
def test_each_rank_holds_what_the_table_says(name, p, m, v):
    largest = math.ceil(m / max(1, m // p))  # p, where p divides m
    for rank, steps in enumerate(make(name, p, m, v)):
        expected = {"gpipe": m, "1f1b": min(m, p - rank), "zero-bubble": min(m, p)}.get(name)
        if name == "interleaved":
            expected = min(m, p - rank) if v == 1 else min(v * m, 2 * (p - rank - 1) + (v - 1) * largest + 1)
        assert peak_activations(steps) == expected


def test_first_rank_of_interleaved_holds_what_korthikanti_says():
    """(1 + (p-1) / (p v)) times 1F1B's, which is the whole model for one microbatch: 2022, section 4.2.3."""
    p, v = 8, 3
    assert Fraction(peak_activations(interleaved(p, 32, v)[0]), p * v) == 1 + Fraction(p - 1, p * v)


def megatron_rank(p, m, v, rank):
    """Megatron-LM's interleaved schedule of a rank, from its rule: the k-th forward or backward of each rank is of
    chunk k // p mod v (counted from the last for a backward) and of microbatch k mod p in group k // (p v)."""

    def step(kind, k):
        chunk, i = k // p % v, k // (p * v) * p + k % p
        return Step(kind, (chunk if kind == "F" else v - 1 - chunk) * p + rank, i)

    warm_up = min(v * m, (p - rank - 1) * 2 + (v - 1) * p)
    steps = [step("F", k) for k in range(warm_up)]
    for k in range(warm_up, v * m):
        steps += [step("F", k), step("B", k - warm_up)]
    return steps + [step("B", k) for k in range(v * m - warm_up, v * m)]


@fast
@given(p=RANKS, groups=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaved_is_megatrons_where_ranks_divide_microbatches(p, groups, v):
    assert interleaved(p, groups * p, v) == [megatron_rank(p, groups * p, v, rank) for rank in range(p)]


@fast
@given(p=RANKS, m=MICROBATCHES)
def test_one_chunk_is_1f1b_and_so_is_zero_bubble_without_its_weight_gradients(p, m):
    assert interleaved(p, m, 1) == one_f_one_b(p, m)
    for steps, plain in zip(zero_bubble(p, m), one_f_one_b(p, m), strict=True):
        assert [step for step in steps if step.kind != "W"] == plain
        assert [step.microbatch for step in steps if step.kind == "W"] == list(range(m))


def test_schedules_of_one_rank():
    assert gpipe(1, 2) == [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]]
    assert one_f_one_b(1, 2) == [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]]
    assert zero_bubble(1, 1) == [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]]


@pytest.mark.parametrize("numbers", [("1f1b", 0, 8, 1), ("1f1b", 4, 0, 1), ("interleaved", 4, 8, 0), ("1f1b", 4, 8, 2)])
def test_impossible_numbers_are_refused_with_all_of_them(numbers):
    name, p, m, v = numbers
    with pytest.raises(ValueError, match=f"schedule {name} of {p} ranks, {m} microbatches, {v} chunks.*use"):
        make_schedule(*numbers)


def test_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"no schedule 1f2b .*use gpipe, 1f1b, interleaved, zero-bubble"):
        make_schedule("1f2b", 4, 8)


# ---- planted faults ----
@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)], ids=SCHEDULES
)
class TestFault:
    P, M = 3, 7

    def test_dropped_step(self, name, v):
        whole = make_schedule(name, self.P, self.M, v)
        for rank, steps in enumerate(whole):
            for i, step in enumerate(steps):
                broken = [*whole[:rank], steps[:i] + steps[i + 1 :], *whole[rank + 1 :]]
                with pytest.raises(ValueError, match="rank") as error:
                    check_schedule(broken, self.M)
                assert str(error.value) == f"rank {rank} has {step} 0 times, not 1"

    def test_repeated_step(self, name, v):
        schedule = make_schedule(name, self.P, self.M, v)
        step = schedule[1][4]
        schedule[1].append(step)
        with pytest.raises(ValueError, match=r"rank 1 has Step.* 2 times, not 1") as error:
            check_schedule(schedule, self.M)
        assert str(step) in str(error.value)

    def test_step_on_another_rank(self, name, v):
        schedule = make_schedule(name, self.P, self.M, v)
        step = schedule[2].pop(2)
        schedule[1].insert(0, step)
        with pytest.raises(ValueError, match=r"rank 1 has Step.* 1 times, not 0") as error:
            check_schedule(schedule, self.M)
        assert str(step) in str(error.value)

    @pytest.mark.parametrize("step", [Step("F", 0, 7), Step("F", 0, -1), Step("X", 0, 0), Step("F", -3, 0)])
    def test_step_that_there_is_not(self, name, v, step):
        schedule = make_schedule(name, self.P, self.M, v)
        schedule[0].append(step)
        with pytest.raises(ValueError, match=r"rank 0 has Step.* 1 times, not 0"):
            check_schedule(schedule, self.M)

    def test_backward_before_its_forward(self, name, v):
        schedule = make_schedule(name, self.P, self.M, v)
        last = v * self.P - 1
        forward, backward = (schedule[2].index(Step(kind, last, 3)) for kind in "FB")
        schedule[2].insert(forward, schedule[2].pop(backward))
        with pytest.raises(ValueError, match=rf"deadlock: .*rank 2, step {forward}, Step\(kind='B'.* waits for .*'F'"):
            check_schedule(schedule, self.M)

    @pytest.mark.parametrize("p", [2, 3])  # in two chunks on two ranks, F and B go the same way, in separate channels
    def test_swap_of_neighbours_is_seen_or_harmless(self, name, v, p):
        """Every swap that the executor would not survive is seen, and no other."""
        num_stages, seen = v * p, Counter()
        whole = make_schedule(name, p, self.M, v)
        for rank, steps in enumerate(whole):
            for i in range(len(steps) - 1):
                swapped = [*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]]
                schedule = [*whole[:rank], swapped, *whole[rank + 1 :]]
                try:
                    run_as_executor(schedule, num_stages)
                except AssertionError:
                    with pytest.raises(ValueError, match=r"deadlock|in another order"):
                        check_schedule(schedule, self.M)
                    seen["fault"] += 1
                else:
                    check_schedule(schedule, self.M)
                    seen["harmless"] += 1
        assert seen["fault"] > 5


def test_weight_gradient_before_its_backward():
    schedule = zero_bubble(3, 4)
    place = schedule[1].index(Step("B", 1, 2))
    schedule[1].insert(place, schedule[1].pop(schedule[1].index(Step("W", 1, 2))))
    with pytest.raises(ValueError, match=rf"deadlock: .*rank 1, step {place}, Step\(kind='W', stage=1, microbatch=2\)"):
        check_schedule(schedule, 4)


def test_cycle_between_two_ranks_names_both_and_what_they_wait_for():
    """Rank 1 wants a second forward before it gives the first gradient, for which rank 0 waits before that forward."""
    ahead = [[Step("F", 0, 0), Step("B", 0, 0), Step("F", 0, 1), Step("B", 0, 1)], gpipe(2, 2)[1]]
    with pytest.raises(ValueError, match="deadlock") as error:
        check_schedule(ahead, 2)
    assert "rank 0, step 1, Step(kind='B', stage=0, microbatch=0) waits for [Step(kind='B', stage=1" in str(error.value)
    assert "rank 1, step 1, Step(kind='F', stage=1, microbatch=1) waits for [Step(kind='F', stage=0" in str(error.value)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_receiver_in_another_order_than_the_sender(kind):
    """No deadlock if messages had names, but the wrong microbatch where they come in a row."""
    schedule = gpipe(3, 4)
    rank = {"F": 1, "B": 0}[kind]
    one, two = (schedule[rank].index(Step(kind, rank, i)) for i in (1, 2))
    schedule[rank][one], schedule[rank][two] = schedule[rank][two], schedule[rank][one]
    why = (
        rf"rank {rank}, step {two}, Step\(kind='{kind}'.*microbatch=1\): rank {1 if rank == 0 else 0} sends in another"
    )
    with pytest.raises(ValueError, match=why):
        check_schedule(schedule, 4)


# ---- the formula ----
@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        (("gpipe", 4, 8), Fraction(3, 11)),
        (("1f1b", 4, 8), Fraction(3, 11)),
        (("interleaved", 4, 8, 2), Fraction(3, 19)),
        (("interleaved", 8, 32, 3), Fraction(7, 103)),
        (("zero-bubble", 4, 8), Fraction(3, 27)),
        (("zero-bubble", 1, 8), 0),
        (("1f1b", 8, 1), Fraction(7, 8)),
    ],
)
def test_bubble_of_the_papers(arguments, share):
    """Narayanan et al. give bubble / ideal time, (p-1) / (v m); as a share x of all time that is x / (1 - x)."""
    assert bubble_formula(*arguments) == share
    name, p, m, *v = arguments
    if name != "zero-bubble":
        assert share / (1 - share) == Fraction(p - 1, m * (v[0] if v else 1))


@fast
@given(p=st.integers(2, 8), m=MICROBATCHES, v=st.integers(2, 4))
def test_zero_bubble_and_interleaved_are_below_1f1b(p, m, v):
    plain = bubble_formula("1f1b", p, m)
    assert bubble_formula("zero-bubble", p, m) < plain
    # Of one microbatch every rank must wait for the whole way there and back, however many chunks it has.
    assert bubble_formula("interleaved", p, m, v) <= plain
    assert (bubble_formula("interleaved", p, m, v) == plain) == (m == 1)


# ---- splits ----
def every_split(num_layers, num_stages, least):
    if num_stages == 1:
        return [[num_layers]] if num_layers >= least else []
    return [
        [count, *rest]
        for count in range(least, num_layers + 1)
        for rest in every_split(num_layers - count, num_stages - 1, least)
    ]


def stage_costs(counts, costs, first, last):
    ends = list(itertools.accumulate(counts, initial=0))
    totals = [sum(costs[start:end]) for start, end in itertools.pairwise(ends)]
    totals[0] += first
    totals[-1] += last
    return totals


@settings(deadline=None, max_examples=150)
@given(
    costs=st.lists(st.integers(0, 5), max_size=8),
    num_stages=st.integers(1, 5),
    first=st.integers(0, 6),
    last=st.integers(0, 6),
)
def test_split_is_the_best_of_all(costs, num_stages, first, last):
    def key(counts):
        totals = stage_costs(counts, costs, first, last)
        return max(totals), sum(total**2 for total in totals), counts

    best = min(every_split(len(costs), num_stages, int(len(costs) >= num_stages)), key=key)
    assert split_layers(costs, num_stages, first, last) == best


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "extra", "counts"),
    [
        (8, 4, {}, [2, 2, 2, 2]),
        (10, 4, {}, [2, 2, 3, 3]),  # where a layer costs memory, early, there are fewer
        (10, 4, {"last": 2}, [3, 3, 3, 1]),
        (9, 3, {"first": 1, "last": 2}, [3, 4, 2]),
        (3, 3, {"last": 100}, [1, 1, 1]),
        (2, 4, {"first": 1, "last": 1}, [0, 1, 1, 0]),
        (5, 1, {"first": 3, "last": 3}, [5]),
    ],
)
def test_split_of_equal_layers(num_layers, num_stages, extra, counts):
    for layer in (1, 0.1, Fraction(1, 3)):  # 0.1 + 0.1 + 0.1 is not 3 * 0.1 in floats, and yet equal layers are equal
        scaled = {name: layer * value for name, value in extra.items()}
        assert split_layers([layer] * num_layers, num_stages, **scaled) == counts


def test_split_of_many_layers_is_near_the_mean():
    costs = [random.Random(0).uniform(1, 2) for _ in range(80)]
    totals = stage_costs(split_layers(costs, 8), costs, 0, 0)
    assert max(totals) < sum(costs) / 8 + max(costs)


@pytest.mark.parametrize("arguments", [([1], 0), ([-1], 1), ([1], 1, -1), ([1], 1, 0, -1)])
def test_impossible_split_is_refused(arguments):
    with pytest.raises(ValueError, match=r"stages must be 1 or more, and costs \[.*\] 0 or more"):
        split_layers(*arguments)


def test_costs_of_layers_agree_with_their_parameters():
    """2 FLOPs per token and weight of a matrix; D = 8, K = 2, 2 kv-heads of 4, hidden 12, V = 10."""
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    tokens = 5
    pairs = sum(range(1, tokens + 1))  # token t looks at t others, itself among them
    layer, embedding, head = layer_costs(dim=8, seq_len=tokens, heads=4, kv_heads=2, hidden=12, vocab_size=10)
    assert layer * tokens == 2 * weights * tokens + 2 * 2 * 8 * pairs
    assert (embedding, head) == (0, 2 * 8 * 10)
