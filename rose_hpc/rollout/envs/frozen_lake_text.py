"""FrozenLake in English with the map drawn, for models that read text.

    observation   the rules once; then what the last move did, and the map with the agent on it
    action        any text with <action>left</action> (down, right, up); without one the turn is lost and the policy told so

Moves and lost turns both count; after max_turns the episode ends.
"""

from __future__ import annotations

from rose_hpc.config import EnvConfig
from rose_hpc.rollout.envs.base import StepResult
from rose_hpc.rollout.envs.lake import Lake
from rose_hpc.rollout.envs.text import spoken, tagged

MOVES = {"left": "L", "down": "D", "right": "R", "up": "U"}
RULES = """\
You are walking across a frozen lake, on a grid. Reach the goal without falling into a hole.
The map: P is you, S the start, F frozen and safe, H a hole, G the goal. Walking against the edge leaves you where you are.{ice}
Each turn, think if you need to, then say one move: <action>left</action>, <action>down</action>, <action>right</action> or \
<action>up</action>. You have {turns} turns.

"""
SLIPPERY = " The ice is slippery: you may slide to the side of where you wanted to go."
NO_MOVE = "That was no move. Say one of <action>left</action>, <action>down</action>, <action>right</action>, <action>up</action>.\n"


class FrozenLakeTextEnv:
    """`Env` over a lake, in English. A step takes some microseconds, so it runs in the caller's event loop, not in a worker."""

    def __init__(self, config: EnvConfig) -> None:
        """Raises ConfigError: there is no such map."""
        self._lake, self._max_turns = Lake(config), config.max_turns
        self._rules = RULES.format(ice=SLIPPERY if config.slippery else "", turns=config.max_turns)
        self._turns = 0

    async def reset(self, seed: int) -> str:
        """See Env.reset; seed >= 0."""
        self._lake.begin(seed)
        self._turns = 0
        return self._rules + self._drawn()

    async def step(self, action: str) -> StepResult:
        """See Env.step."""
        self._lake.check_playing()
        self._turns += 1
        move = wanted_move(action)
        reward = 0.0 if move is None else self._lake.move(move)
        if self._turns >= self._max_turns:
            self._lake.forfeit()
        return StepResult(self._told(move, reward), reward, done=not self._lake.is_playing, success=reward > 0)

    async def close(self) -> None:
        """See Env.close."""
        self._lake.close()

    def _told(self, move: str | None, reward: float) -> str:
        letter = self._lake.rows[self._lake.row][self._lake.col]
        if reward > 0:
            return "You reached the goal."
        if letter == "H":
            return "You fell into a hole."
        if not self._lake.is_playing:
            return "You have no turns left."
        return ("" if move is not None else NO_MOVE) + self._drawn()

    def _drawn(self) -> str:
        rows = [list(row) for row in self._lake.rows]
        rows[self._lake.row][self._lake.col] = "P"
        return "\n".join(" ".join(row) for row in rows)


def wanted_move(text: str) -> str | None:
    """The last move that the policy says after its thoughts, as one of ACTIONS; None where it says none, or none that there is."""
    said = tagged(spoken(text), "action")
    return MOVES.get(said[-1].lower()) if said else None
