"""Process of an agent: `python -m rose_hpc.coserve.agent_process SPEC.json`. A plain agent, or a lender where there is serving to protect.

Exit status: see agent.py and lender.py; 2 where the user can put it right.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from rose_hpc.config import read_spec
from rose_hpc.coserve.agent import Agent
from rose_hpc.coserve.engine import MAX_SOCKET_PATH_BYTES
from rose_hpc.coserve.lender import Lender
from rose_hpc.coserve.specs import AgentSpec
from rose_hpc.errors import RoseError
from rose_hpc.http_api import stop_signals
from rose_hpc.lifeline import die_with_parent, report_failure


def socket_folder() -> Path:
    """A fresh folder of mode 0700 whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="rose-"))
    if len(str(folder)) + 1 + len(f"{'x' * 64}.sock") <= MAX_SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()  # TMPDIR lies too deep
    return Path(tempfile.mkdtemp(prefix="rose-", dir="/tmp"))


async def run_agent(spec: AgentSpec) -> int:
    """Run an agent in a folder of its own; the exit status."""
    spec.logs_dir.mkdir(parents=True, exist_ok=True)
    folder = socket_folder()
    try:
        if spec.serving is not None:
            return await Lender(spec, folder).run()
        return await Agent(spec, folder).run(stop_signals())
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what a killed vLLM process was still writing may appear meanwhile


def main() -> int:
    """Entry point; the exit status."""
    die_with_parent()
    try:
        return asyncio.run(run_agent(read_spec(Path(sys.argv[1]), AgentSpec)))
    except RoseError as error:
        return report_failure(error)


if __name__ == "__main__":
    sys.exit(main())
