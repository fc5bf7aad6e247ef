"""A cluster on one Linux machine: each node is a set of namespaces with its own host name, address and torchrun.

    python 06_hybrid/cluster.py --nodes 2 --procs 2 --rate 1gbit --delay 0.5ms -- 06_hybrid/train.py --tp 2 --dp 2
    python 06_hybrid/cluster.py --rdzv c10d --at "   3 |:kill:1" -- --nnodes 1:2 --max-restarts 3 02_ddp/train.py

Look at the last line: the bytes that each node sent to others, as the kernel counted them.
    node0, 10.77.0.1: ranks 0, 1 and lo        node1, 10.77.0.2: ranks 2, 3 and lo
                  eth0 --- link0 [ a switch with --rate, --delay, --loss ] link1 --- eth0
Words after -- go to torchrun, behind those that this script gives it (of two --nnodes the later counts).
All of it is inside one outer set of namespaces: when this ends, however it does, the kernel takes everything back.
As root, or as a plain user where the kernel lets one make namespaces. The nodes share CPUs, memory and disk.
"""

import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

from switch import Bridge, Refused, Relay, shell, token_bucket

BIT, SECOND = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}, {"s": 1, "ms": 1e-3, "us": 1e-6}
SECONDS = r"\+?\d+(\.\d+)?"
EVENTS = "kill, off, start, cut, heal, rate=R, loss=P"
# What a node does first: its name, the names of all (in a tmpfs that goes with it), then wait for its cable.
BOOT = """hostname "$1"; mount -t tmpfs tmpfs /mnt; printf "$HOSTS" >/mnt/hosts; mount --bind /mnt/hosts /etc/hosts
umount -l /mnt; echo ready; read _; ip link set lo up; ip addr add "$2" dev eth0; ip link set eth0 up; $3; shift 3
exec "$@" </dev/null"""


