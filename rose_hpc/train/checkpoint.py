"""Checkpoints of the sharded trainer: masters, optimiser state and counters. No rank gathers the model.

    CHECKPOINTS/
      step-000010/            appears whole, by rename
        .metadata *.distcp    torch.distributed.checkpoint: every rank writes its shards
        progress.json         counters, and the name and size of every other file
      .step-000020.partial/   being written or deleted, or left so by a killed run; swept by the next save

    all ranks write into .partial ── barrier ── rank 0: progress.json, rename, prune ── barrier

Invariants
- A folder is complete only when progress.json is there and every file that it lists has its size: a folder that was cut short,
  copied in part or made by something else is ignored, never loaded and never deleted.
- A complete checkpoint is never written again: saving the same progress twice does nothing. It is deleted only when
  `kept` newer ones are complete.
- Rank 0 decides what is saved and loaded and tells the others: two nodes may see a shared file system differently.

A checkpoint can be loaded by another number of ranks; the result then agrees with the saved state bit for bit, but later steps
reduce in another order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rose_hpc.errors import EnvironmentFault, RunFailed

FORMAT = "rose_hpc.checkpoint/1"
PROGRESS_FILE = "progress.json"
_FOLDER = re.compile(r"step-(\d{6,})")
_NONE = -1


@dataclass(frozen=True)
class Progress:
    """step: training steps completed. version: the policy version they gave. seed: of the run."""

    step: int
    version: int
    seed: int


class Checkpoints:
    """One rank's view of the run's checkpoints folder. `save` and `load_newest` are collective."""

    def __init__(self, folder: Path, kept: int, rank: int) -> None:
        self._folder, self._kept, self._rank = folder, kept, rank

    def save(self, policy: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Write a checkpoint; it is complete when this returns on any rank. Raises EnvironmentFault where its name is taken."""
        final = self._folder / folder_name(progress.step)
        partial = _hidden(final)
        if self._told_by_rank_0(lambda: int(read_progress(final) == progress)):
            return
        if self._rank == 0:
            self._make_room(final, partial)
        dist.barrier()
        dcp.save(_state(policy, optimizer), checkpoint_id=partial)
        dist.barrier()
        if self._rank == 0:
            complete(partial, final, progress)
            self._prune()
        dist.barrier()

    def load_newest(self, policy: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
        """Restore the newest complete checkpoint in place; None where there is none. Raises RunFailed when another rank cannot see it."""
        step = self._told_by_rank_0(lambda: max(complete_steps(self._folder), default=_NONE))
        if step == _NONE:
            return None
        folder = self._folder / folder_name(step)
        progress = read_progress(folder)
        if progress is None:
            raise RunFailed(f"rank {self._rank} does not see the checkpoint of rank 0", got=f"no complete {folder}")
        state = _state(policy, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(policy, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"])
        return progress

    def _told_by_rank_0(self, look: Callable[[], int]) -> int:
        seen = torch.tensor(look() if self._rank == 0 else _NONE)
        dist.broadcast(seen, src=0)
        return int(seen.item())

    def _make_room(self, final: Path, partial: Path) -> None:
        if final.exists():
            raise EnvironmentFault(
                f"{final} is in the way of a checkpoint", got=read_progress(final), remedy="move it away and resume the run"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def _prune(self) -> None:
        for step in complete_steps(self._folder)[: -self._kept]:
            old = self._folder / folder_name(step)
            shutil.rmtree(old.rename(_hidden(old)))  # a kill while deleting leaves what the next save sweeps


def folder_name(step: int) -> str:
    """step-000010; sorts by step up to a million of them."""
    return f"step-{step:06d}"


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def complete(partial: Path, final: Path, progress: Progress) -> None:
    """Record the counters and the files in a fully written folder, then give it its name."""
    sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
    record = {"format": FORMAT, **asdict(progress), "files": sizes}
    with (partial / PROGRESS_FILE).open("w") as f:
        json.dump(record, f, indent=1)
        f.flush()
        os.fsync(f.fileno())  # before the rename shows it; torch has synced the other files
    partial.rename(final)


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    found = (_FOLDER.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(m[1]) for m in found if m and read_progress(folder / m[0]) is not None)


def read_progress(folder: Path) -> Progress | None:
    """The counters of a complete checkpoint; None for any other folder."""
    try:
        record = json.loads((folder / PROGRESS_FILE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
        known = record["format"] == FORMAT and sizes == record["files"] and folder.name == folder_name(record["step"])
        return Progress(record["step"], record["version"], record["seed"]) if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _state(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    return {"policy": model_state, "optimizer": optimizer_state}
