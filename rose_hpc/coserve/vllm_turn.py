"""One turn in vLLM's terms and back: our request as sampling parameters, and vLLM's output as our answer, complete or refused."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from rose_hpc.http_api import Refused
from rose_hpc.messages import GenerateRequest, GenerateResult

FINISH_REASONS = ("stop", "length", "abort")
ASKED, REVOKED, INACTIVE = "asked", "revoked", "inactive"  # why the engine aborts a request


def abort_reason(completion: CompletionOutput, asked: str | None) -> str | None:
    """Why a request ended early; None: it did not. asked: for what reason the engine was told to, if it was."""
    if completion.finish_reason != "abort":
        return None
    return asked or (completion.stop_reason if isinstance(completion.stop_reason, str) else ASKED)


def sampling(request: GenerateRequest) -> SamplingParams:
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


def result_of(request_id: str, output: RequestOutput, reason: str | None = None) -> GenerateResult:
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
