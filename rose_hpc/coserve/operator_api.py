"""The operator's own way to an agent: a Unix socket that only the agent's user can open, and the client of `rose-hpc lend`.

    GET  /v1/lend → LendStatus          POST /v1/lend LendChange → LendStatus, once the device is free where a lease was revoked

The socket lies in a folder of mode 0700 and has mode 0600: who may open it is the operator, so that no token is asked for.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from aiohttp import web

from rose_hpc.coserve.lease_messages import LendChange, LendStatus
from rose_hpc.coserve.lending import CLEARING_DEADLINE_S, Lending
from rose_hpc.errors import ControlError
from rose_hpc.http_api import received, refusals, reply
from rose_hpc.messages import Fault, decode, encode

ROUTE = "/v1/lend"
SOCKET_MODE = 0o600


def operator_app(lending: Lending) -> web.Application:
    """The application; see the module's docstring for its routes."""

    async def status(request: web.Request) -> web.Response:
        return reply(lending.status())

    async def change(request: web.Request) -> web.Response:
        return reply(await lending.change(await received(request, LendChange)))

    app = web.Application(middlewares=[refusals])
    app.router.add_get(ROUTE, status)
    app.router.add_post(ROUTE, change)
    return app


def tell(socket: Path, change: LendChange | None = None) -> LendStatus:
    """Change an agent's terms, None: only ask. Raises ControlError: nobody listens there, or it refused."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://agent", timeout=CLEARING_DEADLINE_S + 5) as http:
            response = http.get(ROUTE) if change is None else http.post(ROUTE, content=encode(change))
    except httpx.TransportError as error:
        raise ControlError(
            "the agent does not answer", got=f"{socket}: {error}", remedy="run this on the agent's machine, as the user who started it"
        ) from error
    if response.status_code >= 400:
        raise ControlError("the agent refused", got=decode(response.content, Fault).what)
    return decode(response.content, LendStatus)
