"""One receiver that is a real engine: versions come over the link into its relay's arena, and from there into vLLM while it generates.

    ranks ─▶ relay-0 ══ link ══ relay-1 ─▶ arena ─▶ engine (raw weights, 25 M parameters), which samples from its first version on

Its own run with a policy of its own: what is measured is the engine's pause, which depends on the policy, not on the link. Each version is
delivered, then the engine is told to update, as the controller does.

What counts as a mismatch of the engine: an update whose proof is not a digest of all that it runs, or not the trainer's; and every lane of
its arena that differs from the trainer's parameters at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rose_hpc.bench.link_image import LinkImage, Qwen3Sizes
from rose_hpc.bench.link_processes import LinkSpec
from rose_hpc.bench.link_run import LinkRun
from rose_hpc.bench.shaped_link import ShapedLink
from rose_hpc.config import EngineConfig
from rose_hpc.control import TOKEN_FILE, read_token
from rose_hpc.coserve.processes import EngineProcess
from rose_hpc.coserve.specs import EngineSpec
from rose_hpc.errors import RunFailed
from rose_hpc.messages import Fault, GenerateRequest, GenerateResult, Message, UpdateRequest, UpdateResult, decode, encode

SIZES = Qwen3Sizes(vocabulary=1024, hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=4, head_dim=64)  # 25.7 M
CONTEXT = 1024
IN_FLIGHT = 4  # requests, always
NEW_TOKENS = 256  # per request: each lives through a few updates
PARAMETERS = sum(math.prod(shape) for _, shape in SIZES.shapes())
DENSITIES = (0.003, 0.03)
VERSIONS = 8  # per density
BETWEEN_S = 0.2  # from an update to the next version, for tokens to flow
HTTP_OK = 200

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class EngineUpdate:
    """One version in the engine. update_s: from the command to the proof; deliver_s: of the transfer before it."""

    density: float
    deliver_s: float
    update_s: float
    pause_s: float
    how: str
    proof: str
    is_the_trainers: bool


async def measure_engine(link: ShapedLink, folder: Path, real: Path, seed: int) -> dict[str, Any]:
    """`engine_pause_s`, mismatches, and rows per density. folder: new, in shared memory. Raises RoseError."""
    image = LinkImage(SIZES.shapes(), real)
    spec = LinkSpec(folder, image, real, receivers=1, seed=seed)
    try:
        async with LinkRun(link, spec) as run, _engine(spec) as engine, _generating(engine) as answers:
            updates = await _updates(run, engine)
            mismatches = await run.mismatches() + sum(not u.is_the_trainers for u in updates)
            return summary(updates) | {
                "mismatches": mismatches,
                "faults": run.faults,
                "parameters": image.lanes,
                "requests": len(answers),
                "requests_across_versions": sum(len(set(a.policy_versions)) > 1 for a in answers),
                "generated_tokens": sum(len(a.token_ids) for a in answers),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(updates: Sequence[EngineUpdate]) -> dict[str, Any]:
    """The worst pause of all, and median and worst of each density."""
    rows = []
    for density in dict.fromkeys(u.density for u in updates):
        group = [u for u in updates if u.density == density]
        pauses = [u.pause_s for u in group]
        rows.append(
            {
                "density": density,
                "versions": len(group),
                "pause_median_s": statistics.median(pauses),
                "pause_worst_s": max(pauses),
                "update_median_s": statistics.median(u.update_s for u in group),
                "deliver_median_s": statistics.median(u.deliver_s for u in group),
                "how": sorted({u.how for u in group}),
                "proof": sorted({u.proof for u in group}),
            }
        )
    return {"pause_s": max(u.pause_s for u in updates), "rows": rows, "updates": [asdict(u) for u in updates]}


async def _updates(run: LinkRun, engine: EngineProcess) -> list[EngineUpdate]:
    """Deliver and apply version after version, after one per density that does not count."""
    found = []
    for density in DENSITIES:
        for number in range(-1, VERSIONS):
            await run.change(density)
            update = await _update(run, engine, density)
            if number >= 0:
                found.append(update)
            await asyncio.sleep(BETWEEN_S)
    return found


async def _update(run: LinkRun, engine: EngineProcess, density: float) -> EngineUpdate:
    delivery = await run.publish()
    begin_s = time.monotonic()
    result = await _ask(engine, "update", UpdateRequest(delivery.version, delivery.digest), UpdateResult)
    update_s = time.monotonic() - begin_s
    ours = result.proof == "digest" and (result.version, result.digest) == (delivery.version, delivery.digest)
    return EngineUpdate(density, delivery.seconds, update_s, result.pause_s, result.how, result.proof, ours)


@asynccontextmanager
async def _engine(spec: LinkSpec) -> AsyncIterator[EngineProcess]:
    """Started as its agent would, on the first receiver's arena."""
    model, runtime = spec.folder / "model", spec.folder / "engine"
    model.mkdir()
    runtime.mkdir(mode=0o700)
    (model / "config.json").write_text(json.dumps(hugging_face_config(SIZES)))
    engine_spec = EngineSpec(
        executor_id="engine-0",
        model_dir=model,
        arena=spec.arena(spec.sinks[0]),
        engine=EngineConfig(dtype="bfloat16", max_model_len=CONTEXT, max_concurrency=IN_FLIGHT),
        socket=runtime / "e.sock",
        token_file=spec.control_dir / TOKEN_FILE,
    )
    async with EngineProcess(engine_spec, spec.logs_dir / "engine.log", read_token(spec.control_dir)) as engine:
        await engine.healthy()
        yield engine


def hugging_face_config(sizes: Qwen3Sizes) -> dict[str, Any]:
    """What config.json says of such a policy."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


@asynccontextmanager
async def _generating(engine: EngineProcess) -> AsyncIterator[list[GenerateResult]]:
    """Requests in flight meanwhile, from the first version on; yields what has ended."""
    answers: list[GenerateResult] = []
    ids = itertools.count()

    async def generate() -> None:
        while True:
            prompt = [(7 * i) % SIZES.vocabulary for i in range(64)]
            request = GenerateRequest(f"r{next(ids)}", prompt, NEW_TOKENS, 1.0, [])
            status, body = await engine.post("generate", encode(request))
            if status == HTTP_OK:
                answers.append(decode(body, GenerateResult))
            else:
                await asyncio.sleep(BETWEEN_S)  # no version yet

    tasks = [asyncio.create_task(generate()) for _ in range(IN_FLIGHT)]
    try:
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(engine: EngineProcess, verb: str, message: Message, kind: type[R]) -> R:
    status, body = await engine.post(verb, encode(message))
    if status != HTTP_OK:
        raise RunFailed(f"the engine refuses to {verb}", got=decode(body, Fault).what)
    return decode(body, kind)
