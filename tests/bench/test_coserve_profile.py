from __future__ import annotations

from pathlib import Path

import pytest

from rose_hpc.bench.coserve_profile import fit, serving_times
from rose_hpc.coserve.board import BoardWriter
from rose_hpc.coserve.slack import ServingState, StepTimes
from rose_hpc.errors import RunFailed


def test_a_line_of_steps_is_found_again() -> None:
    decoding = [(batch, 0.002 + 0.0005 * batch) for batch in (1, 4, 16)]
    prompts = [(tokens, steps, 0.002 * steps + 1e-5 * tokens) for tokens, steps in ((128, 1.0), (1024, 4.0))]
    found = fit(decoding, prompts)
    assert found.decode_base_s == pytest.approx(0.002)
    assert found.decode_request_s == pytest.approx(0.0005)
    assert found.prefill_token_s == pytest.approx(1e-5)


def test_no_term_is_negative_whatever_the_noise() -> None:
    found = fit([(1, 0.004), (16, 0.003)], [(128, 1.0, 0.001)])
    assert found.decode_request_s == found.prefill_token_s == 0.0 and found.decode_base_s > 0


def test_one_batch_tells_only_the_base() -> None:
    assert fit([(4, 0.003)], [(100, 1.0, 0.004)]).decode_request_s == 0.0


def test_the_servings_times_come_from_its_board(tmp_path: Path) -> None:
    times = StepTimes(1e-5, 0.002, 0.0005)
    writer = BoardWriter(tmp_path / "board", 0.0)
    writer.publish(ServingState(), times, 1.0)
    assert serving_times(tmp_path / "board") == times
    writer.close()


def test_a_board_without_a_record_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="published nothing"):
        serving_times(tmp_path / "board")
