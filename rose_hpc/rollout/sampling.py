"""What the trainer is given of a step's groups: group-relative advantages of rewards that may be shaped by length. Pure.

GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300, § 4.1) samples a group of trajectories from one prompt and takes the group as
its own baseline: A = (r − mean(r)) / std(r). No value network; every sampled token of a trajectory has the trajectory's advantage.

Invariants, asserted by the tests:
- a group whose rewards are all equal has advantages of exactly 0;
- a failed trajectory has no row and no part in its group's mean;
- a trajectory whose oldest token is too old has no row, but a part in its group's mean: its reward is as good as the others';
- rows keep the order of the trajectories they come from.

Which groups are trained on is decided in intake.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rose_hpc.config import SamplingConfig
from rose_hpc.errors import RoseError
from rose_hpc.messages import Row
from rose_hpc.rollout.groups import Group, oldest_version
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


def overlong_penalty(sampled_tokens: int, limit_tokens: int, cache_tokens: int) -> float:
    """Soft overlong punishment, added to a trajectory's reward (DAPO, arXiv 2503.14476, § 3.4, eq. 13).

    0 up to limit − cache sampled tokens, then falling linearly to −1 at the limit, and −1 beyond it.
    """
    if sampled_tokens > limit_tokens:
        return -1.0
    over = sampled_tokens - (limit_tokens - cache_tokens)
    return -over / cache_tokens if over > 0 else 0.0


def shaped_reward(trajectory: Trajectory, config: SamplingConfig) -> float:
    """The environment's reward, less the punishment for length where one is configured. Raises SamplingError: it has none yet."""
    reward = _reward(trajectory)
    if config.overlong_limit_tokens is None:
        return reward
    return reward + overlong_penalty(trajectory.sampled_tokens, config.overlong_limit_tokens, config.overlong_cache_tokens)


def task_rewards(group: Group) -> NDArray[np.float64]:
    """The environment's rewards of the trajectories that are done. Raises SamplingError when one has not ended."""
    return np.array([_reward(t) for t in group.trajectories if t.state is not State.FAILED], np.float64)


def has_variance(group: Group) -> bool:
    """Whether two of its task rewards differ: else it teaches nothing, and DAPO drops it (§ 3.2).

    Of the task's rewards, not of shaped ones: a group that always fails must not be kept for its lengths (verl's metric `acc`).
    """
    rewards = task_rewards(group)
    return rewards.size >= 2 and bool(np.ptp(rewards) > 0)


def dead_groups_frac(groups: Sequence[Group]) -> float:
    """Fraction of groups without variance. 0 for no groups."""
    return sum(not has_variance(group) for group in groups) / len(groups) if groups else 0.0


def training_rows(groups: Iterable[Group], config: SamplingConfig, oldest_allowed: int = 0) -> list[Row]:
    """One row per trajectory that is done and of which every token is of version `oldest_allowed` or later, in the given order.

    The advantage is that of the shaped reward within the group. Failed trajectories are left out of the rows and of the mean and std;
    the sole survivor of a group has advantage 0. Raises SamplingError when a trajectory has not ended.
    """
    return [row for group in groups for row in _rows_of(group, config, oldest_allowed)]


def is_zero_signal(rows: Iterable[Row]) -> bool:
    """Whether all advantages are 0 (also when there is no row): a step on them would learn nothing."""
    return all(row.advantage == 0 for row in rows)


def _rows_of(group: Group, config: SamplingConfig, oldest_allowed: int) -> list[Row]:
    ended = [t for t in group.trajectories if t.state is not State.FAILED]
    advantages = group_advantages([[shaped_reward(t, config) for t in ended]])[0]
    return [_row(t, a) for t, a in zip(ended, advantages.tolist(), strict=True) if _is_fresh(t, oldest_allowed)]


def _is_fresh(trajectory: Trajectory, oldest_allowed: int) -> bool:
    oldest = oldest_version(trajectory)
    return oldest is not None and oldest >= oldest_allowed


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
