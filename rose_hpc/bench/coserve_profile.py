"""`rose-hpc bench coserve --profile`: step times of both engines, each alone on the device, for the gate to start from.

    rollout   so many requests decode at once ──▶ mean step by batch ──▶ a line: decode_base_s + decode_request_s × batch
              prompts of one token to follow, one after the other ──▶ what the line leaves of their steps, per token: prefill_token_s
    serving   the same three as its own plug-in has fitted them under the trace, from the board

The rollout's three are settings of a gate; it goes on refining them. Steps and their time are the gate's own counters.

What the line leaves out is measured beside it: how a decode step grows with its context, and how serving's steps grow beside rollouts that
nothing holds (interference). Both change slowly, from step to step, and the gate's refinement follows them: it learns from the wall time
of the last few steps, in which they are contained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rose_hpc.bench.coserve_engines import ROLLOUT, ROLLOUT_CONCURRENCY, Bench
from rose_hpc.bench.coserve_load import RolloutLoad, serve
from rose_hpc.bench.coserve_plan import GATED, PLAIN
from rose_hpc.bench.coserve_policy import VOCABULARY
from rose_hpc.coserve.board import last_reading
from rose_hpc.coserve.gate_stats import GateStats, read_gate_stats
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.coserve.slack import StepTimes
from rose_hpc.errors import RunFailed
from rose_hpc.messages import GenerateRequest, encode
from rose_hpc.traffic.trace import Request

BATCHES = (1, 2, 4, 8, 16)
DECODED = 200  # tokens per request of a batch
PROMPTS = (128, 256, 512, 1024, 1536)
PROMPT_REPEATS = 3
CONTEXTS, CONTEXT_BATCH, CONTEXT_DECODED = (64, 512, 1536), 8, 64
HTTP_OK = 200


async def profile(bench: Bench, users: Sequence[Request], scratch: Path, seed: int) -> dict[str, Any]:
    """Step times, in seconds, and the measurements behind them. users: of the serving engine, twice; scratch: a folder.

    Raises RunFailed when an engine refuses, or nothing was counted.
    """
    engine, rng = bench.rollouts[GATED], np.random.default_rng(seed)
    decoding = [(batch, await _decode(bench, engine, batch, rng)) for batch in BATCHES if batch <= ROLLOUT.max_concurrency]
    prompts = [(tokens, *await _prefill(bench, engine, tokens, rng)) for tokens in PROMPTS]
    contexts = [(tokens, await _at_context(bench, engine, tokens, rng)) for tokens in CONTEXTS]
    rollout, serving = fit(decoding, prompts), serving_times(bench.board)
    return {
        "rollout": asdict(rollout),
        "serving": asdict(serving),
        "decode_steps": [{"batch": batch, "step_s": step_s} for batch, step_s in decoding],
        "prefills": [{"prompt_tokens": tokens, "steps": steps, "seconds": seconds} for tokens, steps, seconds in prompts],
        "contexts": [{"context_tokens": tokens, "batch": CONTEXT_BATCH, "step_s": step_s} for tokens, step_s in contexts],
        "interference": await _interference(bench, users, scratch, seed),
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


async def _at_context(bench: Bench, engine: EngineProcess, tokens: int, rng: np.random.Generator) -> float:
    """Mean seconds of a step in which CONTEXT_BATCH requests decode after prompts of so many tokens: what decoding adds to prefill."""
    steps, seconds = 0, 0.0
    for sign, new_tokens in ((-1, 1), (1, 1 + CONTEXT_DECODED)):
        before = _stats(bench)
        await asyncio.gather(*(_generate(engine, f"c{tokens}-{new_tokens}-{i}", tokens, new_tokens, rng) for i in range(CONTEXT_BATCH)))
        after = _stats(bench)
        steps, seconds = steps + sign * (after.steps - before.steps), seconds + sign * (after.step_s - before.step_s)
    if steps <= 0:
        raise RunFailed("decoding took no steps of its own", got=steps, expected=f"about {CONTEXT_DECODED}")
    return seconds / steps


async def _interference(bench: Bench, users: Sequence[Request], scratch: Path, seed: int) -> dict[str, float]:
    """Serving's decode step beside ROLLOUT_CONCURRENCY rollouts without gate or quota, over the same alone."""
    steps_s = {}
    for name in ("alone_step_s", "beside_step_s"):
        load = RolloutLoad(bench.rollouts[PLAIN], ROLLOUT_CONCURRENCY, False, seed)
        async with nullcontext() if name == "alone_step_s" else load.flowing():
            await serve(bench.url, users, scratch / "segment.jsonl", seed)
            steps_s[name] = serving_times(bench.board).decode_s(1)
    return steps_s | {"factor": steps_s["beside_step_s"] / steps_s["alone_step_s"]}


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
