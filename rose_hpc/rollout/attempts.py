"""The attempts of one turn under their request ids: several may run at once, the first answer counts. Pure.

    start ─▶ running ─┬─ sampled (the first) ─▶ the turn is over: the other attempts are to be aborted, and their answers do not count
      ▲               └─ lost ─▶ another goes on, or none: then the turn is lost, and start again
      └─────────────────────────────────────────────┘

A Move is an abort, so an attempt that is lost and then started elsewhere; a Hedge is a start while another attempt runs. Request ids are
the trajectory's, its turn's and the attempt's number, from 0: what Trajectory.next_request_id gives while nothing is hedged.

Invariants, asserted by the tests: no request id is used twice; exactly one answer of a turn is accepted; after it, none is.

It keeps no tokens, and knows no scheduler and no time.

Not driven by the controller yet: it neither moves nor hedges turns.
"""

from __future__ import annotations

from rose_hpc.errors import RoseError


class IllegalAttempt(RoseError):
    """An attempt was started or ended that cannot be; nothing has changed."""


class TurnAttempts:
    """Of the turn `turn` (0-based) of a trajectory."""

    def __init__(self, trajectory_id: str, turn: int) -> None:
        self.trajectory_id, self.turn = trajectory_id, turn
        self.is_over = False
        self.lost = 0
        self._started = 0
        self._running: dict[str, str] = {}  # request id → executor id, in the order of starting

    @property
    def running(self) -> dict[str, str]:
        """Request id → executor id of the attempts whose answers would count."""
        return dict(self._running)

    def accepts(self, request_id: str) -> bool:
        """Whether an answer to this request still counts."""
        return request_id in self._running

    def start(self, executor_id: str) -> str:
        """The request id of a new attempt. Raises IllegalAttempt: the turn is over, or runs on this executor already."""
        if self.is_over or executor_id in self._running.values():
            raise self._illegal("an attempt cannot start", got=executor_id, expected="a turn that is not over, and an executor without it")
        request_id = f"{self.trajectory_id}.{self.turn}.{self._started}"
        self._started += 1
        self._running[request_id] = executor_id
        return request_id

    def sampled(self, request_id: str) -> dict[str, str]:
        """The turn is over. Returns the attempts to abort, request id → executor id. Raises IllegalAttempt: it is not accepted."""
        self._end(request_id)
        losers, self._running, self.is_over = self._running, {}, True
        return losers

    def end_lost(self, request_id: str) -> bool:
        """Whether the turn goes on in another attempt. Raises IllegalAttempt: it is not accepted."""
        self._end(request_id)
        self.lost += 1
        return bool(self._running)

    def executor_left(self, executor_id: str) -> bool:
        """Whether the turn goes on elsewhere, now that this executor is gone."""
        for request_id in [r for r, e in self._running.items() if e == executor_id]:
            self.end_lost(request_id)
        return bool(self._running)

    def _end(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is None:
            raise self._illegal("an attempt ended that was not running", got=request_id, expected=f"one of {sorted(self._running)}")

    def _illegal(self, what: str, *, got: object, expected: object) -> IllegalAttempt:
        return IllegalAttempt(f"turn {self.turn} of trajectory {self.trajectory_id}: {what}", got=got, expected=expected)
