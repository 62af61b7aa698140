"""The loss by hand: every expected number below is worked out from the formula in loss.py; gradients also by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.train.loss import TokenLoss, chosen_logprobs, grpo_loss, importance_weight, mismatch_sums, token_logprobs, trajectory_scales

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss_of(ratios: list[float], advantage: float, mask: list[bool] | None = None, rollout_gap: float = 0.0, tokens: int = 1) -> tuple:
    """Loss of one row whose tokens have these ratios new/old; old − rollout is rollout_gap everywhere. Also its gradient."""
    old = torch.full((1, len(ratios)), -1.0)
    new = (old + torch.tensor([ratios]).log()).requires_grad_()
    mask_tensor = torch.tensor([[True] * len(ratios) if mask is None else mask])
    found: TokenLoss = grpo_loss(
        new, old, old - rollout_gap, torch.tensor([advantage]), mask_tensor, **CLIP, importance_cap=2.0, scales=torch.tensor([1 / tokens])
    )
    found.loss.backward()
    return found.loss.item(), new.grad[0].tolist(), found.clipped.item()


def test_logprobs_are_of_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])  # temperature 2: softmax(1, 0), softmax(0, 2); the last predicts nothing
    logprob, entropy = token_logprobs(logits, torch.tensor([[1, 0, 1]]), temperature=2.0)
    p, q = math.e / (1 + math.e), math.e**2 / (1 + math.e**2)
    assert logprob[0].tolist() == pytest.approx([math.log(p), math.log(q)])
    assert entropy[0].tolist() == pytest.approx([-x * math.log(x) - (1 - x) * math.log(1 - x) for x in (p, q)])


def test_logprobs_of_bfloat16_logits_are_float32_and_the_entropy_has_no_gradient() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    token_ids = torch.randint(0, 7, (2, 5))
    logprob, entropy = token_logprobs(logits, token_ids, 0.7)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert logprob.requires_grad and not entropy.requires_grad
    assert torch.equal(logprob, chosen_logprobs(logits, token_ids, 0.7))


def test_at_ratio_one_the_loss_is_minus_the_advantage() -> None:
    loss, gradient, clipped = loss_of([1.0, 1.0], advantage=3.0, tokens=2)
    assert loss == pytest.approx(-3.0)
    assert gradient == pytest.approx([-1.5, -1.5])
    assert clipped == 0


def test_a_good_token_is_clipped_above_and_a_bad_one_below() -> None:
    loss, gradient, clipped = loss_of([1.1, 1.5, 0.5], advantage=1.0)
    assert loss == pytest.approx(-(1.1 + 1.28 + 0.5))
    assert gradient == pytest.approx([-1.1, 0.0, -0.5])
    assert clipped == 1
    loss, gradient, clipped = loss_of([0.9, 0.5, 1.5], advantage=-1.0)
    assert loss == pytest.approx(0.9 + 0.8 + 1.5)
    assert gradient == pytest.approx([0.9, 0.0, 1.5])
    assert clipped == 1


def test_the_clip_is_asymmetric() -> None:
    assert loss_of([1.27], advantage=1.0)[2] == 0
    assert loss_of([1.29], advantage=1.0)[2] == 1
    assert loss_of([0.81], advantage=-1.0)[2] == 0
    assert loss_of([0.79], advantage=-1.0)[2] == 1


def test_the_environments_tokens_have_no_part() -> None:
    loss, gradient, clipped = loss_of([1.0, 1e30, 1.5], advantage=1.0, mask=[True, False, False])
    assert (loss, gradient, clipped) == (pytest.approx(-1.0), [-1.0, 0.0, 0.0], 0)


def test_values_under_the_mask_may_be_anything() -> None:
    mask, wild = torch.tensor([[True, False]]), torch.tensor([[-1.0, float("nan")]])
    new = torch.tensor([[-1.0, float("inf")]], requires_grad=True)
    found = grpo_loss(new, wild, wild, torch.tensor([1.0]), mask, **CLIP, importance_cap=2.0, scales=torch.ones(1))
    found.loss.backward()
    assert found.loss.item() == -1.0 and new.grad.tolist() == [[-1.0, 0.0]]
    assert torch.isfinite(mismatch_sums(wild, wild, wild, mask)).all()


def test_a_micro_batch_of_padding_has_no_gradient() -> None:
    assert loss_of([1.0, 2.0], advantage=0.0, mask=[False, False], tokens=9) == (0.0, [0.0, 0.0], 0)


def test_the_importance_weight_is_truncated_above_only() -> None:
    gaps = torch.tensor([[math.log(0.1), 0.0, math.log(1.9), math.log(5.0), 200.0]])
    weight = importance_weight(gaps, torch.zeros(1, 5), torch.ones(1, 5, dtype=torch.bool), cap=2.0)
    assert weight[0].tolist() == pytest.approx([0.1, 1.0, 1.9, 2.0, 2.0])


def test_the_importance_weight_multiplies_the_clipped_objective() -> None:
    loss, gradient, _ = loss_of([1.1, 1.5], advantage=1.0, rollout_gap=math.log(1.5))
    assert loss == pytest.approx(-1.5 * (1.1 + 1.28))
    assert gradient == pytest.approx([-1.65, 0.0])
    loss, _, _ = loss_of([1.0], advantage=1.0, rollout_gap=math.log(7.0))
    assert loss == pytest.approx(-2.0)


def test_the_mean_is_over_the_tokens_of_the_global_minibatch() -> None:
    parts = [loss_of([1.0] * 3, advantage=1.0, tokens=5)[0], loss_of([1.0] * 2, advantage=-1.0, tokens=5)[0]]
    assert sum(parts) == pytest.approx(-(3 - 2) / 5)


def test_trajectories_weigh_what_their_loss_type_says() -> None:
    mask = torch.tensor([[True, True, False, True], [False, True, False, False], [False] * 4])
    whole = {"tokens": 10, "trajectories": 5, "dr_grpo_tokens": 8}
    assert trajectory_scales(mask, "dapo", **whole).tolist() == pytest.approx([0.1] * 3)
    assert trajectory_scales(mask, "grpo", **whole).tolist() == pytest.approx([1 / 15, 1 / 5, 1 / 5])
    assert trajectory_scales(mask, "dr_grpo", **whole).tolist() == pytest.approx([1 / 40] * 3)


def test_each_loss_type_by_hand() -> None:
    """Two trajectories of 3 and 1 tokens with advantages 1 and −2, all ratios 1: token losses −1 and +2."""
    mask, zeros = torch.tensor([[True] * 3, [True, False, False]]), torch.zeros(2, 3)
    expected = {"dapo": (-3 + 2) / 4, "grpo": (-1 + 2) / 2, "dr_grpo": (-3 + 2) / (2 * 6)}
    for loss_type, value in expected.items():
        scales = trajectory_scales(mask, loss_type, tokens=4, trajectories=2, dr_grpo_tokens=6)
        found = grpo_loss(zeros, zeros, zeros, torch.tensor([1.0, -2.0]), mask, **CLIP, importance_cap=2.0, scales=scales)
        assert found.loss.item() == pytest.approx(value)


def test_the_clip_is_around_the_proximal_policy_and_not_around_a_stale_behaviour_policy() -> None:
    """Decoupled PPO: a token that the behaviour policy gave 1/1.5 of today's probability is not clipped, only weighted by 1.5.

    Coupled PPO would clip its ratio to the behaviour policy, 1.5 · 1.1, and give it no gradient.
    """
    loss, gradient, clipped = loss_of([1.1], advantage=1.0, rollout_gap=math.log(1.5))
    assert (loss, gradient, clipped) == (pytest.approx(-1.5 * 1.1), [pytest.approx(-1.65)], 0)
    coupled, gradient, clipped = loss_of([1.5 * 1.1], advantage=1.0)
    assert (coupled, gradient, clipped) == (pytest.approx(-1.28), [0.0], 1)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_gradient_agrees_with_finite_differences(loss_type: str) -> None:
    g = torch.Generator().manual_seed(3)
    old = -torch.rand(4, 6, generator=g, dtype=torch.float64)
    new, rollout = (old + 0.3 * torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(2))
    mask, advantages = torch.rand(4, 6, generator=g) < 0.7, torch.randn(4, generator=g, dtype=torch.float64)
    scales = trajectory_scales(mask, loss_type, tokens=int(mask.sum()), trajectories=4, dr_grpo_tokens=9).double()
    bounds = torch.tensor([0.8, 1.28], dtype=torch.float64)
    assert ((new - old).exp()[..., None] - bounds).abs().min() > 1e-3  # no kink within reach of a difference

    def loss(x: torch.Tensor) -> torch.Tensor:
        return grpo_loss(x, old, rollout, advantages, mask, **CLIP, importance_cap=2.0, scales=scales).loss

    assert torch.autograd.gradcheck(loss, (new.clone().requires_grad_(),), eps=1e-6, atol=1e-8)


def test_mismatch_sums_by_hand() -> None:
    old, rollout = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask, entropy = torch.tensor([[True, True, False]]), torch.tensor([[0.25, 0.5, 8.0]])
    k3 = (math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0)
    assert mismatch_sums(old, rollout, entropy, mask).tolist() == pytest.approx([k3, 1.5, 0.75])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.floats(-5, 5))
def test_the_kl_estimate_is_never_negative_and_the_clip_never_raises_the_objective(gaps: list[float], advantage: float) -> None:
    old = torch.zeros(1, len(gaps))
    mask = torch.ones(1, len(gaps), dtype=torch.bool)
    assert mismatch_sums(torch.tensor([gaps]), old, old, mask)[0] >= 0
    bounded = grpo_loss(torch.tensor([gaps]), old, old, torch.tensor([advantage]), mask, **CLIP, importance_cap=2.0, scales=torch.ones(1))
    unbounded = -(torch.tensor([gaps]).exp() * advantage).sum()
    assert bounded.loss >= unbounded - 1e-3 * (1 + abs(unbounded))
