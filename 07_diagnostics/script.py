"""Runs the reader's script in this process, unmodified: `train.py --flags` or `-m module --flags`, as Python would."""

import os
import runpy
import sys
from pathlib import Path


def run_script(words: list[str]) -> Exception | None:
    """Runs a script as __main__, with its own arguments and its own folder to import from.

    Returns what it raised, once its traceback is printed as without this module; SystemExit is passed on.
    """
    for path in Path(__file__).parent.glob("*.py"):  # the script may have modules of these names
        sys.modules.pop(path.stem, None)
    is_module = words[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    sys.argv = words[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return error
    return None
