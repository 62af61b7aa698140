"""Real network namespaces; needs root with ip and tc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench_policy import can_shape

from rose_hpc.bench.baselines import Coo, CooEncoder, apply_coo
from rose_hpc.bench.delay import DelayForwarder
from rose_hpc.bench.link_baselines import Flood, SharedImages, Way
from rose_hpc.bench.link_trees import straight, tree
from rose_hpc.bench.shaped_link import ShapedLink, sweep

WAIT_S = 20.0
NAMESPACES = Path("/run/netns")

HOLD = """
import signal
from rose_hpc.bench.shaped_link import ShapedLink
with ShapedLink(1e9) as link:
    print(link.near.namespace, link.far.namespace, flush=True)
    signal.pause()
"""


pytestmark = [pytest.mark.kernel, pytest.mark.skipif(not can_shape(), reason="needs root with ip and tc")]


@pytest.fixture
def link() -> Iterator[ShapedLink]:
    with ShapedLink(100e6) as made:
        yield made


def transfer(link: ShapedLink, nbytes: int) -> float:
    """Seconds to send so many bytes from near to far."""
    with link.inside(link.far):
        listener = socket.create_server((link.far.address, 0))
    with link.inside(link.near):
        sender = socket.create_connection(listener.getsockname(), WAIT_S)
    receiver, _ = listener.accept()
    with listener, sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
        start = time.perf_counter()
        thread.start()
        left = nbytes
        while left:
            left -= len(receiver.recv(1 << 20))
        thread.join()
        return time.perf_counter() - start


def test_a_transfer_takes_its_bytes_over_the_rate_and_is_counted(link: ShapedLink) -> None:
    before = link.counters()
    seconds = transfer(link, 5_000_000)
    counted = link.counters().since(before)
    assert 0.9 < seconds * 100e6 / 8 / 5_000_000 < 1.6  # headers; a busy machine
    assert 5_000_000 < counted.forward_bytes < 5_000_000 * 1.07
    assert 0 < counted.backward_bytes < 500_000


def test_a_small_payload_is_shaped_too(link: ShapedLink) -> None:
    link.set_rate(10e6)
    transfer(link, 128_000)  # empties the bucket
    assert transfer(link, 500_000) > 0.25  # 0.4 s at 10 Mb/s, less what the bucket had saved


def test_nothing_crosses_an_idle_link(link: ShapedLink) -> None:
    time.sleep(0.3)
    assert link.counters().forward_bytes + link.counters().backward_bytes < 500


def test_it_is_removed_at_the_end_and_after_an_error() -> None:
    with contextlib.suppress(KeyboardInterrupt), ShapedLink(1e9) as link:
        names = [link.near.namespace, link.far.namespace]
        assert all((NAMESPACES / name).exists() for name in names)
        raise KeyboardInterrupt
    assert not any((NAMESPACES / name).exists() for name in names)


def test_what_a_killed_owner_leaves_is_removed_by_the_next() -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    names = owner.stdout.readline().split()
    assert len(names) == 2 and not set(names) & set(sweep())  # it lives
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(WAIT_S)
    owner.stdout.close()
    assert all((NAMESPACES / name).exists() for name in names)
    with ShapedLink(1e9):
        assert not any((NAMESPACES / name).exists() for name in names)


@pytest.mark.parametrize("way", Way)
def test_every_baseline_brings_versions_to_all_receivers(link: ShapedLink, way: Way) -> None:
    link.set_rate(1e9)
    rng = np.random.default_rng(0)
    images = SharedImages(rng.integers(0, 1 << 16, 1_000_003, np.uint16), 3)
    coo = CooEncoder(64).encode(np.zeros(64, np.uint16), np.ones(64, np.uint16))
    apply_coo(Coo(coo.positions, coo.values), np.zeros(64, np.uint16))
    parents = straight(3) if way is Way.COO_ALL else tree(3, dict.fromkeys(range(4), 100_000))
    with Flood(link, images, way, parents) as flood:
        for _ in range(2):
            lanes = np.unique(rng.integers(0, 1_000_003, 5_000))
            images.new[lanes] += 1
            timing = flood.measure(WAIT_S)
            assert all(np.array_equal(receiver, images.new) for receiver in images.receivers)
            payload = 2_000_006 if way is Way.DENSE else len(lanes) * 6 * (3 if way is Way.COO_ALL else 1)
            assert payload < timing.counted.forward_bytes < payload * 1.25


def test_a_baseline_crosses_a_long_link(link: ShapedLink) -> None:
    rng = np.random.default_rng(0)
    images = SharedImages(rng.integers(0, 1 << 16, 10_000, np.uint16), 3)
    with Flood(link, images, Way.COO_TREE, tree(3, dict.fromkeys(range(4), 1_000)), delay_s=0.02) as flood:
        images.new[::50] += 1
        assert flood.measure(WAIT_S).seconds > 0.02
        assert all(np.array_equal(receiver, images.new) for receiver in images.receivers)


def test_a_forwarder_delays_and_keeps_order() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        DelayForwarder(socket.create_server(("127.0.0.1", 0)), server.getsockname(), 0.02) as forwarder,
        socket.create_connection(forwarder.address, WAIT_S) as client,
    ):
        start = time.perf_counter()
        client.sendall(b"first ")
        client.sendall(b"second")
        client.shutdown(socket.SHUT_WR)
        there, _ = server.accept()
        with there:
            content = b"".join(iter(lambda: there.recv(64), b""))
        assert content == b"first second"
        assert time.perf_counter() - start >= 0.02
