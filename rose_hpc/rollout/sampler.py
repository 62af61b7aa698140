"""Has the intake's decisions carried out: starts groups, hears of their ends, and gives a training step its batch. Thin.

    sampler = Sampler(collector, config.sampling, seed)
    batch = await sampler.next_batch(version)       # trains on it; what still runs goes on meanwhile
    saved = sampler.saved()                         # for a checkpoint, between two batches

Decides nothing: which groups, intake.py; how they are played, turns.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rose_hpc.config import SamplingConfig
from rose_hpc.rollout.groups import Group, RolloutBatch, freshest_version, new_group
from rose_hpc.rollout.intake import Intake, rules_of
from rose_hpc.rollout.sampling import has_variance
from rose_hpc.rollout.saved_rollouts import SavedRollouts, restored, saved_group


class Plays(Protocol):
    """See collector.Collector."""

    def start(self, groups: Sequence[Group]) -> None: ...

    async def ended(self) -> Group: ...

    def ended_already(self) -> list[Group]: ...

    async def close(self) -> None: ...


class Sampler:
    """One per run."""

    def __init__(self, collector: Plays, config: SamplingConfig, run_seed: int) -> None:
        self._collector, self._config, self._run_seed = collector, config, run_seed
        self._intake = Intake(rules_of(config))
        self._groups: dict[int, Group] = {}  # running, ready, or dropped since the last batch

    async def next_batch(self, version: int) -> RolloutBatch:
        """A batch for the update that is computed from this version. Raises RunFailed: no executor is left."""
        begin_s = time.monotonic()
        self._note(self._collector.ended_already())
        self._start(self._intake.begin(version))
        while not self._intake.is_complete:
            self._note([await self._collector.ended(), *self._collector.ended_already()])
            self._start(self._intake.refill())
        serials = self._intake.take()
        taken, dead, stale = ([self._groups.pop(s) for s in part] for part in (serials.taken, serials.dead, serials.stale))
        return RolloutBatch(taken, dead, stale, self._intake.started, time.monotonic() - begin_s)

    def saved(self) -> SavedRollouts:
        """What no batch has accounted for, as it is now. A group that is over but was not heard of yet counts as running."""
        running, ready = ([saved_group(self._groups[s]) for s in part] for part in (self._intake.running, self._intake.ready))
        return SavedRollouts(self._intake.next_serial, running, ready)

    def restore(self, saved: SavedRollouts) -> None:
        """Go on from what `saved` gave, before the first batch."""
        config = self._config
        running, ready = (
            [restored(group, self._run_seed, config.groups, config.group_size) for group in part] for part in (saved.running, saved.ready)
        )
        self._groups = {group.serial: group for group in (*running, *ready)}
        self._intake = Intake(rules_of(config), saved.next_serial)
        self._intake.restore((g.serial for g in running), ((g.serial, freshest_version(g)) for g in ready))
        self._collector.start(running)

    async def close(self) -> None:
        """Give up what still runs."""
        await self._collector.close()

    def _start(self, serials: Sequence[int]) -> None:
        if serials:
            groups = [new_group(serial, self._run_seed, self._config.groups, self._config.group_size) for serial in serials]
            self._groups.update((group.serial, group) for group in groups)
            self._collector.start(groups)

    def _note(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._intake.ended(group.serial, has_variance(group), freshest_version(group))
