"""A sink looks at its own image: a bit that has flipped where no delta writes is found before an engine loads it again.

    idle turn ─▶ version is AUDIT_EVERY ahead of the last one looked at? ─▶ digest a piece ─▶ … ─▶ all: right │ wrong: the image is nothing
                                                                              └─ another version meanwhile: begin anew, later

The digest that an apply keeps up is the image's only if nobody else wrote to it. An image that is not what its state says is disowned:
engines refuse it, and the next fetch brings a keyframe. It runs while the relay has nothing to do, a piece per turn.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rose_hpc.weights.arena import NOTHING, Arena
from rose_hpc.weights.digest import combine, digest_runs
from rose_hpc.weights.layout import Runs
from rose_hpc.weights.relay_arena import RelayArena

AUDIT_EVERY = 16  # versions, as for the publisher's full digest
PIECE_BYTES = 32 << 20  # some milliseconds
LOCK_DEADLINE_S = 1.0


@dataclass
class _Look:
    """One look at a version, under way. done: bytes of the runs."""

    version: int
    expected: int
    runs: Runs
    found: int = 0
    done: int = 0


class Audit:
    """Of one relay's arena; the relay is its only writer. every: versions between two looks."""

    def __init__(self, home: RelayArena, every: int = AUDIT_EVERY) -> None:
        self._home, self._every = home, every
        self._seen = NOTHING
        self._look: _Look | None = None

    def turn(self) -> None:
        """Digest one piece, if a look is due. Raises TransferTimeout when readers do not let the image be disowned."""
        arena = None if self._home.is_source else self._home.arena
        if arena is None:
            return
        look = self._due(arena)
        if look is None:
            return
        part = look.runs.span(look.done, min(look.done + PIECE_BYTES, look.runs.nbytes))
        look.found, look.done = combine([look.found, digest_runs(arena.image(), part)]), look.done + PIECE_BYTES
        if look.done >= look.runs.nbytes:
            self._look = None
            if look.found != look.expected:
                arena.disown(LOCK_DEADLINE_S)  # where readers do not let it be, the next look finds it again
                print(f"relay: the image is not version {look.version} any more; a keyframe has to heal it", file=sys.stderr, flush=True)
            self._seen = look.version

    def _due(self, arena: Arena) -> _Look | None:
        """The look under way, begun if it is time; one at a version that has gone is given up."""
        state = arena.state()
        if self._look is not None and self._look.version != state.version:
            self._look = None
        if self._look is None and state.verified and not self._seen <= state.version < self._seen + self._every:
            if (record := arena.delta(state.version)) is not None:
                self._look = _Look(state.version, state.digest, arena.runs_of(record.streams))
            else:
                self._seen = state.version  # a keyframe: digested in full when it came
        return self._look
