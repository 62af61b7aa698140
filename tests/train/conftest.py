"""A world of one rank inside the test process, and what a world of two found in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import CPU

from rose_hpc.train.policy import process_group

DEADLINE_S = 120


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is rank 0 of 1."""
    torch.set_num_threads(1)
    with process_group(tmp_path_factory.mktemp("alone") / "rendezvous", 0, 1, CPU, timeout_s=30):
        yield


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two_ranks.py found, by rank."""
    folder = tmp_path_factory.mktemp("two")
    script = str(Path(__file__).with_name("two_ranks.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, str(folder)], env=environment, timeout=DEADLINE_S, check=True)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
