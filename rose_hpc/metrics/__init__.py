"""Metrics: HDF5 files written by one process per attempt, read as pandas frames.

    client = MetricsClient(run_dir, next_attempt(run_dir))      the owner's side, writer.py
    frames = Run("runs/quickstart")                             the reader's side, run.py

Imported on first use: the writer's process must not wait for pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose_hpc.metrics.files import next_attempt
    from rose_hpc.metrics.run import Run
    from rose_hpc.metrics.writer import MetricsClient

__all__ = ["MetricsClient", "Run", "next_attempt"]

_HOMES = {"MetricsClient": "writer", "Run": "run", "next_attempt": "files"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
