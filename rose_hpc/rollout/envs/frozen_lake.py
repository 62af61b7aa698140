"""gymnasium's FrozenLake-v1 as a multi-turn text environment; the one place that knows its words.

    observation   "<obs> row0 col1 <act>"      where the agent stands; the map itself is never shown
    action        "L", "D", "R" or "U"         exactly one of them; anything else ends the episode with reward 0

           begin            act: frozen cell, turns left
    idle ─────────▶ playing ─┐
     ▲                │  ▲───┘
     └────────────────┘  act: goal (reward 1, success) │ hole │ no action │ max_turns actions taken

Each action costs one turn; gymnasium's own TimeLimit counts them. The map is fixed per `map_name`: the seed only
decides where a slippery lake takes the agent.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import MAPS

from rose_hpc.config import EnvConfig
from rose_hpc.errors import RoseError
from rose_hpc.rollout.envs.base import StepResult

OBS, ACT = "<obs>", "<act>"
ACTIONS = ("L", "D", "R", "U")  # position = gymnasium's action number
LONGEST_SIDE = 8  # of the maps that EnvConfig.map_name admits
ROWS = tuple(f"row{i}" for i in range(LONGEST_SIDE))
COLS = tuple(f"col{i}" for i in range(LONGEST_SIDE))
WORDS = (OBS, ACT, *ACTIONS, *ROWS, *COLS)  # all that is ever said, whatever the map, so that models fit either
OBSERVATION_WORDS = 4


def observation(row: int, col: int) -> str:
    """What the policy is told when the agent stands at (row, col), counted from the top left."""
    return f"{OBS} {ROWS[row]} {COLS[col]} {ACT}"


class FrozenLake:
    """One lake, synchronous; the state machine of the module docstring."""

    def __init__(self, config: EnvConfig) -> None:
        self._gym: Any = gymnasium.make(
            "FrozenLake-v1",
            map_name=config.map_name,
            is_slippery=config.slippery,
            max_episode_steps=config.max_turns,
            disable_env_checker=True,  # it plays two extra steps
        )
        self._cols = len(MAPS[config.map_name][0])
        self._cell = 0
        self._playing = False

    def begin(self, seed: int) -> str:
        """Put the agent at the start and seed the ice; returns the first observation."""
        cell, _ = self._gym.reset(seed=seed)
        self._cell, self._playing = int(cell), True
        return self._observe()

    def act(self, action: str) -> StepResult:
        """Take one turn. Raises RoseError when no episode is being played."""
        if not self._playing:
            raise RoseError(
                "FrozenLake was stepped outside an episode", expected="a step between reset and done", remedy="call reset(seed) first"
            )
        if action not in ACTIONS:
            self._playing = False
            return StepResult(self._observe(), 0.0, done=True, success=False)
        cell, reward, terminated, truncated, _ = self._gym.step(ACTIONS.index(action))
        self._cell, self._playing = int(cell), not (terminated or truncated)
        return StepResult(self._observe(), float(reward), done=not self._playing, success=reward > 0)

    def close(self) -> None:
        """End the episode, if any, and close gymnasium's environment."""
        self._playing = False
        self._gym.close()

    def _observe(self) -> str:
        return observation(*divmod(self._cell, self._cols))


class FrozenLakeEnv:
    """`Env` over FrozenLake. A step takes some microseconds, so it runs in the caller's event loop, not in a worker."""

    def __init__(self, config: EnvConfig) -> None:
        self._lake = FrozenLake(config)

    async def reset(self, seed: int) -> str:
        """See Env.reset. Seeds the ice of a slippery lake; seed >= 0."""
        return self._lake.begin(seed)

    async def step(self, action: str) -> StepResult:
        """See Env.step."""
        return self._lake.act(action)

    async def close(self) -> None:
        """See Env.close."""
        self._lake.close()


def shortest_actions(map_name: str) -> dict[str, tuple[str, ...]]:
    """For every observation from which the goal can be reached: the actions that begin a shortest path on dry ice.

    Breadth-first search backwards from the goal over gymnasium's own transition table. Goal and holes have no entry.
    """
    lake: Any = gymnasium.make("FrozenLake-v1", map_name=map_name, is_slippery=False).unwrapped
    cells = lake.desc.ravel().tolist()
    next_cells = {c: [lake.P[c][a][0][1] for a in range(len(ACTIONS))] for c, letter in enumerate(cells) if letter in (b"S", b"F")}
    distance = _distances(next_cells, goal=cells.index(b"G"))
    return {
        observation(*divmod(c, lake.ncol)): tuple(
            word for word, to in zip(ACTIONS, next_cells[c], strict=True) if to in distance and distance[to] < distance[c]
        )
        for c in next_cells
        if c in distance
    }


def _distances(next_cells: dict[int, list[int]], goal: int) -> dict[int, int]:
    distance, frontier, moves = {goal: 0}, {goal}, 0
    while frontier:
        moves += 1
        frontier = {c for c, reached in next_cells.items() if c not in distance and frontier.intersection(reached)}
        distance |= dict.fromkeys(frontier, moves)
    return distance
