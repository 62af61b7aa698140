"""Which map is played: by name, by rows, at random from the seed."""

from __future__ import annotations

import asyncio

import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS, generate_random_map
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.config import EnvConfig, parse
from rose_hpc.errors import ConfigError
from rose_hpc.models.expert import expert_episodes
from rose_hpc.rollout.envs import lake_maps
from rose_hpc.rollout.envs.base import EnvFault
from rose_hpc.rollout.envs.frozen_lake import observation, shortest_actions
from rose_hpc.rollout.envs.lake import Lake
from rose_hpc.rollout.envs.lake_maps import Rows, fixed_rows, is_passable, map_rows, random_rows
from rose_hpc.rollout.envs.registry import make_env

CORRIDOR = "SFG/HHH"


def test_maps_by_name_are_gymnasiums() -> None:
    assert {name: list(fixed_rows(name)) for name in MAPS} == MAPS


def test_given_rows_are_played() -> None:
    async def play() -> list[str]:
        env = make_env(EnvConfig(map_name=CORRIDOR))
        first = await env.reset(0)
        results = [await env.step("R"), await env.step("R")]
        assert results[-1].success and results[-1].done
        return [first, *(r.observation for r in results)]

    assert asyncio.run(play()) == [observation(0, 0), observation(0, 1), observation(0, 2)]


def test_the_expert_plays_given_rows() -> None:
    assert shortest_actions(CORRIDOR) == {observation(0, 0): ("R",), observation(0, 1): ("R",)}
    episode = next(expert_episodes(EnvConfig(map_name=CORRIDOR), noise_frac=0.0, seed=0))
    assert [turn.action for turn in episode] == ["R", "R"]


def test_several_goals_are_all_as_good() -> None:
    best = shortest_actions("GFS/FFF/GFF")
    assert best[observation(0, 1)] == ("L",)
    assert best[observation(1, 0)] == ("D", "U")


@pytest.mark.parametrize("rows", ["SF/FFG", "SX/FG", "SS/FG", "FF/FG", "SF/FF", "", "4x5", "/", "sf/fg"])
def test_rows_that_are_no_map_are_refused_when_the_configuration_is_read(rows: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.map_name"):
        parse({"steps": 1, "model": {"tiny": {}}, "env": {"map_name": rows}}, "test")


def test_a_goal_behind_holes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no way leads"):
        make_env(EnvConfig(map_name="SH/HG"))


def test_words_are_there_for_eight_cells_a_side() -> None:
    make_env(EnvConfig(map_name="/".join(["SFFFFFFF", *["FFFFFFFF"] * 6, "FFFFFFFG"])))
    long = "/".join(["SFFFFFFFF", "FFFFFFFFG"])
    with pytest.raises(ConfigError, match="view = 'text'"):
        parse({"steps": 1, "model": {"tiny": {}}, "env": {"map_name": long}}, "test")
    with pytest.raises(ConfigError, match="view = 'text'"):
        parse({"steps": 1, "model": {"tiny": {}}, "env": {"map_name": "random", "map_side": 9}}, "test")
    make_env(EnvConfig(map_name=long, view="text"))


@settings(max_examples=30, deadline=None)
@given(side=st.integers(2, 10), frozen=st.floats(0.7, 1.0), seed=st.integers(0, 2**32 - 1))
def test_random_maps_are_gymnasiums_and_have_a_way(side: int, frozen: float, seed: int) -> None:
    rows = random_rows(side, frozen, seed)
    assert list(rows) == generate_random_map(side, frozen, seed)
    assert is_passable(rows)


def test_a_random_map_follows_from_the_seed() -> None:
    config = EnvConfig(map_name="random", map_side=6)
    lake = Lake(config)
    maps = []
    for seed in [*range(10), *range(10)]:
        lake.begin(seed)
        maps.append(lake.rows)
        assert lake.rows == map_rows(config, seed)
        assert (lake.row, lake.col) == (0, 0)
    assert maps[:10] == maps[10:]
    assert len(set(maps)) == 10


def test_a_lake_without_a_way_is_given_up() -> None:
    with pytest.raises(ConfigError, match="frozen_frac"):
        random_rows(32, 0.2, seed=0)


def test_the_tiny_models_expert_wants_a_map_that_stays() -> None:
    with pytest.raises(ConfigError, match="same in every episode"):
        next(expert_episodes(EnvConfig(map_name="random"), noise_frac=0.5, seed=0))


def test_the_tiny_models_expert_refuses_what_is_not_said_in_its_words() -> None:
    for other in (EnvConfig(view="text"), EnvConfig(name="tools")):
        with pytest.raises(ConfigError, match="tiny model"):
            next(expert_episodes(other, noise_frac=0.5, seed=0))


def test_a_seed_without_a_way_costs_its_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(EnvConfig(map_name="random", view="text"))

    def none(side: int, frozen_frac: float, seed: int) -> Rows:
        raise ConfigError("no way leads to the goal", got=f"seed {seed}")

    monkeypatch.setattr(lake_maps, "random_rows", none)
    with pytest.raises(EnvFault, match="no way leads"):
        lake.begin(7)
    monkeypatch.undo()
    lake.begin(7)
    assert lake.is_playing


def test_a_groups_map_is_drawn_once() -> None:
    assert random_rows(6, 0.8, 123456) is random_rows(6, 0.8, 123456)
