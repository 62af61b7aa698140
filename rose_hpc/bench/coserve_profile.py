"""`rose-hpc bench coserve --profile`: step times of both engines, each alone on the device, for the gate to start from.

    rollout   so many requests decode at once ──▶ mean step by batch ──▶ a line: decode_base_s + decode_request_s × batch
              prompts of one token to follow, one after the other ──▶ what the line leaves of their steps, per token: prefill_token_s
    serving   the same three as its own plug-in has fitted them under the trace, from the board

The rollout's three are settings of a gate; it goes on refining them. Steps and their time are the gate's own counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rose_hpc.bench.coserve_engines import ROLLOUT, Bench
from rose_hpc.bench.coserve_plan import GATED
from rose_hpc.bench.coserve_policy import VOCABULARY
from rose_hpc.coserve.board import last_reading
from rose_hpc.coserve.gate_stats import GateStats, read_gate_stats
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.coserve.slack import StepTimes
from rose_hpc.errors import RunFailed
from rose_hpc.messages import GenerateRequest, encode

BATCHES = (1, 2, 4, 8, 16)
DECODED = 200  # tokens per request of a batch
PROMPTS = (128, 256, 512, 1024, 1536)
PROMPT_REPEATS = 3
HTTP_OK = 200


async def profile(bench: Bench, seed: int) -> dict[str, Any]:
    """Step times, in seconds, and the measurements behind them. Raises RunFailed when an engine refuses, or nothing was counted."""
    engine, rng = bench.rollouts[GATED], np.random.default_rng(seed)
    decoding = [(batch, await _decode(bench, engine, batch, rng)) for batch in BATCHES if batch <= ROLLOUT.max_concurrency]
    prompts = [(tokens, *await _prefill(bench, engine, tokens, rng)) for tokens in PROMPTS]
    rollout, serving = fit(decoding, prompts), serving_times(bench.board)
    return {
        "rollout": asdict(rollout),
        "serving": asdict(serving),
        "decode_steps": [{"batch": batch, "step_s": step_s} for batch, step_s in decoding],
        "prefills": [{"prompt_tokens": tokens, "steps": steps, "seconds": seconds} for tokens, steps, seconds in prompts],
    }


def fit(decoding: Sequence[tuple[int, float]], prompts: Sequence[tuple[int, float, float]]) -> StepTimes:
    """Least squares. decoding: batch and mean step, s. prompts: tokens, steps that they took, s in all. Pure; no term is negative."""
    batches, step_s = np.array(decoding, np.float64).T
    slope, base = np.polyfit(batches, step_s, 1) if len(set(batches)) > 1 else (0.0, float(step_s.mean()))
    slope, base = max(0.0, float(slope)), max(0.0, float(base))
    tokens, steps, seconds = np.array(prompts, np.float64).T
    left = np.maximum(0.0, seconds - base * steps)
    return StepTimes(float((left * tokens).sum() / (tokens * tokens).sum()), base, slope)


async def _decode(bench: Bench, engine: EngineProcess, batch: int, rng: np.random.Generator) -> float:
    """Mean seconds of a step in which so many requests decode; their few prompt steps are diluted."""
    before = _stats(bench)
    await asyncio.gather(*(_generate(engine, f"d{batch}-{i}", 1, DECODED, rng) for i in range(batch)))
    after = _stats(bench)
    if after.steps == before.steps:
        raise RunFailed("the gate has counted no step", expected=f"about {DECODED}")
    return (after.step_s - before.step_s) / (after.steps - before.steps)


async def _prefill(bench: Bench, engine: EngineProcess, tokens: int, rng: np.random.Generator) -> tuple[float, float]:
    """Steps and seconds of one prompt, the mean of a few."""
    before = _stats(bench)
    for i in range(PROMPT_REPEATS):
        await _generate(engine, f"p{tokens}-{i}", tokens, 1, rng)
    after = _stats(bench)
    return (after.steps - before.steps) / PROMPT_REPEATS, (after.step_s - before.step_s) / PROMPT_REPEATS


async def _generate(engine: EngineProcess, name: str, prompt_tokens: int, new_tokens: int, rng: np.random.Generator) -> None:
    prompt = rng.integers(VOCABULARY, size=prompt_tokens).tolist()
    status, body = await engine.post("generate", encode(GenerateRequest(name, prompt, new_tokens, 1.0, [])))
    if status != HTTP_OK:
        raise RunFailed(f"{engine.name} refuses a rollout", got=body)


def _stats(bench: Bench) -> GateStats:
    stats = read_gate_stats(bench.board)
    if stats is None:
        raise RunFailed("the rollout engine's gate counts nothing", expected=f"counters beside {bench.board}")
    return stats


def serving_times(board: Path) -> StepTimes:
    """What the serving engine's plug-in has fitted so far. Raises RunFailed where it has published nothing."""
    reading = last_reading(board)
    if reading is None:
        raise RunFailed("the serving engine has published nothing", expected=f"a record in {board}")
    return reading.times
