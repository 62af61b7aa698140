"""What the tests here share. The engine tests need a rollout engine and its policies: the harness of tests/engine."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))


@pytest.fixture(scope="module")
def plugin() -> Any:
    """The serving plug-in, which imports vLLM."""
    from rose_hpc.coserve import serving_plugin

    return serving_plugin


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Any]:
    """A machine with a stand-in of MPS's control daemon (mps_harness.Node)."""
    from mps_harness import Node, make_executable

    with contextlib.closing(Node(make_executable(tmp_path / "bin"))) as node:
        yield node


@pytest.fixture
def place(node: Any) -> Iterator[Any]:
    """Of a serving engine on that machine (mps_place.Place)."""
    from mps_place import Place

    with tempfile.TemporaryDirectory(prefix="rose-test-") as folder:  # short: AF_UNIX allows 107 bytes
        yield Place(Path(folder), node)
