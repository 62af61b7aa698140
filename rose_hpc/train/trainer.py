"""Process of one trainer rank: `python -m rose_hpc.train.trainer SPEC.json`.

Ends when the controller says Stop (0), on an error (its exit status), on SIGTERM (143), and with its parent. It ignores
SIGINT, which a terminal sends to every process of the run: the controller decides how to stop, and stops its ranks.
While a collective waits for a silent peer, Python cannot handle SIGTERM before that collective's deadline; whoever started
the rank follows up with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from rose_hpc.config import read_spec
from rose_hpc.control import WorkerChannel
from rose_hpc.errors import RoseError, RunFailed, UsageError
from rose_hpc.lifeline import die_with_parent, report_failure
from rose_hpc.train.spec import TrainerSpec
from rose_hpc.train.worker import run_rank
from rose_hpc.weights.publisher import WeightPublisher

TERMINATED = 128 + signal.SIGTERM


def main(arguments: list[str]) -> int:
    """Run the rank described by the spec file; the exit status. Every error ends here, on standard error."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_once)
    try:
        if len(arguments) != 1:
            raise UsageError("wrong arguments", got=arguments, expected="python -m rose_hpc.train.trainer SPEC.json")
        _run(read_spec(Path(arguments[0]), TrainerSpec))
    except RoseError as error:
        return report_failure(error)
    except Exception as error:
        traceback.print_exc()
        return report_failure(RunFailed("a trainer rank failed", got=f"{type(error).__name__}: {error}"))
    return 0


def _run(spec: TrainerSpec) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a rank never downloads
    torch.set_num_threads(spec.train.threads)
    channel = WorkerChannel(spec.control_dir, f"trainer-{spec.rank}", spec.lease_ttl_s)
    run_rank(spec, channel, lambda policy: _publisher(spec, policy))


def _publisher(spec: TrainerSpec, policy: nn.Module) -> WeightPublisher:
    return WeightPublisher(
        policy,
        spec.arena,
        spec.rank,
        spec.world_size,
        spec.wire_dtype,
        spec.retained_versions,
        spec.bucket_bytes,
        threads=spec.train.threads,
    )


def _exit_once(signum: int, frame: FrameType | None) -> None:
    """Unwind the stack, so that the process group is destroyed; a second SIGTERM must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
