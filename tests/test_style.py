"""What keeps standalone scripts alike, short, and safe to copy: read from their syntax trees, without running them."""

import ast
import re
import sys
from collections import defaultdict

import pytest
from runner import ROOT
from torch.distributed.run import get_args_parser

COMMON = ROOT / "common" / "process_group.py"
SCRIPTS = sorted(ROOT.glob("0[1-7]_*/*.py"))  # with the modules that stand beside them
IDS = [f"{path.parent.name}/{path.name}" for path in SCRIPTS]
each_script = pytest.mark.parametrize("path", SCRIPTS, ids=IDS)
FULL_SIZE = {"train.py", "from_scratch.py", "fsdp.py"}  # they hold a whole model; what stands beside them does not
REACH_COMMON = "sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last"
IMPORT_COMMON = r"from common\.process_group import .+  # copied this folder out\? copy common/ beside it or into it"
BANNERS = ["config", "model", "data", "checkpoint", "main"]  # the technique, under its own name, stands before main
CALLS_AT_IMPORT = {"getattr", "Path", "Path(__file__).with_name", "re.compile", "frozenset"}  # for constants


def test_there_are_scripts():
    assert {"train.py", "from_scratch.py"} <= {path.name for path in SCRIPTS}


# ---- same name, same code ----
def named_differently(sources):
    """Returns {name: files} of the top-level functions and classes whose code differs; sources: {file: text}."""
    versions = defaultdict(lambda: defaultdict(list))  # name -> code -> files
    for file, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in ("main", "parse_args"):
                versions[node.name][ast.dump(node)].append(file)
    return {name: [*codes.values()] for name, codes in versions.items() if len(codes) > 1}


def test_same_name_is_the_same_code_in_every_script():
    assert named_differently({str(path.relative_to(ROOT)): path.read_text() for path in [COMMON, *SCRIPTS]}) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F.silu", "F.gelu"),
        ("        hidden = 64", "        hidden = 32"),
        ('"""Fills each matrix', '"""Fills every matrix'),  # a docstring is read, too
        ("class Block(nn.Module)", "class Block(nn.Sequential)"),
    ],
)
def test_planted_difference_is_seen(old, new):
    source = (ROOT / "02_ddp" / "train.py").read_text()
    assert old in source
    assert len(named_differently({"a": source, "b": source.replace(old, new)})) == 1


def test_main_comments_and_blank_lines_may_differ():
    left = "def main():\n    return 1\n\n\ndef f():  # one\n    return 2\n"
    right = "def f():\n\n    return 2  # two\n\n\ndef main():\n    return 3\n"
    assert named_differently({"a": left, "b": right}) == {}


# ---- length ----
def cap(path):
    if path == COMMON:
        return 100
    if path.parent.name[:2] in ("01", "06", "07"):
        return 400
    return 300 if path.name in FULL_SIZE else 150


@pytest.mark.parametrize("path", [COMMON, *SCRIPTS], ids=["common/process_group.py", *IDS])
def test_script_is_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= cap(path)


# ---- imports ----
def imports(tree):
    """The first part of each imported module's name, imports inside functions included."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@each_script
def test_script_imports_from_no_other_folder(path):
    siblings = {other.stem for other in path.parent.glob("*.py")}
    elsewhere = {other.stem for other in SCRIPTS} - siblings - sys.stdlib_module_names
    names = imports(ast.parse(path.read_text()))
    assert not names & elsewhere
    assert not {name for name in names if re.match(r"\d|tests", name)}


@each_script
def test_training_script_needs_nothing_but_torch(path):
    allowed = {*sys.stdlib_module_names, "torch", "common", *(other.stem for other in path.parent.glob("*.py"))}
    if path.parent.name.startswith("05"):
        allowed.add("deepspeed")
    if path.parent.name[:2] in ("02", "03", "04", "05", "06"):
        tree = ast.parse(path.read_text())
        optional = set().union(*(imports(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)))
        always = imports(ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], []))
        assert always <= allowed
        assert optional <= allowed | {"safetensors", "matplotlib"}  # imported where used: checkpoints, pictures


@each_script
def test_script_reaches_common_by_the_two_lines_alone(path):
    source = path.read_text()
    lines = source.splitlines()
    if "common" in imports(ast.parse(source)):
        assert lines.count(REACH_COMMON) == 1
        assert sum(bool(re.fullmatch(IMPORT_COMMON, line)) for line in lines) == 1
    runs_a_script = path.name == "script.py"  # and gives it its own folder to import from, as Python does
    assert len(re.findall(r"\bsys\.path\b", source)) == lines.count(REACH_COMMON) + runs_a_script
    assert len(re.findall(r"\b(from|import) common\b", source)) == lines.count(REACH_COMMON)


# ---- import without side effects ----
def is_harmless(node):
    """True for a top-level statement that defines something and does nothing."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return True
    if isinstance(node, ast.Assign | ast.AnnAssign):
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        return all(ast.unparse(call.func) in CALLS_AT_IMPORT for call in calls)
    if isinstance(node, ast.Try):  # an optional import
        return all(map(is_harmless, [*node.body, *(line for handler in node.handlers for line in handler.body)]))
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    text = ast.unparse(node)
    return text == REACH_COMMON.split("  #")[0] or isinstance(getattr(node, "value", None), ast.Constant)


@each_script
def test_import_does_nothing(path):
    assert [ast.unparse(node) for node in ast.parse(path.read_text()).body if not is_harmless(node)] == []


@pytest.mark.parametrize("line", ["print('hello')", "torch.manual_seed(0)", "args = parse_args()", "if x:\n    y()"])
def test_side_effect_is_seen(line):
    assert not is_harmless(ast.parse(line).body[0])


# ---- safety ----
@each_script
def test_checkpoints_are_loaded_as_data_not_as_code(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert keywords.get("weights_only") == "True", ast.unparse(node)


def taken(flags):
    """Those flags that torchrun, which allows abbreviations, takes for its own even behind the script's name."""
    options = [option for option in get_args_parser()._option_string_actions if option.startswith("--")]
    return {flag for flag in flags if any(option.startswith(flag) for option in options)}


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name != "cluster.py"])  # it starts torchrun itself
def test_no_flag_is_the_beginning_of_one_of_torchruns(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    flags = {text for text in texts if re.fullmatch("--[a-z][a-z0-9-]*", text)}
    negated = {flag.replace("--", "--no-", 1) for flag in flags}  # argparse.BooleanOptionalAction adds these
    assert taken(flags | negated) == set()


def test_flag_that_torchrun_would_take_is_seen():
    assert taken({"--start", "--log", "--node", "--steps", "--batch"}) == {"--start", "--log", "--node"}


# ---- one order ----
@each_script
def test_shared_sections_stand_in_one_order(path):
    banners = re.findall(r"^# ---- (.+) ----$", path.read_text(), re.MULTILINE)
    shared = [banner for banner in banners if banner in BANNERS]
    assert shared == [name for name in BANNERS if name in banners]  # in order, each once
    if 'if __name__ == "__main__":' in path.read_text():
        assert banners[-1] == "main"
    if path.name in ("train.py", "from_scratch.py"):
        assert {"config", "model", "data", "main"} < set(banners)  # and the technique
        technique = [banner for banner in banners if banner not in BANNERS]
        assert banners[-1 - len(technique) :] == [*technique, "main"]
