"""Writers that no test leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose_hpc.metrics.writer import MetricsClient


@pytest.fixture
def open_client(tmp_path: Path) -> Iterator[Callable[..., MetricsClient]]:
    """Starts the writer of an attempt; closes it after the test."""
    clients: list[MetricsClient] = []

    def opened(attempt: int = 0, run_dir: Path = tmp_path) -> MetricsClient:
        clients.append(MetricsClient(run_dir, attempt))
        clients[-1].start()
        return clients[-1]

    yield opened
    for client in clients:
        client.close(5)
