"""Shared memory that vLLM's tensor-parallel CPU workers leave behind: 4 MiB a worker, on SIGTERM as on SIGKILL.

Its name begins with that of the workers' rendezvous file, which lies in their TMPDIR for as long as that is there.
"""

from __future__ import annotations

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def worker_groups(folder: Path) -> set[str]:
    """Names of the worker groups of engines whose TMPDIR is in this folder, at any depth: vLLM's rendezvous files."""
    return {path.name for path in folder.rglob("vllm_dist_*")}


def remove_shared_memory(groups: set[str]) -> None:
    """Unlink what workers of these groups have left; nothing of them may run any more."""
    for group in groups:
        for segment in SHARED_MEMORY.glob(f"{group}*"):
            segment.unlink(missing_ok=True)
