"""Looks at a lent engine from outside and says what it is doing: progress.py fed from its gate's counters and from /proc."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from rose_hpc.coserve.device import cpu_seconds, workers_of
from rose_hpc.coserve.gate import GateStats, read_gate_stats
from rose_hpc.coserve.progress import ProgressReading, ProgressState, progress_state
from rose_hpc.errors import RoseError

LOOK_S = 0.5  # shortest span that is judged: CPU time is counted in ticks of 10 ms


class ProgressWatch:
    """One engine behind the gate of a board."""

    def __init__(self, board: Path) -> None:
        self._board = board
        self._last = ProgressReading(time.monotonic())
        self._state: ProgressState = "open"

    def state(self, engine_pid: int) -> ProgressState:
        """What it has been doing lately; what was known before where that cannot be read now."""
        if time.monotonic() - self._last.time_s < LOOK_S:
            return self._state
        try:
            now = self._reading([engine_pid, *workers_of(engine_pid)])
        except (RoseError, OSError):
            return self._state
        self._state, self._last = progress_state(self._last, now), now
        return self._state

    def _reading(self, pids: list[int]) -> ProgressReading:
        gate = read_gate_stats(self._board) or GateStats()
        runnable = any(map(wants_cpu, pids))
        return ProgressReading(time.monotonic(), cpu_seconds(pids), runnable, gate.steps, gate.held_steps, gate.held_s)


def wants_cpu(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a core: state R in /proc/PID/task/TID/stat (proc_pid_stat(5))."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    for thread in threads:
        with suppress(OSError, IndexError):
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
