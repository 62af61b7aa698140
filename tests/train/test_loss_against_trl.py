"""Our loss against TRL's own code on the same tensors, value and gradient, with the loss_type named as there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from trl_loss import trl_loss, trl_overlong_punishment

from rose_hpc.rollout.sampling import overlong_penalty
from rose_hpc.train.loss import grpo_loss, trajectory_scales

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.5}
CONSTANT = 23


def tensors(seed: int) -> tuple[Tensor, ...]:
    """new, old, rollout [6, 11] that differ enough to be clipped and truncated; advantages [6]; mask [6, 11] with gaps and short rows."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(6, 11, generator=g)
    new, rollout = (old + 0.4 * torch.randn(6, 11, generator=g) for _ in range(2))
    mask = torch.rand(6, 11, generator=g) < 0.6
    mask[:, 0] = True  # TRL's metrics divide by a row's tokens
    mask[1, 1:] = False
    return new, old, rollout, torch.randn(6, generator=g), mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_loss_and_gradient_are_trls_with_importance_weights_of_mode_token_truncate(loss_type: str, seed: int) -> None:
    new, old, rollout, advantages, mask = tensors(seed)
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    scales = trajectory_scales(mask, loss_type, tokens=int(mask.sum()), trajectories=6, dr_grpo_tokens=CONSTANT)
    found = grpo_loss(ours, old, rollout, advantages, mask, **CLIP, scales=scales)
    expected = trl_loss(loss_type, theirs, old, rollout, advantages, mask, **CLIP, max_completion_length=CONSTANT)
    found.loss.backward()
    expected.backward()
    assert found.clipped > 0 and ((old - rollout).exp()[mask] > 1.5).any()  # the cases that differ are there
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_parts_of_a_minibatch_add_up_to_trls_loss_of_the_whole(loss_type: str) -> None:
    new, old, rollout, advantages, mask = tensors(7)
    whole = {"tokens": int(mask.sum()), "trajectories": 6, "dr_grpo_tokens": CONSTANT}
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    losses = [
        grpo_loss(new[p], old[p], rollout[p], advantages[p], mask[p], **CLIP, scales=trajectory_scales(mask[p], loss_type, **whole)).loss
        for p in parts
    ]
    expected = trl_loss(loss_type, new, old, rollout, advantages, mask, **CLIP, max_completion_length=CONSTANT)
    torch.testing.assert_close(sum(losses), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("limit", "cache"), [(20, 5), (20, 0), (7, 7)])
def test_the_overlong_punishment_is_trls(limit: int, cache: int) -> None:
    theirs = trl_overlong_punishment(limit, cache)([[1] * size for size in range(30)])
    assert [overlong_penalty(size, limit, cache) for size in range(30)] == pytest.approx(theirs)
