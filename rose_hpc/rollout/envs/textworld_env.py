"""Games of TextWorld (*.z8) and of ALFWorld (*.tw-pddl): household tasks in text, played by commands.

    observation   the game's words, and the admissible commands where the configuration says so
    action        any text with <action>go to cabinet 1</action>; without one the turn is lost and the policy told so

Which game is played follows from the seed: the games, sorted by path, are counted round. The reward is what the score rises by, as a
part of the game's highest; where a game keeps no score, 1 for winning it. Commands and lost turns both count; after max_turns the
episode ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import textworld as tw

from rose_hpc.config import EnvConfig
from rose_hpc.errors import ConfigError
from rose_hpc.rollout.envs.base import StepResult, outside_an_episode
from rose_hpc.rollout.envs.text import spoken, tagged

SUFFIXES = (".z8", ".tw-pddl")
RULES = "Play this game: each turn, think if you need to, then give one command as <action>...</action>. You have {turns} turns.\n\n"
NO_COMMAND = "That was no command. Give one as <action>...</action>."


def textworld(config: EnvConfig) -> TextWorldEnv:
    """Games as TextWorld makes them."""
    return TextWorldEnv(config, wrappers=())


def alfworld(config: EnvConfig) -> TextWorldEnv:
    """Games of ALFWorld: things get the names that a person would give them."""
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    return TextWorldEnv(config, wrappers=(AlfredDemangler,))


class TextWorldEnv:
    """`Env` over a folder of games. A game is loaded when its turn comes, and kept until another's does."""

    def __init__(self, config: EnvConfig, wrappers: Sequence[Callable[[Any], Any]]) -> None:
        """Raises ConfigError: there is no game."""
        assert config.textworld is not None  # EnvConfig sees to it
        self._max_turns, self._show_commands = config.max_turns, config.textworld.show_commands
        self._games, self._wrappers = find_games(config.textworld.games), list(wrappers)
        self._loaded: Path | None = None
        self._game: Any = None
        self._turns, self._score, self._is_playing = 0, 0.0, False

    async def reset(self, seed: int) -> str:
        """See Env.reset; seed >= 0."""
        self._is_playing = False
        self._load(self._games[seed % len(self._games)])
        self._game.seed(seed)
        state = self._game.reset()
        self._turns, self._score, self._is_playing = 0, 0.0, True
        return RULES.format(turns=self._max_turns) + self._told(state)

    async def step(self, action: str) -> StepResult:
        """See Env.step."""
        if not self._is_playing:
            raise outside_an_episode("a game")
        self._turns += 1
        said = tagged(spoken(action), "action")
        if not said or not said[-1]:
            self._is_playing = self._turns < self._max_turns
            return StepResult(NO_COMMAND, 0.0, done=not self._is_playing, success=False)
        state, _, done = self._game.step(" ".join(said[-1].split()))
        won = bool(state.won)
        self._is_playing = not (done or won or self._turns >= self._max_turns)
        return StepResult(self._told(state), self._gained(state), done=not self._is_playing, success=won)

    async def close(self) -> None:
        """See Env.close."""
        self._is_playing = False
        if self._game is not None:
            self._game.close()
        self._game = self._loaded = None

    def _load(self, path: Path) -> None:
        if path == self._loaded:
            return
        if self._game is not None:
            self._game.close()
        self._loaded = None
        infos = tw.EnvInfos(feedback=True, won=True, lost=True, score=True, max_score=True, admissible_commands=self._show_commands)
        self._game = tw.start(str(path), infos, wrappers=self._wrappers)
        self._loaded = path

    def _told(self, state: Any) -> str:
        words = str(state.feedback).strip()
        commands = state.admissible_commands if self._show_commands else None
        return words if not commands else f"{words}\n\nYou can: {', '.join(sorted(commands))}."

    def _gained(self, state: Any) -> float:
        """The rise of the score since the last turn, as a part of the highest."""
        score = float(state.score) / float(state.max_score) if state.max_score else float(bool(state.won))
        gained, self._score = score - self._score, score
        return gained


def find_games(path: Path) -> list[Path]:
    """The game, or all games below the folder, sorted. Raises ConfigError: there is none."""
    games = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path] * path.is_file()
    if not games:
        raise ConfigError(
            "there are no games",
            got=f"env.textworld.games = {path}",
            expected=f"a game or a folder with games in it ({', '.join(SUFFIXES)})",
            remedy="make some with tw-make, or get ALFWorld's with alfworld-download",
        )
    return games
