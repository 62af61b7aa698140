"""A run's side of a lease: which agents to ask, ask one, and keep what was granted.

    entries of the registry ──can_grant──▶ ask ─▶ LeaseGranted ─▶ until_up, renewing ─▶ AgentUp ─▶ … renew … ─▶ release

Once the engine is up, any client of agents works with the agent's URL and the lease's token.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from rose_hpc.coserve.lease_messages import LeaseAsk, LeaseGranted, LeaseState
from rose_hpc.coserve.registry import AgentEntry
from rose_hpc.errors import ControlError
from rose_hpc.http_api import CONTENT_TYPE
from rose_hpc.messages import TOKEN_HEADER, AgentStatus, AgentUp, Fault, LeaseRenewal, decode, encode

REQUEST_DEADLINE_S = 5.0
POLL_S = 0.2

T = TypeVar("T")


def can_grant(entry: AgentEntry, ask: LeaseAsk) -> bool:
    """Whether the agent may grant it now, as far as its entry tells; whether it does, only it can tell."""
    fits = int(ask.engine.get("tensor_parallel", 1)) <= entry.devices and ask.ceiling_frac <= entry.max_frac
    return entry.state == "free" and fits and Path(os.path.realpath(ask.model)) in entry.models


def lending_most(entries: Iterable[AgentEntry]) -> list[AgentEntry]:
    """In the order in which to ask: those that lend most come first, then by name."""
    return sorted(entries, key=lambda e: (-e.max_frac * e.devices, e.name))


class Refusal(ControlError):
    """The agent refused, or does not answer: status None."""

    def __init__(self, what: str, *, status: int | None = None, got: object = None, expected: object = None) -> None:
        super().__init__(what, got=got, expected=expected)
        self.status = status


class LeaseClient:
    """Talks to one agent. Use as an async context manager; it does not release on leaving."""

    def __init__(self, url: str) -> None:
        self.url, self._token, self._ttl_s = url, "", 0.0
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> LeaseClient:
        timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
        self._session = aiohttp.ClientSession(base_url=self.url, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def ask(self, key: str, ask: LeaseAsk) -> LeaseGranted:
        """A lease, which this client then holds. Raises Refusal."""
        granted = decode(await self._request("POST", "/v1/leases", key, ask), LeaseGranted)
        self._token, self._ttl_s = granted.token, granted.ttl_s
        return granted

    async def renew(self, ttl_s: float) -> AgentStatus:
        """Raises Refusal: 410 once the lease is over."""
        return decode(await self._request("POST", "/v1/lease", self._token, LeaseRenewal(ttl_s)), AgentStatus)

    async def state(self) -> LeaseState:
        """Raises Refusal."""
        return decode(await self._request("GET", "/v1/lease", self._token), LeaseState)

    async def until_up(self, deadline_s: float) -> AgentUp:
        """Returns when the engine answers, renewing meanwhile. Raises Refusal: the lease is over; TimeoutError: after the deadline."""
        async with asyncio.timeout(deadline_s):
            renewed_s = time.monotonic()
            while not (await self.state()).up:
                if time.monotonic() - renewed_s > self._ttl_s / 4:
                    await self.renew(self._ttl_s)
                    renewed_s = time.monotonic()
                await asyncio.sleep(POLL_S)
            return decode(await self._request("GET", "/v1/health", self._token), AgentUp)

    async def release(self) -> None:
        """Give it back. Raises Refusal."""
        await self._request("POST", "/v1/stop", self._token)

    async def _request(self, method: str, path: str, token: str, message: msgspec.Struct | None = None) -> bytes:
        headers = {TOKEN_HEADER: f"Bearer {token}", "Content-Type": CONTENT_TYPE}
        body = None if message is None else encode(message)
        try:
            async with self._session.request(method, path, data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Refusal(f"agent at {self.url}: no answer to {path}", got=repr(error)) from error
        if response.status >= 400:
            raise Refusal(f"agent at {self.url} refused {path}", status=response.status, got=decode(answer, Fault).what)
        return answer
