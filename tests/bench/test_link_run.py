"""The engine over a shaped link, small; needs root with ip and tc."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_policy import can_shape, write_policy

from rose_hpc.bench import link_bench
from rose_hpc.bench.link_bench import Case, engine_cases, summary
from rose_hpc.bench.link_engine import EngineUpdate
from rose_hpc.bench.link_engine import summary as engine_summary
from rose_hpc.bench.link_image import LinkImage
from rose_hpc.bench.link_processes import LinkSpec
from rose_hpc.bench.link_run import LinkRun
from rose_hpc.bench.shaped_link import ShapedLink
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.arena_home import ArenaHome

DELAY_S = 0.005
SHAPES = [(f"w{i}", (256, 64)) for i in range(4)]
needs_root = pytest.mark.skipif(not can_shape(), reason="needs root with ip and tc")


@pytest.fixture
def home() -> Iterator[Path]:
    with ArenaHome(Path("/dev/shm")) as made:
        yield made.path


@pytest.mark.kernel
@needs_root
def test_versions_reach_every_receiver_and_cross_a_long_link_once(home: Path) -> None:
    real = write_policy(home / "real", SHAPES)
    image = LinkImage(SHAPES, real)

    async def run(link: ShapedLink) -> None:
        spec = LinkSpec(home / "link", image, real, receivers=3, seed=0)
        async with LinkRun(link, spec, DELAY_S) as running:
            assert await running.mismatches() == 0
            for density in (0.01, 0.1):
                await running.change(density)
                delivery = await running.publish()
                assert delivery.encoded_bytes < delivery.counted.forward_bytes < delivery.encoded_bytes + 20_000
                assert set(delivery.receivers) == {"relay-1", "relay-2", "relay-3"} and delivery.seconds > 2 * DELAY_S
            assert await running.mismatches() == 0 and running.faults == []
            Arena.open(spec.arena("relay-2")).image(writable=True)[5] ^= 1
            assert await running.mismatches() == 1

    with ShapedLink(1e9) as link:
        asyncio.run(run(link))


def row(case: Case, seconds: float, nbytes: float) -> dict[str, object]:
    return link_bench._row(case, [(seconds, int(nbytes), 0)])


def test_figures_are_ratios_between_rows_of_the_same_case() -> None:
    cases = [*link_bench.BASELINE_CASES, *(c for n in link_bench.RECEIVERS for c in engine_cases(n, 0.0))]
    cases += engine_cases(link_bench.MOST, link_bench.DELAY_S)
    assert len(set(cases)) == len(cases)
    rows = [row(c, 0.1 if c.way == "engine" else 0.3, 1000 + c.receivers) for c in cases]
    figures = summary(rows)
    assert figures.pop("bytes_ratio_8_vs_1") == pytest.approx(1008 / 1001)
    assert list(figures.values()) == [pytest.approx(3.0)] * 5


def test_the_pause_reported_is_the_worst_of_all() -> None:
    updates = [EngineUpdate(d, 0.1, 0.2, p, "sparse", "digest", True) for d, p in [(0.003, 0.01), (0.003, 0.02), (0.03, 0.015)]]
    figures = engine_summary(updates)
    assert figures["pause_s"] == 0.02
    found = [(r["density"], r["pause_median_s"], r["pause_worst_s"]) for r in figures["rows"]]
    assert found == [(0.003, 0.015, 0.02), (0.03, 0.015, 0.015)]