# ---- config ----
def quantity(text, units):
    """Returns "1.5gbit" as a number of bits per second, "2ms" as one of seconds."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]+)", text)
    if not found or found[2] not in units:
        raise Refused(f"{text!r}: use a number and one of {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def share(text):
    if not re.fullmatch(r"\d*\.?\d+%", text) or not 0 <= float(text[:-1]) <= 100:
        raise Refused(f"{text!r}: use a share such as 1%")
    return float(text[:-1]) / 100


def event(text, num_nodes):
    """Returns (when, what, value, node) of WHEN:WHAT:NODE."""
    when, _, rest = text.rpartition(":")[0].rpartition(":")
    what, equals, value = rest.partition("=")
    node = text.rpartition(":")[2]
    if what not in (word.split("=")[0] for word in EVENTS.split(", ")) or bool(equals) != (what in ("rate", "loss")):
        raise Refused(f"--at {text!r}: use WHEN:WHAT:NODE with one of {EVENTS}")
    if not node.isdigit() or int(node) >= num_nodes:
        raise Refused(f"--at {text!r}: of {num_nodes} nodes use 0 to {num_nodes - 1}")
    return when, what, quantity(value, BIT) if what == "rate" else share(value) if equals else None, int(node)


def parse_args():
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    add = (parser := argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)).add_argument
    add("--nodes", type=int, default=2)
    add("--procs", type=int, default=2, help="ranks of a node")
    add("--rate", default="", help="of each node's link, each way: 1gbit, 100mbit; default: as fast as it goes")
    add("--delay", default="0s", help="one way: 0.5ms")
    add("--loss", default="0%", help="of frames: 1%%")
    add("--rdzv", choices=("static", "c10d"), default="static", help="c10d: nodes may come and go")
    add("--at", action="append", default=[], metavar="WHEN:WHAT:NODE",
        help=f"one after the other. WHEN: seconds, +seconds after the one before, or text in a line of output. WHAT: "
             f"{EVENTS}. kill: processes die, others are told; off: like a power cut, silence")  # fmt: skip
    add("--each", action="store_true", help="run the words after -- themselves on every node, without torchrun")
    add("--limit", default="600s", help="then all is killed, with exit code 124")
    args, words = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if args.nodes < 1 or args.nodes > 200 or args.procs < 1:
        raise Refused(f"--nodes {args.nodes} --procs {args.procs}: use 1 to 200, and 1 or more")
    args.rate = quantity(args.rate, BIT) if args.rate else None
    args.delay, args.limit, args.loss = quantity(args.delay, SECOND), quantity(args.limit, SECOND), share(args.loss)
    args.at = [event(text, args.nodes) for text in args.at]
    if not words:
        raise Refused("nothing to run: put a script, and its flags, after --")
    scripts = [word for word in words if word.endswith(".py")]
    if not args.each and scripts and not os.path.exists(scripts[0]):
        raise Refused(f"{scripts[0]}: no such file in {os.getcwd()}")
    return args, words


# ---- nodes ----
class Cluster:
    def __init__(self, args, words):
        self.args, self.words, self.at = args, words, list(args.at)
        self.nodes, self.network, self.rest, self.dead = {}, {}, {}, set()  # rest: of a line of output
        self.bytes_before, self.bytes_sent = {}, {}
        relay = args.delay or args.loss or any(what == "loss" for _, what, _, _ in args.at)
        self.switch = (Relay if relay else Bridge)(args)

    def command(self, node):
        if self.args.each:
            return self.words
        static = ["--node-rank", str(node), "--master-addr", "node0", "--master-port", "29500"]
        c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "cluster"]
        where = static if self.args.rdzv == "static" else c10d
        sizes = ["--nnodes", str(self.args.nodes), "--nproc-per-node", str(self.args.procs)]
        return [sys.executable, "-m", "torch.distributed.run", *sizes, *where, *self.words]

    def boot(self, nodes):
        """Starts these nodes together: none runs before the cables of all are in."""
        # The second form keeps torch's reverse look-ups quiet.
        names = [f"{form}10.77.0.{i + 1} node{i}" for i in range(self.args.nodes) for form in ("", "::ffff:")]
        env = {"OMP_NUM_THREADS": "1"} | os.environ | {"HOSTS": "\\n".join(["127.0.0.1 localhost", *names, ""])}
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
        for node in nodes:
            bridge, rate = isinstance(self.switch, Bridge), self.switch.rate[node]
            shaped = " ".join(map(str, token_bucket("eth0", rate))) if bridge and rate else ":"
            boot = ["sh", "-ec", BOOT, "sh", f"node{node}", f"10.77.0.{node + 1}/24", shaped, *self.command(node)]
            self.nodes[node] = started = subprocess.Popen(
                ["unshare", "-n", "-u", "-m", "-p", "-f", "--mount-proc", "--kill-child", *boot],
                env=env | {"NODE_RANK": str(node)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if (line := started.stdout.readline()) != b"ready\n":
                said = (line + started.stdout.read()).decode().strip()
                raise Refused(f"node{node} cannot be made: {said}: this kernel or sandbox lacks what it needs")
            os.set_blocking(started.stdout.fileno(), False)
            self.rest[node] = b""
            # As long as this is open the node has its link, and the link its count of bytes.
            self.network[node] = os.open(f"/proc/{started.pid}/ns/net", os.O_RDONLY)
            link = f"link{node}"
            shell("ip", "link", "add", "name", link, "type", "veth", "peer", "name", "eth0", "netns", started.pid)
            shell("ip", "link", "set", link, "addrgenmode", "none", "up")
            self.switch.attach(node)
        for node in nodes:
            self.nodes[node].stdin.write(b"go\n")
            self.nodes[node].stdin.close()

    def fire(self, what, value, node):
        say(f"{time.monotonic() - self.started:.1f} s: {what} node{node}")
        if what in ("cut", "off"):
            shell("ip", "link", "set", f"link{node}", "down")
        if what == "heal":
            shell("ip", "link", "set", f"link{node}", "up")
        if what in ("kill", "off", "start"):
            self.nodes[node].kill()
            self.nodes[node].wait()
            self.dead.add(node)
        if what == "start":
            shell("ip", "link", "del", f"link{node}")
            os.close(self.network[node])
            self.bytes_before[node] = self.bytes_sent.get(node, 0)
            self.dead.discard(node)
            self.boot([node])
        if what == "loss":
            self.switch.loss[node] = value
        if what == "rate":
            self.switch.rate[node] = value
            if isinstance(self.switch, Bridge):
                shell(*token_bucket(f"link{node}", value))
                inside = ["nsenter", "-n", "-t", self.nodes[node].pid]
                shell(*inside, *token_bucket("eth0", value))

    # ---- running ----
    def print_output(self, node):
        """Prints the whole lines that a node has written; returns them."""
        try:
            data = self.nodes[node].stdout.read() or b""
        except ValueError:  # closed
            data = b""
        *lines, self.rest[node] = (self.rest[node] + data).split(b"\n")
        if self.rest[node] and not data and self.nodes[node].poll() is not None:
            lines, self.rest[node] = [*lines, self.rest[node]], b""
        for line in lines:
            print(f"[node{node}] {line.decode(errors='replace')}", flush=True)
        return [line.decode(errors="replace") for line in lines]

    def count_bytes(self):
        with open("/proc/net/dev") as file:  # received at the switch's end: sent by the node
            for node, received in re.findall(r"link(\d+): *(\d+)", file.read()):
                now = self.bytes_before.get(int(node), 0) + int(received)
                self.bytes_sent[int(node)] = max(now, self.bytes_sent.get(int(node), 0))

    def goes_on(self):
        """Whether a node runs, or time alone will bring one back."""
        timed = self.at and re.fullmatch(SECONDS, self.at[0][0]) and any(what == "start" for _, what, *_ in self.at)
        return timed or any(node.poll() is None for node in self.nodes.values())

    def is_due(self, when, lines):
        if re.fullmatch(SECONDS, when):
            return time.monotonic() >= float(when) + (self.fired if when.startswith("+") else self.started)
        return any(when in line for line in lines)

    def run(self):
        """Returns the exit code: the worst of the nodes that were not killed on purpose; 1 if not all could be done."""
        self.boot(range(self.args.nodes))
        self.started = self.fired = time.monotonic()
        wait = 0.0
        while self.goes_on():
            if time.monotonic() - self.started > self.args.limit:
                say(f"the limit of {self.args.limit:g} s is over")
                return 124
            pipes = {node.stdout: r for r, node in self.nodes.items() if node.poll() is None}
            ready, _, _ = select.select([*pipes, *self.switch.sockets], [], [], wait)
            wait = self.switch.move(ready)
            lines = [line for r in self.nodes for line in self.print_output(r)]
            while self.at and self.is_due(self.at[0][0], lines):
                _, *what = self.at.pop(0)
                self.fired, lines = time.monotonic(), []
                self.fire(*what)
            self.count_bytes()
        for node in self.nodes:
            self.print_output(node)
        codes = {r: exit_code(node.returncode) for r, node in self.nodes.items()}
        sent = ", ".join(f"node{r} {size:,}" for r, size in sorted(self.bytes_sent.items()))
        sent += f"; {self.switch.lost} frames lost" if self.switch.lost else ""
        took = f"{time.monotonic() - self.started:.1f} s, exit codes {', '.join(map(str, codes.values()))}"
        say(f"{took}; bytes sent to other nodes: {sent}")
        for when, what, _, node in self.at:
            say(f"not done: {what} of node{node}, as {when!r} did not come before the end")
        return max((code for r, code in codes.items() if r not in self.dead), default=0) or (1 if self.at else 0)


def exit_code(code):
    return code if code >= 0 else 128 - code  # as a shell has it


def say(words):
    print(f"cluster: {words}", file=sys.stderr, flush=True)


# ---- main ----
def contain():
    """Runs this script again, inside namespaces that end with it; returns its exit code."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where ip and tc lie; not all users look there
    for tool in ("ip", "tc", "unshare", "setpriv", "nsenter"):
        if not shutil.which(tool):
            raise Refused(f"{tool} is missing: install iproute2 and util-linux, as in apt-get install iproute2")
    outer = ["unshare", *(["-U", "-r"] if os.geteuid() else []), "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*outer, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise Refused(f"no namespaces here ({tried.stderr.strip()}): run it as root, or in a --privileged container")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # setpriv: if this process is killed, so is the rest
    command = ["setpriv", "--pdeathsig", "KILL", *outer, sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    child = subprocess.Popen(command, env=os.environ | {"CLUSTER_INSIDE": "1"}, start_new_session=True)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        child.kill()
        child.wait()
    return exit_code(code)


def main():
    try:
        args, words = parse_args()
        code = Cluster(args, words).run() if os.environ.pop("CLUSTER_INSIDE", None) else contain()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
