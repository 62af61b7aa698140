"""The engine and the baselines over one shaped link, in the same run: seconds, and bytes on the link.

Every row is one way, rate, number of receivers and density; its figures are the best of the repeats, after one version to warm up. All ways
carry the same image, the same kind of update and the same number of ranks; dense crosses the link once in all of them.

Seconds run from the command to the ranks until the last receiver has the version: for the engine applied and verified by its digest, for
the baselines applied. Bytes are those of both directions, as the interfaces count them.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rose_hpc.bench import link_baselines
from rose_hpc.bench.baselines import COO_BYTES, Coo, CooEncoder, apply_coo
from rose_hpc.bench.link_baselines import RANKS, Flood, Parents, SharedImages, Way
from rose_hpc.bench.link_image import LinkImage
from rose_hpc.bench.link_run import LinkRun
from rose_hpc.bench.shaped_link import ShapedLink
from rose_hpc.bench.synthetic import Change, Positions, ValueTable, make_change
from rose_hpc.errors import DigestMismatch, EnvironmentFault

RECEIVERS = (1, 2, 4, 8)
MOST = max(RECEIVERS)
SPARSE, DENSER = 0.003, 0.03
GIGABIT = 1e9
DENSE_REPEATS = 2  # seconds each, and steady
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


ENGINE = "engine"
BASELINE_CASES = (
    *(Case(Way.DENSE, GIGABIT, n, SPARSE) for n in RECEIVERS),
    *(Case(way, GIGABIT, MOST, SPARSE) for way in (Way.COO_TREE, Way.COO_ALL)),
    *(Case(way, GIGABIT, MOST, DENSER) for way in (Way.COO_TREE, Way.COO_ALL)),
    *(Case(way, GIGABIT / 10, MOST, SPARSE) for way in (Way.COO_TREE, Way.COO_ALL)),
    *(Case(way, 10 * GIGABIT, MOST, SPARSE) for way in Way),
)


def engine_cases(receivers: int) -> list[Case]:
    """What is measured of the engine with so many receivers."""
    cases = [Case(ENGINE, GIGABIT, receivers, SPARSE), Case(ENGINE, GIGABIT, receivers, DENSER)]
    if receivers == MOST:
        cases += [Case(ENGINE, rate, receivers, SPARSE) for rate in (GIGABIT / 10, 10 * GIGABIT)]
    return cases


def run_link(real: Path, home: Path, image_bytes: int, repeats: int, seed: int, say: Say) -> dict[str, Any]:
    """Rows, and the figures that are held against the bars. real: the real versions' folder; home: of the arenas, in shared memory."""
    image = LinkImage.at_least(real, image_bytes)
    check_room(home, image.nbytes)
    with ShapedLink(GIGABIT) as link:
        rows = _baseline_rows(link, image, repeats, seed, say)
        mismatches = 0
        for receivers in RECEIVERS:
            more, wrong = asyncio.run(_engine_rows(link, home, image, real, receivers, repeats, seed, say))
            rows += more
            mismatches += wrong
    return {"image_bytes": image.nbytes, "rows": rows, "mismatches": mismatches} | summary(rows)


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

    def of(way: str, rate: float, receivers: int, density: float, field: str = "seconds") -> float:
        case = Case(way, rate, receivers, density)
        return float(next(row[field] for row in rows if _case_of(row) == case))

    def speedup(way: str, rate: float) -> float:
        return of(way, rate, MOST, SPARSE) / of(ENGINE, rate, MOST, SPARSE)

    return {
        "bytes_ratio_8_vs_1": of(ENGINE, GIGABIT, MOST, DENSER, "bytes") / of(ENGINE, GIGABIT, 1, DENSER, "bytes"),
        "speedup_vs_dense_1gbps": speedup(Way.DENSE, GIGABIT),
        "speedup_vs_coo_tree_100mbps": speedup(Way.COO_TREE, GIGABIT / 10),
        "speedup_vs_coo_all_100mbps": speedup(Way.COO_ALL, GIGABIT / 10),
        "speedup_vs_coo_all_1gbps": speedup(Way.COO_ALL, GIGABIT),
    }


