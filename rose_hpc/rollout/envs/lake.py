"""gymnasium's FrozenLake-v1 as a game on cells; the views put it into words (frozen_lake.py, frozen_lake_text.py).

           begin            move: frozen cell, turns left
    idle ─────────▶ playing ─┐
     ▲                │  ▲───┘
     └────────────────┘  move: goal (reward 1) │ hole │ max_turns turns taken; or forfeit

Each move costs one turn; gymnasium's own TimeLimit counts them. The seed decides where a slippery lake takes the agent, and which
random map it is.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ConfigError
from rose_hpc.rollout.envs.base import EnvFault, outside_an_episode
from rose_hpc.rollout.envs.lake_maps import Rows, map_rows

ACTIONS = ("L", "D", "R", "U")  # position = gymnasium's action number


class Lake:
    """One lake; the state machine of the module docstring.

    rows: the map that is played. row, col: where the agent stands, counted from the top left.
    """

    def __init__(self, config: EnvConfig) -> None:
        """Raises ConfigError: there is no such map."""
        self._config = config
        self.rows: Rows = map_rows(config, seed=0)
        self._gym = _make(self.rows, config)
        self.row = self.col = 0
        self.is_playing = False

    def begin(self, seed: int) -> None:
        """Put the agent at the start and seed the ice; seed >= 0. Raises EnvFault: this seed has no map with a way to the goal."""
        try:
            rows = map_rows(self._config, seed)
        except ConfigError as error:
            raise EnvFault(error.what, got=error.got, remedy=error.remedy) from error
        if rows != self.rows:
            self._gym.close()
            self.rows, self._gym = rows, _make(rows, self._config)
        cell, _ = self._gym.reset(seed=seed)
        self._stand(cell)
        self.is_playing = True

    def move(self, action: str) -> float:
        """Take one turn; returns the reward. action: one of ACTIONS. Raises RoseError when no episode is being played."""
        self.check_playing()
        cell, reward, terminated, truncated, _ = self._gym.step(ACTIONS.index(action))
        self._stand(cell)
        self.is_playing = not (terminated or truncated)
        return float(reward)

    def check_playing(self) -> None:
        """Raises RoseError when no episode is being played."""
        if not self.is_playing:
            raise outside_an_episode("FrozenLake")

    def forfeit(self) -> None:
        """End the episode where the agent stands."""
        self.is_playing = False

    def close(self) -> None:
        """End the episode, if any, and close gymnasium's environment."""
        self.forfeit()
        self._gym.close()

    def _stand(self, cell: Any) -> None:
        self.row, self.col = divmod(int(cell), len(self.rows[0]))


def _make(rows: Rows, config: EnvConfig) -> Any:
    return gymnasium.make(
        "FrozenLake-v1",
        desc=list(rows),
        is_slippery=config.slippery,
        max_episode_steps=config.max_turns,
        disable_env_checker=True,  # it plays two extra steps
    )
