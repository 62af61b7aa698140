"""Collects the trajectories of one step after the other: holds what outlives a step (environments, format, fleet).

collector = Collector(fleet, TurnForm(tokenizer, sampling, max_model_len, deadline_s), env_config, group_size)
batch = await collector.collect(step, seeds)
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_hpc.config import EnvConfig, SamplingConfig
from rose_hpc.messages import GenerateRequest
from rose_hpc.rollout.envs.base import Env
from rose_hpc.rollout.envs.registry import make_env
from rose_hpc.rollout.fleet import Fleet
from rose_hpc.rollout.step_run import RolloutBatch, StepRun, TurnFormat
from rose_hpc.rollout.tokenizer import TurnTokenizer
from rose_hpc.rollout.trajectories import Trajectory


class TurnForm:
    """The policy's way of taking a turn: the whole history as the prompt, a few tokens, ended by the end-of-turn token."""

    def __init__(self, tokenizer: TurnTokenizer, sampling: SamplingConfig, max_model_len: int, deadline_s: float) -> None:
        self._tokenizer, self._sampling, self._max_model_len = tokenizer, sampling, max_model_len
        self._deadline_s = deadline_s

    @property
    def deadline_s(self) -> float:
        return self._deadline_s

    def encode(self, observation: str) -> list[int]:
        return self._tokenizer.encode(observation)

    def action(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.action(token_ids)

    def has_room(self, trajectory: Trajectory) -> bool:
        """Whether another turn fits into the context."""
        return len(trajectory.token_ids) + self._sampling.max_new_tokens <= self._max_model_len

    def request(self, trajectory: Trajectory) -> GenerateRequest:
        return GenerateRequest(
            request_id=trajectory.next_request_id(),
            prompt_token_ids=list(trajectory.token_ids),
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            stop_token_ids=[self._tokenizer.eos_token_id],
        )


class Collector:
    """One per run; one `collect` at a time."""

    def __init__(self, fleet: Fleet, form: TurnFormat, env_config: EnvConfig, group_size: int) -> None:
        self._fleet, self._form, self._env_config, self._group_size = fleet, form, env_config, group_size
        self._envs: list[Env] = []

    async def collect(self, step: int, seeds: Sequence[int]) -> RolloutBatch:
        """Sample seeds × group_size trajectories; seeds: one environment seed per group. Raises RunFailed: no executor is left."""
        while len(self._envs) < len(seeds) * self._group_size:
            self._envs.append(make_env(self._env_config))
        step_run = StepRun(self._fleet, self._form, self._envs, step, seeds, self._group_size)
        try:
            return await step_run.finish()
        finally:
            step_run.cancel()

    async def close(self) -> None:
        for env in self._envs:
            await env.close()
