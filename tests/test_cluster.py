"""06_hybrid/cluster.py: nodes with names, addresses and links on one machine; nothing of them stays behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from emulated import CLUSTER, KINDS, USER, cluster, needs_namespaces

pytestmark = needs_namespaces


def each(script, *flags, **more):
    """Runs a Python script on every node, with `node` its number, `listen()` and `connect(node)`."""
    before = """
import os, socket, sys, time
node = int(os.environ["NODE_RANK"])

def listen():
    server = socket.create_server(("", 5000))
    print("listening", flush=True)
    return server.accept()[0]

def connect(other):
    while True:
        try:
            return socket.create_connection((f"node{other}", 5000), 1)
        except OSError:
            time.sleep(0.01)
"""
    done = cluster(*flags, "--each", "--", sys.executable, "-c", before + script, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def said(done, node):
    return [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith(f"[node{node}] ")]


def sent(done):
    found = re.search(r"bytes sent to other nodes: (.*)", done.stderr)[1]
    return {int(node): int(size.replace(",", "")) for node, size in re.findall(r"node(\d+) ([\d,]+)", found)}


# ---- nodes ----
def test_nodes_have_names_and_addresses_of_their_own_and_find_each_other():
    script = """
import subprocess
print(socket.gethostname(), socket.gethostbyname("node0"), socket.gethostbyname("node2"))
print(subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True).stdout.count("inet"))
"""
    done = each(script, "--nodes", 3)
    for node in range(3):
        assert said(done, node) == [f"node{node} 10.77.0.1 10.77.0.3", "2"]  # lo and eth0


def test_a_node_sees_its_own_processes_and_no_others():
    """Under the numbers that they have there: what watches a process reads /proc."""
    done = each(
        'print(os.readlink("/proc/self") == str(os.getpid()), *sorted(filter(str.isdigit, os.listdir("/proc"))))'
    )
    for node in range(2):
        assert said(done, node) == ["True 1"]


def test_exit_code_is_that_of_the_worst_node():
    done = cluster("--nodes", 3, "--each", "--", "sh", "-c", "exit $((NODE_RANK * 3))")
    assert done.returncode == 6
    assert "exit codes 0, 3, 6" in done.stderr


def test_nodes_past_the_limit_are_killed():
    done = cluster("--limit", "500ms", "--each", "--", "sleep", "100")
    assert done.returncode == 124
    assert "the limit of 0.5 s is over" in done.stderr


# ---- links ----
MIB = 2**20
SEND = f"""
if node == 0:
    link, size = listen(), 0
    start = time.monotonic()
    while data := link.recv(1 << 20):
        size += len(data)
    print(size, time.monotonic() - start)
else:
    link = connect(0)
    link.sendall(bytes({MIB}))
    link.close()
"""


@pytest.mark.parametrize("more", [[], ["--delay", "1ms"]], ids=["in the kernel", "in the process"])
def test_bytes_are_counted_and_never_faster_than_the_rate(more):
    done = each(SEND, "--rate", "40mbit", *more)
    size, seconds = said(done, 0)[-1].split()
    assert int(size) == MIB
    # A token bucket lets a burst of 64 KiB pass at once.
    assert float(seconds) > 0.9 * 8 * (MIB - 65536) / 40e6
    assert MIB < sent(done)[1] < 1.05 * MIB  # and headers
    assert sent(done)[0] < 0.05 * MIB  # acknowledgements


def test_delay_is_added_to_each_way():
    script = """
link = listen() if node == 0 else connect(0)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if node == 0:
    while data := link.recv(1):
        link.send(data)
else:
    for _ in range(5):
        start = time.monotonic()
        link.send(b"x")
        link.recv(1)
        print(time.monotonic() - start)
"""
    done = each(script, "--delay", "20ms")
    assert min(map(float, said(done, 1))) > 0.04


def test_loss_takes_its_share_of_frames():
    script = """
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("", 5001))
udp.settimeout(0.1)
seen, last = set(), b""
if node == 0:  # answers each greeting, counts the numbers, and says how many when it is over
    while last != b"end":
        try:
            last, sender = udp.recvfrom(100)
        except TimeoutError:
            continue
        if last == b"hello":
            udp.sendto(b"welcome", sender)
        elif last != b"end":
            seen.add(last)
    print(len(seen))
else:
    while last != b"welcome":
        udp.sendto(b"hello", ("node0", 5001))
        try:
            last = udp.recv(100)
        except TimeoutError:
            pass
    for number in range(1000):
        udp.sendto(str(number).encode(), ("node0", 5001))
        time.sleep(0.0005)
    for _ in range(100):
        udp.sendto(b"end", ("node0", 5001))
"""
    done = each(script, "--loss", "20%")
    assert 700 < int(said(done, 0)[-1]) < 900  # 800 expected; 7 standard deviations of 13


# ---- the timetable ----
def test_a_killed_node_is_told_to_the_others_and_does_not_count():
    script = """
link = listen() if node == 0 else connect(0)
if node == 1:
    print("up", flush=True)
    time.sleep(100)
link.setblocking(True)
print("end", link.recv(1))
"""
    done = each(script, "--at", "up:kill:1")
    assert said(done, 0)[-1] == "end b''"
    assert re.search(r"cluster: [\d.]+ s: kill node1", done.stderr)


def test_a_cut_link_is_silent_until_it_heals():
    script = """
