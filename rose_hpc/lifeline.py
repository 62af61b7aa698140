"""No orphans: a process asks the kernel to end it when its parent ends, however the parent ends.

Linux prctl(2) PR_SET_PDEATHSIG. The signal is sent when the parent THREAD that forked us exits, so spawn from a thread
that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `how` to this process when its parent exits; exit now if the parent is already gone."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent or parent == 1:
        os.kill(os.getpid(), how)
