"""What an environment is to the rollout scheduler: text in, text and reward out, one episode at a time.

    env = make_env(config)
    observation = await env.reset(seed)            # the first turn's prompt
    result = await env.step(action)                # until result.done
    await env.close()

Invariants every environment keeps: the same config, seed and actions give the same results; an action that is no action
ends the episode with reward 0 instead of raising, because the policy may say anything; every episode ends.
Environments know no tokens: who calls them encodes and decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepResult:
    """What one action led to.

    observation: the next turn's prompt; where `done`, the state the episode ended in. reward: of this action alone.
    success: the task was solved, which implies `done`.
    """

    observation: str
    reward: float
    done: bool
    success: bool


class Env(Protocol):
    """One environment instance, reused for one episode after the other."""

    async def reset(self, seed: int) -> str:
        """Begin a new episode, whatever the state of the last one; returns the first observation."""
        ...

    async def step(self, action: str) -> StepResult:
        """Apply one action. Raises RoseError outside an episode (before reset, or after done)."""
        ...

    async def close(self) -> None:
        """Free what the environment holds. May be called more than once."""
        ...
