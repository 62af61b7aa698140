"""GRPO token loss with asymmetric clipping and truncated importance weights. Pure functions of tensors; imports torch only.

Three log-probabilities of the same sampled token:

    rollout   of the engine that sampled it (its own kernels, perhaps an older policy version)
    old       of the trainer before this training step (no gradient)
    new       of the trainer now

    loss = − Σ_t mask · min(e^(old−rollout), cap) · min(r·A, clip(r, 1−low, 1+high)·A) / N        r = e^(new−old)

N counts the sampled tokens of the GLOBAL minibatch: every token weighs the same, whichever trajectory, rank or
micro-batch it is in (DAPO, arXiv:2503.14476, §3.3, also the asymmetric clip). The truncated weight corrects for the
mismatch between engine and trainer (truncated importance sampling). There is no KL penalty and no entropy bonus.

Masked tokens (the environment's, and padding) are replaced before any exponential, so they give exactly no gradient,
whatever their values. All functions take [B, T-1] tensors whose column t belongs to token t+1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """loss: scalar with gradient, already divided by the global token count. clipped: tokens whose gradient was clipped away."""

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
    global_tokens: int,
) -> TokenLoss:
    """The loss above over one micro-batch. new, old, rollout [B, T-1] float32; advantages [B]; mask [B, T-1] bool.

    Only `new` gets a gradient. global_tokens: sampled tokens of the minibatch over all ranks, > 0.
    """
    ratio = torch.exp(_masked(new - old.detach(), mask))
    weight = importance_weight(old, rollout, mask, importance_cap)
    advantage = advantages[:, None].expand_as(ratio)
    free = ratio * advantage
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = -(mask * weight * torch.minimum(free, bounded)).sum() / global_tokens
    return TokenLoss(loss, (mask & (bounded < free)).sum())


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
