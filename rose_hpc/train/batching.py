"""Which rank computes which rows of a training batch, in which optimiser step and which forward pass. Pure: numpy only.

    rows ── shuffle(seed) ──▶ minibatches ── by tokens ──▶ ranks ── by padded tokens ──▶ micro-batches

Every rank holds all rows of the batch, so every rank computes the same plan and nothing needs to be communicated.

Invariants
- Each row is in exactly one micro-batch of one rank of one minibatch.
- The rows of a minibatch depend on the seed only, not on the number of ranks: 1 and 8 ranks take the same optimiser steps.
- Within a minibatch every rank has the same number of micro-batches, at least one: each pass is a round of collectives.
  Ranks that run out get empty ones, which compute on padding and weigh nothing.
- A micro-batch holds at most `micro_batch_tokens` padded tokens, except for a single row that is longer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import ControlError
from rose_hpc.messages import Row

EMPTY_SHAPE = (1, 2)  # rows, tokens: the smallest batch in which one token predicts another

MicroBatch = tuple[int, ...]  # row numbers, longest first; () is padding


@dataclass(frozen=True)
class Minibatch:
    """One optimiser step. by_rank[r] are the micro-batches of rank r; all ranks have as many."""

    by_rank: tuple[tuple[MicroBatch, ...], ...]

    @property
    def rows(self) -> list[int]:
        """Row numbers of all ranks, ascending."""
        return sorted(row for micro_batches in self.by_rank for micro_batch in micro_batches for row in micro_batch)


@dataclass(frozen=True)
class PaddedRows:
    """One micro-batch, padded on the right to its longest row; B rows of T tokens.

    Column t of the [B, T-1] arrays belongs to token t+1, the one that position t predicts. Padding has mask False; causal
    attention keeps it from every real position, so no attention mask is needed.
    """

    token_ids: NDArray[np.int64]  # [B, T]
    mask: NDArray[np.bool_]  # [B, T-1]
    rollout_logprobs: NDArray[np.float32]  # [B, T-1], 0 where not sampled
    advantages: NDArray[np.float32]  # [B]


def plan_step(
    lengths: Sequence[int], *, ranks: int, minibatches: int, micro_batch_tokens: int, seed: Sequence[int]
) -> tuple[Minibatch, ...]:
    """Plan one training step over rows of these lengths, in tokens. Fewer rows than minibatches: as many minibatches as rows."""
    order = np.random.default_rng(list(seed)).permutation(len(lengths))
    parts = [part.tolist() for part in np.array_split(order, minibatches) if len(part)]
    return tuple(_plan_minibatch(part, lengths, ranks, micro_batch_tokens) for part in parts)


def _plan_minibatch(rows: list[int], lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> Minibatch:
    packed = [pack(share, lengths, micro_batch_tokens) for share in share_out(rows, lengths, ranks)]
    passes = max(1, *(len(p) for p in packed))
    return Minibatch(tuple(tuple(p) + ((),) * (passes - len(p)) for p in packed))


def share_out(rows: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows per rank, balanced by tokens: longest first, each to the rank with the fewest so far (Graham's LPT, ≤ 4/3 of optimal)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in _longest_first(rows, lengths):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        shares[rank].append(row)
        tokens[rank] += lengths[row]
    return shares


def pack(rows: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Cut rows, longest first, into micro-batches: the first row of each sets its width, so neighbours waste little padding."""
    packed: list[list[int]] = []
    for row in _longest_first(rows, lengths):
        if packed and (len(packed[-1]) + 1) * lengths[packed[-1][0]] <= micro_batch_tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    return [tuple(p) for p in packed]


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def pad(rows: Sequence[Row]) -> PaddedRows:
    """Lay rows side by side. No rows gives padding of EMPTY_SHAPE with an all-False mask."""
    count, width = (len(rows), max(2, *(len(r.token_ids) for r in rows), 2)) if rows else EMPTY_SHAPE
    token_ids, mask = np.zeros((count, width), np.int64), np.zeros((count, width), np.bool_)
    logprobs, advantages = np.zeros((count, width), np.float32), np.zeros(count, np.float32)
    for i, row in enumerate(rows):
        size = len(row.token_ids)
        token_ids[i, :size], mask[i, :size], logprobs[i, :size] = row.token_ids, row.loss_mask, row.rollout_logprobs
        advantages[i] = row.advantage
    return PaddedRows(token_ids, mask[:, 1:], logprobs[:, 1:], advantages)


@dataclass(frozen=True)
class Totals:
    """Of a global minibatch. tokens: sampled ones, those that enter the loss."""

    trajectories: int
    tokens: int


def totals_of(rows: Sequence[Row]) -> Totals:
    """Count them."""
    return Totals(len(rows), sum(int(np.count_nonzero(row.loss_mask)) for row in rows))


def has_signal(rows: Sequence[Row]) -> bool:
    """Whether these rows can give a gradient: some sampled token with a non-zero advantage."""
    return any(row.advantage != 0 and row.loss_mask.any() for row in rows)


def check_rows(rows: Sequence[Row], vocabulary: int) -> None:
    """Refuse rows that cannot be trained on. Raises ControlError naming the first bad row.

    Checked here because a bad id is an index error on a CPU but ends the CUDA context, and a NaN ends the weights.
    """
    for number, row in enumerate(rows):
        problem = _problem(row, vocabulary)
        if problem is not None:
            raise ControlError(f"training row {number} cannot be used", got=problem[0], expected=problem[1])


def _problem(row: Row, vocabulary: int) -> tuple[str, str] | None:
    if len(row.token_ids) == 0:
        return "no tokens", "a prompt and what was sampled"
    if int(row.token_ids.min()) < 0 or int(row.token_ids.max()) >= vocabulary:
        return f"token ids {row.token_ids.min()} to {row.token_ids.max()}", f"0 to {vocabulary - 1}"
    if row.loss_mask[0]:
        return "a first token that was sampled", "a prompt of at least one token: nothing predicts the first"
    if not (np.isfinite(row.advantage) and np.isfinite(row.rollout_logprobs).all()):
        return "a value that is not finite", "finite advantages and log-probabilities"
    return None
