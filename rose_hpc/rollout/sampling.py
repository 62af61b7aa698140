"""What the trainer is given of a step's trajectories: GRPO's group-relative advantages. Pure.

GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300, § 4.1) samples a group of trajectories from one prompt and takes the group as
its own baseline: A = (r − mean(r)) / std(r). No value network; every sampled token of a trajectory has the trajectory's advantage.

Invariants, asserted by the tests:
- a group whose rewards are all equal has advantages of exactly 0;
- a failed trajectory has no row and no part in its group's mean;
- rows keep the order of the trajectories they come from.

It deliberately does not filter groups without a signal (that changes the batch that the trainer averages over): it only counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rose_hpc.errors import RoseError
from rose_hpc.messages import Row
from rose_hpc.rollout.trajectories import State, Trajectory

STD_EPSILON = 1e-4  # keeps a group of nearly equal rewards from being blown up; the paper divides by std alone


class SamplingError(RoseError):
    """Rewards or trajectories that no advantage can be computed from."""


def group_advantages(rewards: ArrayLike) -> NDArray[np.float64]:
    """Advantages [groups, size] of rewards [groups, size]: (r − mean) / (std + 1e-4) within each group.

    std is the population's (divided by size, numpy's default), as the group is all there is, not a sample of it.
    Raises SamplingError: not two-dimensional, or not finite.
    """
    r = np.asarray(rewards, np.float64)
    if r.ndim != 2 or not np.isfinite(r).all():
        raise SamplingError("rewards cannot be compared", got=f"shape {r.shape}: {r}", expected="finite numbers [groups, size]")
    if r.size == 0:
        return np.zeros_like(r)
    centred = r - r.mean(axis=1, keepdims=True)
    advantages = centred / (r.std(axis=1, keepdims=True) + STD_EPSILON)
    # The mean of equal numbers is off by rounding; such a group must not train at all.
    return np.where(np.ptp(r, axis=1, keepdims=True) == 0, 0.0, advantages)


def dead_groups_frac(rewards: Sequence[ArrayLike] | NDArray[np.float64]) -> float:
    """Fraction of groups without a signal: all rewards equal, or fewer than two. 0 for no groups.

    rewards: one row per group, [groups, size] or ragged, as `group_rewards` gives them.
    """
    return sum(map(_is_dead, rewards)) / len(rewards) if len(rewards) > 0 else 0.0


def is_zero_signal(rewards: Sequence[ArrayLike] | NDArray[np.float64]) -> bool:
    """Whether every group is dead (also when there is none): all advantages are 0, and a step on them would learn nothing."""
    return all(map(_is_dead, rewards))


def _is_dead(rewards: ArrayLike) -> bool:
    r = np.asarray(rewards, np.float64)
    return r.size < 2 or bool(np.ptp(r) == 0)


def group_rewards(trajectories: Iterable[Trajectory]) -> list[NDArray[np.float64]]:
    """Rewards of the trajectories that are done, one array per group that any trajectory names, by group number.

    A group of which all failed is an empty array. Raises SamplingError when a trajectory has not ended.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        group = groups[trajectory.group]
        if trajectory.state is not State.FAILED:
            group.append(_reward(trajectory))
    return [np.array(groups[g], np.float64) for g in sorted(groups)]


def training_rows(trajectories: Iterable[Trajectory]) -> list[Row]:
    """One row per trajectory that is done, in the given order, with its advantage within its group.

    Failed trajectories are left out of the rows and of the mean and std; the sole survivor of a group has advantage 0.
    Raises SamplingError when a trajectory has not ended.
    """
    ended = list(trajectories)
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in ended:
        if trajectory.state is not State.FAILED:
            groups[trajectory.group].append(trajectory)
    advantage_of: dict[Trajectory, float] = {}
    for members in groups.values():
        advantages = group_advantages([[_reward(t) for t in members]])[0]
        advantage_of.update(zip(members, advantages.tolist(), strict=True))
    return [_row(t, advantage_of[t]) for t in ended if t in advantage_of]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise SamplingError(
            f"trajectory {trajectory.trajectory_id} has no reward",
            got=f"state {trajectory.state.value}",
            expected=f"state {State.DONE.value} or {State.FAILED.value}",
            remedy="train once every trajectory has ended",
        )
    return trajectory.reward


def _row(trajectory: Trajectory, advantage: float) -> Row:
    return Row(
        np.array(trajectory.token_ids, np.int32),
        np.array(trajectory.loss_mask, np.uint8),
        np.array(trajectory.rollout_logprobs, np.float32),
        advantage,
    )
