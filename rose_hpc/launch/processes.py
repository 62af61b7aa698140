"""Owns the processes of a run on this machine: starts, watches, stops and reaps them. No orphan on any path.

Each child has its own process group, so that Ctrl-C at the terminal reaches the launcher alone, which then stops all in good
order; and each dies with the launcher (lifeline.py), so that SIGKILL of the launcher leaves nothing either.

Standard output and error of a child go to logs/NAME.log, appended per attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_hpc.lifeline import last_words, parent_variable

TERM_DEADLINE_S = 12.0  # an agent needs up to 5 s for its engines, and they for theirs
KILL_DEADLINE_S = 5.0
LOG_TAIL_LINES = 15


@dataclass
class Child:
    """One process and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def failure(self) -> str:
        """Its last words, or the end of its log."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        return last_words(text) or "\n".join(text.splitlines()[-LOG_TAIL_LINES:]) or "(it wrote nothing)"


class Supervisor:
    """All children of one launcher. Use as a context manager: leaving it stops whatever still runs."""

    def __init__(
        self, logs_dir: Path, env: Mapping[str, str] | None = None, cpus: set[int] | None = None, shared_fds: Sequence[int] = ()
    ) -> None:
        """cpus: the cores that the children may use; None: all of ours. shared_fds: what they keep open until they end."""
        self._cpus = cpus
        self._logs_dir, self._env = logs_dir, {**os.environ, "PYTHONUNBUFFERED": "1", **parent_variable(), **(env or {})}
        self._shared_fds = tuple(shared_fds)
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start one child in a group of its own."""
        log = self._logs_dir / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**self._env, **(env or {})},
                pass_fds=self._shared_fds,
            )
            self._children[name] = Child(name, process, log, out.tell())
        if self._cpus is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, self._cpus)  # before it has threads or children, which inherit it
        return self._children[name]

    def start_module(self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module arguments…`."""
        return self.start(name, [sys.executable, "-m", module, *arguments], env)

    def child(self, name: str) -> Child:
        return self._children[name]

    def ended(self) -> list[Child]:
        """Children that have exited, whatever their status."""
        return [c for c in self._children.values() if c.process.poll() is not None]

    def failed(self) -> list[Child]:
        """Children that have exited with a status other than 0; those that the user can put right (2) first, killed ones last."""
        return sorted(
            (c for c in self.ended() if c.process.returncode != 0), key=lambda c: (c.process.returncode != 2, c.process.returncode < 0)
        )

    def wait_for(self, child: Child, deadline_s: float) -> bool:
        """Wait for one child to exit by itself. False when the deadline came first."""
        try:
            child.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_ended(self, deadline_s: float) -> bool:
        """Wait for all children to exit by themselves. False when the deadline came first."""
        end = time.monotonic() + deadline_s
        while len(self.ended()) < len(self._children):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def stop(self, name: str, deadline_s: float) -> None:
        """SIGTERM to one child and wait for it, because others still serve it; what is left is `stop_all`'s."""
        child = self._children[name]
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
            self.wait_for(child, deadline_s)

    def stop_all(self) -> None:
        """SIGTERM to every child that runs, SIGKILL to the groups that are left after the deadline; all are reaped."""
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        if not self.wait_ended(TERM_DEADLINE_S):
            self._kill_groups()
            self.wait_ended(KILL_DEADLINE_S)
        self._kill_groups()

    def _kill_groups(self) -> None:
        """SIGKILL to what is left of every child's group: also to grandchildren whose parent has already gone."""
        for child in self._children.values():
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
