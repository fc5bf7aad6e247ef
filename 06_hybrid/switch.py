"""The switch between the nodes of cluster.py: in the kernel for a rate alone, in this process for delay and loss.

A switch has sockets to wait for, attach(node) for a cable link{node} that is new, and move(ready sockets).
"""

import contextlib
import heapq
import random
import socket
import subprocess
import time


class Refused(Exception):
    """Ends with one line and exit code 2."""


def shell(*words):
    """Runs a command of the set-up; Refused with what it said if the kernel will not."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{' '.join(map(str, words))}: {done.stderr.strip()}: this kernel lacks what it needs")


def token_bucket(device, rate):
    """Returns the command that makes a device send at a rate, in bits per second."""
    burst = max(65536, int(rate / 4000))  # bytes that may go at once: a whole frame of 64 KiB, 2 ms
    how = ["rate", f"{rate:.0f}bit", "burst", f"{burst}", "latency", "50ms"]
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", *how]


class Bridge:
    """A switch in the kernel, and a token bucket at both ends of each cable: a rate, and nothing to slow the CPUs."""

    sockets, lost = (), 0

    def __init__(self, args):
        self.rate = [args.rate] * args.nodes
        shell("ip", "link", "add", "name", "switch", "type", "bridge")
        shell("ip", "link", "set", "switch", "up")

    def attach(self, node):
        shell("ip", "link", "set", f"link{node}", "master", "switch")
        if self.rate[node]:
            shell(*token_bucket(f"link{node}", self.rate[node]))

    def move(self, _):
        return 0.05


class Relay:
    """A switch in this process, for delay and loss: it takes frames from all cables and sends each when it is due."""

    HEADER = 10  # virtio_net_hdr, before each frame: with it frames of 64 KiB pass whole

    def __init__(self, args):
        self.delay, self.sockets, self.addresses, self.due = args.delay, [None] * args.nodes, {}, []
        self.count = self.lost = 0  # of frames
        self.loss, self.rate = [args.loss] * args.nodes, [args.rate or 1e12] * args.nodes
        self.sent, self.received = [0.0] * args.nodes, [0.0] * args.nodes  # when each direction of a link is free again

    def attach(self, node):
        self.sockets[node] = link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        link.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
        link.setsockopt(263, 23, 1)  # PACKET_IGNORE_OUTGOING
        for direction in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            link.setsockopt(socket.SOL_SOCKET, direction, 4 << 20)
        link.bind((f"link{node}", 3))  # ETH_P_ALL
        link.setblocking(False)

    def move(self, ready):
        """Takes what came, sends what is due; returns the seconds until the next is."""
        for source, link in enumerate(self.sockets):
            for _ in range(32 if link in ready else 0):
                try:
                    self.take(source, link.recv(1 << 17))
                except OSError:  # nothing left, or the link is down
                    break
        while self.due and self.due[0][0] <= time.monotonic():
            *_, target, frame = heapq.heappop(self.due)
            with contextlib.suppress(OSError):  # the link is down
                self.sockets[target].send(frame)
        return min(0.05, max(0.0, self.due[0][0] - time.monotonic())) if self.due else 0.05

    def take(self, source, frame):
        target, sender = frame[self.HEADER : self.HEADER + 6], frame[self.HEADER + 6 : self.HEADER + 12]
        self.addresses[sender] = source
        bits = 8 * (len(frame) - self.HEADER + 66 * (len(frame) // 1514))  # a large frame stands for small ones
        for node in [self.addresses[target]] if target in self.addresses else range(len(self.sockets)):
            if node == source:
                continue
            now = time.monotonic()
            free = max(now - 0.002, self.sent[source], self.received[node])  # 2 ms of credit: late is not slow
            is_full = free - now > 0.05  # a queue of 50 ms
            if is_full or random.random() < max(self.loss[source], self.loss[node]):
                self.lost += 1
                continue
            free += bits / min(self.rate[source], self.rate[node])
            self.sent[source] = self.received[node] = free
            self.count += 1  # of frames that are due at the same time the earlier goes first
            heapq.heappush(self.due, (max(free, now) + self.delay, self.count, node, frame))
