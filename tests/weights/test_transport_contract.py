"""One contract for all transports, over real processes: what a relay may rely on, whatever carries its messages."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from transport_node import checksum, content

from rose_hpc.launch.preflight import find_mpiexec

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
RANK = HERE.parents[1] / "mpi" / "rank.sh"
KINDS = [pytest.param("tcp"), pytest.param("gloo", marks=pytest.mark.ranks), pytest.param("mpi", marks=pytest.mark.mpi)]
NAMES = ("a", "b", "c")
STALL_S = 1.5
LIMITS = {"max_message_bytes": 9 << 20, "stall_s": STALL_S}


class Node:
    """The test's end of one process."""

    def __init__(self, control):
        self._control, self._lines = control, control.makefile("rb")
        hello = json.loads(self._lines.readline())
        self.name, self.pid, self.port, self.seen = hello["name"], hello["pid"], hello["port"], []

    def do(self, what, **how):
        self.begin(what, **how)
        return self.end()

    def begin(self, what, **how):
        self._control.sendall(json.dumps({"what": what, **how}).encode() + b"\n")

    def end(self):
        return json.loads(self._lines.readline())

    def wait_for(self, enough, deadline_s=20.0):
        """Events so far, as soon as enough(events)."""
        ends_s = time.monotonic() + deadline_s
        while True:
            self.seen += self.do("take")
            if enough(self.seen):
                return self.seen
            assert time.monotonic() < ends_s, f"{self.name} saw only {self.seen[-5:]}"
            time.sleep(0.01)

    def received(self, count, peer, deadline_s=20.0):
        """The first `count` messages of a peer as (nbytes, checksum)."""
        events = self.wait_for(lambda seen: sum(e[:2] == ["received", peer] for e in seen) >= count, deadline_s)
        return [tuple(e[2:]) for e in events if e[:2] == ["received", peer]][:count]

    def lost(self, peer, deadline_s=20.0):
        """Why a peer was lost."""
        return next(
            e[2] for e in self.wait_for(lambda seen: any(e[:2] == ["lost", peer] for e in seen), deadline_s) if e[:2] == ["lost", peer]
        )

    def forget(self):
        self.do("take")
        self.seen = []


@contextmanager
def nodes_of(kind, folder, **environment):
    """Connected processes by name. At the end all must end by themselves, with status 0 unless they were killed."""
    (folder / "limits.json").write_text(json.dumps(LIMITS))
    command = [sys.executable, str(HERE / "transport_node.py"), kind, ",".join(NAMES), str(folder)]
    if kind == "mpi":
        command = [find_mpiexec("mpiexec"), "-disable-auto-cleanup", "-n", str(len(NAMES)), str(RANK), *command]
    env = {**os.environ, "HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1", **environment}
    with ExitStack() as stack, (folder / "log").open("ab") as log:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "control"))
        listener.listen()
        listener.settimeout(60)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        stack.callback(_end, process)
        nodes = {}
        for _ in NAMES:
            control = stack.enter_context(listener.accept()[0])
            control.settimeout(60)
            node = Node(control)
            stack.callback(control.shutdown, socket.SHUT_RDWR)  # first of all at the end: then the nodes end
            nodes[node.name] = node
        if kind == "tcp":
            for one, other in itertools.combinations(NAMES, 2):
                nodes[one].do("connect", peer=other, port=nodes[other].port)
        yield nodes


