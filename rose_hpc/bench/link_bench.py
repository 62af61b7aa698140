"""The engine and the baselines over one shaped link, in the same run: seconds, and bytes on the link.

Every row is one way, rate, number of receivers, density and delay; its figures are the best of the repeats, after versions to warm up. All
ways carry the same image, the same kind of update and the same number of ranks; dense crosses the link once in all of them.

Seconds run from the command to the ranks until the last receiver has the version: for the engine applied and verified by its digest, for
the baselines applied. Bytes are those of both directions, as the interfaces count them. The pause of a real engine is measured in a run of
its own over the same link (link_engine.py).
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rose_hpc.bench import link_engine, link_trees
from rose_hpc.bench.baselines import COO_BYTES, Coo, CooEncoder, apply_coo
from rose_hpc.bench.link_baselines import Flood, SharedImages, Timing, Way
from rose_hpc.bench.link_image import LinkImage, link_policy
from rose_hpc.bench.link_processes import LinkSpec
from rose_hpc.bench.link_run import Delivery, LinkRun
from rose_hpc.bench.link_trees import RANKS, Parents
from rose_hpc.bench.shaped_link import ShapedLink
from rose_hpc.bench.synthetic import Change, Positions, ValueTable, make_change
from rose_hpc.errors import DigestMismatch, EnvironmentFault
from rose_hpc.weights.warm_up import warm_up

RECEIVERS = (1, 2, 4, 8)
MOST = max(RECEIVERS)
SPARSE, DENSER = 0.003, 0.03
GIGABIT = 1e9
DELAY_S = 1e-3  # one way
LONG_S, LONG_REPEATS = 1.0, 2  # what takes longer is steady
BASELINE_DEADLINE_S = 120.0
ROOM_FACTOR = 1.15  # deltas, keyframe buckets, images of the processes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One row to be measured."""

    way: str
    bits_per_s: float
    receivers: int
    density: float
    delay_s: float = 0.0

    def __str__(self) -> str:
        delay = f", {1e3 * self.delay_s:g} ms" if self.delay_s else ""
        return f"{self.way} to {self.receivers}, {self.bits_per_s / 1e9:g} Gb/s{delay}, {100 * self.density:g} % changed"


ENGINE = "engine"
BASELINE_CASES = (
    *(Case(Way.DENSE, GIGABIT, n, SPARSE) for n in (1, MOST)),
    *(Case(way, GIGABIT, MOST, density) for density in (SPARSE, DENSER) for way in (Way.COO_TREE, Way.COO_ALL)),
    *(Case(way, GIGABIT / 10, MOST, SPARSE) for way in (Way.COO_TREE, Way.COO_ALL)),
    *(Case(way, 10 * GIGABIT, MOST, SPARSE) for way in Way),
    Case(Way.COO_TREE, GIGABIT, MOST, SPARSE, DELAY_S),
)


def engine_cases(receivers: int, delay_s: float) -> list[Case]:
    """What is measured of the engine in one run."""
    if delay_s:
        return [Case(ENGINE, GIGABIT, receivers, SPARSE, delay_s)]
    cases = [Case(ENGINE, GIGABIT, receivers, SPARSE), Case(ENGINE, GIGABIT, receivers, DENSER)]
    if receivers == MOST:
        cases += [Case(ENGINE, rate, receivers, SPARSE) for rate in (GIGABIT / 10, 10 * GIGABIT)]
    return cases


def run_link(real: Path, home: Path, image_bytes: int, repeats: int, seed: int, say: Say) -> dict[str, Any]:
    """Rows, and the figures that are held against the bars. real: the real versions' folder; home: of the arenas, in shared memory."""
    image = LinkImage(link_policy(image_bytes), real)
    check_room(home, image.nbytes)
    say("link: compiling")
    _compile(home)
    with ShapedLink(GIGABIT) as link:
        say(f"link: a real engine of {link_engine.PARAMETERS / 1e6:.0f} M parameters")
        engine = asyncio.run(link_engine.measure_engine(link, home / "link-engine", real, seed))
        rows = _baseline_rows(link, image, repeats, seed, say)
        mismatches, faults = engine["mismatches"], list(engine["faults"])
        for receivers, delay_s in (*((n, 0.0) for n in RECEIVERS), (MOST, DELAY_S)):
            measured = asyncio.run(_engine_rows(link, home, image, real, receivers, delay_s, repeats, seed, say))
            rows += measured.rows
            mismatches += measured.mismatches
            faults += measured.faults
    report = {"image_bytes": image.nbytes, "parameters": len(image.shapes), "rows": rows, "engine": engine}
    return report | summary(rows) | {"engine_pause_s": engine["pause_s"], "mismatches": mismatches, "faults": faults}


