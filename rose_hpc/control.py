"""The workers' side of the control plane: trainer ranks and relays poll the controller for commands and reply.

The controller publishes its address and the run's bearer token in RUN/control/ (mode 0700, files 0600). A worker that
cannot reach the controller for the lease TTL raises ControlError and ends: it never outlives its run.

    channel = WorkerChannel(Path("RUN/control"), "trainer-0", ttl_s=10)
    channel.hello(WorkerUp(world_size=2))
    channel.serve(handle)                      # handle(command) -> reply, until Stop
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rose_hpc.errors import ControlError, UsageError
from rose_hpc.messages import TOKEN_HEADER, Command, Reply, Stop, Stopped, WorkerFailed, WorkerUp, decode, encode

ADDRESS_FILE = "controller.json"
TOKEN_FILE = "token"
POLL_S = 2.0  # how long the controller may hold one poll
RETRY_S = 0.2
UNIX = "unix:"  # an address may be a Unix socket's path: the control plane of one machine's network namespaces


def make_token(control_dir: Path) -> str:
    """Create control_dir (0700) and a fresh bearer token in it (0600)."""
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    write_private(control_dir / TOKEN_FILE, token)
    return token


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 by temporary path and rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        f.write(text)
    temporary.replace(path)


def read_token(control_dir: Path) -> str:
    """The run's bearer token."""
    return (control_dir / TOKEN_FILE).read_text()


def publish_address(control_dir: Path, url: str) -> None:
    """Called by the controller once it listens."""
    write_private(control_dir / ADDRESS_FILE, json.dumps({"url": url}))


def read_address(control_dir: Path, deadline_s: float) -> str:
    """The controller's base URL; waits for the file. Raises ControlError after deadline_s."""
    end = time.monotonic() + deadline_s
    path = control_dir / ADDRESS_FILE
    while not path.exists():
        if time.monotonic() > end:
            raise ControlError("the controller has not published its address", got=f"no {path} after {deadline_s:g} s")
        time.sleep(0.05)
    return str(json.loads(path.read_text())["url"])


class WorkerChannel:
    """One worker's connection to the controller."""

    def __init__(self, control_dir: Path, worker_id: str, ttl_s: float, start_deadline_s: float = 60.0) -> None:
        self.worker_id, self._ttl_s = worker_id, ttl_s
        base = read_address(control_dir, start_deadline_s)
        headers = {TOKEN_HEADER: f"Bearer {read_token(control_dir)}"}
        transport = None
        if base.startswith(UNIX):
            transport, base = httpx.HTTPTransport(uds=base.removeprefix(UNIX)), "http://controller"
        self._http = httpx.Client(
            base_url=f"{base}/v1/workers/{worker_id}", headers=headers, timeout=POLL_S + ttl_s / 2, trust_env=False, transport=transport
        )

    def hello(self, message: WorkerUp) -> None:
        """Announce this worker."""
        self._post("/hello", encode(message))

    def next(self) -> Command | None:
        """The next command, or None when there was none within the poll. Raises ControlError after the TTL without an answer."""
        response = self._until_ttl(lambda: self._http.get("/next", params={"wait_s": POLL_S}))
        return None if response.status_code == 204 else decode(response.content, Command)  # type: ignore[arg-type]

    def reply(self, call_id: int, message: Reply) -> None:
        """Answer a command."""
        self._post(f"/replies/{call_id}", encode(message))

    def serve(self, handle: Callable[[Any], Reply]) -> None:
        """Handle commands until Stop. An exception is reported as WorkerFailed and raised again."""
        while True:
            command = self.next()
            if command is None:
                continue
            if isinstance(command, Stop):
                self.reply(command.call_id, Stopped())
                return
            try:
                reply = handle(command)
            except Exception as error:
                self.fail(error, command.call_id)
                raise
            self.reply(command.call_id, reply)

    def fail(self, error: Exception, call_id: int = -1) -> None:
        """Report an error, once and without insisting: this process is about to end. call_id −1: outside any command."""
        message = WorkerFailed(f"{type(error).__name__}: {error}", isinstance(error, UsageError))
        with contextlib.suppress(httpx.TransportError):
            self._http.post(f"/replies/{call_id}", content=encode(message))

    def _post(self, path: str, body: bytes) -> None:
        self._until_ttl(lambda: self._http.post(path, content=body))

    def _until_ttl(self, call: Callable[[], httpx.Response]) -> httpx.Response:
        end = time.monotonic() + self._ttl_s
        while True:
            try:
                response = call()
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise ControlError(
                        f"{self.worker_id}: the controller does not answer", got=error, expected=f"an answer within {self._ttl_s:g} s"
                    ) from error
                time.sleep(RETRY_S)
                continue
            if response.status_code >= 400:
                raise ControlError(f"{self.worker_id}: the controller refused", got=f"{response.status_code} {response.text[:200]}")
            return response
