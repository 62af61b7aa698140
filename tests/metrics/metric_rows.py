"""Rows that only state what matters to a test, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 20.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds within WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    counts = ("policy_version", "trajectories", "optimizer_steps", "skipped", "prompt_tokens", "cached_prompt_tokens", "wire_bytes")
    tokens = {"rollout_tokens_dedicated": 0, "rollout_tokens_opportunistic": 0}
    return {"step": step, **dict.fromkeys(counts, 0), **tokens, **changes}


def sync_row(version: int, receiver: str, **changes: Any) -> dict[str, Any]:
    row = {
        "version": version,
        "receiver": receiver,
        "how": "delta",
        "changes": 3,
        "wire_bytes": 10,
        "image_bytes": 40,
        "digest": 1,
        "proof": "digest",
        "verified": True,
    }
    return {**row, **changes}


def turn_row(step: int, **changes: Any) -> dict[str, Any]:
    counts = ("trajectory", "turn", "prompt_tokens", "cached_tokens", "new_tokens", "policy_version")
    return {"step": step, **dict.fromkeys(counts, 0), "executor": "dedicated-0", "kind": "dedicated", **changes}


def trajectory_row(step: int, **changes: Any) -> dict[str, Any]:
    counts = ("trajectory", "group", "turns", "tokens", "success")
    return {"step": step, **dict.fromkeys(counts, 0), "outcome": "done", **changes}
