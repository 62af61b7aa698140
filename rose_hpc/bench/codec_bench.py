"""Bytes and speed of the codec against memcpy, COO, zstd and the entropy bound, on one core and side by side.

Each operation is timed `repeats` times, the operations taking turns so that noise hits all alike, and the best counts. Speed is always
counted on the dense bytes of the image, as a ratio to memcpy of the same bytes in the same run. Undoing an update is not timed; since it
has just touched the lanes that change, the caches are filled with other bytes before the next operation, as they are in a training run.

Every encoding is decoded, and the result compared bit by bit with the new version, before it is reported.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from rose_hpc.bench import baselines, real_versions
from rose_hpc.bench.entropy import bound_bytes, delta_entropy_bits
from rose_hpc.bench.synthetic import Change, Positions, ValueTable, make_change
from rose_hpc.config import WeightsConfig
from rose_hpc.errors import DigestMismatch
from rose_hpc.weights.codec import StreamDecoder, StreamEncoder
from rose_hpc.weights.digest import digest_lanes
from rose_hpc.weights.layout import Run, build_layout
from rose_hpc.weights.routing import Stream

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
SCALING_DENSITIES = (0.003, 0.03)
REAL_REPEATS = 2
ZSTD_LEVELS = (1, 3)
BUCKET_BYTES = WeightsConfig().bucket_bytes
PLAN_ID = 1  # any: nobody checks it here
SAMPLE_S = 0.3  # of the cores' load, to find the idlest

Lanes = NDArray[np.uint16]
Say = Callable[[str], None]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_codec(real: Path, repeats: int, seed: int, say: Say) -> dict[str, Any]:
    """Rows of all synthetic and real updates, on the idlest core. real: what `real_versions.make_versions` wrote."""
    _pin_to_idlest_core()
    image = real_versions.read_image(real)
    bench = _Bench(image, _piece_lanes(real))
    bench.warm_up()
    real_rows = [_real_row(bench, image, step, say) for step in real_versions.read_steps(real)]
    bench.restore(image)
    values = ValueTable.of([step.change.deltas for step in real_versions.read_steps(real)])
    rng = np.random.default_rng(seed)
    rows = []
    for density in DENSITIES:
        for positions in Positions:
            say(f"codec: {100 * density:g} % changed, {positions}")
            change = make_change(rng, len(image), density, positions, values)
            rows.append({"density": density, "positions": str(positions)} | bench.measure(change, repeats, ZSTD_LEVELS))
    return {
        "image_bytes": image.nbytes,
        "value_entropy_bits": values.entropy_bits,
        "synthetic": rows,
        "real": real_rows,
        "all_changed_bytes_over_dense": bench.all_changed_bytes_over_dense(),
    }


def run_scaling(real: Path, repeats: int, seed: int, say: Say) -> dict[str, Any]:
    """Speed with a thread per core over that with one, up to two cores; none where there is one core only."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return {"threads": len(cores), "rows": []}
    os.sched_setaffinity(0, cores)
    image = real_versions.read_image(real)
    values = ValueTable.of([step.change.deltas for step in real_versions.read_steps(real)])
    rng = np.random.default_rng(seed)
    rows = []
    for density in SCALING_DENSITIES:
        say(f"codec: {len(cores)} threads, {100 * density:g} % changed")
        change = make_change(rng, len(image), density, Positions.IID, values)
        rows.append({"density": density} | _scaled(image, _piece_lanes(real), change, repeats, len(cores)))
    return {"threads": len(cores), "rows": rows}


def summary(codec: dict[str, Any]) -> dict[str, float]:
    """The figures that are held against the bars: the worst of what was measured at each density."""
    synthetic, real = codec["synthetic"], codec["real"]

    def worst_speed(name: str, density: float) -> float:
        return float(min(row[name] for row in synthetic if row["density"] == density))

    return {
        "worst_bytes_over_entropy": max(row["bytes_over_entropy"] for row in [*synthetic, *real]),
        "real_versions_bytes_over_entropy": max(row["bytes_over_entropy"] for row in real),
        "encode_over_memcpy_at_0_3_pct": worst_speed("encode_over_memcpy", 0.003),
        "encode_over_memcpy_at_3_pct": worst_speed("encode_over_memcpy", 0.03),
        "apply_over_memcpy_at_0_3_pct": worst_speed("apply_over_memcpy", 0.003),
        "apply_over_memcpy_at_3_pct": worst_speed("apply_over_memcpy", 0.03),
    }


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Operation:
    """run: what is timed; after: what brings the arrays back."""

    run: Callable[[], object]
    after: Callable[[], object] = lambda: None