def _end(process):
    """Nodes end when their control socket closes, whatever happened to their peers."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        raise AssertionError("a node hangs at its end") from None
    assert process.returncode in (0, -signal.SIGKILL % 256, 128 + signal.SIGKILL)


@pytest.fixture(scope="module", params=KINDS)
def shared(request, tmp_path_factory):
    """Processes that no test breaks."""
    with nodes_of(request.param, tmp_path_factory.mktemp(request.param)) as nodes:
        yield nodes


@pytest.fixture
def nodes(shared):
    for node in shared.values():
        node.forget()
    return shared


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


_seeds = itertools.count(1)


def messages(*sizes):
    """[seed, sizes of the parts] for each message; a size may be a tuple of parts."""
    return [[next(_seeds), list(size) if isinstance(size, tuple) else [size]] for size in sizes]


def expected(sent):
    return [(sum(sizes), checksum(content(seed, sum(sizes)))) for seed, sizes in sent]


def test_messages_of_all_sizes_arrive_whole_and_in_order_in_all_directions_at_once(nodes):
    kib, mib = 1 << 10, 1 << 20
    sent = {
        (one, other): messages(0, 1, 100, 64 * kib - 1, 64 * kib, 64 * kib + 1, 0, mib - 1, mib, mib + 1, 3 * mib + 7, 5, 8 * mib, 1)
        for one, other in itertools.permutations(NAMES, 2)
    }
    for (one, other), batch in sent.items():
        nodes[one].do("send", peer=other, messages=batch)
    for (one, other), batch in sent.items():
        assert nodes[other].received(len(batch), one) == expected(batch)


def test_parts_make_one_message(nodes):
    sent = messages((0,), (), (1, 0, 2), (64, 3 << 20), (1 << 20, 1 << 20, 1), (100_000,) * 12, (3,) * 3000, (7, 2 << 20, 9))
    nodes["a"].do("send", peer="b", messages=sent)
    assert nodes["b"].received(len(sent), "a") == expected(sent)


def test_many_small_messages_keep_their_order(nodes):
    sent = messages(*(i % 300 for i in range(1500)))
    nodes["a"].do("send", peer="b", messages=sent)
    nodes["c"].do("send", peer="b", messages=sent)
    assert nodes["b"].received(len(sent), "a") == nodes["b"].received(len(sent), "c") == expected(sent)


def test_counters_count_the_payload_of_whole_messages(nodes):
    before = nodes["a"].do("counts", peer="b"), nodes["b"].do("counts", peer="a")
    sent = messages(0, 1000, 2 << 20, 17)
    nodes["a"].do("send", peer="b", messages=sent)
    nodes["b"].received(len(sent), "a")
    nodes["a"].do("timed_poll", wait_s=0.1)
    after = nodes["a"].do("counts", peer="b"), nodes["b"].do("counts", peer="a")
    total = 1000 + (2 << 20) + 17
    assert after[0]["sent"] - before[0]["sent"] == after[1]["received"] - before[1]["received"] == total
    assert after[0]["queued"] == 0


def test_a_peer_that_does_not_read_shows_as_queued_bytes_and_holds_nobody_up(nodes):
    sent = messages(*[8 << 20] * 6)
    nodes["b"].begin("sleep", seconds=0.8)
    begun = time.monotonic()
    nodes["a"].do("send", peer="b", messages=sent)
    to_c = messages(1 << 20, 5)
    nodes["a"].do("send", peer="c", messages=to_c)
    assert nodes["c"].received(2, "a") == expected(to_c)
    assert nodes["a"].do("counts", peer="b")["queued"] > 8 << 20
    assert time.monotonic() - begun < 0.8, "too slow to say anything"
    nodes["b"].end()
    assert nodes["b"].received(6, "a") == expected(sent)
    nodes["a"].do("timed_poll", wait_s=0.1)
    assert nodes["a"].do("counts", peer="b")["queued"] == 0


def test_poll_waits_no_longer_than_told_and_wakes_for_a_message(nodes):
    assert 0.25 < nodes["a"].do("timed_poll", wait_s=0.3) < 0.6
    assert nodes["a"].do("timed_poll", wait_s=0) < 0.2
    nodes["b"].begin("timed_poll", wait_s=5)
    time.sleep(0.1)
    nodes["a"].do("send", peer="b", messages=messages(10))
    assert nodes["b"].end() < 2


def test_nothing_can_be_sent_to_a_peer_that_is_not_connected(nodes):
    assert nodes["a"].do("send", peer="nobody", messages=messages(1))["error"] == "WeightsError"
    assert nodes["a"].do("counts", peer="nobody")["queued"] == 0
    nodes["a"].do("drop", peer="nobody")


def test_too_long_a_message_costs_its_sender_the_link_and_no_memory(kind, tmp_path):
    with nodes_of(kind, tmp_path) as nodes:
        memory = nodes["b"].do("memory")
        nodes["a"].do("send", peer="b", messages=messages(LIMITS["max_message_bytes"]))
        nodes["b"].received(1, "a")
        nodes["a"].do("send", peer="b", messages=messages(40 << 20))
        assert "too long" in nodes["b"].lost("a")
        nodes["a"].lost("b")
        assert nodes["b"].do("memory") - memory < 20 << 10
        carries_on(nodes, "b", "c")


def test_a_dropped_peer_is_heard_no_more_and_learns_of_it(kind, tmp_path):
    with nodes_of(kind, tmp_path) as nodes:
        nodes["b"].do("drop", peer="a")
        nodes["a"].do("send", peer="b", messages=messages(1, 2))
        nodes["a"].lost("b")
        assert nodes["a"].do("send", peer="b", messages=messages(1))["error"] == "WeightsError"
        assert nodes["b"].do("send", peer="a", messages=messages(1))["error"] == "WeightsError"
        carries_on(nodes, "b", "c")
        carries_on(nodes, "a", "c")
        assert not [e for e in nodes["b"].seen if e[1] == "a"]


def test_a_killed_peer_is_lost_within_the_deadline_and_the_others_go_on(kind, tmp_path):
    with nodes_of(kind, tmp_path) as nodes:
        nodes["a"].do("send", peer="c", messages=messages(*[8 << 20] * 3))
        nodes["c"].do("send", peer="b", messages=messages(*[8 << 20] * 3))
        os.kill(nodes["c"].pid, signal.SIGKILL)
        for one in "ab":
            for size in [10] * 100 + [1 << 20] * 10:  # more than any buffer between them forgives
                if nodes[one].do("send", peer="c", messages=messages(size)):
                    break  # lost already
        carries_on(nodes, "a", "b")
        for one in "ab":
            nodes[one].lost("c", deadline_s=STALL_S + 3)
        carries_on(nodes, "a", "b")


def test_a_stopped_peer_is_lost_after_the_stall_and_the_others_go_on(kind, tmp_path):
    with nodes_of(kind, tmp_path) as nodes:
        os.kill(nodes["c"].pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            nodes["a"].do("send", peer="c", messages=messages(*[8 << 20] * 6))
            carries_on(nodes, "a", "b")
            nodes["a"].lost("c", deadline_s=STALL_S + 4)
            assert time.monotonic() - begun > STALL_S
            carries_on(nodes, "a", "b")
        finally:
            os.kill(nodes["c"].pid, signal.SIGCONT)


def test_a_process_that_does_not_close_ends_all_the_same(kind, tmp_path):
    with nodes_of(kind, tmp_path, LEAVE_OPEN="1") as nodes:
        nodes["a"].do("send", peer="b", messages=messages(5))
        nodes["b"].received(1, "a")


def carries_on(nodes, one, other):
    """Both directions between two survivors, short and long."""
    for sender, receiver in ((one, other), (other, one)):
        nodes[receiver].seen = [e for e in nodes[receiver].seen if e[:2] != ["received", sender]]
        sent = messages(3, 1 << 20, *[50] * 100)
        nodes[sender].do("send", peer=receiver, messages=sent)
        assert nodes[receiver].received(len(sent), sender) == expected(sent)
