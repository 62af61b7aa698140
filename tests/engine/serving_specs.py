"""What a serving engine is told, where a test does not care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose_hpc.config import EngineConfig, GateConfig, SloConfig
from rose_hpc.coserve.specs import ServingSpec


def serving_spec(folder: Path, **changes: Any) -> ServingSpec:
    """Everything in one folder, on the first core."""
    values = {
        "model_dir": folder,
        "socket": folder / "serving.sock",
        "board": folder / "board",
        "engine": EngineConfig(),
        "slo": SloConfig(),
        "gate": GateConfig(),
        "device_cpus": [0],
    }
    return ServingSpec(**values | changes)