class _Bench:
    """An image, room for a second and a third one, and the codec over the whole of it."""

    def __init__(self, image: Lanes, piece_lanes: Sequence[int]) -> None:
        self._old, self._new, self._spare = image.copy(), image.copy(), image.copy()
        self._cuts = np.cumsum([0, *piece_lanes]).tolist()
        stream = Stream(0, 0, [Run(0, image.nbytes)])  # type: ignore[arg-type]  # kept as arrays
        self._encoder, self._decoder = StreamEncoder(stream, PLAN_ID, BUCKET_BYTES), StreamDecoder(stream, BUCKET_BYTES)
        self._coo = baselines.CooEncoder(len(image))

    def warm_up(self) -> None:
        """Compile what is compiled on first use."""
        self.measure(Change(np.arange(0, len(self._old), 1 << 16), np.ones(-(-len(self._old) >> 16), np.uint16)), 1, ())

    def restore(self, image: Lanes) -> None:
        np.copyto(self._old, image)

    def advance(self, change: Change) -> None:
        """Make the new version the old one."""
        change.apply(self._old)

    def measure(self, change: Change, repeats: int, zstd_levels: Sequence[int]) -> dict[str, Any]:
        """A row: bytes and speeds of one update of the image, which is left as it was."""
        np.copyto(self._new, self._old)
        change.apply(self._new)
        messages, digest_change = self._encode()
        self._check("encoded", digest_change, change)
        coo = self._coo.encode(self._old, self._new)
        change.undo(self._old)
        best = _best_of(repeats, self._operations(change, messages, coo), self._chill)
        self._check("decoded", sum(self._decoder.apply(m, self._old) for m in messages), change)
        row = self._sizes(change, messages, coo) | _speeds(best)
        return row | {f"zstd_{level}": self._zstd(change, level, best["memcpy"]) for level in zstd_levels}

    def all_changed_bytes_over_dense(self) -> float:
        """Bytes of an update that changes every lane at random, over the image's: the codec must fall back."""
        rng = np.random.default_rng(0)
        self._new[:] = rng.integers(0, 1 << 16, len(self._new), np.uint16)
        messages, _ = self._encode()
        return sum(map(len, messages)) / self._new.nbytes

    def _encode(self) -> tuple[list[bytes], int]:
        pieces = (self._new[a:b] for a, b in itertools.pairwise(self._cuts))
        encoded = list(self._encoder.encode_delta(self._old, pieces, 1, 0))
        return [e.message for e in encoded], sum(e.digest_change for e in encoded)

    def _chill(self) -> None:
        np.copyto(self._spare, self._new)

    def _operations(self, change: Change, messages: Sequence[bytes], coo: baselines.Coo) -> dict[str, _Operation]:
        def undo() -> None:
            change.undo(self._old)

        return {
            "memcpy": _Operation(self._chill),
            "encode": _Operation(self._encode, undo),
            "apply": _Operation(lambda: [self._decoder.apply(m, self._old) for m in messages], undo),
            "apply_undigested": _Operation(lambda: [self._decoder.apply(m, self._old, digest=False) for m in messages], undo),
            "digest": _Operation(lambda: digest_lanes(0, self._old)),
            "coo_encode": _Operation(lambda: self._coo.encode(self._old, self._new), undo),
            "coo_apply": _Operation(lambda: baselines.apply_coo(coo, self._old), undo),
        }

    def _sizes(self, change: Change, messages: Sequence[bytes], coo: baselines.Coo) -> dict[str, Any]:
        nbytes, bound = sum(map(len, messages)), bound_bytes(len(self._old), change.deltas)
        return {
            "changed_frac": len(change.lanes) / len(self._old),
            "value_entropy_bits": delta_entropy_bits(change.deltas),
            "bytes": nbytes,
            "entropy_bytes": bound,
            "bytes_over_entropy": nbytes / bound,
            "coo_bytes_over_entropy": coo.nbytes / bound,
            "dense_bytes_over_entropy": self._old.nbytes / bound,
        }

    def _zstd(self, change: Change, level: int, memcpy_s: float) -> dict[str, float]:
        """Measured once: it is slow, and its size is what it is shown for."""
        start = time.perf_counter()
        blob = baselines.zstd_of_xor(self._old, self._new, level)
        encoded = time.perf_counter()
        baselines.apply_zstd(blob, self._old)
        applied = time.perf_counter()
        change.undo(self._old)
        return {
            "bytes_over_entropy": len(blob) / bound_bytes(len(self._old), change.deltas),
            "encode_over_memcpy": memcpy_s / (encoded - start),
            "apply_over_memcpy": memcpy_s / (applied - encoded),
        }

    def _check(self, what: str, digest_change: int, change: Change) -> None:
        """The old image must have become the new one, and the digest must have noticed; then it is brought back."""
        equal = np.array_equal(self._old, self._new)
        after = digest_lanes(0, self._old)
        change.undo(self._old)
        if not equal or (after - digest_lanes(0, self._old) - digest_change) % (1 << 64):
            raise DigestMismatch(f"the {what} image is not the new version", remedy="report this: the codec is at fault")


