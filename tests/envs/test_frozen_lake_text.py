"""FrozenLake in English, with the map drawn."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.config import EnvConfig
from rose_hpc.errors import RoseError
from rose_hpc.rollout.envs.base import StepResult
from rose_hpc.rollout.envs.frozen_lake_text import NO_MOVE, wanted_move
from rose_hpc.rollout.envs.registry import make_env


def text_config(**settings: object) -> EnvConfig:
    return EnvConfig.model_validate({"view": "text", **settings})


def episode(config: EnvConfig, said: list[str], seed: int = 0) -> tuple[str, list[StepResult]]:
    """The first observation, and the results up to the end."""

    async def play() -> tuple[str, list[StepResult]]:
        env = make_env(config)
        first, results = await env.reset(seed), []
        for text in said:
            results.append(await env.step(text))
            if results[-1].done:
                break
        await env.close()
        return first, results

    return asyncio.run(play())


def moves(*names: str) -> list[str]:
    return [f"<action>{name}</action>" for name in names]


def test_the_rules_and_the_map_are_told_once_and_then_the_map() -> None:
    first, results = episode(text_config(), moves("down"))
    assert first.endswith("P F F F\nF H F H\nF F F H\nH F F G")
    assert "You have 12 turns" in first and "slippery" not in first
    assert results == [StepResult("S F F F\nP H F H\nF F F H\nH F F G", 0.0, done=False, success=False)]


def test_slippery_ice_is_told() -> None:
    assert "slippery" in episode(text_config(slippery=True), [])[0]


def test_the_goal_pays_1() -> None:
    _, results = episode(text_config(), moves("down", "down", "right", "right", "down", "right"))
    assert results[-1] == StepResult("You reached the goal.", 1.0, done=True, success=True)
    assert [r.reward for r in results[:-1]] == [0.0] * 5


def test_a_hole_ends_the_episode() -> None:
    assert episode(text_config(), moves("right", "down"))[1][-1] == StepResult("You fell into a hole.", 0.0, done=True, success=False)


def test_a_turn_without_a_move_is_lost_and_told_so_and_counts() -> None:
    _, results = episode(text_config(max_turns=3), ["I wonder.", *moves("north"), "?", "never said"])
    assert [r.observation.startswith(NO_MOVE) for r in results] == [True, True, False]
    assert results[-1] == StepResult("You have no turns left.", 0.0, done=True, success=False)


def test_moves_and_lost_turns_count_together() -> None:
    _, results = episode(text_config(max_turns=4), ["what?", *moves("left"), "what?", *moves("left")])
    assert [r.done for r in results] == [False, False, False, True]


def test_the_goal_in_the_last_turn_still_counts() -> None:
    assert episode(text_config(max_turns=2, map_name="SFG/HHH"), moves("right", "right"))[1][-1].success


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("<action>left</action>", "L"),
        ("So I go <action> Right </action>.", "R"),
        ("<think>perhaps <action>left</action>?</think>\n<action>UP</action>", "U"),
        ("<action>left</action> no, <action>down</action>", "D"),
        ("left", None),
        ("<action>left", None),
        ("<action>left or right</action>", None),
        ("<action>left</action><action>nowhere</action>", None),
        ("<think><action>left</action></think>", None),
    ],
)
def test_the_last_move_after_the_thoughts_counts(text: str, move: str | None) -> None:
    assert wanted_move(text) == move


def test_a_step_outside_an_episode_is_refused() -> None:
    with pytest.raises(RoseError, match="outside an episode"):
        asyncio.run(make_env(text_config()).step("<action>left</action>"))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), said=st.lists(st.sampled_from([*moves("left", "down", "right", "up"), "hm"]), min_size=20, max_size=20)
)
def test_every_episode_ends_in_time_and_repeats_itself(seed: int, said: list[str]) -> None:
    config = text_config(map_name="random", map_side=5, slippery=True)
    first, results = episode(config, said, seed)
    assert (first, results) == episode(config, said, seed)
    assert len(results) <= config.max_turns and [r.done for r in results] == [False] * (len(results) - 1) + [True]
    assert all(r.reward == float(r.success) for r in results)
