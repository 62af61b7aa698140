"""The environments by name: the one place that maps EnvConfig.name to what makes it.

    environments = Environments(config)            # starts nothing yet
    env = environments.new()                       # one a trajectory; reused step after step
    await environments.close()

    ours, and quick                    in the caller's event loop
    others, which may hang or die      in worker processes (pool.py): a fault costs its own trajectory only

What makes an environment is a class or function of one argument, the section [env]. It is imported when first needed, so that
a run pays only for the environment that it uses; a missing package is an error that names the extra to install.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ConfigError, EnvironmentFault
from rose_hpc.rollout.envs.base import Env
from rose_hpc.rollout.envs.pool import EnvPool, PooledEnv

HERE = "rose_hpc.rollout.envs"


@dataclass(frozen=True)
class Entry:
    """One environment. factory: "module:name". isolated: it runs in worker processes. extra: of our package, with what it needs."""

    factory: str
    isolated: bool = True
    extra: str | None = None


ENVIRONMENTS = {
    "frozen_lake": Entry(f"{HERE}.frozen_lake:frozen_lake", isolated=False),
    "tools": Entry(f"{HERE}.tools:ToolsEnv", isolated=False),
    "reasoning_gym": Entry(f"{HERE}.reasoning:ReasoningGymEnv", extra="reasoning-gym"),
    "verifiers": Entry(f"{HERE}.verifiers_env:VerifiersEnv", extra="verifiers"),
    "textworld": Entry(f"{HERE}.textworld_env:textworld", extra="textworld"),
    "alfworld": Entry(f"{HERE}.textworld_env:alfworld", extra="alfworld"),
}


class Environments:
    """All environments of one run."""

    def __init__(self, config: EnvConfig) -> None:
        """Raises ConfigError: no environment has that name."""
        self._config, self._slots = config, itertools.count()
        self._pool = EnvPool(config) if find(config.name).isolated else None
        self._here: list[Env] = []  # those that are played in this process

    def new(self) -> Env:
        """One more instance. Raises ConfigError, EnvironmentFault: it cannot be made."""
        if self._pool is not None:
            return PooledEnv(self._pool, next(self._slots))
        self._here.append(make_env(self._config))
        return self._here[-1]

    async def close(self) -> None:
        """End the worker processes, if any, and close the instances in this process. All are unusable afterwards."""
        if self._pool is not None:
            await self._pool.close()
        while self._here:
            await self._here.pop().close()


async def try_out(config: EnvConfig) -> None:
    """Begin one episode where episodes will be played, and give it up: what is missing shows before anything else is started.

    Raises ConfigError, EnvironmentFault, RunFailed: it cannot be made; EnvFault: it cannot begin an episode.
    """
    environments = Environments(config.model_copy(update={"workers": 1}))
    try:
        env = environments.new()
        await env.reset(0)
        await env.close()
    finally:
        await environments.close()


def find(name: str) -> Entry:
    """What makes the environment of that name. Raises ConfigError."""
    if ":" in name:
        return Entry(name)
    if name not in ENVIRONMENTS:
        raise ConfigError(
            "no environment has this name",
            got=name,
            expected=f"one of {', '.join(ENVIRONMENTS)}",
            remedy="set env.name, or give module:factory for one of your own",
        )
    return ENVIRONMENTS[name]


def make_env(config: EnvConfig) -> Env:
    """A new instance, in this process whatever it is. Raises ConfigError; EnvironmentFault: a package is not installed."""
    entry = find(config.name)
    module_name, _, name = entry.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name, None)
        if factory is None:
            raise ConfigError(f"{module_name} has no {name}", got=f"env.name = {config.name!r}")
        return cast(Callable[[EnvConfig], Env], factory)(config)
    except ImportError as error:
        raise EnvironmentFault(f"the environment {config.name} cannot be imported", got=error, remedy=_remedy(entry)) from error


def _remedy(entry: Entry) -> str:
    if entry.extra is None:
        return "install it, or put its folder on PYTHONPATH"
    return f"pip install 'rose_hpc[{entry.extra}]'"
