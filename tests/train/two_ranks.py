"""One rank of a world of two, started by conftest.py: runs every scenario and saves what it found.

python two_ranks.py RANK FOLDER
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tiny import CPU, local_parameters, tiny_learner, tiny_rows

from rose_hpc.lifeline import die_with_parent
from rose_hpc.train.checkpoint import Checkpoints, Progress
from rose_hpc.train.policy import process_group

DEADLINE_S = 90
LENGTHS = [9, 30, 4, 17, 12, 22, 5]


def one_step(rank: int, lengths: list[int], **settings: object) -> dict:
    learner = tiny_learner(rank, 2, **settings)
    statistics = learner.train_step(0, tiny_rows(lengths))
    return {"statistics": asdict(statistics), "parameters": local_parameters(learner.policy)}


def straight(rank: int) -> dict:
    learner = tiny_learner(rank, 2)
    statistics = [asdict(learner.train_step(step, tiny_rows(LENGTHS, seed=step))) for step in range(4)]
    return {"statistics": statistics, "parameters": local_parameters(learner.policy)}


def resumed(rank: int, folder: Path) -> dict:
    first = tiny_learner(rank, 2)
    statistics = [asdict(first.train_step(step, tiny_rows(LENGTHS, seed=step))) for step in range(2)]
    Checkpoints(folder, 2, rank).save(first.policy, first.optimizer, Progress(2, 7, 5))
    second = tiny_learner(rank, 2)
    progress = Checkpoints(folder, 2, rank).load_newest(second.policy, second.optimizer)
    statistics += [asdict(second.train_step(step, tiny_rows(LENGTHS, seed=step))) for step in range(2, 4)]
    return {"statistics": statistics, "parameters": local_parameters(second.policy), "progress": asdict(progress)}


def run(rank: int, folder: Path) -> None:
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    with process_group(folder / "rendezvous", rank, 2, CPU, timeout_s=60):
        found = {
            "one step": one_step(rank, LENGTHS),
            "narrow": one_step(rank, LENGTHS, micro_batch_tokens=20),
            "one row": one_step(rank, [11]),
            "bfloat16": one_step(rank, LENGTHS, compute_dtype="bfloat16"),
            "straight": straight(rank),
            "resumed": resumed(rank, folder / "checkpoints"),
        }
    torch.save(found, folder / f"rank{rank}.pt")


def main(folder: Path) -> int:
    """Fork both ranks from one process that has paid for the imports; 0 when both ended well."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, folder), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
    return int(any(process.exitcode != 0 for process in ranks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
