"""The gate: before each step of the rollout engine, run or hold, from the serving engine's board.

    no record, and never one before ──────────────────────────▶ run     (no serving engine has come up; looked for again)
    no record, where one has been ────────────────────────────▶ hold    (somebody took the board away: not known to be idle)
    idle ─────────────────────────────────────────────────────▶ run
    busy, record older than stale_s, writer lives ────────────▶ hold    (stuck in a long step, or stopped: its users wait)
    busy, record older than stale_s, writer is gone ──────────▶ run     (nothing left to protect; a new file is looked for)
    busy, and the predicted step fits into the slack ─────────▶ run
    busy otherwise ───────────────────────────────────────────▶ hold    (asleep on the board's FIFO, at most hold_cap_s at a time)

A step's time is predicted by its kind (step_estimate.py): with prompt tokens, or only decoding. A kind never run is taken to cost
nothing: once in an engine's life such a step runs on any positive slack. While there is slack, and the prediction alone holds a
kind of step, the prediction shrinks, until the step is tried again.

Where serving is known to be there, the first row must not decide: the lender starts no rollout engine before it has read the board.

It decides and waits; it knows nothing of vLLM (rollout_plugin.py) and never writes to the board.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rose_hpc.coserve.board import BoardReader, BoardReading
from rose_hpc.coserve.slack import Budgets, may_run, slack_s
from rose_hpc.coserve.slots import SlotReader, SlotWriter
from rose_hpc.coserve.step_estimate import StepEstimate
from rose_hpc.errors import ConfigError

LOOK_AGAIN_S = 0.5  # between two looks for a board that is not there
COUNTERS = struct.Struct("<QQddQdd")


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What the operator grants. Times in seconds; see GateConfig and SloConfig."""

    board: Path
    ttft_s: float
    tpot_s: float
    hold_cap_s: float
    stale_s: float
    headroom_frac: float

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.ttft_s, self.tpot_s)


def gate_settings(tree: Mapping[str, Any]) -> GateSettings:
    """Settings from the JSON object under `rose_gate`. Raises ConfigError: keys missing or unknown, a value that is no such number."""
    names = {f.name for f in fields(GateSettings)}
    if set(tree) != names:
        raise ConfigError("rose_gate has other keys than expected", got=sorted(tree), expected=sorted(names))
    numbers = {name: tree[name] for name in names - {"board"}}
    wrong = {n: v for n, v in numbers.items() if isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v < math.inf}
    zero = [n for n in ("ttft_s", "tpot_s", "hold_cap_s", "stale_s") if numbers[n] == 0]
    if wrong or zero or not isinstance(tree["board"], str):
        raise ConfigError("rose_gate has unusable values", got=dict(tree), expected="board: a path; times > 0; headroom_frac ≥ 0")
    return GateSettings(board=Path(tree["board"]), **{name: float(value) for name, value in numbers.items()})


@dataclass(frozen=True, slots=True)
class GateStats:
    """Since the rollout engine's start. held_steps: decisions that ended without a step; held_s: time asleep in decisions.

    closings: how often the serving engine got busy, and the gate closed, during a step; reaction: from then to the step's end.
    """

    steps: int = 0
    held_steps: int = 0
    step_s: float = 0.0
    held_s: float = 0.0
    closings: int = 0
    reaction_sum_s: float = 0.0
    reaction_max_s: float = 0.0


def stats_path(board: Path) -> Path:
    """The file beside a board with its gate's counters."""
    return board.with_name(f"{board.name}.gate")


def read_gate_stats(board: Path) -> GateStats | None:
    """What the gate of a board has counted; None: no gate has been there. Raises RoseError: slots.py."""
    reader = SlotReader(stats_path(board), COUNTERS.size)
    try:
        record = reader.read()
    finally:
        reader.close()
    return None if record is None else GateStats(*COUNTERS.unpack(record.payload))


