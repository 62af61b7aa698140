"""What a lent engine is doing, seen from its agent: open, held or starved. Pure.

    steps since the last look, or nothing to do ──▶ open
    no steps, the gate has held ──────────────────▶ held        serving needs the device; the engine is well
    no steps, a thread waits for a core, no CPU ──▶ starved     the kernel gives it none; the engine is well
    half of the time or more in the gate ─────────▶ held

Only an engine that is open and has work without making progress is stalled: who judges that needs this word first. The agent can
give it because it is outside the idle class; a starved engine cannot even answer a health check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProgressState = Literal["open", "held", "starved"]
HELD_FRAC = 0.5
STARVED_FRAC = 0.01  # of the span: less CPU time than this is none


@dataclass(frozen=True, slots=True)
class ProgressReading:
    """One look. cpu_s: CPU time of its workers so far; runnable: one of their threads runs or waits for a core; the rest: its gate's."""

    time_s: float
    cpu_s: float = 0.0
    runnable: bool = False
    steps: int = 0
    held_steps: int = 0
    held_s: float = 0.0


def progress_state(before: ProgressReading, now: ProgressReading) -> ProgressState:
    """The state between two looks. Counters that went back are those of a new engine: they count from zero."""
    if now.steps < before.steps or now.held_s < before.held_s:
        before = ProgressReading(before.time_s, min(before.cpu_s, now.cpu_s))
    span_s = max(now.time_s - before.time_s, 1e-6)
    steps, held_s = now.steps - before.steps, now.held_s - before.held_s
    if held_s >= HELD_FRAC * span_s or (steps == 0 and now.held_steps > before.held_steps):
        return "held"
    starving = steps == 0 and now.runnable and now.cpu_s - before.cpu_s < STARVED_FRAC * span_s
    return "starved" if starving else "open"
