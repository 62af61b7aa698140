"""The environments by name. EnvConfig.name admits only names listed here."""

from __future__ import annotations

from rose_hpc.config import EnvConfig
from rose_hpc.rollout.envs.base import Env
from rose_hpc.rollout.envs.frozen_lake import FrozenLakeEnv

ENVIRONMENTS = {"frozen_lake": FrozenLakeEnv}


def make_env(config: EnvConfig) -> Env:
    """A new instance of the environment that the configuration names."""
    return ENVIRONMENTS[config.name](config)
