"""Runs a script and writes down, from beside it, where it is. hang.py starts this in the place of `python script`.

    FOLDER/beat     about once a second: what has progressed, the main thread's stack, the groups, sends and receives
    FOLDER/record   once nothing has progressed for a while, or the script raised: the calls of torch's flight recorder
    FOLDER/call     the last call that Python made of a process group: it outlives a process that aborts
    FOLDER/stack    faulthandler's: all on a fatal signal, and on SIGNAL the main thread's: for code that never lets
                    Python's lock go

The flight recorder is on by default (TORCH_FR_BUFFER_SIZE) and sees the calls of C++ (DDP's reducer), too. It has no
sends and receives of gloo: they are counted here.
"""

import faulthandler
import json
import linecache
import os
import pickle
import re
import runpy
import shutil
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import script

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)  # SIGUSR1 and SIGUSR2 are often the script's own
KEEP = 300  # calls in a record, of the 2,000 that the flight recorder holds
FRAMES = 12  # of the user's code, per call
SHOWN = 60  # frames of a stack
CALL_BYTES = 1024
DTYPES = {  # the flight recorder's words -> torch's
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Bool": "bool",
}
METHODS = (  # of torch.distributed.ProcessGroup, in the words of torch 2.11 to 2.14
    "allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced "
    "all_gather_single all_gather_single_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_single "
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single "
    "broadcast reduce gather scatter barrier send recv recv_anysource"
)


# ---- calls ----
def tensors(argument: Any) -> str:
    """The shapes and types in a call's first argument: "[4] float32"."""
    while isinstance(argument, list | tuple) and argument and isinstance(argument[0], list | tuple):
        argument = argument[0]
    several = argument if isinstance(argument, list | tuple) else [argument]
    return ", ".join(f"{list(one.shape)} {str(one.dtype)[6:]}" for one in several[:4] if hasattr(one, "dtype"))


def user_frame(frame: FrameType | None, torch_folder: str) -> list[Any]:
    """[file, line, function] of the innermost frame outside torch."""
    while frame and frame.f_code.co_filename.startswith(torch_folder):
        frame = frame.f_back
    return [frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name] if frame else ["", 0, ""]


