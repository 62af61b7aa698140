"""Users of a serving engine, as threads."""

from __future__ import annotations

import threading
from typing import Protocol

import httpx

PROMPT_TOKENS = 16


class Serves(Protocol):
    """A serving engine's user side."""

    def complete(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens that one request got. Raises httpx.HTTPError when it failed."""


class Traffic:
    """Closed-loop clients of a serving engine: each sends its next request when the last one is done, until told to stop."""

    def __init__(self, serving: Serves, clients: int, output_tokens: int, pause_s: float = 0.0, prompt_tokens: int = PROMPT_TOKENS) -> None:
        self.done, self.tokens = 0, 0
        self.failures: list[httpx.HTTPError] = []
        self._serving, self._output_tokens, self._pause_s, self._prompt_tokens = serving, output_tokens, pause_s, prompt_tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]

    def _client(self) -> None:
        while not self._stop.is_set():
            try:
                tokens = self._serving.complete(self._prompt_tokens, self._output_tokens)
            except httpx.HTTPError as error:
                self.failures.append(error)
                return
            with self._lock:
                self.done += 1
                self.tokens += tokens
            self._stop.wait(self._pause_s)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
