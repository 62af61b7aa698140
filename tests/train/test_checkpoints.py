"""A checkpoint is whole or it is not there; what is not ours is left alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from tiny import local_parameters, tiny_learner, tiny_rows

from rose_hpc.errors import EnvironmentFault
from rose_hpc.train.checkpoint import PROGRESS_FILE, Checkpoints, Progress, complete_steps, read_progress
from rose_hpc.train.learner import Learner


@pytest.fixture
def learner(alone: None) -> Learner:
    learner = tiny_learner(0, 1)
    learner.train_step(0, tiny_rows([8, 9]))
    return learner


def save(folder: Path, learner: Learner, step: int, kept: int = 2, version: int = 1) -> None:
    Checkpoints(folder, kept, rank=0).save(learner.policy, learner.optimizer, Progress(step, version, seed=5))


def test_the_newest_are_kept(tmp_path: Path, learner: Learner) -> None:
    for step in (10, 20, 30):
        save(tmp_path, learner, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000020", "step-000030"]
    assert read_progress(tmp_path / "step-000030") == Progress(30, 1, 5)


def test_the_newest_complete_one_is_loaded_bit_for_bit(tmp_path: Path, learner: Learner) -> None:
    saved = local_parameters(learner.policy)
    save(tmp_path, learner, 10)
    (tmp_path / "step-000011").mkdir()
    (tmp_path / "step-000012").write_text("a file")
    fresh = tiny_learner(0, 1)
    assert Checkpoints(tmp_path, 2, rank=0).load_newest(fresh.policy, fresh.optimizer) == Progress(10, 1, 5)
    assert all(torch.equal(p, saved[name]) for name, p in local_parameters(fresh.policy).items())


def test_an_empty_folder_has_nothing_to_resume(tmp_path: Path, learner: Learner) -> None:
    assert Checkpoints(tmp_path / "absent", 2, rank=0).load_newest(learner.policy, learner.optimizer) is None


@pytest.mark.parametrize("harm", ["no progress", "a file cut short", "a file missing", "not json", "another format", "another name"])
def test_a_folder_that_is_not_whole_is_ignored(tmp_path: Path, learner: Learner, harm: str) -> None:
    save(tmp_path, learner, 10)
    folder = tmp_path / "step-000010"
    progress, shard = folder / PROGRESS_FILE, next(folder.glob("*.distcp"))
    assert complete_steps(tmp_path) == [10]
    match harm:
        case "no progress":
            progress.unlink()
        case "a file cut short":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "a file missing":
            shard.unlink()
        case "not json":
            progress.write_text('{"format"')
        case "another format":
            progress.write_text(json.dumps({**json.loads(progress.read_text()), "format": "else"}))
        case "another name":
            folder.rename(tmp_path / "step-000099")
    assert complete_steps(tmp_path) == []


def test_a_checkpoint_appears_whole(tmp_path: Path, learner: Learner) -> None:
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.extend((path.name, read_progress(path) is not None) for path in tmp_path.iterdir())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in (10, 20, 30):
            save(tmp_path, learner, step, kept=9)
    finally:
        done.set()
        watcher.join()
    assert (".step-000010.partial", False) in seen and ("step-000010", True) in seen
    assert all(whole for name, whole in seen if not name.startswith("."))


def test_what_a_killed_run_left_is_swept_by_the_next_save(tmp_path: Path, learner: Learner) -> None:
    for step in (20, 40):
        left = tmp_path / f".step-{step:06d}.partial"
        left.mkdir()
        (left / "__0_0.distcp").write_text("half")
    save(tmp_path, learner, 20)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000020"]
    assert read_progress(tmp_path / "step-000020") == Progress(20, 1, 5)


def test_what_is_not_ours_is_never_deleted(tmp_path: Path, learner: Learner) -> None:
    foreign = tmp_path / "step-000010"
    foreign.mkdir()
    (foreign / "notes").write_text("mine")
    with pytest.raises(EnvironmentFault, match="in the way"):
        save(tmp_path, learner, 10)
    for step in (20, 30):
        save(tmp_path, learner, step, kept=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000030"]
    assert (foreign / "notes").read_text() == "mine"


def test_saving_the_same_progress_again_changes_nothing(tmp_path: Path, learner: Learner) -> None:
    save(tmp_path, learner, 10)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "step-000010").iterdir()}
    save(tmp_path, learner, 10)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "step-000010").iterdir()} == before
    with pytest.raises(EnvironmentFault, match="in the way"):
        save(tmp_path, learner, 10, version=2)


def test_a_checkpoint_before_the_first_step_resumes_like_the_run_that_wrote_it(tmp_path: Path, alone: None) -> None:
    first, second = tiny_learner(0, 1), tiny_learner(0, 1)
    save(tmp_path, first, 0)
    Checkpoints(tmp_path, 2, rank=0).load_newest(second.policy, second.optimizer)
    assert first.train_step(0, tiny_rows([8, 9])) == second.train_step(0, tiny_rows([8, 9]))
    resumed = local_parameters(second.policy)
    assert all(torch.equal(p, resumed[name]) for name, p in local_parameters(first.policy).items())
