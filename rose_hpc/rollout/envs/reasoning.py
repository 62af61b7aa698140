"""Tasks of the package reasoning-gym: one question a seed, one answer, scored by the dataset's own scorer.

    observation   the question, and how to answer
    action        any text with <answer>…</answer>; without one, what is said after the thoughts is the answer

The reward is the scorer's, from 0 to 1; a task counts as solved at 1. The scorer may give a little for a wrong answer in the right form.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ConfigError
from rose_hpc.rollout.envs.base import StepResult, outside_an_episode
from rose_hpc.rollout.envs.text import final_answer, spoken

FORM = "\n\nThink if you need to, then say your answer as <answer>...</answer>."


class ReasoningGymEnv:
    """`Env` over one dataset of reasoning-gym."""

    def __init__(self, config: EnvConfig) -> None:
        """Raises ConfigError: reasoning-gym knows no such dataset, or refuses its settings."""
        self._config = config.reasoning_gym
        self._dataset: Any = self._make(seed=0)
        self._entry: dict[str, Any] | None = None

    async def reset(self, seed: int) -> str:
        """See Env.reset."""
        self._dataset = self._make(seed)
        self._entry = self._dataset[0]
        return str(self._entry["question"]) + FORM

    async def step(self, action: str) -> StepResult:
        """See Env.step. The first one ends the episode."""
        if self._entry is None:
            raise outside_an_episode("a reasoning-gym task")
        entry, self._entry = self._entry, None
        said = final_answer(action)
        score = float(self._dataset.score_answer(answer=spoken(action) if said is None else said, entry=entry))
        return StepResult("The answer is noted.", score, done=True, success=score >= 1.0)

    async def close(self) -> None:
        """See Env.close."""
        self._entry = None

    def _make(self, seed: int) -> Any:
        try:
            return reasoning_gym.create_dataset(self._config.dataset, seed=seed, size=1, **self._config.settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                "reasoning-gym cannot make the dataset",
                got=f"env.reasoning_gym.dataset = {self._config.dataset!r}, settings {self._config.settings}: {error}",
                expected="a name of reasoning_gym.factory.DATASETS and settings of its configuration",
            ) from error