def _speeds(best: dict[str, float]) -> dict[str, float]:
    ratios = {f"{name}_over_memcpy": best["memcpy"] / seconds for name, seconds in best.items() if name != "memcpy"}
    return {"memcpy_s": best["memcpy"]} | ratios


def _best_of(repeats: int, operations: dict[str, _Operation], chill: Callable[[], None]) -> dict[str, float]:
    """Least seconds of each operation; they take turns. chill: fills the caches with something else."""
    best = dict.fromkeys(operations, float("inf"))
    for _ in range(repeats):
        for name, operation in operations.items():
            chill()
            start = time.perf_counter()
            operation.run()
            best[name] = min(best[name], time.perf_counter() - start)
            operation.after()
    return best


def _real_row(bench: _Bench, image: Lanes, step: real_versions.RealStep, say: Say) -> dict[str, Any]:
    say(f"codec: SmolLM2-135M, lr {step.learning_rate:g}, step {step.step + 1}")
    if step.step == 0:
        bench.restore(image)
    row = bench.measure(step.change, REAL_REPEATS, ())
    bench.advance(step.change)
    return {"learning_rate": step.learning_rate, "step": step.step} | row


def _scaled(image: Lanes, piece_lanes: Sequence[int], change: Change, repeats: int, threads: int) -> dict[str, float]:
    old, new = image.copy(), image.copy()
    change.apply(new)
    cuts = np.cumsum([0, *piece_lanes]).tolist()
    stream = Stream(0, 0, [Run(0, image.nbytes)])  # type: ignore[arg-type]
    operations = {}
    for n in (1, threads):
        encoder, decoder = StreamEncoder(stream, PLAN_ID, BUCKET_BYTES, n), StreamDecoder(stream, BUCKET_BYTES, n)

        def encode(encoder: StreamEncoder = encoder) -> list[bytes]:
            pieces = (new[a:b] for a, b in itertools.pairwise(cuts))
            return [e.message for e in encoder.encode_delta(old, pieces, 1, 0)]

        messages = encode()
        change.undo(old)

        def apply(decoder: StreamDecoder = decoder, messages: Sequence[bytes] = messages) -> None:
            for message in messages:
                decoder.apply(message, old)

        apply()
        change.undo(old)
        operations[f"encode_{n}"] = _Operation(encode, lambda: change.undo(old))
        operations[f"apply_{n}"] = _Operation(apply, lambda: change.undo(old))
    spare = np.empty_like(new)
    best = _best_of(repeats, operations, lambda: np.copyto(spare, new))
    return {f"{name}_speedup": best[f"{name}_1"] / best[f"{name}_{threads}"] for name in ("encode", "apply")}


def _piece_lanes(real: Path) -> list[int]:
    """Lanes of each parameter: a publisher hands them over one by one."""
    return [p.numel for p in build_layout(real_versions.read_shapes(real), "bfloat16").parameters]


def _pin_to_idlest_core() -> None:
    load = psutil.cpu_percent(SAMPLE_S, percpu=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0), key=lambda core: load[core] if core < len(load) else 0.0)})
