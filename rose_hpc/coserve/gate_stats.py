"""What a gate has counted since its engine's start, in a file beside the board that others may read while it runs.

    gate ──write──▶ BOARD.gate (slots.py) ──read──▶ agent, bench

Payload of a record, little-endian, no padding: version u32, then the fields of GateStats in their order; counts u64, times f64.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rose_hpc.coserve.reaction import EDGES_S, LATE_STEPS, quantile
from rose_hpc.coserve.slots import read_record
from rose_hpc.errors import RoseError

VERSION = 2
COUNTS, TIMES = 10, len(EDGES_S) + 1
LAYOUT = struct.Struct(f"<I{COUNTS}Q4d{LATE_STEPS + 1}Q{TIMES}Q")


@dataclass(slots=True)
class GateStats:
    """Since the rollout engine's start.

    squeezed_steps: ran with fewer tokens than there were, for lack of slack. held_steps: decisions that ended without a step.
    closings: how often the serving engine got busy, and the gate closed, beside a step; reaction: from then to the end of the last
    step. late_steps, reactions: the closings' histograms, see reaction.py. kv_*: the memory policy's, see memory_policy.py.
    """

    steps: int = 0
    squeezed_steps: int = 0
    held_steps: int = 0
    closings: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    kv_budget_blocks: int = 0
    kv_held_blocks: int = 0
    kv_cuts: int = 0
    kv_aborted: int = 0
    step_s: float = 0.0
    held_s: float = 0.0
    reaction_sum_s: float = 0.0
    reaction_max_s: float = 0.0
    late_steps: list[int] = field(default_factory=lambda: [0] * (LATE_STEPS + 1))
    reactions: list[int] = field(default_factory=lambda: [0] * TIMES)

    @property
    def reaction_steps_p99(self) -> int:
        """P99, over the closings, of the late steps of one."""
        return quantile(self.late_steps, 0.99)

    @property
    def reaction_p99_s(self) -> float:
        """P99 of the reaction times: the upper edge of its bucket, or the longest seen if that is less; seconds."""
        edge = quantile(self.reactions, 0.99)
        return self.reaction_max_s if edge == len(EDGES_S) else min(EDGES_S[edge], self.reaction_max_s)


SCALARS = tuple(GateStats.__slots__)[: COUNTS + 4]
_scalars = attrgetter(*SCALARS)


class Counters:
    """The record: `GateStats(*COUNTERS.unpack(payload))`."""

    size = LAYOUT.size

    def pack(self, stats: GateStats) -> bytes:
        """Payload of a record."""
        return LAYOUT.pack(VERSION, *_scalars(stats), *stats.late_steps, *stats.reactions)

    def unpack(self, payload: bytes) -> tuple[Any, ...]:
        """The fields of GateStats, in their order. Raises RoseError: written by another version."""
        version, *fields = LAYOUT.unpack(payload)
        if version != VERSION:
            raise RoseError(
                "a gate's counters of another version", got=version, expected=VERSION, remedy="run the same rose_hpc on both sides"
            )
        scalars, late, rest = fields[: len(SCALARS)], fields[len(SCALARS) :][: LATE_STEPS + 1], fields[-TIMES:]
        return *scalars, late, rest


COUNTERS = Counters()


def stats_path(board: Path) -> Path:
    """The file beside a board with its gate's counters."""
    return board.with_name(f"{board.name}.gate")


def read_gate_stats(board: Path) -> GateStats | None:
    """What the gate of a board has counted; None: no gate has been there. Raises RoseError: slots.py."""
    record = read_record(stats_path(board), COUNTERS.size)
    return None if record is None else GateStats(*COUNTERS.unpack(record.payload))
