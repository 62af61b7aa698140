"""Enforces a budget of KV blocks inside a rollout engine: what is beyond it, we take out of vLLM's pool ourselves.

    vLLM's pool   │ used by requests │ free │ held by us │       held = blocks − budget, as soon as so many are free
                  └───── budget_blocks ─────┘

Then vLLM's own rules for a full cache do the rest, exactly and at no cost: no request is admitted, and none grows, beyond the
budget. Blocks that requests no longer use but the prefix cache remembers count as free.

It decides nothing (memory_policy.py) and aborts nobody (rollout_plugin.py). While blocks are held, vLLM's pool cannot drop its
prefix cache: `release` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rose_hpc.coserve.memory_policy import MemoryPolicy


class Pool(Protocol):
    """vLLM's BlockPool, as far as we use it. One of its num_gpu_blocks is never free: the null block."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...

    def get_new_blocks(self, num_blocks: int) -> Sequence[Any]: ...  # each with a block_id

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class BlockBudget:
    """One engine's pool under one policy. Changes of the budget hold from the next `enforce` on."""

    def __init__(self, pool: Pool, least: int, high_frac: float) -> None:
        self._pool = pool
        self._held: list[Any] = []
        self.policy = MemoryPolicy(pool.num_gpu_blocks - 1, least, high_frac)

    @property
    def used(self) -> int:
        """Blocks in use by requests."""
        return self.policy.blocks - self._pool.get_num_free_blocks() - len(self._held)

    def observe(self, serving_kv_frac: float, now_s: float) -> int:
        """Blocks that must be freed by aborting requests, before the next `enforce`."""
        return self.policy.observe(serving_kv_frac, self.used, now_s).give_up_blocks

    @property
    def held(self) -> int:
        """Blocks that we hold."""
        return len(self._held)

    @property
    def held_ids(self) -> list[int]:
        """Which they are: nobody uses them."""
        return [block.block_id for block in self._held]

    def enforce(self) -> bool:
        """Hold what is beyond the budget, as far as it is free now; whether that was more than before."""
        missing = self.policy.blocks - self.policy.budget_blocks - len(self._held)
        take = min(missing, self._pool.get_num_free_blocks())
        if take > 0:
            self._held += self._pool.get_new_blocks(take)
        return take > 0

    def release(self) -> None:
        """Hold nothing until the next `enforce`."""
        held, self._held = self._held, []
        self._pool.free_blocks(held)
