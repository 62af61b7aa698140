from __future__ import annotations

from itertools import islice

import pytest

from rose_hpc.config import EnvConfig
from rose_hpc.models.expert import Turn, expert_episodes
from rose_hpc.rollout.envs.frozen_lake import ACTIONS, FrozenLake, observation


def first_episodes(count: int, env: EnvConfig, noise_frac: float, seed: int = 0) -> list[list[Turn]]:
    return list(islice(expert_episodes(env, noise_frac, seed), count))


def replay(env: EnvConfig, episode: list[Turn]) -> bool:
    """Play the episode's actions again, checking every observation; returns whether it reached the goal."""
    lake = FrozenLake(env)
    told = lake.begin(0)
    for turn in episode:
        assert told == turn.observation
        result = lake.act(turn.action)
        told = result.observation
    assert result.done
    return result.success


@pytest.mark.parametrize(("map_name", "moves"), [("4x4", 6), ("8x8", 14)])
def test_without_noise_every_episode_is_a_shortest_path(map_name: str, moves: int) -> None:
    env = EnvConfig(map_name=map_name, max_turns=20)
    episodes = first_episodes(30, env, noise_frac=0.0)
    assert {len(e) for e in episodes} == {moves}
    assert all(replay(env, e) for e in episodes)


def test_noisy_episodes_are_what_the_environment_says_and_end_where_it_ends() -> None:
    env = EnvConfig()
    successes = [replay(env, e) for e in first_episodes(200, env, noise_frac=0.5)]
    assert 0.2 < sum(successes) / len(successes) < 0.5


def test_pure_noise_takes_every_action_about_equally_often() -> None:
    actions = [e[0].action for e in first_episodes(400, EnvConfig(), noise_frac=1.0)]
    assert all(60 < actions.count(a) < 140 for a in ACTIONS)


def test_episodes_depend_on_the_seed_and_on_nothing_else() -> None:
    env = EnvConfig(slippery=True)
    assert first_episodes(20, env, 0.5, seed=1) == first_episodes(20, env, 0.5, seed=1)
    assert first_episodes(20, env, 0.5, seed=1) != first_episodes(20, env, 0.5, seed=2)


def test_on_slippery_ice_the_expert_goes_where_it_did_not_mean_to() -> None:
    told = {turn.observation for e in first_episodes(50, EnvConfig(slippery=True, max_turns=40), 0.0) for turn in e}
    assert observation(0, 3) in told  # no shortest path from the start leads there
