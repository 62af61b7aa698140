"""Which Python has the packages of other people's environments: ours, the one that ROSE_HPC_ENVS_PYTHON names, or .venv-envs/.

python -m venv .venv-envs
.venv-envs/bin/pip install msgspec numpy pydantic 'reasoning-gym==0.1.25' 'alfworld==0.4.2' 'verifiers==0.3.1'
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def python_with(module: str) -> Path:
    """An interpreter that can import the module; skips the test where there is none."""
    beside = REPOSITORY / ".venv-envs" / "bin" / "python"
    for python in (sys.executable, os.environ.get("ROSE_HPC_ENVS_PYTHON", str(beside))):
        if Path(python).is_file() and subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120).returncode == 0:
            return Path(python)
    pytest.skip(f"{module} is not installed; tests/envs/envs_python.py says how to test with it")


def run_there(python: Path, script: str, *arguments: str) -> str:
    """Standard output of a script run by that interpreter."""
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