class Recorder:
    def __init__(self, folder: Path, every: float, patience: float):
        self.folder, self.every, self.patience = folder, every, patience
        self.parent = os.getppid()
        self.error: dict[str, Any] | None = None
        self.num_calls = 0
        self.recorded = False  # since the last progress
        self.groups: dict[str, dict[str, Any]] = {}
        self.transfers: deque[tuple[weakref.ref, dict[str, Any]]] = deque(maxlen=64)
        self.call_file = os.open(folder / "call", os.O_CREAT | os.O_WRONLY)
        self.distributed: Any = None  # torch.distributed.distributed_c10d, once the script has imported it
        self.lock = threading.Lock()

    def attach(self) -> bool:
        """Wraps the methods of ProcessGroup as soon as the script has imported torch.distributed. True when done."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if self.distributed or not hasattr(module, "new_subgroups_by_enumeration"):  # the last one that it defines
            return self.distributed is not None
        folder = os.path.dirname(sys.modules["torch"].__file__ or "")
        for name in METHODS.split():
            if method := getattr(module.ProcessGroup, name, None):  # type: ignore[union-attr]
                setattr(module.ProcessGroup, name, self.wrapped(name, method, folder))  # type: ignore[union-attr]
        self.distributed = module
        return True

    def wrapped(self, name: str, method: Callable[..., Any], torch_folder: str) -> Callable[..., Any]:
        transfer = name in ("send", "recv", "recv_anysource")
        op = name.strip("_")
        for word in ("reduce", "gather", "to"):  # allreduce -> all_reduce, alltoall -> all_to_all, as elsewhere
            op = op.replace(f"all{word}", f"all_{word}").replace("all_toall", "all_to_all")

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            note = {"op": op, "group": group.group_name, "size": tensors(args[0]) if args else ""}
            note["where"] = user_frame(sys._getframe(1), torch_folder)
            os.pwrite(self.call_file, json.dumps(note).encode().ljust(CALL_BYTES)[:CALL_BYTES], 0)
            work = method(group, *args, **kwargs)
            if transfer and work is not None:
                peer, tag = (args[1], args[2]) if name != "recv_anysource" else (None, args[1])
                self.transfers.append((weakref.ref(work), note | {"peer": peer, "tag": tag}))
            return work

        return call

    def trace(self, *which: bool) -> tuple[list[dict[str, Any]], list[dict[str, int]]]:
        """The calls, and the state of the groups, in torch's flight recorders: gloo's, and NCCL's own."""
        entries, states = [], []
        for name in ("_dump_fr_trace", "_dump_nccl_trace"):
            if dump := getattr(sys.modules.get("torch._C._distributed_c10d"), name, None):
                found = pickle.loads(dump(*which))
                entries += found.get("entries", [])
                states += found.get("pg_status", {}).values()
        return sorted(entries, key=lambda entry: entry["time_created_ns"]), states

    def progress(self) -> list[int]:
        """Numbers of which one grows whenever a call is made or done: 30 microseconds."""
        if not self.distributed:  # torch may be half imported
            return [0]
        _, states = self.trace(False, False, False)
        keys = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        counts = [sum(max(one.get(key, 0), 0) for one in states) for key in keys]
        return [self.num_calls, sum(map(is_done, list(self.transfers))), *counts]

    # ---- files ----
    def write(self, name: str, content: object) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(content))
        part.replace(self.folder / name)

    def beat(self, count: list[int]) -> None:
        for group, ranks in list(self.distributed._world.pg_group_ranks.items()) if self.distributed else ():
            if isinstance(group, self.distributed.ProcessGroup):  # a number stands for groups without this rank
                self.groups[group.group_name] = {"ranks": sorted(ranks), "name": group.group_desc}
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack: list[list[Any]] = []
        while frame and len(stack) < SHOWN and frame.f_code.co_filename != script.__file__:
            if not frame.f_code.co_filename.startswith("<frozen"):
                stack.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
            frame = frame.f_back
        transfers = [note for work, note in list(self.transfers) if not is_done((work, note))]
        line = linecache.getline(*stack[0][:2]).strip() if stack else ""
        state = dict(count=count, recorded=self.recorded, stack=stack, line=line, groups=self.groups)
        self.write("beat", state | dict(transfers=transfers, error=self.error))

    def record(self) -> None:
        """Writes the flight recorder's last calls, only when the rank stands still anyway: 20 milliseconds.

        The first time, torch imports torch._dynamo for the stacks, unless an optimizer already has: a second or two.
        """
        folder = os.path.dirname(sys.modules["torch"].__file__ or "") if "torch" in sys.modules else "?"
        calls = []
        for entry in self.trace()[0][-KEEP:] if self.distributed else ():
            if entry["is_p2p"]:
                continue
            frames = [[frame["filename"], frame["line"], frame["name"]] for frame in entry.get("frames", [])]
            hidden = (folder, os.path.dirname(runpy.__file__), __file__, script.__file__, "<frozen")
            where = [frame for frame in frames if not frame[0].startswith(hidden)][:FRAMES]
            pairs = zip(entry["input_sizes"], (DTYPES.get(name, name) for name in entry["input_dtypes"]))
            done = entry["state"] == "completed" or (entry["retired"] and entry["state"] == "scheduled")
            call = dict(group=entry["process_group"][0], seq=entry["collective_seq_id"], done=done, where=where)
            call |= dict(op=entry["profiling_name"].partition(":")[2], size=", ".join(f"{s} {t}" for s, t in pairs))
            calls.append(call)
        self.write("record", calls)
        self.recorded = True

    def end(self, error: Exception | None) -> None:
        """Keeps what the script raised, and the calls that it had made by its end."""
        with self.lock:
            if error:
                where, trace = ["", 0, ""], error.__traceback__
                while trace:
                    if "/torch/" not in (file := trace.tb_frame.f_code.co_filename):
                        where = [file, trace.tb_lineno, trace.tb_frame.f_code.co_name]
                    trace = trace.tb_next
                words = re.sub(r"\[/\S+\] ", "", str(error))  # gloo puts the place in its own source in front
                text = f"{type(error).__name__}: {words}".splitlines()[0][:500]
                self.error = {"text": text, "where": where, "time": time.time()}
            self.recorded = False
            self.beat(self.progress())
            self.record()
            self.beat(self.progress())

    def watch(self) -> None:
        count: list[int] = []
        since, next_beat = 0.0, 0.0
        while True:
            attached, now = self.attach(), time.monotonic()
            if now >= next_beat:
                next_beat = now + self.every
                with self.lock:
                    if (current := self.progress()) != count:
                        count, since, self.recorded = current, now, False
                    elif attached and now - since >= self.patience and not self.recorded:
                        self.record()
                    self.beat(count)
                if os.getppid() != self.parent:  # the one that watches was killed: leave nobody behind
                    shutil.rmtree(self.folder.parent, ignore_errors=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(max(0.0, next_beat - time.monotonic()) if attached else 0.01)


def is_done(transfer: tuple[weakref.ref, dict[str, Any]]) -> bool:
    work = transfer[0]()
    return work is None or work.is_completed()


# ---- main ----
def become(folder: Path, every: float, patience: float, words: list[str]) -> None:
    """Runs `script flags...` or `-m module flags...` as __main__, and records it."""
    stacks = open(folder / "stack", "w")
    faulthandler.enable(stacks)
    faulthandler.register(SIGNAL, stacks, all_threads=False)  # to walk the stack of a thread that runs may crash
    recorder = Recorder(folder, every, patience)
    threading.Thread(target=recorder.watch, daemon=True).start()
    try:
        raised = script.run_script(words)
    except SystemExit:
        recorder.end(None)
        raise
    recorder.end(raised)
    if raised:
        raise SystemExit(1)