# ── baselines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _baseline_rows(link: ShapedLink, image: LinkImage, repeats: int, seed: int, say: Say) -> list[dict[str, Any]]:
    _compile()
    values, rng = image.values(), np.random.default_rng(seed)
    images = SharedImages(image.bits(), MOST)
    rows = []
    for case in BASELINE_CASES:
        say(f"link: {case.way} to {case.receivers}, {case.bits_per_s / 1e9:g} Gb/s, {100 * case.density:g} % changed")
        link.set_rate(case.bits_per_s)
        rows.append(_baseline_row(link, images, case, DENSE_REPEATS if case.way == Way.DENSE else repeats, values, rng))
    return rows


def _baseline_row(
    link: ShapedLink, images: SharedImages, case: Case, repeats: int, values: ValueTable, rng: np.random.Generator
) -> dict[str, Any]:
    timings = []
    with Flood(link, images, Way(case.way), _parents(case, images.old.nbytes)) as flood:
        for _ in range(1 + repeats):
            change = make_change(rng, len(images.old), case.density, Positions.IID, values)
            change.apply(images.new)
            timings.append(flood.measure(BASELINE_DEADLINE_S))
            _check(images, case, change)
    return _row(case, [(t.seconds, t.counted.forward_bytes, t.counted.backward_bytes) for t in timings[1:]])


def _parents(case: Case, image_bytes: int) -> Parents:
    if case.way == Way.COO_ALL:
        return link_baselines.straight(case.receivers)
    nbytes = image_bytes if case.way == Way.DENSE else int(COO_BYTES * case.density * image_bytes / 2)
    return link_baselines.tree(case.receivers, dict.fromkeys(range(RANKS), nbytes // RANKS))


def _check(images: SharedImages, case: Case, change: Change) -> None:
    """The version has arrived everywhere; dense leaves `old` behind, which is brought forward here."""
    if case.way == Way.DENSE:
        images.old[change.lanes] = images.new[change.lanes]
    for receiver in images.receivers[: case.receivers]:
        if not np.array_equal(receiver[change.lanes], images.new[change.lanes]):
            raise DigestMismatch(f"the {case.way} baseline did not bring the version over", remedy="report this: the benchmark is at fault")


def _compile() -> None:
    """Before the first fork: children inherit what is compiled."""
    old, new = np.zeros(64, np.uint16), np.ones(64, np.uint16)
    coo = CooEncoder(64).encode(old, new)
    apply_coo(Coo(coo.positions, coo.values), old)
    apply_coo(Coo(np.frombuffer(coo.positions.tobytes(), np.int32), np.frombuffer(coo.values.tobytes(), np.uint16)), old)  # read-only
    room = memoryview(bytearray(coo.nbytes))
    apply_coo(Coo(np.frombuffer(room[: 4 * 64], np.int32), np.frombuffer(room[4 * 64 :], np.uint16)), old)


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _engine_rows(
    link: ShapedLink, home: Path, image: LinkImage, real: Path, receivers: int, repeats: int, seed: int, say: Say
) -> tuple[list[dict[str, Any]], int]:
    """Rows, and how many lanes of all receivers differ from the trainer's at the end."""
    folder = home / f"link{receivers}"
    say(f"link: starting the engine with {receivers} receivers")
    link.set_rate(10 * GIGABIT)  # the first image is not timed
    rows = []
    try:
        async with LinkRun(link, folder, image, real, receivers, seed) as run:
            for case in engine_cases(receivers):
                say(f"link: engine to {receivers}, {case.bits_per_s / 1e9:g} Gb/s, {100 * case.density:g} % changed")
                link.set_rate(case.bits_per_s)
                rows.append(await _engine_row(run, case, repeats))
            mismatches = await run.mismatches()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows, mismatches


async def _engine_row(run: LinkRun, case: Case, repeats: int) -> dict[str, Any]:
    deliveries = []
    for _ in range(1 + repeats):
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
        "seconds": min(seconds),
        "median_s": statistics.median(seconds),
        "bytes": statistics.median(forward + backward for _, forward, backward in measured),
        "backward_bytes": statistics.median(backward for _, _, backward in measured),
    }


def _case_of(row: dict[str, Any]) -> Case:
    return Case(row["way"], row["bits_per_s"], row["receivers"], row["density"])