class Gate:
    """One rollout engine's gate. `admit` before a step, `finished` after it; called from one thread."""

    def __init__(self, settings: GateSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._file = SlotWriter(stats_path(settings.board), COUNTERS.size)  # first: it refuses a second gate on the board
        self._board = BoardReader(settings.board)
        self._next_look_s = clock() + LOOK_AGAIN_S
        self._board_seen = self._board.read() is not None
        self._estimates = {prefill: StepEstimate() for prefill in (True, False)}
        self._newest: tuple[float, float] | None = None  # begin and end of the last step, until a closed gate has looked at it
        self._count = GateStats()
        self._store()

    @property
    def stats(self) -> GateStats:
        """As they stand, in the file too."""
        return self._count

    def step_s(self, prefill: bool) -> float:
        """Predicted seconds of a step with prompt tokens, or of one that only decodes."""
        return self._estimates[prefill].step_s

    def admit(self, step_s: float, may_wait: bool = True, prefill: bool | None = None) -> bool:
        """Whether a step of step_s may run now; sleeps up to hold_cap_s for it, woken by the board.

        prefill: the kind whose prediction step_s rests on; None: on none.
        """
        begin_s = now_s = self._clock()
        admitted, reading = self._look(step_s, now_s)
        if admitted:
            return True
        self._count_reaction(reading)
        end_s = begin_s + (self._settings.hold_cap_s if may_wait else 0.0)
        while not admitted and now_s < end_s:
            self._board.wait(end_s - now_s)
            now_s = self._clock()
            admitted, reading = self._look(step_s, now_s)
        if prefill is not None and not admitted and self._slack_s(reading, now_s) > 0:
            self._estimates[prefill].held(now_s - begin_s)
        self._add(held_steps=0 if admitted else 1, held_s=now_s - begin_s)
        self._store()
        return admitted

    def finished(self, prefill: bool, begin_s: float) -> None:
        """The step that began at begin_s is over."""
        now_s = self._clock()
        self._newest = (begin_s, now_s)
        self._estimates[prefill].ran(now_s - begin_s)
        self._add(steps=1, step_s=now_s - begin_s)
        self._store()

    def close(self) -> None:
        """Let go of the board and of the counters' file, which stays."""
        self._board.close()
        self._file.close()

    def _look(self, step_s: float, now_s: float) -> tuple[bool, BoardReading | None]:
        reading = self._board.read()
        lost = reading is None or (self._stale(reading, now_s) and not reading.writer.alive())
        if lost and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_AGAIN_S
            self._board.reopen()
            reading = self._board.read()
        self._board_seen = self._board_seen or reading is not None
        return may_run(self._slack_s(reading, now_s), step_s, self._settings.headroom_frac), reading

    def _slack_s(self, reading: BoardReading | None, now_s: float) -> float:
        """The table in the module's docstring: infinite where any step may run, −infinite where none may."""
        if reading is None:
            return -math.inf if self._board_seen else math.inf
        if self._stale(reading, now_s):
            return -math.inf if reading.writer.alive() else math.inf
        return slack_s(reading.state, self._settings.budgets, reading.times, now_s)

    def _stale(self, reading: BoardReading, now_s: float) -> bool:
        return reading.state.busy and now_s - reading.stamp_s > self._settings.stale_s

    def _count_reaction(self, reading: BoardReading | None) -> None:
        """The serving engine got busy while the last step was running: how long that step still took. Once for each step."""
        newest, self._newest = self._newest, None
        since_s = None if reading is None else reading.busy_since_s
        if newest is not None and since_s is not None and newest[0] <= since_s < newest[1]:
            reaction_s = newest[1] - since_s
            self._add(closings=1, reaction_sum_s=reaction_s)
            self._count = replace(self._count, reaction_max_s=max(self._count.reaction_max_s, reaction_s))

    def _add(self, **more: float) -> None:
        self._count = replace(self._count, **{name: getattr(self._count, name) + value for name, value in more.items()})

    def _store(self) -> None:
        self._file.write(COUNTERS.pack(*astuple(self._count)))
