"""Episodes of a noisy shortest-path expert on FrozenLake: what the tiny model imitates before reinforcement learning.

The expert plays the environment itself, so the episodes hold exactly the observations that rollouts will see, and end
as rollouts end: goal, hole or turn limit. It is noisy on purpose: imitation should give the policy the format of a turn
and a little success (a signal for reinforcement learning), not the solution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rose_hpc.config import EnvConfig
from rose_hpc.rollout.envs.frozen_lake import ACTIONS, FrozenLake, shortest_actions


@dataclass(frozen=True)
class Turn:
    """What the policy is told, and what the expert answers."""

    observation: str
    action: str


def expert_episodes(env: EnvConfig, noise_frac: float, seed: int) -> Iterator[list[Turn]]:
    """Endless episodes, the same for the same arguments.

    Each action is, with probability noise_frac, uniform over all four; else uniform over those that begin a shortest path.
    """
    rng = np.random.default_rng(seed)
    best = shortest_actions(env.map_name)
    lake = FrozenLake(env)
    while True:
        yield list(_play(lake, best, noise_frac, rng))


def _play(lake: FrozenLake, best: dict[str, tuple[str, ...]], noise_frac: float, rng: np.random.Generator) -> Iterator[Turn]:
    observation, done = lake.begin(int(rng.integers(2**31))), False
    while not done:
        choices = ACTIONS if rng.random() < noise_frac else best[observation]
        action = choices[rng.integers(len(choices))]
        yield Turn(observation, action)
        result = lake.act(action)
        observation, done = result.observation, result.done
