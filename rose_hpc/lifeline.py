"""How a process of ours ends: with its parent, and saying why.

No orphans: a process asks the kernel to end it when its parent ends, however the parent ends (prctl(2) PR_SET_PDEATHSIG).
The signal is sent when the parent THREAD that forked us exits, so spawn from a thread that lives as long as the process.

    python -m rose_hpc.lifeline COMMAND …       become COMMAND, which then dies with the parent although it is not ours

A failure's last words are one JSON line on standard error, which whoever supervises the process can find in its log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from rose_hpc.errors import RoseError

_PR_SET_PDEATHSIG = 1
_PARENT_VARIABLE = "ROSE_HPC_PARENT_PID"


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `how` to this process when its parent exits; survives exec. Ends now if the parent is gone already.

    Whoever starts the process tells it its own pid in the environment (`parent_variable`): a parent that dies while the child is
    still importing cannot be noticed otherwise, since a child may rightly belong to PID 1 (in a container).
    """
    told = os.environ.pop(_PARENT_VARIABLE, None)  # not for our children: their parent is another
    parent = os.getppid() if told is None else int(told)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def parent_variable() -> dict[str, str]:
    """Environment for a child that this process starts directly, and that calls `die_with_parent`."""
    return {_PARENT_VARIABLE: str(os.getpid())}


def first_to_go(pid: int | None = None) -> None:
    """Have the kernel end this process, or that one, before others when memory runs out; its children inherit it (proc(5))."""
    with suppress(OSError):
        Path(f"/proc/{'self' if pid is None else pid}/oom_score_adj").write_text("1000")


def report_failure(error: RoseError) -> int:
    """Write the last words; returns the exit status that goes with them."""
    print(json.dumps({"error": str(error), "exit": error.exit_code}), file=sys.stderr, flush=True)
    return error.exit_code


def last_words(log_text: str) -> str | None:
    """The last failure reported in a log, or None."""
    for line in reversed(log_text.splitlines()):
        if line.startswith('{"error":'):
            try:
                return str(json.loads(line)["error"])
            except (ValueError, KeyError):
                continue
    return None


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
