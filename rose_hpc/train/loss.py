"""GRPO token loss with asymmetric clipping and truncated importance weights. Pure functions of tensors; imports torch only.

Three log-probabilities of the same sampled token:

    rollout   behaviour policy: of the engine that sampled it (its own kernels, perhaps an older policy version)
    old       proximal policy: of the trainer before this training step, recomputed by it (no gradient)
    new       of the trainer now

    loss = − Σ_i s_i Σ_t mask · min(e^(old−rollout), cap) · min(r·A_i, clip(r, 1−low, 1+high)·A_i)        r = e^(new−old)

This is the decoupled PPO objective (AReaL, arXiv:2505.24298, § 5.2, eq. 5): the clip holds the policy near the proximal one, however stale
the rollouts are, and the weight from the behaviour to the proximal policy corrects for their staleness as for the mismatch between engine
and trainer (truncated importance sampling). Under synchronous GRPO behaviour and proximal policy differ by that mismatch only.

s_i is what a trajectory's tokens weigh, by `loss_type`, named as in TRL; every figure is of the GLOBAL minibatch, so that the loss does
not depend on ranks and micro-batches:

    dapo      1 / sampled tokens of the minibatch        every token weighs the same (DAPO, arXiv:2503.14476, § 3.3, also the clip)
    grpo      1 / (trajectories · its sampled tokens)    every trajectory weighs the same (DeepSeekMath, arXiv:2402.03300, eq. 3)
    dr_grpo   1 / (trajectories · a constant)            no bias by length (Dr. GRPO, arXiv:2503.20783, § 3.2)

There is no KL penalty and no entropy bonus.

Masked tokens (the environment's, and padding) are replaced before any exponential, so they give exactly no gradient,
whatever their values. All functions take [B, T-1] tensors whose column t belongs to token t+1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossType = Literal["dapo", "grpo", "dr_grpo"]


@dataclass(frozen=True)
class TokenLoss:
    """loss: scalar with gradient, this part of the global minibatch's. clipped: tokens whose gradient was clipped away."""

    loss: Tensor
    clipped: Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token after the first, and the entropy of the distribution that it was drawn from, in nats.

    logits [B, T, V] of any float dtype, token_ids [B, T] int64 → two float32 tensors [B, T-1]. The distribution is
    softmax(logits / temperature), the one that the engine samples from. The entropy carries no gradient.
    """
    scaled = _scaled(logits, temperature)
    with torch.no_grad():
        log_probs = F.log_softmax(scaled, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return _chosen(scaled, token_ids), entropy


def chosen_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """The first result of `token_logprobs` without the cost of the second."""
    return _chosen(_scaled(logits, temperature), token_ids)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits[:, :-1].float() / temperature


def _chosen(scaled: Tensor, token_ids: Tensor) -> Tensor:
    return scaled.gather(-1, token_ids[:, 1:, None]).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def grpo_loss(
    new: Tensor,
    old: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    scales: Tensor,
) -> TokenLoss:
    """The loss above over one micro-batch. new, old, rollout [B, T-1] float32; advantages [B]; mask [B, T-1] bool.

    Only `new` gets a gradient. scales: s_i [B], from `trajectory_scales`.
    """
    ratio = torch.exp(_masked(new - old.detach(), mask))
    weight = importance_weight(old, rollout, mask, importance_cap)
    advantage = advantages[:, None].expand_as(ratio)
    free = ratio * advantage
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = -((mask * weight * torch.minimum(free, bounded)).sum(1) * scales).sum()
    return TokenLoss(loss, (mask & (bounded < free)).sum())


def trajectory_scales(mask: Tensor, loss_type: LossType, *, tokens: int, trajectories: int, dr_grpo_tokens: int) -> Tensor:
    """s_i [B] float32 for the trajectories of mask [B, T-1].

    tokens, trajectories: of the global minibatch, > 0. dr_grpo_tokens: the constant.
    """
    sampled = mask.sum(1)
    match loss_type:
        case "dapo":
            return torch.full_like(sampled, 1 / tokens, dtype=torch.float32)
        case "grpo":
            return 1 / (trajectories * sampled.clamp(min=1).float())
        case "dr_grpo":
            return torch.full_like(sampled, 1 / (trajectories * dr_grpo_tokens), dtype=torch.float32)


def importance_weight(old: Tensor, rollout: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(π_trainer / π_engine, cap) per token before the step; 1 where masked; no gradient."""
    return torch.exp(_masked(old - rollout, mask)).clamp(max=cap).detach()


def mismatch_sums(old: Tensor, rollout: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """Sums over the sampled tokens, float64 [3]: k3 estimate of KL(engine ‖ trainer), |old − rollout|, entropy.

    k3 (Schulman, "Approximating KL divergence", 2020): e^d − 1 − d with d = log π_trainer − log π_engine over samples of the engine;
    unbiased and never negative. expm1 in float64: the usual d is 1e-4, where float32 would return rounding noise.
    """
    difference = _masked(old - rollout, mask).double()
    k3 = torch.expm1(difference) - difference
    return torch.stack([k3.sum(), difference.abs().sum(), _masked(entropy, mask).double().sum()])


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))
