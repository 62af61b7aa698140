"""Which FrozenLake is played: a map by name, by its rows, or drawn at random from the seed. Every map has a way to the goal."""

from __future__ import annotations

from functools import lru_cache

from gymnasium.envs.toy_text.frozen_lake import MAPS
from gymnasium.utils.seeding import np_random

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ConfigError

RANDOM = "random"
MAX_DRAWS = 1000  # of a random map, before we say that there is none
Rows = tuple[str, ...]


def map_rows(config: EnvConfig, seed: int) -> Rows:
    """The rows of the episode's map, of the letters S (start), F (frozen), H (hole) and G (goal). Raises ConfigError: no such map."""
    return random_rows(config.map_side, config.frozen_frac, seed) if config.map_name == RANDOM else fixed_rows(config.map_name)


def fixed_rows(map_name: str) -> Rows:
    """The rows of a map that no seed decides. Raises ConfigError for a random one, and where the goal cannot be reached."""
    if map_name == RANDOM:
        raise ConfigError(
            "this wants a map that is the same in every episode",
            got="env.map_name = random",
            expected="4x4, 8x8, or rows divided by '/'",
            remedy="set env.map_name, or train a model that can read a map, with env.view = 'text'",
        )
    rows = tuple(MAPS[map_name] if map_name in MAPS else map_name.split("/"))
    if not is_passable(rows):
        raise ConfigError("no way leads to the goal", got=f"env.map_name = {map_name}")
    return rows


@lru_cache(maxsize=1024)  # a group's trajectories have one seed
def random_rows(side: int, frozen_frac: float, seed: int) -> Rows:
    """gymnasium's generate_random_map, but it gives up: below about 0.6 a large lake has no way across. Raises ConfigError."""
    random, _ = np_random(seed)
    for _ in range(MAX_DRAWS):
        board = random.choice(["F", "H"], (side, side), p=[frozen_frac, 1 - frozen_frac])
        board[0][0], board[-1][-1] = "S", "G"
        rows = tuple("".join(row) for row in board)
        if is_passable(rows):
            return rows
    raise ConfigError(
        "no way leads to the goal",
        got=f"env.frozen_frac = {frozen_frac:g}: {MAX_DRAWS} random maps of {side} by {side} cells without one",
        remedy="raise env.frozen_frac, or lower env.map_side",
    )


def is_passable(rows: Rows) -> bool:
    """Whether a goal can be reached from the start on dry ice."""
    cells = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row) if letter != "H"}
    frontier = [cell for cell, letter in cells.items() if letter == "S"]
    reached = set(frontier)
    while frontier:
        r, c = frontier.pop()
        if cells[r, c] == "G":
            return True
        beside = {(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)} & cells.keys() - reached
        reached |= beside
        frontier.extend(beside)
    return False
