"""The rollout engine: vLLM's AsyncLLM with token ids in, and token ids, logprobs and policy versions out.

    no weights ──update──▶ serving v ──update──▶ serving v' …          (generate is refused before the first update)
                              │ ▲
                        pause │ │ resume                               (requests freeze and go on)
                              ▼ │
                            paused ──update──▶ paused                  (an update leaves a pause of the caller's as it is)
    any ──load fails half-way or is not proved, or EngineCore dies──▶ broken     (final: `broken` returns and the process ends)

Invariants
- The model's weights come only through the arena and only verified; the folder's own weights are never read.
- Every token is sampled from π_v given KV entries computed by π_v, v being the version reported for it: an update recomputes
  the KV cache of requests in flight and drops the prefix cache.
- A refused update changes nothing: the old version goes on serving.
- No token leaves before the weights that it was sampled from are proved: answers wait for the proof of an update (weight_update.py).
- An aborted request ends with the tokens, logprobs and versions that it has, and for a reason: `asked`, `revoked` (the engine is to
  end), or what the scheduler says (rollout_plugin.py: `pressure`).

Importing this module imports vLLM, which reads the environment: see engine.py, which sets it first. It does not listen on
anything (engine_api.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rose_hpc.coserve import rollout_plugin
from rose_hpc.coserve.memory_return import WORKER_EXTENSION, watching
from rose_hpc.coserve.specs import EngineSpec
from rose_hpc.coserve.weight_update import Prepared, WeightUpdate
from rose_hpc.errors import RunFailed
from rose_hpc.http_api import Refused, first_of
from rose_hpc.messages import GenerateRequest, GenerateResult, UpdateRequest, UpdateResult
from rose_hpc.weights.vllm_plugin import BACKEND

NO_VERSION = -1
CORE_CLOSE_S = 1.5  # its teardown takes milliseconds, its interpreter's end seconds; then it is killed
FINISH_REASONS = ("stop", "length", "abort")
ASKED, REVOKED = "asked", "revoked"  # why a request was aborted

log = logging.getLogger(__name__)


def engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    """vLLM's arguments. Its CUDA graphs and compilation are for GPUs; on a CPU they cost a warm-up and gain nothing."""
    return AsyncEngineArgs(
        model=str(spec.model_dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=spec.engine.dtype,
        seed=spec.seed,
        tensor_parallel_size=spec.engine.tensor_parallel,
        max_model_len=spec.engine.max_model_len,
        max_num_seqs=spec.engine.max_concurrency,
        kv_cache_memory_bytes=spec.engine.kv_cache_bytes,
        block_size=spec.engine.block_size,
        enforce_eager=current_platform.is_cpu(),
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="rose_hpc.weights.vllm_backend.RoseWorkerExtension" if spec.gate is None else WORKER_EXTENSION,
        disable_log_stats=True,
        **_gated(spec),
    )


def _gated(spec: EngineSpec) -> dict[str, Any]:
    """On a lent device the scheduler asks the gate before each step."""
    if spec.gate is None:
        return {}
    return {"scheduler_cls": rollout_plugin.SCHEDULER_CLASS, "additional_config": {rollout_plugin.CONFIG_KEY: spec.gate}}


class RolloutEngine:
    """One engine. All methods run in the event loop that started it."""

    def __init__(self, spec: EngineSpec, llm: AsyncLLM) -> None:
        self._spec, self._llm = spec, llm
        self._vocabulary = llm.model_config.get_vocab_size()
        self._control = asyncio.Lock()  # pause, resume and update, one at a time
        self._live: set[str] = set()
        self._abort_reasons: dict[str, str] = {}  # of requests in flight
        self._is_revoked = False
        self.aborted: Counter[str] = Counter()  # requests so far, by reason
        self._serving: UpdateResult | None = None
        self._update = WeightUpdate(llm)
        self._proved = asyncio.Event()  # cleared from an update's pause to its proof
        self._proved.set()
        self._paused = False
        self._load_failed = asyncio.Event()
        self._memory = watching(llm, spec.gate)

    @classmethod
    async def start(cls, spec: EngineSpec) -> RolloutEngine:
        """Start vLLM (blocks the loop for seconds, from its main thread: the lifeline of its children hangs on that thread)."""
        llm = AsyncLLM.from_engine_args(engine_args(spec))
        await llm.init_weight_transfer_engine(WeightTransferInitRequest({"arena": str(spec.arena)}))
        await llm.get_supported_tasks()  # cached from here on: `generate` then registers with vLLM without yielding to an abort
        return cls(spec, llm)

    @property
    def policy_version(self) -> int:
        return NO_VERSION if self._serving is None else self._serving.version

    @property
    def running(self) -> int:
        """Requests in flight, queued ones included."""
        return len(self._live)

    @property
    def paused(self) -> bool:
        return self._paused

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Cancelling the call aborts the request.

        Raises Refused: 409 without weights or for a request id in flight, 400 for what vLLM cannot run, 503 when it is ending.
        """
        self._check(request)
        self._live.add(request.request_id)
        try:
            async for output in self._llm.generate(tokens_input(request.prompt_token_ids), _sampling(request), request.request_id):
                final = output  # FINAL_ONLY: there is exactly one
        except (VLLMClientError, ValueError) as error:
            raise Refused(400, "vLLM refused the request", got=error) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise Refused(503, "vLLM failed", got=error) from error
        finally:
            self._live.discard(request.request_id)
            asked = self._abort_reasons.pop(request.request_id, None)
        if (reason := abort_reason(final.outputs[0], asked)) is not None:
            self.aborted[reason] += 1
            log.info("%s aborted (%s) with %d tokens", request.request_id, reason, len(final.outputs[0].token_ids))
        await self._proved.wait()  # for ever where the proof fails: then this process ends
        return _result(request.request_id, final, reason)

    def _check(self, request: GenerateRequest) -> None:
        if self._is_revoked:
            raise Refused(503, "this engine is ending", got=REVOKED)
        if self._serving is None:
            raise Refused(409, "no policy version applied yet", remedy="send an update first")
        if request.request_id in self._live:
            raise Refused(409, "request id in flight", got=request.request_id)
        length, limit = len(request.prompt_token_ids) + request.max_new_tokens, self._spec.engine.max_model_len
        if not request.prompt_token_ids or request.max_new_tokens < 1 or length > limit:
            raise Refused(
                400,
                "prompt and answer do not fit",
                got=f"{len(request.prompt_token_ids)} + {request.max_new_tokens} tokens",
                expected=f"at least 1 + 1, at most {limit} together",
            )
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._vocabulary:
            raise Refused(400, "token id outside of the vocabulary", expected=f"0 to {self._vocabulary - 1}")

    async def abort(self, request_ids: Iterable[str], reason: str = ASKED) -> None:
        """End these now; their `generate` returns the partial tokens. Ids not in flight are ignored."""
        if known := [r for r in request_ids if r in self._live]:
            self._abort_reasons.update(dict.fromkeys(known, reason))
            await self._llm.abort(known)

    async def revoke(self) -> None:
        """Take no more requests and end those in flight: their callers get the partial tokens before the process ends."""
        self._is_revoked = True
        await self.abort(list(self._live), REVOKED)

    async def pause(self) -> None:
        """Freeze all requests, new ones included, between two steps."""
        async with self._control:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        async with self._control:
            await self._llm.resume_generation()
            self._paused = False

    async def update(self, request: UpdateRequest) -> UpdateResult:
        """Serve another version. The same version and digest again: the earlier result, at once.

        Raises Refused 409: not newer, not in the arena, or not the trainer's bits; the old version goes on serving.
        """
        async with self._control:
            if self._serving is not None and (self._serving.version, self._serving.digest) == (request.version, request.digest):
                return self._serving
            if request.version <= self.policy_version:
                raise Refused(409, "not newer than the serving version", got=request.version, expected=f"> {self.policy_version}")
            begin_s = time.monotonic()
            prepared = await self._update.prepare(request)
            pause_s, proof = await self._load(prepared)
            apply_s = time.monotonic() - begin_s
            self._serving = UpdateResult(
                request.version, request.digest, apply_s, pause_s, proof=proof, how=prepared.how, changed=prepared.changed
            )
            return self._serving

    async def _load(self, prepared: Prepared) -> tuple[float, str]:
        """Seconds of pause, and the proof that the version is what runs now.

        A failure in here leaves weights in the model that must not serve: no answer leaves any more, and the process ends.
        """
        self._proved.clear()
        try:
            pause_s = await self._update.apply(prepared, resume=not self._paused)
            proof = await self._update.prove(prepared)
        except Exception as error:  # the edge to vLLM, which raises bare Exception for what failed in another process
            self._load_failed.set()
            raise Refused(500, f"loading version {prepared.request.version} failed; this engine ends", got=error) from error
        self._proved.set()
        return pause_s, proof

    async def broken(self) -> None:
        """Returns never, unless the engine cannot serve any more: then raises RunFailed."""
        # vLLM's output loop ends exactly when its core has died; asyncio.wait watches it without cancelling it
        cause = await first_of(core=asyncio.wait((self._llm.output_handler,)), update=self._load_failed.wait())
        raise RunFailed(f"engine {self._spec.executor_id}: " + {"core": "vLLM's core died", "update": "an update failed half-way"}[cause])

    def close(self) -> None:
        """End vLLM and its processes, whatever is in flight."""
        if self._memory is not None:
            self._memory.cancel()
        self._llm.shutdown(timeout=CORE_CLOSE_S)


def abort_reason(completion: CompletionOutput, asked: str | None) -> str | None:
    """Why a request ended early; None: it did not. asked: for what reason the engine was told to, if it was."""
    if completion.finish_reason != "abort":
        return None
    return asked or (completion.stop_reason if isinstance(completion.stop_reason, str) else ASKED)


def _sampling(request: GenerateRequest) -> SamplingParams:
    """No text is involved: no detokenisation, and the only stop tokens are the request's."""
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=True,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _result(request_id: str, output: RequestOutput, reason: str | None = None) -> GenerateResult:
    """Raises Refused 500: vLLM ended the request for a reason of its own, or not every token has its logprob and version."""
    completion = output.outputs[0]
    if completion.finish_reason not in FINISH_REASONS:
        raise Refused(500, "vLLM ended the request", got=completion.finish_reason, expected=" or ".join(FINISH_REASONS))
    token_ids, logprobs, versions = list(completion.token_ids), _logprobs(completion), _versions(completion)
    if not len(token_ids) == len(logprobs) == len(versions):
        raise Refused(
            500,
            "vLLM's answer has gaps",
            got=f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} policy versions",
            expected="one of each per token",
            remedy="run the vLLM release that the requirements name",
        )
    return GenerateResult(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=completion.finish_reason,
        cached_tokens=output.num_cached_tokens if output.num_cached_tokens is not None else 0,
        abort_reason="" if reason is None else reason,
    )


def _logprobs(completion: CompletionOutput) -> list[float]:
    """One per token: the sampled token is the first entry of its position."""
    flat = completion.logprobs
    return [flat.logprobs[start] for start in flat.start_indices] if isinstance(flat, FlatLogprobs) else []


def _versions(completion: CompletionOutput) -> list[int]:
    """One per token, from vLLM's spans over the output."""
    return [int(span.version) for span in completion.weight_versions or [] for _ in range(span.start, span.end)]
