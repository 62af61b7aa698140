"""One serving engine seen by its users: health, its model, and streamed completions, over TCP or a Unix socket.

What a response took is counted by token ids, because one piece of the stream may bring several tokens, or text of none.
Every request has a connection of its own, as users have: a server closes idle ones, and a request sent just then would fail
through no fault of the server's.
This module decides neither when a request is sent nor how long it may take.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from rose_hpc.errors import ConfigError, EnvironmentFault, RoseError

HEALTH_POLL_S = 0.1
HEALTH_DEADLINE_S = 5.0
FAULT_CHARACTERS = 200
END_OF_STREAM = b"[DONE]"


class RequestFailed(RoseError):
    """The server answered, but not with the completion."""


@dataclass(frozen=True)
class Target:
    """Where the server listens. socket: path of a Unix socket, or None for TCP."""

    base_url: str
    socket: str | None = None


@dataclass(frozen=True)
class ServedModel:
    """max_total_tokens: prompt and output of one request together; None where the server does not say."""

    name: str
    max_total_tokens: int | None


def parse_target(url: str) -> Target:
    """`http://host:port` or `unix:/path/to.sock`. Raises ConfigError for anything else."""
    if url.startswith("unix:/"):
        return Target("http://localhost", url.removeprefix("unix:"))
    if re.fullmatch(r"https?://[^/\s]+/?", url):
        return Target(url.rstrip("/"))
    raise ConfigError("the server's address cannot be used", got=url, expected="http://HOST:PORT or unix:/PATH/TO.sock")


def open_session(target: Target) -> aiohttp.ClientSession:
    """A client without limits of its own on connections or time. Call it inside the event loop; close it."""
    timeout = aiohttp.ClientTimeout(total=None)
    if target.socket is not None:
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path=target.socket, limit=0, force_close=True)
    else:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(target.base_url, connector=connector, timeout=timeout)


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def await_model(session: aiohttp.ClientSession, deadline_s: float) -> ServedModel:
    """The model, as soon as the server is healthy. Raises EnvironmentFault at the deadline, with what stood in the way."""
    fault = "no answer"
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    await _get(session, "/health")
                    return _served_model(await _get(session, "/v1/models"))
                except (aiohttp.ClientError, OSError, RequestFailed) as error:
                    fault = describe(error)
                await asyncio.sleep(HEALTH_POLL_S)
    except TimeoutError as error:
        raise EnvironmentFault(
            f"the serving engine was not healthy within {deadline_s:g} s",
            got=fault,
            expected="GET /health and GET /v1/models answered with 200",
            remedy="start the server, or check the address",
        ) from error


async def _get(session: aiohttp.ClientSession, path: str) -> bytes:
    async with session.get(path, timeout=aiohttp.ClientTimeout(total=HEALTH_DEADLINE_S)) as response:
        await _refuse_errors(response)
        return await response.read()


def _served_model(body: bytes) -> ServedModel:
    try:
        model = json.loads(body)["data"][0]
        limit = model.get("max_model_len")
        return ServedModel(str(model["id"]), None if limit is None else int(limit))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            "GET /v1/models names no model", got=body[:FAULT_CHARACTERS], expected="an OpenAI-compatible server"
        ) from error


# ── one completion ───────────────────────────────────────────────────────────────────────────────────────────────────


class TokenTimes:
    """When the tokens of one response came, by the event loop's clock."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s = self.last_s = math.nan

    def arrived(self, count: int, now_s: float) -> None:
        """`count` tokens came together."""
        if count == 0:
            return
        if self.count == 0:
            self.first_s = now_s
        self.last_s = now_s
        self.count += count

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN for less than two tokens."""
        return (self.last_s - self.first_s) / (self.count - 1) if self.count > 1 else math.nan


class EventLines:
    """The data of server-sent events, from a stream cut anywhere. Lines may be of any length: the first event repeats the prompt."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events whose lines are now complete."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]


def completion_body(model: str, prompt_token_ids: list[int], output_tokens: int, cache_salt: str) -> bytes:
    """Body of a streamed completion of exactly output_tokens. cache_salt: requests of different salts share no prefix cache."""
    body = {
        "model": model,
        "prompt": prompt_token_ids,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }
    return json.dumps(body).encode()


async def complete(session: aiohttp.ClientSession, body: bytes, times: TokenTimes) -> None:
    """Send one completion and note its tokens until the stream ends.

    Raises RequestFailed (refused, or an error inside the stream), aiohttp.ClientError, OSError, ValueError (a piece that cannot be read).
    """
    loop, lines = asyncio.get_running_loop(), EventLines()
    async with session.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response:
        await _refuse_errors(response)
        async for piece in response.content.iter_any():
            now_s = loop.time()
            for event in lines.feed(piece):
                times.arrived(count_tokens(event), now_s)


async def _refuse_errors(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailed(f"HTTP {response.status}: {(await response.text())[:FAULT_CHARACTERS]}")


def count_tokens(event: bytes) -> int:
    """Tokens that one event brings. Raises RequestFailed for an error and for text without token ids, ValueError for what is no event."""
    if event == END_OF_STREAM:
        return 0
    message = json.loads(event)
    if not isinstance(message, dict) or "error" in message:
        raise RequestFailed(f"error in the stream: {event.decode(errors='replace')[:FAULT_CHARACTERS]}")
    return sum(_choice_tokens(choice) for choice in message.get("choices", []))


def _choice_tokens(choice: dict[str, Any]) -> int:
    ids = choice.get("token_ids")
    if ids is None and choice.get("text"):
        raise RequestFailed("the server sends text without token ids: it does not know return_token_ids")
    return 0 if ids is None else len(ids)


def describe(error: Exception) -> str:
    """One line: what was refused, else the kind of error and its text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RequestFailed) else f"{type(error).__name__}: {text}"
