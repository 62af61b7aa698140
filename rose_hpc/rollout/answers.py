"""Whether an engine's answer can be used: checked before it touches a trajectory. Pure.

An engine is another process, perhaps another owner's: what it says is input. A faulty answer costs its turn, not the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rose_hpc.messages import GenerateRequest, GenerateResult

MAX_NUMBER = 2**31 - 1  # training rows carry token ids as int32


def answer_fault(request: GenerateRequest, result: GenerateResult) -> str | None:
    """What is wrong with a complete answer to this request, or None."""
    lengths = [len(result.token_ids), len(result.logprobs), len(result.policy_versions)]
    if result.request_id != request.request_id:
        return f"an answer to {result.request_id!r}"
    if min(lengths) < 1 or min(lengths) != max(lengths):
        return f"lists of {lengths} tokens, log probabilities and versions"
    if not all(map(math.isfinite, result.logprobs)):
        return "a log probability that is not finite"
    if not _in_range(result.token_ids):
        return "a token id out of range"
    if not _in_range(result.policy_versions):
        return "a policy version out of range"
    return None


def _in_range(numbers: Sequence[int]) -> bool:
    return 0 <= min(numbers) <= max(numbers) <= MAX_NUMBER
