"""What an environment is to the rollout scheduler: text in, text and reward out, one episode at a time.

    env = environments.new()                       # registry.Environments
    observation = await env.reset(seed)            # the first turn's prompt
    result = await env.step(action)                # until result.done
    await env.close()

Invariants every environment keeps: the same config, seed and actions give the same results; an action that is no action never
raises, because the policy may say anything: it ends the episode with reward 0, or is answered with what is wrong and costs the
turn; every episode ends. An environment that breaks them, hangs or dies raises EnvFault, which ends its own trajectory and no other.
Environments know no tokens: who calls them encodes and decodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from rose_hpc.errors import RoseError

MAX_OBSERVATION_CHARS = 1 << 20  # beyond any context: a quarter of a million tokens at least


class EnvFault(RoseError):
    """An environment failed one episode: it raised, hung, died or said what is no answer. Its trajectory fails, the run goes on."""


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
        """Begin a new episode, whatever the state of the last one; returns the first observation. Raises EnvFault."""
        ...

    async def step(self, action: str) -> StepResult:
        """Apply one action. Raises EnvFault; RoseError outside an episode (before reset, or after done)."""
        ...

    async def close(self) -> None:
        """Free what the environment holds. May be called more than once."""
        ...


def outside_an_episode(name: str) -> RoseError:
    """For a step before reset, or after done."""
    return RoseError(f"{name} was stepped outside an episode", expected="a step between reset and done", remedy="call reset(seed) first")


def checked_observation(text: object) -> str:
    """`text`, if it can be a turn's prompt: valid Unicode, not blank, at most MAX_OBSERVATION_CHARS. Raises EnvFault."""
    if not _checked_text(text).strip():
        raise EnvFault("an observation is blank", got=repr(text)[:100], expected="something for the policy to read")
    return _checked_text(text)


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        raise EnvFault("an observation is no text", got=type(text).__name__, expected="str")
    if len(text) > MAX_OBSERVATION_CHARS:
        raise EnvFault("an observation is too long", got=f"{len(text)} characters", expected=f"at most {MAX_OBSERVATION_CHARS}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvFault("an observation is no valid Unicode", got=error.reason) from error
    return str(text)


def checked(result: object) -> StepResult:
    """`result`, if it is one that training can use. Raises EnvFault saying what is wrong with it."""
    if not isinstance(result, StepResult):
        raise EnvFault("a step gave no result", got=type(result).__name__, expected="StepResult")
    reward, done, success = result.reward, result.done, result.success
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EnvFault("a reward is no number", got=repr(reward)[:100], expected="a finite float")
    if not isinstance(done, bool) or not isinstance(success, bool) or (success and not done):
        raise EnvFault(
            "a step contradicts itself", got=f"done = {done!r}, success = {success!r}"[:100], expected="bools; success implies done"
        )
    observation = _checked_text(result.observation) if done else checked_observation(result.observation)
    return StepResult(observation, float(reward), done, success)
