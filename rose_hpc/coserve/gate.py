"""The gate: before each step of the rollout engine, how many tokens it may hold, from the serving engine's board.

    no record, and never one before ──────────────────────────▶ all     (no serving engine has come up; looked for again)
    no record, where one has been ────────────────────────────▶ hold    (somebody took the board away: not known to be idle)
    idle ─────────────────────────────────────────────────────▶ all that decodes, and prompts for idle_step_s
    busy, record older than stale_s, writer lives ────────────▶ hold    (stuck in a long step, or stopped: its users wait)
    busy, record older than stale_s, writer is gone ──────────▶ all     (nothing left to protect; a new file is looked for)
    busy, and some of the step is predicted to fit the slack ─▶ that much
    busy otherwise ───────────────────────────────────────────▶ hold    (asleep on the board's FIFO, for hold_cap_s, then longer)

A step's time is predicted from its prompt tokens and decoding requests (step_estimate.py). Before the first prompt the cost of one is
not known: a chunk of the least size finds out. While there is slack, and the prediction alone holds a step, the prediction shrinks,
until the step is tried again. Beside an idle engine nothing is held, but a request that comes waits for the step in flight: that
is why prompts are cut there too.

Each held decision costs the engine a turn of its loop, on a device that serving has a use for: while it stays held they get rarer, twice
as long each, up to LONGEST_HOLD times hold_cap_s. What loosens the gate wakes it at any length; requests and aborts wait for its end.

Where serving is known to be there, the first row must not decide: the lender starts no rollout engine before it has read the board.

It decides and waits; it knows nothing of vLLM (rollout_plugin.py) and never writes to the board.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from rose_hpc.coserve.board import BoardReader, BoardReading
from rose_hpc.coserve.gate_stats import COUNTERS, GateStats, read_gate_stats, stats_path
from rose_hpc.coserve.reaction import Reactions
from rose_hpc.coserve.slack import LEAST_CHUNK_TOKENS, Budgets, StepTimes, fitting_tokens, slack_s
from rose_hpc.coserve.slots import SlotWriter
from rose_hpc.coserve.step_estimate import StepEstimate
from rose_hpc.errors import ConfigError

__all__ = ["COUNTERS", "Gate", "GateSettings", "GateStats", "gate_settings", "read_gate_stats", "stats_path"]

LOOK_AGAIN_S = 0.5  # between two looks for a board that is not there
IDLE_FRAC = 0.1  # of ttft_s: the default of idle_step_s
LONGEST_HOLD = 10.0  # times hold_cap_s: about 1 % of a core instead of 7 %
LONGEST_GAP_S = 1.0  # between two decisions that belong together: what lies longer apart was spent without work


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What the operator grants. Times in seconds; see GateConfig and SloConfig.

    idle_step_s: longest that a step's prompts should take beside an idle serving engine; None: IDLE_FRAC of ttft_s.
    kv_high_frac: use of serving's KV cache at which rollout gives up half of its own; above 1: never. profile: the three terms of
    StepTimes, measured beforehand; all or none of them.
    """

    board: Path
    ttft_s: float
    tpot_s: float
    hold_cap_s: float
    stale_s: float
    headroom_frac: float
    idle_step_s: float | None = None
    kv_high_frac: float = 0.9
    prefill_token_s: float | None = None
    decode_base_s: float | None = None
    decode_request_s: float | None = None

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.ttft_s, self.tpot_s)

    @property
    def idle_limit_s(self) -> float:
        return IDLE_FRAC * self.ttft_s if self.idle_step_s is None else self.idle_step_s

    @property
    def profile(self) -> StepTimes | None:
        if self.prefill_token_s is None or self.decode_base_s is None or self.decode_request_s is None:
            return None
        return StepTimes(self.prefill_token_s, self.decode_base_s, self.decode_request_s)


