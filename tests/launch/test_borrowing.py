"""What a run asks operators' agents for, from its configuration and its model."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rose_hpc.config import EngineConfig, load
from rose_hpc.coserve.lease_book import RUN_ID
from rose_hpc.launch.borrowing import borrow_for, relay_of, run_id_of, wish_of
from rose_hpc.rollout.borrowed import LeaseNames
from rose_hpc.rollout.controller import ControllerSpec

BORROW = Path(__file__).parents[2] / "configs" / "borrow.toml"
QUICKSTART = BORROW.with_name("quickstart.toml")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a": np.zeros((1000, 10), np.float32)}, tmp_path / "one.safetensors")
    return tmp_path


def spec(model: Path, source: Path = BORROW, *overrides: str) -> ControllerSpec:
    return ControllerSpec(
        run_dir=model / "my run",
        control_dir=model,
        model_dir=model,
        attempt=0,
        started_s=time.time(),
        relays={},
        dedicated=1,
        opportunistic=0,
        config=load(source, list(overrides)),
    )


def test_a_run_asks_for_room_for_its_weights_and_for_the_engine_that_it_was_told(model: Path) -> None:
    wish = wish_of(spec(model, BORROW, "borrow.ceiling_frac=0.5", "seed=3"))
    assert (wish.run_id, wish.model, wish.ceiling_frac) == ("my-run", str(model), 0.5)
    image_bytes = 10_000 * 4
    assert 6 * image_bytes <= wish.arena_bytes <= 6 * image_bytes + (8 << 20)
    assert EngineConfig.model_validate(wish.engine) == load(BORROW, []).borrow.engine  # type: ignore[union-attr]
    assert wish.seed // 1000 == 3 and wish.relay is None


def test_agents_may_know_the_model_by_another_path(model: Path) -> None:
    assert wish_of(spec(model, BORROW, "borrow.model=/elsewhere/policy")).model == "/elsewhere/policy"


def test_the_relay_is_told_the_runs_transfer_settings_and_its_own_token_alone(model: Path) -> None:
    config = load(BORROW, ["weights.retained_versions=7"])
    relay = relay_of(config, LeaseNames(0, "borrowed-0", "relay-2", "token-of-the-relay"), "http://10.0.0.1:1")
    assert (relay.name, relay.controller_url, relay.controller_token) == ("relay-2", "http://10.0.0.1:1", "token-of-the-relay")
    assert (relay.bucket_bytes, relay.deadline_s, relay.retained_versions) == (config.weights.bucket_bytes, config.weights.deadline_s, 7)


def test_a_run_without_a_section_for_it_borrows_nothing(model: Path) -> None:
    assert borrow_for(spec(model, QUICKSTART)) is None and borrow_for(spec(model)) is not None


@pytest.mark.parametrize("name", ["run", "my run", "größe/../x", "x" * 200])
def test_any_folders_name_makes_a_run_id_that_agents_take(name: str) -> None:
    assert RUN_ID.fullmatch(run_id_of(name))
