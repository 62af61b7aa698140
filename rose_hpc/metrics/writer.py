"""The metrics writer, a process of its own, and the client through which its owner records rows.

    owner: MetricsClient.record ─▶ bounded queue ─▶ one thread ─▶ pipe ─▶ writer: batch ─▶ HDF5, at most FLUSH_S later

Invariants
- The owner never waits for the disk: a full queue or a dead writer costs rows, which are counted, never time or an exception.
- The pipe carries JSON lines {"table", "row"}, the row's values in column order. End of file means: write the rest, exit 0.
- Signals meant for the run (Ctrl-C, scancel) do not end the writer; the end of its owner does. So the owner's last words are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

from rose_hpc.errors import UsageError
from rose_hpc.metrics.files import TableFile, metrics_file, next_attempt
from rose_hpc.metrics.schema import TABLES, MetricsError, Value, table

__all__ = ["MetricsClient", "main", "next_attempt"]

FLUSH_S = 0.5  # longest time that a row waits for its batch; the promise to readers is 1 s, the rest is for the write itself
OWNER_CHECK_S = 1.0  # how often an idle writer looks whether its owner lives: a forked child may keep the pipe open after it
READ_BYTES = 1 << 18
QUEUE_ROWS = 1 << 16
BATCH_ROWS = 1 << 10  # rows per write to the pipe
KILLED_S = 5.0  # a process in uninterruptible sleep outlives its SIGKILL; we do not wait for ever

Record = tuple[str, list[Value]]


# ── the owner's side ─────────────────────────────────────────────────────────────────────────────────────────────────


class MetricsClient:
    """Starts the writer of one attempt and feeds it.

        new ──start()──▶ writing ──close()──▶ closed
                            └── the writer ends by itself ──▶ failed: rows are dropped and counted, the run goes on

    failed: None, or what befell the writer. dropped: rows that are certainly not in the file; up to 1 s of rows more may be
    lost where the writer was killed.
    """

    def __init__(self, run_dir: Path, attempt: int, path: Path | None = None) -> None:
        """path: the file to write, if it shall not be the run's metrics file. The writer's log is logs/STEM-writer.log beside the file."""
        self.path = metrics_file(run_dir, attempt) if path is None else path
        self.attempt = attempt
        self._log = self.path.parent / "logs" / f"{self.path.name.split('.')[0]}-writer.log"
        self._records: queue.Queue[Record | None] = queue.Queue(QUEUE_ROWS)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._fault: str | None = None
        self._closed = False
        self._log_start = 0  # bytes of the log that earlier attempts wrote
        self._refused = self._unsent = 0  # counted by the recording thread and by the pumping thread respectively

    def start(self, started_s: float | None = None) -> None:
        """Spawn the writer; rows recorded before are kept. Raises UsageError where this attempt has a file already.

        started_s: Unix time from which the attempt's wall time counts; the present where not given.
        """
        if self.path.exists():
            raise UsageError(f"{self.path} exists already; metrics are never overwritten", remedy="name another file, or the next attempt")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rose_hpc.metrics.writer", "--file", str(self.path), "--attempt", str(self.attempt)]
        command += ["--started-s", repr(time.time() if started_s is None else started_s)]
        with self._log.open("ab") as stderr:
            self._log_start = stderr.tell()
            # Its own process group: a Ctrl-C at the terminal must not reach it before it has learnt to ignore it.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": stderr}
            self._process = subprocess.Popen(command, process_group=0, **pipes)
        self._thread = threading.Thread(target=self._pump, args=(self._process.stdin,), name="metrics", daemon=True)
        self._thread.start()

    def record(self, table_name: str, /, **row: object) -> None:
        """Add one row. Never blocks. `time_s` is the present where the table has it and the row does not.

        Raises MetricsError where the row does not fit the schema: a mistake of the caller, not of the writer.
        """
        chosen = table(table_name)
        if "time_s" in chosen.column_names:
            row.setdefault("time_s", time.time())
        values = chosen.row(row)
        if self._closed or self._fault is not None:
            self._refused += 1
            return
        try:
            self._records.put_nowait((table_name, values))
        except queue.Full:
            self._refused += 1

    @property
    def pid(self) -> int | None:
        """The writer's process id, once started."""
        return self._process.pid if self._process else None

    @property
    def backlog(self) -> int:
        """Rows that wait for the writer; whoever has many to record lets it catch up, so that none is dropped."""
        return self._records.qsize()

    @property
    def dropped(self) -> int:
        stranded = self._records.qsize() if self._fault is not None else 0
        return self._refused + self._unsent + stranded

    @property
    def failed(self) -> str | None:
        status = self._process.poll() if self._process else None
        if status is not None and (status != 0 or not self._closed):
            return f"the metrics writer ended with status {status}: {self._last_words()}"
        return self._fault

    def close(self, deadline_s: float = 10.0) -> None:
        """Have every row written and the writer gone; it is killed at the deadline. Blocks: call it from a thread in asyncio."""
        if self._process is None or self._thread is None or self._closed:
            return
        self._closed = True
        end_s = time.monotonic() + deadline_s
        try:
            if self._fault is None:
                self._records.put(None, timeout=deadline_s)
            self._process.wait(max(0.0, end_s - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            self._kill(f"the metrics writer had not finished within {deadline_s:g} s and was killed")
        self._thread.join(KILLED_S)

    def _kill(self, why: str) -> None:
        self._fault = why
        if self._process:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)

    def _pump(self, pipe: IO[bytes]) -> None:
        """Body of the thread: queue to pipe until the end mark, then close the pipe, which ends the writer."""
        batch: list[Record] = []
        more = True
        try:
            with pipe:
                while more:
                    batch, more = self._next_batch()
                    pipe.write(b"".join(_line(record) for record in batch))
                    pipe.flush()
        except OSError as error:
            self._unsent += len(batch)
            self._fault = f"the pipe to the metrics writer broke: {error}"

    def _next_batch(self) -> tuple[list[Record], bool]:
        """What is queued, waiting for the first record, and whether more may follow."""
        batch: list[Record] = []
        record = self._records.get()
        while record is not None:
            batch.append(record)
            if len(batch) == BATCH_ROWS or self._records.empty():
                return batch, True
            record = self._records.get()
        return batch, False

    def _last_words(self) -> str:
        try:
            lines = self._log.read_bytes()[self._log_start :].splitlines()
        except OSError:
            lines = []
        return lines[-1].decode(errors="replace") if lines else "it left no message"


def _line(record: Record) -> bytes:
    return json.dumps({"table": record[0], "row": record[1]}).encode() + b"\n"


def record_event(metrics: MetricsClient, kind: str, subject: str, detail: str) -> None:
    """Now, a row of the table `events`."""
    metrics.record("events", time_s=time.time(), kind=kind, subject=subject, detail=detail)


# ── the writer's process ─────────────────────────────────────────────────────────────────────────────────────────────


class LineStream:
    """Complete lines from a pipe. `ended` once the pipe is at its end or its owner is gone."""

    def __init__(self, source_fd: int, owner_pid: int) -> None:
        self._source_fd, self._owner_pid = source_fd, owner_pid
        self._rest = b""
        self.ended = False

    def read(self, timeout_s: float) -> list[bytes]:
        """What came within timeout_s, perhaps nothing. A line that its owner died over is dropped."""
        if not select.select([self._source_fd], [], [], timeout_s)[0]:
            self.ended = os.getppid() != self._owner_pid
            return []
        chunk = os.read(self._source_fd, READ_BYTES)
        self.ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


def _parse(line: bytes) -> Record:
    try:
        message = json.loads(line)
        return table(message["table"]).name, message["row"]
    except (ValueError, KeyError, TypeError) as error:
        raise MetricsError("the metrics writer was sent a line that is no record", got=line[:200], expected='{"table", "row"}') from error


class Batch:
    """Rows waiting to be written together, and until when they may wait."""

    def __init__(self) -> None:
        self._rows: dict[str, list[list[Value]]] = defaultdict(list)
        self._due_s: float | None = None

    def add(self, lines: list[bytes], now_s: float) -> None:
        """Raises MetricsError at the first line that is no record; the lines before it are in the batch."""
        if lines and self._due_s is None:
            self._due_s = now_s + FLUSH_S
        for line in lines:
            name, row = _parse(line)
            self._rows[name].append(row)

    def wait_s(self, now_s: float) -> float:
        """How long the writer may sleep. 0: flush now."""
        return OWNER_CHECK_S if self._due_s is None else max(0.0, self._due_s - now_s)

    def flush(self, file: TableFile) -> None:
        rows, self._rows, self._due_s = self._rows, defaultdict(list), None
        for name in TABLES:
            if rows[name]:
                file.append(TABLES[name], rows[name])


def follow(stream: LineStream, file: TableFile) -> None:
    """Append what comes until the stream ends. Rows that came are written even when a later line cannot be read."""
    batch = Batch()
    try:
        while not stream.ended:
            batch.add(stream.read(batch.wait_s(time.monotonic())), time.monotonic())
            if batch.wait_s(time.monotonic()) == 0:
                batch.flush(file)
    finally:
        batch.flush(file)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process, which it ends itself on an error. Exit status 0: every row that came is in the file."""
    parser = argparse.ArgumentParser(prog="python -m rose_hpc.metrics.writer", description="Append JSON lines to a metrics file.")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--started-s", type=float, default=time.time(), help="start of the attempt, Unix time")
    options = parser.parse_args(arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        file = TableFile.create(options.file, options.attempt, options.started_s)
        with contextlib.closing(file):
            follow(LineStream(sys.stdin.fileno(), os.getppid()), file)
    except Exception as error:  # the edge of the process: the owner reads the last line of the log
        traceback.print_exc()
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        os._exit(1)  # no teardown: after a failed write (disk full) HDF5 crashes when its objects are freed, and hides the reason
    return 0


if __name__ == "__main__":
    sys.exit(main())