NAMES = {f.name: f.default is MISSING for f in fields(GateSettings)}  # and whether it must be there
POSITIVE = ("ttft_s", "tpot_s", "hold_cap_s", "stale_s", "idle_step_s", "kv_high_frac")
PROFILE = {"prefill_token_s", "decode_base_s", "decode_request_s"}


def gate_settings(tree: Mapping[str, Any]) -> GateSettings:
    """Settings from the JSON object under `rose_gate`. Raises ConfigError: keys missing or unknown, a value that is no such number."""
    given = {name: value for name, value in tree.items() if value is not None}
    required = {name for name, needed in NAMES.items() if needed}
    if not required <= given.keys() or not tree.keys() <= NAMES.keys() or len(PROFILE & given.keys()) not in (0, len(PROFILE)):
        raise ConfigError(
            "rose_gate has other keys than expected",
            got=sorted(given),
            expected=f"{sorted(required)}, and perhaps {sorted(NAMES.keys() - required)}, of {sorted(PROFILE)} all or none",
        )
    numbers = {name: value for name, value in given.items() if name != "board"}
    wrong = {n: v for n, v in numbers.items() if isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v < math.inf}
    zero = [name for name in POSITIVE if numbers.get(name) == 0]
    if wrong or zero or not isinstance(tree["board"], str):
        raise ConfigError("rose_gate has unusable values", got=dict(tree), expected="board: a path; times > 0; fractions and profile ≥ 0")
    return GateSettings(board=Path(tree["board"]), **{name: float(value) for name, value in numbers.items()})


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step in flight. begin_s: when it was admitted; predicted_s: then."""

    prompt_tokens: int
    batch: int
    begin_s: float
    predicted_s: float


class Gate:
    """One rollout engine's gate: `admit` before a step, `started` and `finished` around it; called from one thread."""

    def __init__(self, settings: GateSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._file = SlotWriter(stats_path(settings.board), COUNTERS.size)  # first: it refuses a second gate on the board
        self._board = BoardReader(settings.board)
        self._next_look_s = clock() + LOOK_AGAIN_S
        self._reading = self._board.read()
        self._board_seen = self._reading is not None
        self._estimate = StepEstimate(settings.profile)
        self._flying: deque[_Flight] = deque()
        self._reactions = Reactions()
        self._decided_s = self._last_end_s = -math.inf
        self._hold_s = settings.hold_cap_s
        self.stats = GateStats(late_steps=self._reactions.late_steps, reactions=self._reactions.times)
        self._store()

    @property
    def times(self) -> StepTimes:
        """T̂ of the rollout engine's steps, as it is believed now."""
        return self._estimate.times

    @property
    def serving_kv_frac(self) -> float:
        """How much of its KV cache the serving engine used when the board was last looked at; 0 where nobody lives to say so."""
        return 0.0 if self._reading is None else self._reading.state.kv_frac

    def admit(self, needs: Sequence[int], most: int) -> int:
        """Token budget of a step that would spend it on requests with these needs, in this order; at most `most`; 0: hold.

        needs: tokens that each still has to compute; 1: it decodes. Sleeps for it, woken by the board; not while a step is in flight,
        whose output must not be kept waiting.
        """
        begin_s = now_s = self._clock()
        slack = self._look(now_s)
        tokens = self._budget(needs, slack)
        if self._reading is not None and self._reading.busy_since_s is not None:
            self._reactions.looked(self._reading.busy_since_s, tokens > 0)
        if not tokens:
            end_s = begin_s if self._flying else begin_s + self._hold_s
            while not tokens and now_s < end_s:
                self._board.wait(end_s - now_s)
                now_s = self._clock()
                slack = self._look(now_s)
                tokens = self._budget(needs, slack)
            self.stats.held_steps += not tokens
            self.stats.held_s += now_s - begin_s
        if tokens:
            self._hold_s = self._settings.hold_cap_s
        elif not self._flying:
            self._hold_s = min(2 * self._hold_s, LONGEST_HOLD * self._settings.hold_cap_s)
        self._doubt(needs, tokens, slack, begin_s, now_s)
        self._decided_s = now_s
        if not tokens:
            self._store()
        return min(tokens, most)

    def started(self, prompt_tokens: int, batch: int) -> None:
        """The step that was admitted last starts, with so many prompt tokens and decoding requests."""
        self._flying.append(_Flight(prompt_tokens, batch, self._decided_s, self.times.step_s(prompt_tokens, batch)))
        self._reactions.started(self._clock())

    def finished(self) -> None:
        """The oldest step in flight is over; one that began while another ran took from that one's end on."""
        now_s, flight = self._clock(), self._flying.popleft()
        took_s = now_s - max(flight.begin_s, self._last_end_s)
        self._last_end_s = now_s
        self._estimate.ran(flight.prompt_tokens, flight.batch, took_s)
        self._reactions.finished(now_s)
        self.stats.steps += 1
        self.stats.step_s += took_s
        self._store()

    def memory(self, blocks: int, used: int, budget: int, held: int, cuts: int) -> None:
        """What the memory policy has come to, for the counters."""
        stats = self.stats
        stats.kv_blocks, stats.kv_used_blocks, stats.kv_budget_blocks = blocks, used, budget
        stats.kv_held_blocks, stats.kv_cuts = held, cuts

    def close(self) -> None:
        """Let go of the board and of the counters' file, which stays."""
        self._board.close()
        self._file.close()

    def _look(self, now_s: float) -> float:
        """The slack, from the board as it is now: infinite where any step may run, −infinite where none may."""
        reading = self._board.read()
        lost = reading is None or (self._stale(reading, now_s) and not reading.writer.alive())
        if lost and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_AGAIN_S
            self._board.reopen()
            reading = self._board.read()
        self._board_seen = self._board_seen or reading is not None
        self._reading = reading
        if reading is None:
            return -math.inf if self._board_seen else math.inf
        if self._stale(reading, now_s):
            if reading.writer.alive():
                return -math.inf
            self._reading = None
            return math.inf
        return slack_s(reading.state, self._settings.budgets, reading.times, now_s)

    def _stale(self, reading: BoardReading, now_s: float) -> bool:
        return reading.state.busy and now_s - reading.stamp_s > self._settings.stale_s

    def _budget(self, needs: Sequence[int], slack: float) -> int:
        """Tokens of `needs` that may run in this slack."""
        if slack <= 0:
            return 0
        idle = slack == math.inf
        if idle and self._reading is None:
            return sum(needs)
        times, decoding = self.times, needs.count(1)
        least = decoding + LEAST_CHUNK_TOKENS
        ahead_s = sum(flight.predicted_s for flight in self._flying)
        limit_s = (
            slack / (1 + self._settings.headroom_frac) - ahead_s if not idle else times.decode_s(decoding) + self._settings.idle_limit_s
        )
        tokens = fitting_tokens(needs, limit_s, times)
        if not self._estimate.knows_prefill:
            tokens = min(tokens, least)
        return min(max(tokens, least), sum(needs)) if idle else tokens

    def _doubt(self, needs: Sequence[int], tokens: int, slack: float, begin_s: float, now_s: float) -> None:
        """Shrink the predictions that have kept a step, or its prompts, from running in the slack that there is."""
        if tokens >= sum(needs):
            return
        if not tokens and slack > 0:
            self._estimate.held(now_s - begin_s, prompts_only=False)
        elif 0 < tokens <= needs.count(1):
            self._estimate.held(min(now_s - self._decided_s, LONGEST_GAP_S), prompts_only=True)
        self.stats.squeezed_steps += tokens > 0

    def _store(self) -> None:
        stats, reactions = self.stats, self._reactions
        stats.closings, stats.reaction_sum_s, stats.reaction_max_s = reactions.closings, reactions.sum_s, reactions.max_s
        self._file.write(COUNTERS.pack(stats))
