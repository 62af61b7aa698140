"""What every HTTP API of ours has in common: bearer-token check, typed MessagePack bodies, faults, an ephemeral port.

aiohttp on both sides: a step makes hundreds of small requests, so the cost per request matters.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from rose_hpc.errors import ControlError, EnvironmentFault
from rose_hpc.messages import MAX_BODY_BYTES, TOKEN_HEADER, Fault, decode, encode

CONTENT_TYPE = "application/msgpack"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def application(token: str, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
    """An empty application: every route needs the token, a malformed message is answered 400."""
    return web.Application(middlewares=[_authorised(token), _faults], client_max_size=max_body_bytes)


def _authorised(token: str):  # type: ignore[no-untyped-def]
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, expected):
            return fault(401, "wrong or missing bearer token")
        return await handler(request)

    return check


@web.middleware
async def _faults(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ControlError as error:
        return fault(400, str(error))


async def read(request: web.Request, kind: type[T]) -> T:
    """The body as a message of the given type. Raises ControlError, which is answered 400."""
    return decode(await request.read(), kind)


def answer(message: msgspec.Struct | None = None, status: int = 200) -> web.Response:
    """A message, or an empty answer."""
    if message is None:
        return web.Response(status=204)
    return web.Response(status=status, body=encode(message), content_type=CONTENT_TYPE)


def fault(status: int, what: str) -> web.Response:
    """A refusal with its reason."""
    return answer(Fault(what), status)


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve on host:port (0: any free port). Returns the runner, to be cleaned up by its owner, and the base URL.

    Raises EnvironmentFault when the port is taken or the host is not ours.
    """
    listener = bind(host, port)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    address = f"[{host}]" if ":" in host else host
    return runner, f"http://{address}:{listener.getsockname()[1]}"


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises EnvironmentFault saying what is in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EnvironmentFault(
            f"cannot listen on {host}:{port}",
            got=error.strerror,
            expected="a free port on this machine",
            remedy="set control.port = 0 for any free port, or choose another",
        ) from error
    return listener