def check_room(home: Path, image_bytes: int) -> None:
    """An arena per receiver and the trainer's lie in shared memory. Raises EnvironmentFault with what is missing."""
    needed = int((MOST + 1) * image_bytes * ROOM_FACTOR)
    in_home, in_memory = shutil.disk_usage(home).free, psutil.virtual_memory().available
    if min(in_home, in_memory) < needed + 2 * image_bytes:
        raise EnvironmentFault(
            f"no room for {MOST} receivers of {image_bytes / 1e6:.0f} MB each",
            got=f"{in_home / 1e9:.1f} GB in {home}, {in_memory / 1e9:.1f} GB of memory",
            expected=f"{(needed + 2 * image_bytes) / 1e9:.1f} GB of both",
            remedy="free memory, pass a smaller --image-mb, or --skip-link",
        )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ratios between rows."""

    def of(case: Case, field: str = "seconds") -> float:
        return float(next(row[field] for row in rows if _case_of(row) == case))

    def speedup(way: str, rate: float, delay_s: float = 0.0) -> float:
        return of(Case(way, rate, MOST, SPARSE, delay_s)) / of(Case(ENGINE, rate, MOST, SPARSE, delay_s))

    most, one = (of(Case(ENGINE, GIGABIT, n, DENSER), "bytes") for n in (MOST, 1))
    return {
        "bytes_ratio_8_vs_1": most / one,
        "speedup_vs_dense_1gbps": speedup(Way.DENSE, GIGABIT),
        "speedup_vs_coo_tree_100mbps": speedup(Way.COO_TREE, GIGABIT / 10),
        "speedup_vs_coo_all_100mbps": speedup(Way.COO_ALL, GIGABIT / 10),
        "speedup_vs_coo_all_1gbps": speedup(Way.COO_ALL, GIGABIT),
        "speedup_vs_coo_tree_1gbps_1ms": speedup(Way.COO_TREE, GIGABIT, DELAY_S),
    }


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _baseline_rows(link: ShapedLink, image: LinkImage, repeats: int, seed: int, say: Say) -> list[dict[str, Any]]:
    values, rng = image.values(), np.random.default_rng(seed)
    images = SharedImages(image.bits(), MOST)
    rows = []
    for case in BASELINE_CASES:
        say(f"link: {case}")
        link.set_rate(case.bits_per_s)
        rows.append(_baseline_row(link, images, case, repeats, values, rng))
    return rows


def _baseline_row(
    link: ShapedLink, images: SharedImages, case: Case, repeats: int, values: ValueTable, rng: np.random.Generator
) -> dict[str, Any]:
    timings: list[Timing] = []
    with Flood(link, images, Way(case.way), _parents(case, images.old.nbytes), case.delay_s) as flood:
        while len(timings) < 1 + _repeats(repeats, timings):
            change = make_change(rng, len(images.old), case.density, Positions.IID, values)
            change.apply(images.new)
            timings.append(flood.measure(BASELINE_DEADLINE_S))
            _check(images, case, change)
    return _row(case, [(t.seconds, t.counted.forward_bytes, t.counted.backward_bytes) for t in timings[1:]])


def _repeats(wanted: int, timings: Sequence[Timing | Delivery]) -> int:
    """What takes long is steady, and few repeats will do."""
    return min(wanted, LONG_REPEATS) if timings and min(t.seconds for t in timings) > LONG_S else wanted


def _parents(case: Case, image_bytes: int) -> Parents:
    if case.way == Way.COO_ALL:
        return link_trees.straight(case.receivers)
    nbytes = image_bytes if case.way == Way.DENSE else int(COO_BYTES * case.density * image_bytes / 2)
    return link_trees.tree(case.receivers, dict.fromkeys(range(RANKS), nbytes // RANKS))


def _check(images: SharedImages, case: Case, change: Change) -> None:
    """The version has arrived everywhere; dense leaves `old` behind, which is brought forward here."""
    if case.way == Way.DENSE:
        images.old[change.lanes] = images.new[change.lanes]
    for receiver in images.receivers[: case.receivers]:
        if not np.array_equal(receiver[change.lanes], images.new[change.lanes]):
            raise DigestMismatch(f"the {case.way} baseline did not bring the version over", remedy="report this: the benchmark is at fault")


def _compile(home: Path) -> None:
    """Before the first process: children inherit what is compiled, or find it in numba's cache instead of compiling it all at once."""
    old, new = np.zeros(64, np.uint16), np.ones(64, np.uint16)
    coo = CooEncoder(64).encode(old, new)
    apply_coo(Coo(coo.positions, coo.values), old)
    apply_coo(Coo(np.frombuffer(coo.positions.tobytes(), np.int32), np.frombuffer(coo.values.tobytes(), np.uint16)), old)  # read-only
    room = memoryview(bytearray(coo.nbytes))
    apply_coo(Coo(np.frombuffer(room[: 4 * 64], np.int32), np.frombuffer(room[4 * 64 :], np.uint16)), old)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        warm_up(Path(folder))


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Measured:
    """mismatches: lanes of all receivers that differ from the trainer's at the end; faults: what was healed on the way."""

    rows: list[dict[str, Any]]
    mismatches: int
    faults: list[str]


