"""FrozenLake as a text environment. The 4x4 map, for reading the episodes below:

SFFF
FHFH
FFFH
HFFG
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.config import EnvConfig
from rose_hpc.errors import RoseError
from rose_hpc.rollout.envs.base import StepResult
from rose_hpc.rollout.envs.frozen_lake import ACTIONS, COLS, ROWS, WORDS, FrozenLake, observation, shortest_actions
from rose_hpc.rollout.envs.registry import make_env


def episode(config: EnvConfig, actions: str | list[str], seed: int = 0) -> list[StepResult]:
    """Results of the actions, up to the end of the episode."""

    async def play() -> list[StepResult]:
        env = make_env(config)
        await env.reset(seed)
        results: list[StepResult] = []
        for action in actions:
            results.append(await env.step(action))
            if results[-1].done:
                break
        await env.close()
        return results

    return asyncio.run(play())


def test_the_first_observation_is_the_start() -> None:
    assert asyncio.run(make_env(EnvConfig()).reset(3)) == "<obs> row0 col0 <act>"


def test_a_shortest_path_reaches_the_goal_with_reward_1() -> None:
    results = episode(EnvConfig(), "DDRRDR")
    assert [r.observation for r in results] == [observation(*cell) for cell in [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3)]]
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    assert [r.done for r in results] == [r.success for r in results] == [False] * 5 + [True]


def test_a_wall_costs_a_turn_and_leaves_the_agent_where_it_stood() -> None:
    assert episode(EnvConfig(), "L") == episode(EnvConfig(), "U") == [StepResult("<obs> row0 col0 <act>", 0.0, done=False, success=False)]


def test_a_hole_ends_the_episode_with_reward_0() -> None:
    assert episode(EnvConfig(), "RD")[-1] == StepResult("<obs> row1 col1 <act>", 0.0, done=True, success=False)


@pytest.mark.parametrize("rubbish", ["", " ", "r", "RR", "R ", "R L", "right", "<eos>", "row0", "2"])
def test_what_is_no_action_ends_the_episode_where_it_stands_with_reward_0(rubbish: str) -> None:
    assert episode(EnvConfig(), ["D", rubbish])[1:] == [StepResult("<obs> row1 col0 <act>", 0.0, done=True, success=False)]


def test_the_episode_ends_after_max_turns() -> None:
    results = episode(EnvConfig(max_turns=5), "LLLLLLLL")
    assert [r.done for r in results] == [False] * 4 + [True]
    assert not results[-1].success


def test_the_goal_in_the_last_turn_still_counts() -> None:
    assert episode(EnvConfig(max_turns=6), "DDRRDR")[-1].success


def test_an_episode_may_be_longer_than_gymnasium_allows_by_itself() -> None:
    assert len(episode(EnvConfig(max_turns=150), "L" * 200)) == 150


def test_reset_begins_a_new_episode_whatever_came_before() -> None:
    lake = FrozenLake(EnvConfig(max_turns=2))
    for ending in ("DD", ["D", "nonsense"], "D"):
        assert lake.begin(0) == observation(0, 0)
        for action in ending:
            lake.act(action)


@pytest.mark.parametrize("before", [[], ["nonsense"], ["R", "D"]], ids=["reset missing", "rubbish", "hole"])
def test_a_step_outside_an_episode_is_refused(before: list[str]) -> None:
    lake = FrozenLake(EnvConfig())
    if before:
        lake.begin(0)
    for action in before:
        lake.act(action)
    with pytest.raises(RoseError, match="outside an episode"):
        lake.act("L")


def test_closing_twice_is_harmless_and_ends_the_episode() -> None:
    lake = FrozenLake(EnvConfig())
    lake.begin(0)
    lake.close()
    lake.close()
    with pytest.raises(RoseError):
        lake.act("L")


def test_the_large_map_uses_all_rows_and_columns() -> None:
    results = episode(EnvConfig(map_name="8x8", max_turns=14), "R" * 7 + "D" * 7)
    assert results[6].observation == f"<obs> row0 {COLS[7]} <act>"
    assert results[-1] == StepResult(f"<obs> {ROWS[7]} {COLS[7]} <act>", 1.0, done=True, success=True)


def test_slippery_ice_depends_on_the_seed_and_on_nothing_else() -> None:
    config = EnvConfig(slippery=True, max_turns=30)
    walks = [[r.observation for r in episode(config, "D" * 30, seed)] for seed in range(20)]
    assert walks == [[r.observation for r in episode(config, "D" * 30, seed)] for seed in range(20)]
    assert len({tuple(walk) for walk in walks}) > 5


def test_dry_ice_does_not_depend_on_the_seed() -> None:
    assert episode(EnvConfig(), "DDRRDR", seed=1) == episode(EnvConfig(), "DDRRDR", seed=2)


@settings(max_examples=50, deadline=None)
@given(
    map_name=st.sampled_from(["4x4", "8x8"]),
    slippery=st.booleans(),
    max_turns=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    actions=st.lists(st.sampled_from([*ACTIONS, "nonsense"]), min_size=20, max_size=20),
)
def test_every_episode_ends_in_time_and_is_rewarded_only_for_success(
    map_name: str, slippery: bool, max_turns: int, seed: int, actions: list[str]
) -> None:
    results = episode(EnvConfig(map_name=map_name, slippery=slippery, max_turns=max_turns), actions, seed)
    assert len(results) <= max_turns
    assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
    assert all(r.reward == float(r.success) for r in results)
    assert all(set(r.observation.split(" ")) <= set(WORDS) for r in results)


@pytest.mark.parametrize(("map_name", "moves"), [("4x4", 6), ("8x8", 14)])
def test_shortest_actions_lead_to_the_goal_from_wherever_the_ice_holds(map_name: str, moves: int) -> None:
    best = shortest_actions(map_name)
    lake = FrozenLake(EnvConfig(map_name=map_name, max_turns=100))
    told, path = lake.begin(0), 0
    while told in best:
        result, path = lake.act(best[told][-1]), path + 1
        told = result.observation
    assert (path, result.success) == (moves, True)
    assert len(best) == {"4x4": 11, "8x8": 53}[map_name]  # frozen cells and the start


def test_shortest_actions_of_the_small_map_by_hand() -> None:
    best = shortest_actions("4x4")
    assert best[observation(0, 0)] == ("D", "R")
    assert best[observation(0, 3)] == ("L",)
    assert best[observation(2, 1)] == ("D", "R")
    assert best[observation(3, 2)] == ("R",)
    assert observation(1, 1) not in best
    assert observation(3, 3) not in best
