"""A fault to plant: rank 1 stands still for as long as another rank lives, and is killed then, as torchrun would.

Each rank holds a lock as long as it lives; the one that stalls asks for it alone.
"""

ALIVE = "# ---- config", "import fcntl\n\nalive = open(__file__)\nfcntl.flock(alive, fcntl.LOCK_SH)\n\n\n# ---- config"
STALL = "fcntl.flock({}alive, fcntl.LOCK_EX)"


def stall_before(place):
    """Returns the edits of a script whose rank 1 stalls in step 2, before the line `place`, given with its blanks."""
    indent = place[: len(place) - len(place.lstrip())]
    lines = ["if step == 2 and rank == 1:", f"    {STALL.format('')}", "    os.kill(os.getpid(), 9)"]
    return ALIVE, (place, "".join(f"{indent}{line}\n" for line in lines) + place)