async def _engine_rows(
    link: ShapedLink, home: Path, image: LinkImage, real: Path, receivers: int, delay_s: float, repeats: int, seed: int, say: Say
) -> _Measured:
    folder = home / f"link{receivers}"
    say(f"link: starting the engine with {receivers} receivers")
    link.set_rate(10 * GIGABIT)  # the first image is not timed
    rows = []
    try:
        async with LinkRun(link, LinkSpec(folder, image, real, receivers, seed), delay_s) as run:
            for case in engine_cases(receivers, delay_s):
                say(f"link: {case}")
                link.set_rate(case.bits_per_s)
                rows.append(await _engine_row(run, case, repeats))
            return _Measured(rows, await run.mismatches(), run.faults)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _engine_row(run: LinkRun, case: Case, repeats: int) -> dict[str, Any]:
    deliveries: list[Delivery] = []
    while len(deliveries) < 1 + _repeats(repeats, deliveries):
        await run.change(case.density)
        deliveries.append(await run.publish())
    best = min(deliveries[1:], key=lambda d: d.seconds)
    row = _row(case, [(d.seconds, d.counted.forward_bytes, d.counted.backward_bytes) for d in deliveries[1:]])
    return row | {
        "publish_s": best.publish_s,
        "write_s": best.write_s,
        "encoded_bytes": best.encoded_bytes,
        "apply_s": max(r["apply_s"] for r in best.receivers.values()),
        "fetch_s": max(r["transfer_s"] for r in best.receivers.values()),
    }


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _row(case: Case, measured: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """measured: seconds, bytes forward, bytes backward of every repeat."""
    seconds = [m[0] for m in measured]
    return {
        "way": str(case.way),
        "bits_per_s": case.bits_per_s,
        "receivers": case.receivers,
        "density": case.density,
        "delay_s": case.delay_s,
        "seconds": min(seconds),
        "median_s": statistics.median(seconds),
        "repeats": len(seconds),
        "bytes": statistics.median(forward + backward for _, forward, backward in measured),
        "backward_bytes": statistics.median(backward for _, _, backward in measured),
    }


def _case_of(row: dict[str, Any]) -> Case:
    return Case(row["way"], row["bits_per_s"], row["receivers"], row["density"], row["delay_s"])
