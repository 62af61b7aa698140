"""How much KV cache a rollout engine may use beside a serving engine: the paper's policy of three states (PAPER.md, "Memory").

    open ──serving's KV use reaches high_frac──▶ cut: half the budget, once; the requests over it are aborted whole
     ▲                                            │
     └────────── next_step: a new policy version ─┴─ frozen: the budget stays, whatever serving's use does

The watermark lies inside the headroom of about 20 % that serving keeps for itself, at half of it: reaching it is early enough to
give memory back, and late enough not to answer every burst.

Invariants (asserted by the tests)
- At most one cut between two calls of next_step, and no growth.
- The budget is never below `least`, what one request of the greatest length needs: whatever is admitted can be finished.
- The victims of a cut free at least what is over the budget, and without the last of them they would not.

Pure: it counts blocks, and knows no engine, board or clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT = 2  # the budget is divided by it


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is to be done now. give_up_blocks: to be freed at once, by aborting requests; only ever more than 0 at a cut."""

    budget_blocks: int
    give_up_blocks: int = 0


class MemoryPolicy:
    """One rollout engine's. blocks: of its KV cache; least: of a request of the greatest length; high_frac above 1: never cut."""

    def __init__(self, blocks: int, least: int, high_frac: float) -> None:
        self.blocks, self._least, self._high_frac = blocks, min(least, blocks), high_frac
        self.budget_blocks = blocks
        self.cut_s: float | None = None  # when the budget was cut in this step; None: open
        self.cuts = 0

    def observe(self, serving_kv_frac: float, rollout_blocks: int, now_s: float) -> MemoryPlan:
        """What follows from serving's use of its KV cache, 0 to 1, while rollout uses so many blocks."""
        if self.cut_s is not None or serving_kv_frac < self._high_frac:
            return MemoryPlan(self.budget_blocks)
        self.budget_blocks = max(self._least, self.budget_blocks // CUT)
        self.cut_s = now_s
        self.cuts += 1
        return MemoryPlan(self.budget_blocks, max(0, rollout_blocks - self.budget_blocks))

    def next_step(self) -> None:
        """The next RL step begins: all of the KV cache may be used again."""
        self.budget_blocks, self.cut_s = self.blocks, None


def victims(admitted: Sequence[tuple[str, int]], give_up_blocks: int) -> list[str]:
    """Who is to be aborted so that so many blocks get free; everybody where even that is not enough.

    admitted: in the order of admission, with the blocks that nobody shares. The last admitted go first: what is lost is their
    computation, which elsewhere is done again, and they have the least of it; the first admitted are a step's long tail, for which
    the next policy version waits. Those with the most blocks would be fewer, but just that tail.
    """
    chosen: list[str] = []
    for request_id, blocks in reversed(admitted):
        if give_up_blocks <= 0:
            break
        if blocks > 0:
            chosen.append(request_id)
            give_up_blocks -= blocks
    return chosen
