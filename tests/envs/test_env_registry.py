"""The environments by name: configuration, registry, and what a worker does with one instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bad_envs import Counting, Forgetful
from msgspec import structs

from rose_hpc.config import ENVIRONMENT_NAMES, EnvConfig, parse
from rose_hpc.errors import ConfigError, EnvironmentFault
from rose_hpc.rollout.envs import registry
from rose_hpc.rollout.envs.base import EnvFault, StepResult, checked
from rose_hpc.rollout.envs.frozen_lake import FrozenLakeEnv
from rose_hpc.rollout.envs.frozen_lake_text import FrozenLakeTextEnv
from rose_hpc.rollout.envs.pool import SPARE_INSTANCES, EnvPool, _Call
from rose_hpc.rollout.envs.registry import ENVIRONMENTS, Environments, find, make_env
from rose_hpc.rollout.envs.tools import ToolsEnv
from rose_hpc.rollout.envs.worker import Stage
from rose_hpc.rollout.envs.worker_messages import NOTHING_SEEN, Answer, Faulted, Play, Played, saw


def run_config(**env: Any) -> EnvConfig:
    return parse({"steps": 1, "model": {"tiny": {}}, "env": env}, "test").env


def test_every_name_that_the_configuration_admits_is_in_the_registry_and_no_other() -> None:
    assert set(ENVIRONMENTS) == set(ENVIRONMENT_NAMES)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(EnvConfig(), FrozenLakeEnv), (EnvConfig(view="text"), FrozenLakeTextEnv), (EnvConfig(name="tools"), ToolsEnv)],
)
def test_ours_are_made_in_this_process(config: EnvConfig, kind: type) -> None:
    environments = Environments(config)
    one, other = environments.new(), environments.new()
    assert type(one) is type(other) is kind and one is not other
    asyncio.run(environments.close())


@pytest.mark.parametrize("name", ["frozenlake", "", "tool", "a.b", "module:", ":name", "os; import x:y"])
def test_an_unknown_name_lists_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="frozen_lake, tools, reasoning_gym, verifiers, textworld, alfworld"):
        run_config(name=name)


def test_the_registry_says_so_too_when_asked_by_another_way() -> None:
    with pytest.raises(ConfigError, match="frozen_lake, tools") as raised:
        find("frozenlake")
    assert "module:factory" in str(raised.value)


def test_an_environment_of_ones_own_is_named_by_module_and_factory() -> None:
    config = run_config(name="bad_envs:Counting", options={"anything": [1, 2]})
    assert find(config.name).isolated
    assert isinstance(make_env(config), Counting)
    with pytest.raises(EnvironmentFault, match="cannot be imported"):
        make_env(EnvConfig(name="no.such.module:Env"))
    with pytest.raises(ConfigError, match="has no Absent"):
        make_env(EnvConfig(name="bad_envs:Absent"))


@pytest.mark.parametrize(("name", "section"), [("verifiers", "verifiers"), ("textworld", "textworld"), ("alfworld", "textworld")])
def test_an_environment_that_needs_a_section_says_which(name: str, section: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[env\.{section}\]"):
        run_config(name=name)


def test_an_unknown_key_of_a_section_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="dataset, settings"):
        run_config(name="reasoning_gym", reasoning_gym={"name": "chain_sum"})


# ── what a step may say ──


def test_numbers_become_floats() -> None:
    result = checked(StepResult("x", 1, done=True, success=True))
    assert result == StepResult("x", 1.0, done=True, success=True) and isinstance(result.reward, float)


@pytest.mark.parametrize("reward", [True, float("nan"), float("-inf"), None, "1", 1j])
def test_a_reward_that_is_no_finite_number_is_a_fault(reward: Any) -> None:
    with pytest.raises(EnvFault, match="reward"):
        checked(StepResult("x", reward, done=False, success=False))


def test_only_a_turn_to_come_needs_something_to_read() -> None:
    assert checked(StepResult("", 0.0, done=True, success=False)).observation == ""
    with pytest.raises(EnvFault, match="blank"):
        checked(StepResult("", 0.0, done=False, success=False))


# ── one worker's instances ──


class Watched(Counting):
    """Counts how many there are, and what they played."""

    made = 0
    closed = 0

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        Watched.made += 1
        self.acted = 0

    async def step(self, action: str) -> StepResult:
        self.acted += 1
        return await super().step(action)

    async def close(self) -> None:
        Watched.closed += 1


class Episode:
    """A recipe that grows, as a pool would send it."""

    def __init__(self, stage: Stage, slot: int = 0, episode: int = 0, seed: int = 5, instances: int = 9) -> None:
        self.stage, self.play = stage, Play(slot, episode, seed, [], NOTHING_SEEN, instances)

    async def begin(self) -> Answer:
        return self._note(await self.stage.play(self.play))

    async def act(self, action: str) -> Answer:
        self.play = structs.replace(self.play, actions=[*self.play.actions, action])
        return self._note(await self.stage.play(self.play))

    def _note(self, answer: Answer) -> Answer:
        if isinstance(answer, Played):
            self.play = structs.replace(self.play, seen=saw(self.play.seen, answer.observation))
        return answer


@pytest.fixture
def replays() -> list[None]:
    return []


@pytest.fixture
def stage(replays: list[None]) -> Stage:
    Watched.made = Watched.closed = 0
    return Stage(lambda: Watched(EnvConfig()), lambda: replays.append(None))


def said(actions: int, seed: int = 5) -> Played:
    return Played(f"seed {seed}, {actions} actions", 0.5, False, False)


def test_an_episode_plays_on_in_its_instance(stage: Stage, replays: list[None]) -> None:
    async def play() -> None:
        episode = Episode(stage)
        assert await episode.begin() == Played("seed 5", 0.0, False, False)
        assert [await episode.act("a") for _ in range(3)] == [said(1), said(2), said(3)]

    asyncio.run(play())
    assert (Watched.made, len(replays)) == (1, 0)


def test_a_stage_that_never_saw_the_episode_plays_it_again_first(stage: Stage, replays: list[None]) -> None:
    async def play() -> None:
        episode = Episode(Stage(lambda: Counting(EnvConfig()), lambda: None))
        await episode.begin()
        for _ in range(3):
            await episode.act("a")
        episode.stage = stage
        assert await episode.act("a") == said(4)
        assert await episode.act("a") == said(5)

    asyncio.run(play())
    assert (Watched.made, len(replays)) == (1, 4)  # reset and three actions, each with a deadline of its own


def test_an_instance_that_stands_elsewhere_is_brought_back(stage: Stage) -> None:
    async def play() -> None:
        episode = Episode(stage)
        await episode.begin()
        await episode.act("a")
        await stage.play(Play(0, 0, 5, ["a", "b"], episode.play.seen))  # an answer that got lost
        assert await episode.act("a") == said(2)

    asyncio.run(play())
    assert Watched.made == 1


def test_slots_and_episodes_do_not_mix(stage: Stage) -> None:
    async def play() -> None:
        one, other = Episode(stage, slot=0, seed=1), Episode(stage, slot=1, seed=2)
        for episode in (one, other):
            await episode.begin()
        assert [await one.act("a"), await other.act("a"), await other.act("a")] == [said(1, 1), said(1, 2), said(2, 2)]
        again = Episode(stage, slot=0, episode=1, seed=3)
        await again.begin()
        assert await again.act("a") == said(1, 3)

    asyncio.run(play())
    assert Watched.made == 2


def test_a_fault_closes_the_instance_and_the_next_episode_gets_a_fresh_one(stage: Stage) -> None:
    async def play() -> None:
        episode = Episode(stage)
        await episode.begin()
        answer = await episode.act("raise")
        assert answer == Faulted("the environment raised RuntimeError: the moon is full")
        assert await Episode(stage, episode=1).begin() == Played("seed 5", 0.0, False, False)
        await stage.close()

    asyncio.run(play())
    assert (Watched.made, Watched.closed) == (2, 2)


def test_an_episode_that_went_another_way_the_second_time_is_a_fault() -> None:
    async def play() -> Answer:
        episode = Episode(Stage(lambda: Forgetful(EnvConfig()), lambda: None))
        await episode.begin()
        await episode.act("a")
        p = episode.play
        episode.play = Play(p.slot, p.episode + 1, p.seed, p.actions, saw(NOTHING_SEEN, "something else"))
        return await episode.act("a")

    answer = asyncio.run(play())
    assert isinstance(answer, Faulted) and "other observations" in answer.reason


def test_a_stage_keeps_as_many_instances_as_it_is_told_and_an_episode_that_was_dropped_is_played_again(stage: Stage) -> None:
    async def play() -> None:
        episodes = [Episode(stage, slot, seed=slot, instances=2) for slot in range(3)]
        for episode in episodes:
            await episode.begin()
            await episode.act("a")
        assert (Watched.made, Watched.closed) == (3, 1)  # the first one's
        assert await episodes[1].act("a") == said(2, 1)
        assert Watched.made == 3
        assert await episodes[0].act("a") == said(2, 0)
        assert (Watched.made, Watched.closed) == (4, 2)  # the third one's: the second was used since
        assert await episodes[1].act("a") == said(3, 1)
        assert Watched.made == 4

    asyncio.run(play())


def test_a_worker_is_told_to_keep_what_it_played_last_and_a_few_more() -> None:
    async def play() -> None:
        pool = EnvPool(EnvConfig(workers=2))
        told: list[list[int]] = [[], []]
        for worker, plays in zip(pool._workers, told, strict=True):

            async def answered(play: Play, plays: list[int] = plays) -> Played:
                plays.append(play.instances - SPARE_INSTANCES)
                return Played("here", 0.0, False, False)

            worker.process.play = answered  # type: ignore[method-assign, assignment]
        one, other = pool._workers
        for worker, slots in ((one, (0, 1, 2, 1)), (other, (2, 1)), (one, (0,))):
            for slot in slots:
                begin = Play(slot, 0, 0, [], NOTHING_SEEN)
                await pool._answer(worker, _Call(0, begin, asyncio.get_running_loop().create_future()))
        assert told == [[1, 2, 3, 3, 1], [1, 2]]
        pool.forget(2)
        pool.forget(2)
        assert pool._at_home[other] == 1
        await pool.close()

    asyncio.run(play())


def test_what_is_played_in_this_process_is_closed_with_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched.closed = 0
    monkeypatch.setattr(registry, "make_env", Watched)
    environments = Environments(EnvConfig())
    for _ in range(3):
        environments.new()
    asyncio.run(environments.close())
    asyncio.run(environments.close())
    assert Watched.closed == 3
