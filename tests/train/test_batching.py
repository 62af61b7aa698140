"""The invariants that batching.py lists, for any lengths."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import ControlError
from rose_hpc.messages import Row
from rose_hpc.train.batching import Totals, check_rows, has_signal, pack, pad, plan_step, share_out, totals_of

lengths_of_rows = st.lists(st.integers(1, 60), max_size=40)
settings = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 5),
        "minibatches": st.integers(1, 6),
        "micro_batch_tokens": st.integers(1, 200),
        "seed": st.tuples(st.integers(0, 99), st.integers(0, 99)),
    }
)


def row(tokens: list[int], mask: list[int], advantage: float = 1.0, logprobs: list[float] | None = None) -> Row:
    values = [-0.5 * m for m in mask] if logprobs is None else logprobs
    return Row(np.array(tokens, np.int32), np.array(mask, np.uint8), np.array(values, np.float32), advantage)


@given(lengths_of_rows, settings)
def test_each_row_is_computed_exactly_once(lengths: list[int], how: dict) -> None:
    plan = plan_step(lengths, **how)
    assert Counter(i for m in plan for i in m.rows) == Counter(range(len(lengths)))
    assert len(plan) == min(how["minibatches"], len(lengths))


@given(lengths_of_rows, settings)
def test_all_ranks_make_as_many_passes(lengths: list[int], how: dict) -> None:
    for minibatch in plan_step(lengths, **how):
        passes = {len(micro_batches) for micro_batches in minibatch.by_rank}
        assert len(minibatch.by_rank) == how["ranks"] and len(passes) == 1 and passes.pop() >= 1


@given(lengths_of_rows, settings)
def test_padded_tokens_stay_within_the_budget(lengths: list[int], how: dict) -> None:
    for minibatch in plan_step(lengths, **how):
        for micro_batch in (m for micro_batches in minibatch.by_rank for m in micro_batches if len(m) > 1):
            assert len(micro_batch) * max(lengths[i] for i in micro_batch) <= how["micro_batch_tokens"]


@given(lengths_of_rows, settings, st.integers(1, 5))
def test_minibatches_do_not_depend_on_the_number_of_ranks(lengths: list[int], how: dict, ranks: int) -> None:
    assert [m.rows for m in plan_step(lengths, **how)] == [m.rows for m in plan_step(lengths, **{**how, "ranks": ranks})]


@given(lengths_of_rows, settings)
def test_the_plan_follows_from_its_arguments(lengths: list[int], how: dict) -> None:
    assert plan_step(lengths, **how) == plan_step(lengths, **how)


@given(lengths_of_rows, st.integers(1, 5))
def test_ranks_differ_by_no_more_than_the_longest_row(lengths: list[int], ranks: int) -> None:
    tokens = [sum(lengths[i] for i in share) for share in share_out(range(len(lengths)), lengths, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_the_shuffle_changes_with_seed_and_step() -> None:
    plans = [plan_step([5] * 40, ranks=1, minibatches=4, micro_batch_tokens=50, seed=seed) for seed in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(tuple(m.rows) for m in plan) for plan in plans}) == 3


def test_a_row_longer_than_the_budget_is_alone() -> None:
    assert pack([0, 1, 2], [3, 50, 4], micro_batch_tokens=8) == [(1,), (2, 0)]


def test_rows_are_padded_on_the_right_and_shifted_by_one() -> None:
    padded = pad([row([7, 8, 9], [0, 1, 1], advantage=2.0), row([5, 6], [0, 1], advantage=-1.0)])
    assert padded.token_ids.tolist() == [[7, 8, 9], [5, 6, 0]]
    assert padded.mask.tolist() == [[True, True], [True, False]]
    assert padded.rollout_logprobs.tolist() == [[-0.5, -0.5], [-0.5, 0.0]]
    assert padded.advantages.tolist() == [2.0, -1.0]


@pytest.mark.parametrize("rows", [[], [row([3], [0])]])
def test_padding_and_a_lone_token_still_have_a_token_to_predict(rows: list[Row]) -> None:
    padded = pad(rows)
    assert padded.token_ids.shape == (1, 2) and padded.mask.shape == (1, 1) and not padded.mask.any()


def test_tokens_and_signal_are_counted_over_what_was_sampled() -> None:
    assert totals_of([row([1, 2, 3], [0, 1, 1]), row([1, 2], [0, 0])]) == Totals(trajectories=2, tokens=2)
    assert has_signal([row([1, 2], [0, 1], advantage=-0.1)])
    assert not has_signal([row([1, 2], [0, 1], advantage=0.0), row([1, 2], [0, 0], advantage=1.0)])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row([], []), "no tokens"),
        (row([1, 151], [0, 1]), "token ids 1 to 151"),
        (row([-1, 2], [0, 1]), "token ids -1 to 2"),
        (row([1, 2], [1, 1]), "first token"),
        (row([1, 2], [0, 1], advantage=float("inf")), "not finite"),
        (row([1, 2], [0, 1], logprobs=[0.0, float("nan")]), "not finite"),
    ],
)
def test_unusable_rows_are_named(bad: Row, says: str) -> None:
    with pytest.raises(ControlError, match=f"training row 1 cannot be used\n  got: .*{says}"):
        check_rows([row([1, 150], [0, 1]), bad], vocabulary=151)
