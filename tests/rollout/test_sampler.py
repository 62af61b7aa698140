"""The sampler over scripted groups: prompts, batches, and a checkpoint in the middle of it all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_groups import ScriptedCollector, play

from rose_hpc.config import SamplingConfig
from rose_hpc.rollout.groups import prompt_seed
from rose_hpc.rollout.sampler import Sampler

SEED = 11


def config(mode, **settings):
    return SamplingConfig(mode=mode, groups=2, group_size=2, **settings)


def wins_and_loses(group):
    """One of two trajectories succeeds."""
    for index in range(len(group.trajectories)):
        play(group, index, float(index == 0))


def test_a_grpo_step_plays_the_prompts_of_its_number():
    collector = ScriptedCollector(wins_and_loses)
    sampler = Sampler(collector, config("grpo"), SEED)
    for step in range(3):
        batch = asyncio.run(sampler.next_batch(0))
        expected = np.random.SeedSequence([SEED, step]).generate_state(2).tolist()
        assert [g.seed for g in batch.taken] == expected and not collector.running
    assert [t.trajectory_id for t in batch.trajectories] == ["p4.0", "p4.1", "p5.0", "p5.1"]


def test_prompts_follow_from_the_runs_seed_and_their_number_alone():
    assert len({prompt_seed(SEED, serial, 8) for serial in range(200)}) == 200
    assert prompt_seed(SEED, 20, 8) == prompt_seed(SEED, 20, 8) != prompt_seed(SEED + 1, 20, 8)


def test_dapo_fills_the_batch_with_groups_that_teach_and_accounts_for_the_others():
    fates = iter([(1, 1), (0, 0), (0, 0), (1, 0), (0, 0), (0, 1), (1, 0), (1, 0)])

    def auto(group):
        for index, reward in enumerate(next(fates)):
            play(group, index, reward)

    sampler = Sampler(ScriptedCollector(auto), config("dapo"), SEED)
    batch = asyncio.run(sampler.next_batch(0))
    assert [g.serial for g in batch.taken] == [3, 5] and [g.serial for g in batch.dead] == [0, 1, 2, 4]
    assert batch.started == 6 and len(batch.trajectories) == 12
    assert [t.trajectory for t in batch.turns] == list(range(12))  # one turn each, numbered over the whole batch


def test_async_goes_on_with_what_ran_while_the_trainer_trained():
    collector = ScriptedCollector()
    sampler = Sampler(collector, config("async", max_staleness=1), SEED)

    def play_if_even(group):
        if group.serial % 2 == 0:
            wins_and_loses(group)

    async def steps():
        collector.auto = play_if_even
        batch = await sampler.next_batch(0)  # starts 4; 0 and 2 end at once
        collector.auto = None
        assert [g.serial for g in batch.taken] == [0, 2] and [g.serial for g in collector.running] == [1, 3]
        for group in collector.running:  # while the trainer trains
            collector.end(group, (1, 0))
        batch = await sampler.next_batch(1)
        assert [g.serial for g in batch.taken] == [1, 3] and [g.serial for g in collector.running] == [4, 5]
        assert batch.started == 2

    asyncio.run(steps())


def test_a_checkpoint_loses_nothing_that_was_finished_and_starts_again_what_was_in_flight():
    collector = ScriptedCollector()
    sampler = Sampler(collector, config("async", max_staleness=1), SEED)

    async def first():
        collector.auto = lambda group: wins_and_loses(group) if group.serial < 3 else None
        batch = await sampler.next_batch(0)
        assert [g.serial for g in batch.taken] == [0, 1]
        play(collector.running[0], 1, 1.0)  # of group 3; its other trajectory is in flight
        return sampler.saved()

    saved = asyncio.run(first())
    assert (saved.next_serial, [g.serial for g in saved.running], [g.serial for g in saved.ready]) == (4, [3], [2])

    again = ScriptedCollector()

    async def second():
        resumed = Sampler(again, config("async", max_staleness=1), SEED)
        resumed.restore(saved)
        (running,) = again.started
        assert running.serial == 3 and running.seed == collector.running[0].seed
        assert [t.is_live for t in running.trajectories] == [True, False]
        again.end(running, (0.0, 0.0), (1, 1))
        batch = await resumed.next_batch(1)
        return batch

    batch = asyncio.run(second())
    assert [g.serial for g in batch.taken] == [2, 3] and [t.reward for t in batch.taken[1].trajectories] == [0.0, 1.0]
    assert [g.serial for g in again.started] == [3, 4, 5]


def test_a_group_that_ended_unheard_before_the_checkpoint_is_not_lost():
    collector = ScriptedCollector()
    sampler = Sampler(collector, config("dapo"), SEED)

    async def scenario():
        collector.auto = lambda group: wins_and_loses(group) if group.serial < 2 else None
        await sampler.next_batch(0)
        collector.end(collector.running[0], (0, 0))  # a dead one: dropped only when a batch can account for it
        saved = sampler.saved()
        assert [g.serial for g in saved.running] == [2]
        resumed = Sampler(ScriptedCollector(wins_and_loses), config("dapo"), SEED)
        resumed.restore(saved)
        return await resumed.next_batch(1)

    batch = asyncio.run(scenario())
    assert [g.serial for g in batch.dead] == [2] and [g.serial for g in batch.taken] == [3, 4]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["grpo", "dapo", "async"]), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_whatever_is_killed_and_resumed_no_trajectory_is_trained_on_twice_or_lost(mode, staleness, seed):
    """Groups end in a random order; after each step the run may be killed and resumed from what was saved."""
    rng = np.random.default_rng(seed)
    setting = config(mode, max_staleness=staleness)
    version = 0

    def some(group):
        if rng.random() < 0.6:
            for trajectory in group.trajectories:
                if trajectory.is_live:
                    play(group, trajectory.index, float(rng.integers(2)) if rng.random() < 0.9 else None, (version, version))

    class Random(ScriptedCollector):
        async def ended(self):
            while not self.over:
                some(group := self.running[rng.integers(len(self.running))])
                if group.is_over:
                    self.over.append(group)
            return self.over.pop(0)

    async def scenario():
        nonlocal version
        collector, accounted = Random(some), []
        sampler = Sampler(collector, setting, SEED)
        for _ in range(6):
            batch = await sampler.next_batch(version)
            assert all(group.is_over for group in batch.groups)
            accounted += [group.serial for group in batch.groups]
            version += int(rng.integers(2))
            saved = sampler.saved()
            if rng.random() < 0.5:
                collector = Random(some)
                sampler = Sampler(collector, setting, SEED)
                sampler.restore(saved)
        left = [g.serial for g in (*saved.running, *saved.ready)]
        assert sorted(accounted + left) == list(range(saved.next_serial))

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("mode", ["grpo", "dapo", "async"])
def test_closing_gives_up_what_runs(mode):
    collector = ScriptedCollector(wins_and_loses)
    sampler = Sampler(collector, config(mode), SEED)
    asyncio.run(sampler.next_batch(0))
    asyncio.run(sampler.close())
    assert collector.closed
