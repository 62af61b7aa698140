"""A worker's update, step by step, over a real arena and toy workers: what is written when, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_node import Node, is_locked
from toy_workers import bits

from rose_hpc.errors import DigestMismatch, WeightsError


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.change()
    node.describe()
    return node


@pytest.fixture
def running(node: Node) -> Node:
    """The first version is in the workers and proved."""
    assert [a["how"] for a in node.prepare()] == ["dense", "dense"]
    node.apply()
    assert node.total([w.prove(True) for w in node.workers]) == node.digest and node.is_current()
    return node


def test_a_sparse_update_foretells_its_digest_writes_in_apply_and_proves_it(running: Node) -> None:
    for full in (True, False):
        running.change()
        running.change()  # two deltas at once
        answers = running.prepare()
        assert [a["how"] for a in answers] == ["sparse", "sparse"] and answers[0]["changed"] == len(running.tensors)
        assert running.total(answers) == running.digest and not running.is_current()
        running.apply()
        assert running.is_current()
        assert running.total([w.prove(full) for w in running.workers]) == running.digest


@pytest.mark.parametrize(("elements", "keyframe"), [(1, True), (30, False)], ids=["keyframe", "much changed"])
def test_without_deltas_or_with_many_changes_everything_is_copied(running: Node, elements: int, keyframe: bool) -> None:
    running.change(elements, keyframe)
    assert [a["how"] for a in running.prepare()] == ["dense", "dense"]
    running.apply()
    assert running.is_current() and running.total([w.prove(True) for w in running.workers]) == running.digest
    running.change()
    assert [a["how"] for a in running.prepare()] == ["sparse", "sparse"]


def test_a_damaged_image_shows_in_the_foretold_digest_and_in_a_dense_prepare(running: Node) -> None:
    running.change()
    lanes = running.arena.changed_lanes(running.version - 1, running.version)
    assert lanes is not None
    running.arena.image(writable=True)[lanes[0]] ^= 1
    assert running.total(running.prepare()) != running.digest
    assert all("not what the trainer published" in a["fault"] for a in running.prepare(dense=True))
    running.arena.image(writable=True)[lanes[0]] ^= 1
    assert running.total(running.prepare()) == running.digest


def test_a_damaged_model_shows_in_the_proof_and_a_dense_update_heals_it(running: Node) -> None:
    running.models[1].worker.p0[0, 0] += 1  # nobody noticed
    running.change()
    running.prepare()
    running.apply()
    assert running.total([w.prove(True) for w in running.workers]) != running.digest
    running.change()
    assert all(a["fault"] is None for a in running.prepare(dense=True))
    running.apply()
    assert running.is_current() and running.total([w.prove(True) for w in running.workers]) == running.digest


def test_replicas_that_differ_are_found_though_one_of_them_is_right(running: Node) -> None:
    running.models[1].worker.p2[0, 0] += 1  # both workers hold all of p2
    with pytest.raises(DigestMismatch, match="worker 1 holds other bits"):
        running.total([w.prove(True) for w in running.workers])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda node: setattr(node, "digest", node.digest ^ 1),
        lambda node: setattr(node, "version", node.version + 1),
        lambda node: node.arena.begin_keyframe(),
        lambda node: (node.arena.path / "layout.json").unlink(),
    ],
    ids=["another digest", "not there yet", "a keyframe is coming", "no arena"],
)
def test_what_the_arena_does_not_hold_is_refused_by_value_and_nothing_is_written(running: Node, spoil: Any) -> None:
    running.change()
    before = [bits(model.worker) for model in running.models]
    spoil(running)
    assert all(a["fault"] is not None for a in running.prepare())
    with pytest.raises(WeightsError, match="not prepared"):
        running.apply()
    assert [bits(model.worker) for model in running.models] == before


def test_only_what_was_prepared_can_be_applied_and_only_once(running: Node) -> None:
    running.change()
    running.prepare()
    for version, digest in ((running.version, running.digest ^ 1), (running.version + 1, running.digest)):
        with pytest.raises(WeightsError, match="not prepared"):
            running.workers[0].apply(version, digest)
    running.apply()
    with pytest.raises(WeightsError, match="not prepared"):
        running.apply()


def test_the_image_stays_locked_from_a_dense_prepare_to_its_apply_or_release_and_no_longer(running: Node) -> None:
    running.change()
    running.prepare()
    assert not is_locked(running)  # sparse: all that is needed has been read
    running.prepare(dense=True)
    assert is_locked(running)
    for worker in running.workers:
        worker.release()
    assert not is_locked(running)
    running.prepare(dense=True)
    running.apply()
    assert not is_locked(running)


def test_a_packed_model_is_reloaded_and_probed_while_the_image_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, packed=True)
    for _ in range(2):
        node.change()
        node.describe()
        assert [(a["how"], a["fault"]) for a in node.prepare()] == [("reload", None)] * 2
        node.apply()
        assert node.is_current() and is_locked(node)
        assert [w.is_probed for w in node.workers] == [True, True]
        probes = [worker.probing() for worker in node.workers]
        assert [next(p) for p in probes] == [None, None] and is_locked(node)
        assert [next(p)["proof"] for p in probes] == ["probe", "probe"] and not is_locked(node)
    node.change()
    node.prepare()
    node.apply()
    node.models[0].probed = SimpleNamespace(faults=("p0",), unknown=())
    node.models[1].probed = SimpleNamespace(faults=(), unknown=("p1",))
    (*_, first), (*_, second) = (w.probing() for w in node.workers)
    assert "p0" in first["fault"] and second["proof"] == "partial" and not is_locked(node)
    assert [*node.workers[0].probing()][-1]["fault"]  # once is enough


def test_after_a_vacate_nothing_is_whole_until_all_of_it_is_loaded_again(running: Node) -> None:
    running.change()
    running.prepare(dense=True)
    assert [w.vacate()["fault"] for w in running.workers] == [None, None] and not is_locked(running)
    with pytest.raises(WeightsError, match="not prepared"):
        running.apply()
    assert all("nothing to prove" in w.prove(True)["fault"] for w in running.workers)
    running.change()  # there are deltas, but nothing that they could be applied to
    assert [a["how"] for a in running.prepare()] == ["dense", "dense"]
    running.apply()
    assert running.is_current() and running.total([w.prove(True) for w in running.workers]) == running.digest


def test_a_dense_update_without_a_look_at_the_image_is_found_out_by_its_proof(running: Node) -> None:
    running.change()
    running.arena.image(writable=True)[0] ^= 1
    assert all("not what the trainer" in w.prepare(running.version, running.digest, True)["fault"] for w in running.workers)
    assert [w.prepare(running.version, running.digest, True, False)["how"] for w in running.workers] == ["dense", "dense"]
    running.apply()
    assert not is_locked(running)
    assert running.total([w.prove(True) for w in running.workers]) != running.digest


def test_a_vacate_that_fails_on_the_way_leaves_nothing_whole(running: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("madvise")

    monkeypatch.setattr(running.models[0], "give_back", fail)
    running.change()
    assert "madvise" in running.workers[0].vacate()["fault"]
    assert running.workers[0].prepare(running.version, running.digest, False)["how"] == "dense"


def test_steps_out_of_order_are_faults(tmp_path: Path) -> None:
    node = Node(tmp_path)
    worker = node.workers[0]
    assert worker.share(np.zeros(1, np.int64))["fault"] and worker.prove(True)["fault"]
    node.change()
    assert "describe" in worker.prepare(node.version, node.digest, False)["fault"]