link = listen() if node == 0 else connect(0)
if node == 1:
    print("up", flush=True)
    time.sleep(100)
link.settimeout(1)
try:
    link.recv(1)
except TimeoutError:
    print("silence", flush=True)
link.settimeout(30)
link.send(b"x")
print("cut", flush=True)
link.recv(1)
print("healed")
"""
    script = script.replace("    time.sleep(100)", "    link.send(link.recv(1))\n    time.sleep(100)")
    done = each(script, "--at", "up:cut:1", "--at", "cut:heal:1", "--at", "healed:kill:1")
    assert said(done, 0)[-3:] == ["silence", "cut", "healed"]


def test_a_node_can_come_back_after_a_power_cut():
    script = """
if node == 1:
    print("born", flush=True)
    link = connect(0)
    link.recv(1)
else:
    server = socket.create_server(("", 5000))
    first = server.accept()[0]
    print("one", flush=True)
    second = server.accept()[0]
    print("two", flush=True)
    second.send(b"x")
"""
    done = each(script, "--at", "one:off:1", "--at", "+0.1:start:1")
    assert said(done, 1) == ["born", "born"]
    assert said(done, 0)[-1] == "two"


def test_what_did_not_come_before_the_end_is_said_and_is_no_success():
    done = cluster("--at", "never said:kill:1", "--at", "+1:start:1", "--each", "--", "true")
    assert done.returncode == 1
    assert "not done: kill of node1, as 'never said' did not come before the end\n" in done.stderr
    assert "not done: start of node1, as '+1' did not come before the end\n" in done.stderr


# ---- nothing stays ----
def processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "cmdline").read_text() or mark in (path / "environ").read_text(errors="replace"):
                found.append(int(path.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["INT", "TERM", "KILL"]
)
def test_nothing_stays_behind_however_it_ends(number, code, tmp_path):
    mark = uuid.uuid4().hex
    links = sorted(os.listdir("/sys/class/net"))
    env = os.environ | {"TMPDIR": str(tmp_path), "MARK": mark}
    words = ["--rate", "1gbit", "--delay", "1ms", "--each", "--", "sh", "-c", "echo up; setsid sleep 1000 & wait"]
    command = [sys.executable, str(CLUSTER), *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    assert {started.stdout.readline(), started.stdout.readline()} == {"[node0] up\n", "[node1] up\n"}
    assert len(processes(mark)) > 6
    started.send_signal(number)
    assert started.wait(20) == code
    started.stdout.close()
    deadline = time.monotonic() + 20
    while processes(mark) and time.monotonic() < deadline:  # the kernel takes them down in its own time
        time.sleep(0.05)
    assert processes(mark) == []
    assert sorted(os.listdir("/sys/class/net")) == links
    assert os.listdir(tmp_path) == []


def test_it_works_for_a_plain_user():
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    if subprocess.run([*user, "unshare", "-U", "-r", *KINDS, "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets no plain user make namespaces")
    if not (python := shutil.which("python3", path=os.defpath)):
        pytest.skip("no python3 that any user may run")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        for name in ("cluster.py", "switch.py"):
            shutil.copy(CLUSTER.with_name(name), folder)
        command = [*user, python, f"{folder}/cluster.py", "--rate", "1gbit", "--each", "--", "hostname"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd="/", env={"PATH": os.environ["PATH"]}
        )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["[node0]", "[node1]", "node0", "node1"]


# ---- refused ----
BAD = {
    "--rate 1gbits -- x.py": "'1gbits': use a number and one of bit, kbit, mbit, gbit",
    "--rate fast -- x.py": "'fast': use a number and one of bit, kbit, mbit, gbit",
    "--delay 3 -- x.py": "'3': use a number and one of s, ms, us",
    "--loss 2 -- x.py": "'2': use a share such as 1%",
    "--nodes 0 -- x.py": "--nodes 0 --procs 2: use 1 to 200, and 1 or more",
    "--procs 0 -- x.py": "--nodes 2 --procs 0: use 1 to 200, and 1 or more",
    "-- nowhere.py --steps 1": "nowhere.py: no such file in ",
    "--nodes 2": "nothing to run: put a script, and its flags, after --",
    "--at 3:explode:1 -- x.py": "--at '3:explode:1': use WHEN:WHAT:NODE with one of kill, off, start, cut, heal",
    "--at 3:kill:2 -- x.py": "--at '3:kill:2': of 2 nodes use 0 to 1",
    "--at 3:rate:1 -- x.py": "--at '3:rate:1': use WHEN:WHAT:NODE with one of kill",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_ends_in_one_line(flags):
    done = cluster(*flags.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {BAD[flags]}")
    assert done.stderr.count("\n") == 1


def test_missing_iproute2_is_said_in_one_line(tmp_path):
    (tmp_path / "unshare").symlink_to(shutil.which("unshare"))
    hidden = ["unshare", *USER, "-m", "sh", "-c", 'mount -t tmpfs tmpfs /usr/sbin; PATH=$1; shift; exec "$@"', "sh"]
    command = [*hidden, str(tmp_path), sys.executable, str(CLUSTER), "--each", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ip is missing: install iproute2")


def test_kernel_that_forbids_namespaces_is_said_in_one_line(tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    done = cluster("--each", "--", "true", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: no namespaces here (unshare: Operation not permitted): run it as root")
