"""Group advantages, against values computed by hand, and the rows that the trainer is given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import RoseError
from rose_hpc.messages import pack_rows, unpack_rows
from rose_hpc.rollout.sampling import SamplingError, dead_groups_frac, group_advantages, group_rewards, is_zero_signal, training_rows
from rose_hpc.rollout.trajectories import Trajectory


def sampled(group: int, index: int) -> Trajectory:
    """A trajectory of one turn that waits for its environment: tokens [group, index, 7], the last one sampled."""
    trajectory = Trajectory(f"g{group}.{index}", group, index)
    trajectory.open([group, index])
    trajectory.start_turn("engine-0", trajectory.next_request_id())
    trajectory.turn_sampled([7], [-0.5], [0])
    return trajectory


def done(group: int, index: int, reward: float) -> Trajectory:
    trajectory = sampled(group, index)
    trajectory.finish(reward, reward > 0)
    return trajectory


def failed(group: int, index: int) -> Trajectory:
    trajectory = sampled(group, index)
    trajectory.fail("environment timed out")
    return trajectory


def test_advantages_are_the_hand_computed_ones():
    # [0, 0, 0, 1]: mean 1/4, population variance 3/16. [2, 4]: mean 3, std 1.
    std = 3**0.5 / 4
    expected = [[-0.25 / (std + 1e-4)] * 3 + [0.75 / (std + 1e-4)]]
    np.testing.assert_allclose(group_advantages([[0, 0, 0, 1]]), expected, rtol=1e-12)
    np.testing.assert_allclose(group_advantages([[2, 4]]), [[-1 / 1.0001, 1 / 1.0001]], rtol=1e-12)


def test_each_group_is_its_own_baseline():
    together = group_advantages([[0, 0, 0, 1], [5, 6, 7, 8]])
    np.testing.assert_array_equal(together[0], group_advantages([[0, 0, 0, 1]])[0])
    np.testing.assert_array_equal(together[1], group_advantages([[5, 6, 7, 8]])[0])


@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 16))
def test_equal_rewards_give_advantages_of_exactly_zero(reward, size):
    assert (group_advantages([[reward] * size]) == 0).all()
    assert is_zero_signal([[reward] * size])


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards):
    advantages = group_advantages([rewards])[0]
    assert abs(advantages.sum()) < 1e-8
    assert np.abs(advantages).max() <= len(rewards) ** 0.5
    assert (np.diff(advantages[np.argsort(rewards)]) >= 0).all()


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [[0.0, np.nan]], [[np.inf, 0.0]]])
def test_rewards_that_cannot_be_compared_are_refused(rewards):
    with pytest.raises(SamplingError) as caught:
        group_advantages(rewards)
    assert isinstance(caught.value, RoseError) and caught.value.expected == "finite numbers [groups, size]"


def test_groups_without_a_signal_are_counted():
    assert dead_groups_frac(np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, 0.5]])) == 0.75
    assert dead_groups_frac([[0.0, 1.0, 1.0], [1.0], []]) == pytest.approx(2 / 3)
    assert dead_groups_frac([]) == 0.0


def test_a_step_without_any_signal_is_recognised():
    assert is_zero_signal([[0.0, 0.0], [1.0, 1.0], []])
    assert is_zero_signal([])
    assert not is_zero_signal([[0.0, 0.0], [0.0, 1.0]])


def test_rows_carry_tokens_mask_log_probabilities_and_the_groups_advantage():
    rows = training_rows([done(0, 0, 1.0), done(1, 0, 0.0), done(0, 1, 0.0), done(1, 1, 0.0)])
    assert [row.token_ids.tolist() for row in rows] == [[0, 0, 7], [1, 0, 7], [0, 1, 7], [1, 1, 7]]
    assert all(row.loss_mask.tolist() == [0, 0, 1] and row.rollout_logprobs.tolist() == [0.0, 0.0, -0.5] for row in rows)
    assert [row.advantage for row in rows] == pytest.approx([0.5 / 0.5001, 0.0, -0.5 / 0.5001, 0.0])
    assert (rows[0].token_ids.dtype, rows[0].loss_mask.dtype, rows[0].rollout_logprobs.dtype) == (np.int32, np.uint8, np.float32)


def test_rows_survive_the_wire():
    rows = training_rows([done(0, 0, 1.0), done(0, 1, 0.0)])
    back = unpack_rows(pack_rows(rows))
    assert [row.token_ids.tolist() for row in back] == [row.token_ids.tolist() for row in rows]
    assert [row.advantage for row in back] == pytest.approx([row.advantage for row in rows])


def test_a_failed_trajectory_has_no_row_and_no_part_in_its_groups_mean():
    survivors = [done(0, 0, 1.0), done(0, 1, 0.0), done(0, 3, 0.0)]
    rows = training_rows([*survivors[:2], failed(0, 2), survivors[2], failed(1, 0), done(1, 1, 1.0)])
    assert [row.token_ids.tolist()[:2] for row in rows] == [[0, 0], [0, 1], [0, 3], [1, 1]]
    assert [row.advantage for row in rows[:3]] == pytest.approx(group_advantages([[1, 0, 0]])[0].tolist())
    assert rows[3].advantage == 0.0, "the sole survivor of its group has nothing to be compared with"


def test_a_group_of_which_all_failed_counts_as_dead():
    trajectories = [done(0, 0, 1.0), done(0, 1, 0.0), failed(1, 0), failed(1, 1)]
    assert [rewards.tolist() for rewards in group_rewards(trajectories)] == [[1.0, 0.0], []]
    assert dead_groups_frac(group_rewards(trajectories)) == 0.5


@pytest.mark.parametrize("read", [training_rows, group_rewards])
def test_a_trajectory_that_has_not_ended_is_refused(read):
    with pytest.raises(SamplingError, match=r"g0\.1(.|\n)*state environment"):
        read([done(0, 0, 1.0), sampled(0, 1)])
