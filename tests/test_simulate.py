"""04_pipeline/simulate.py and draw.py: schedules typed by hand, bubbles that equal the formula exactly, pictures."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import ROOT

sys.path.append(str(ROOT / "04_pipeline"))
from draw import LEFT, WIDTH, draw
from schedules import SCHEDULES, Step, bubble_formula, gpipe, interleaved, make_schedule, one_f_one_b, zero_bubble
from schedules import __doc__ as schedules_docstring
from simulate import Event, bubble, makespan, render, simulate

sys.path.pop()
for module in ("draw", "schedules", "simulate"):  # a script that is forked later loads its own, with a planted fault
    del sys.modules[module]

SCRIPT = ROOT / "04_pipeline" / "simulate.py"
SVG = "{http://www.w3.org/2000/svg}"
UNIT = {"F": 1, "B": 1}
each_name = pytest.mark.parametrize("name", SCHEDULES)
fast = settings(deadline=None, max_examples=60)


# ---- schedules typed by hand ----
GPIPE = """
rank 0  0123....abcd
rank 1  .0123..abcd.
rank 2  ..0123abcd..
"""
ONE_F_ONE_B = """
rank 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
rank 1  .012....aa3bb4cc5dd6ee7ff.gg.hh..
rank 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh....
rank 3  ...0aa1bb2cc3dd4ee5ff6gg7hh......
"""
INTERLEAVED = """
rank 0  01012a3b2a3b.c.dcd
rank 1  .010a1b2a3b2c3dcd.
"""
ZERO_BUBBLE = """
rank 0  0123...aA4bB5cCdDeEfF
rank 1  .012..a3bA4cB5dCeDfEF
rank 2  ..01.a2b3cA4dB5eCfDEF
rank 3  ...0a1b2c3dA4eB5fCDEF
"""


@pytest.mark.parametrize(
    ("schedule", "costs", "picture"),
    [
        (gpipe(3, 4), UNIT, GPIPE),
        (one_f_one_b(4, 8), {"F": 1, "B": 2}, ONE_F_ONE_B),  # Narayanan et al. 2021, figure 4, above
        (one_f_one_b(4, 8), {"F": 1, "B": 1, "W": 1}, ONE_F_ONE_B),
        (interleaved(2, 4, 2), UNIT, INTERLEAVED),
        (zero_bubble(4, 6), {"F": 1, "B": 1, "W": 1}, ZERO_BUBBLE),
    ],
    ids=["gpipe", "1f1b", "1f1b of three costs", "interleaved", "zero-bubble"],
)
def test_schedule_is_the_one_typed_by_hand(schedule, costs, picture):
    events = simulate(schedule, costs)
    width = len(picture.splitlines()[1]) - len("rank 0  ")
    assert makespan(events) == width
    assert render(events, width, colour=False) == picture.strip()


def test_picture_in_the_docstring_of_schedules():
    lines = [line[13:36] for line in schedules_docstring.splitlines() if line.startswith("    rank ")]
    picture = render(simulate(one_f_one_b(3, 4), UNIT), 12, colour=False)
    assert [line.replace(" ", "") for line in lines] == [line.split()[-1] for line in picture.splitlines()]


# ---- bubble ----
@each_name
def test_bubble_is_the_formula_for_every_number_of_ranks_microbatches_chunks(name):
    for p, m, v in product(range(1, 9), range(1, 21), range(1, 5) if name == "interleaved" else [1]):
        events = simulate(make_schedule(name, p, m, v), {"F": 1, "B": 1, "W": 1})
        assert bubble(events) == float(bubble_formula(name, p, m, v)), (p, m, v)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 1, 1), (1, 5, 3), (2, 2, 2), (4, 8, 2), (4, 10, 3), (8, 8, 4), (5, 17, 2)]
)
@each_name
def test_bubble_is_the_papers_with_no_fewer_microbatches_than_ranks(name, p, m, v):
    v = v if name == "interleaved" else 1
    share = {"interleaved": Fraction(p - 1, v * m + p - 1), "zero-bubble": Fraction(p - 1, 3 * m + p - 1)}
    events = simulate(make_schedule(name, p, m, v), {"F": 1, "B": 1, "W": 1})
    assert bubble(events) == float(share.get(name, Fraction(p - 1, m + p - 1)))


COST = st.integers(1, 7)


@each_name
@fast
@given(p=st.integers(1, 8), m=st.integers(1, 20), v=st.integers(1, 4), forward=COST, backward=COST, weight=COST)
def test_bubble_is_the_formula_for_any_costs(name, p, m, v, forward, backward, weight):
    v = v if name == "interleaved" else 1
    events = simulate(make_schedule(name, p, m, v), {"F": forward, "B": backward, "W": weight})
    assert bubble(events) == float(bubble_formula(name, p, m, v, forward, backward, weight))


@fast
@given(p=st.integers(2, 8), more=st.integers(0, 10), costs=st.tuples(COST, COST, COST))
def test_zero_bubble_idles_what_the_papers_table_2_says(p, more, costs):
    forward, backward = costs[:2]
    weight = min(costs)
    m = p + more
    events = simulate(zero_bubble(p, m), {"F": forward, "B": backward, "W": weight})
    assert makespan(events) - m * (forward + backward + weight) == (p - 1) * (forward + backward - weight)


# ---- simulation ----
@each_name
@fast
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    v=st.integers(1, 3),
    send=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
)
def test_events_obey_the_schedule_with_uneven_stages_and_slow_sends(name, p, m, v, send, seed):
    schedule = make_schedule(name, p, m, v if name == "interleaved" else 1)
    stages = range(1 + max(step.stage for steps in schedule for step in steps))
    costs = {kind: [seed.randint(1, 9) for _ in stages] for kind in "FBW"}
    events = simulate(schedule, costs, send)
    by_step = {event.step: event for event in events}
    assert len(by_step) == len(events) == sum(map(len, schedule))
    for rank, steps in enumerate(schedule):
        free = 0
        for step in steps:
            event = by_step[step]
            before = {"F": ("F", step.stage - 1), "B": ("B", step.stage + 1), "W": ("B", step.stage)}[step.kind]
            ready = [by_step[Step(*before, step.microbatch)]] if before[1] in stages else []
            ready += [by_step[Step("F", step.stage, step.microbatch)]] if step.kind == "B" else []
            arrivals = [one.end + send * (one.rank != rank) for one in ready]
            assert event.rank == rank
            assert event.start == max([free, *arrivals])  # not before it can, and not after
            cost = costs[step.kind][step.stage]
            cost += costs["W"][step.stage] if step.kind == "B" and name != "zero-bubble" else 0
            assert event.end - event.start == cost
            free = event.end


def test_a_wrong_number_of_costs_is_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        simulate(gpipe(2, 2), {"F": 1, "B": [1, 1], "W": [1]})


def test_bubble_of_measured_events_counts_neither_sends_nor_waits():
    step = Step("F", 0, 0)
    events = [Event(0, step, 10.0, 12.0), Event(0, step._replace(kind="wait"), 12.0, 14.0), Event(1, step, 11.5, 14.0)]
    assert makespan(events) == 4.0
    assert bubble(events) == pytest.approx(1 - 4.5 / 8)


# ---- picture in the terminal ----
def test_microbatches_from_ten_on_begin_again_at_zero():
    picture = render(simulate(zero_bubble(1, 12), {"F": 1, "B": 1, "W": 1}), 36, colour=False)
    assert picture == "rank 0  0aA1bB2cC3dD4eE5fF6gG7hH8iI9jJ0aA1bB"


def test_names_of_ten_ranks_are_of_one_width():
    lines = render(simulate(gpipe(11, 2), UNIT), 24, colour=False).splitlines()
    assert lines[9].startswith("rank 9   ........")
    assert lines[10].startswith("rank 10  ........")
    assert len({len(line) for line in lines}) == 1


def test_picture_may_be_wider_or_narrower_than_the_times():
    events = simulate(gpipe(2, 2), {"F": 0.5, "B": 1.0})
    assert render(events, 18, colour=False) == "rank 0  0011......aaaabbbb\nrank 1  ..0011aaaabbbb...."
    assert {len(line) for line in render(events, 5, colour=False).splitlines()} == {len("rank 0  ") + 5}


def test_colours_only_on_a_terminal(monkeypatch):
    events = simulate(gpipe(2, 2), UNIT)
    plain = render(events, 6)
    assert "\033" not in plain  # pytest's stdout is no terminal
    coloured = render(events, 6, colour=True)
    assert coloured.count("\033[30;46m") == coloured.count("\033[30;43m") == 4
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert render(events, 6) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert render(events, 6) == plain


# ---- drawings ----
def rectangles(path):
    root = ET.parse(path).getroot()
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "event"], root


def test_svg_has_a_box_for_each_event_in_its_place(tmp_path):
    lanes = {name: simulate(make_schedule(name, 3, 5), {"F": 1, "B": 1, "W": 1}) for name in ("1f1b", "zero-bubble")}
    lanes["<interleaved> & co"] = simulate(interleaved(3, 5, 2), {"F": 0.5, "B": 1.0}, 0.25)
    draw(lanes, tmp_path / "a.svg", 'a "title" <with> &')
    boxes, root = rectangles(tmp_path / "a.svg")
    assert len(boxes) == sum(map(len, lanes.values()))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {*lanes, 'a "title" <with> &', "forward", "backward", "gradient of the weights", "idle"} <= set(texts)
    events = [event for events in lanes.values() for event in events]
    assert {"0", "1", "2", "3", "4"} <= set(texts)
    scale = WIDTH / max(makespan(events) for events in lanes.values())
    tops = {}
    for box, event in zip(boxes, events, strict=True):
        kind, stage, i = event.step
        assert box.findtext(f"{SVG}title").startswith(f"{kind} stage {stage} microbatch {i}: {float(event.start):g} to")
        assert float(box.get("x")) == pytest.approx(LEFT + event.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((event.end - event.start) * scale, abs=0.01)
        tops.setdefault(box.get("y"), set()).add(event.rank)
    assert len(tops) == 9  # 3 pictures of 3 ranks
    assert all(len(ranks) == 1 for ranks in tops.values())
    assert len({box.get("fill") for box in boxes}) == 3
    assert len({box.get("fill-opacity") for box in boxes}) == 2  # two chunks


def test_numbers_stand_only_where_they_fit(tmp_path):
    draw({"a": simulate(gpipe(1, 300), UNIT)}, tmp_path / "a.svg", "")
    boxes, root = rectangles(tmp_path / "a.svg")
    assert len(boxes) == 600
    assert not {text.text for text in root.iter(f"{SVG}text")} & set(map(str, range(300)))


def test_measured_events_of_all_kinds_are_drawn(tmp_path):
    kinds = ("F", "B", "W", "send", "wait", "all_reduce")
    events = [Event(0, Step(kind, 0, 0), 1e6 + i, 1e6 + i + 0.5) for i, kind in enumerate(kinds)]
    draw({"measured": events}, tmp_path / "a.svg", "times of a clock that did not begin at 0")
    boxes, _ = rectangles(tmp_path / "a.svg")
    assert len({box.get("fill") for box in boxes}) == len(kinds)
    assert float(boxes[0].get("x")) == LEFT


def test_png_is_drawn_by_matplotlib(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    draw({"$a_1$": simulate(gpipe(2, 2), UNIT)}, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"a\.png needs matplotlib: pip install matplotlib"):
        draw({"a": simulate(gpipe(1, 1), UNIT)}, tmp_path / "a.png", "")


@pytest.mark.parametrize(("lanes", "file"), [({"a": []}, "a.svg"), ({}, "a.svg"), ({"a": [1]}, "a.gif"), ({}, "svg")])
def test_what_cannot_be_drawn_is_refused(tmp_path, lanes, file):
    with pytest.raises(ValueError, match=r"no events to draw in .*a\.svg|must end in \.svg or \.png"):
        draw(lanes, tmp_path / file, "")
    assert not any(tmp_path.iterdir())


# ---- script ----
def script(*flags):
    env = {"PATH": "", "COLUMNS": "120"}
    command = [sys.executable, "-S", SCRIPT, *map(str, flags)]  # -S: nothing but the standard library
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_script_draws_the_four_and_a_table(tmp_path):
    result = script("--all", "--pp", 4, "--microbatches", 8, "--chunks", 2, "--save", tmp_path / "a.svg")
    assert (result.returncode, result.stderr) == (0, "")
    *pictures, table = result.stdout.split("\n\n")
    assert [picture.splitlines()[0] for picture in pictures] == [
        "gpipe",
        "1f1b",
        "interleaved, 2 chunks",
        "zero-bubble",
    ]
    assert [len(picture.splitlines()) for picture in pictures] == [5, 5, 5, 5]
    rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines()]
    assert rows == [
        ["schedule", "time", "bubble", "formula", "held", "per rank, of one stage each"],
        ["gpipe", "33", "27.3%", "27.3%", "8.00", "8 8 8 8"],
        ["1f1b", "33", "27.3%", "27.3%", "4.00", "4 3 2 1"],
        ["interleaved, 2 chunks", "28.5", "15.8%", "15.8%", "5.50", "11 9 7 5"],
        ["zero-bubble", "27", "11.1%", "11.1%", "4.00", "4 4 4 4"],
    ]
    assert len({row.index("|") for row in table.splitlines()}) == 1  # aligned
    assert len(rectangles(tmp_path / "a.svg")[0]) == 4 * 8 * (2 + 2 + 2 * 2 + 3)


def test_script_draws_one_character_for_one_unit():
    flags = ("--forward", "0.5", "--backward", 0.5, "--weight", "1/2")
    assert script("--schedule", "zero-bubble", "--microbatches", 6, *flags).stdout.startswith(
        f"zero-bubble{ZERO_BUBBLE}"
    )


def test_script_fits_the_terminal_and_compares_with_free_sends():
    result = script("--microbatches", 200, "--backward", 2, "--send", "0.123456789")
    picture, table = result.stdout.split("\n\n")
    assert max(map(len, picture.splitlines())) <= 120
    simulated, formula = (float(cell.strip(" %")) for cell in table.splitlines()[1].split("|")[2:4])
    assert simulated > formula == 1.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pp 0", "--pp 0 must be above 0"),
        ("--microbatches -1", "--microbatches -1 must be above 0"),
        ("--chunks 0", "--chunks 0 must be above 0"),
        ("--forward 0", "--forward 0 must be above 0"),
        ("--weight=-0.5", "--weight -1/2 must be 0 or more"),
        ("--send 1/0", "argument --send: invalid seconds value: '1/0'"),
        ("--send nan", "argument --send: invalid seconds value: 'nan'"),
        ("--schedule 1f2b", "argument --schedule: invalid choice: '1f2b'"),
        ("--save picture.gif", "picture.gif must end in .svg or .png"),
        ("--save /no/such/folder/a.svg", "No such file or directory: '/no/such/folder/a.svg'"),
    ],
)
def test_bad_value_ends_with_one_line_and_code_2(flags, message):
    result = script(*flags.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
