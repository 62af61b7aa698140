"""An update of the policy as its engine drives it: prepare while generating, apply in a pause, prove while generating again.

    prepare ──▶ pause ─ apply ─ resume ──▶ prove ──▶ the version serves ──vacate──▶ no weights are there, until the next prepare …
       │ Refused 409: nothing has changed      │ Broken: the model holds bits that are not the trainer's

The workers do the work (weights/worker_update.py); here their answers are put together: no worker of several holds the whole
policy, but the digests of what each holds must add up to the trainer's, and replicas must agree (weights/placement.py).

It pauses nothing but the apply, and decides nothing about requests (vllm_engine.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from rose_hpc.errors import DigestMismatch, LayoutError, RoseError
from rose_hpc.http_api import Refused
from rose_hpc.messages import UpdateRequest
from rose_hpc.weights.destination import from_bytes
from rose_hpc.weights.layout import from_json
from rose_hpc.weights.placement import Sharing, share

STEP_DEADLINE_S = 120.0  # of one step of all workers
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.02  # each poll is a call into the engine's loop, between two of its steps

log = logging.getLogger(__name__)

Answer = dict[str, Any]


class Broken(RoseError):
    """The model holds weights that must not serve."""


@dataclass(frozen=True)
class Prepared:
    """An update that every worker can apply now. how, changed: see messages.UpdateResult."""

    request: UpdateRequest
    how: str
    changed: int


class WeightUpdate:
    """One engine's updates, one at a time. full_proof_every: every so many updates all weights are hashed, at the others what changed."""

    def __init__(self, llm: AsyncLLM, full_proof_every: int = 1) -> None:
        self._llm, self._full_proof_every = llm, full_proof_every
        self._is_described = False
        self._sharing: Sharing | None = None  # None: the model is loaded anew each time
        self._updates = 0

    # ── while generating ──

    async def prepare(self, request: UpdateRequest, look: bool = True) -> Prepared:
        """Raises Refused 409, with nothing changed: the version is not in the arena, or its bits are not the trainer's.

        look: at all bits before they are loaded. Without it the model must not run before the proof, which then finds out.
        """
        try:
            if not self._is_described:
                await self._describe()
            answers = await self._step("prepare", request.version, request.digest, False, look)
            if not self._is_sound(answers, request.digest):
                log.warning("version %d: the changed elements do not give the trainer's digest; loading all of it", request.version)
                answers = await self._step("prepare", request.version, request.digest, True)
        except Refused:
            self._is_described = False  # the arena may have been made again, with another layout
            with suppress(Refused):
                await self._step("release")  # a worker without a fault keeps the image locked
            raise
        return Prepared(request, answers[0]["how"], answers[0]["changed"])

    def _is_sound(self, answers: Sequence[Answer], digest: int) -> bool:
        """Whether the digest will come out right. If not, a dense prepare tells that the image is damaged, or heals the model."""
        if self._sharing is None or all(a["how"] != "sparse" for a in answers):
            return True
        return all(a["how"] == "sparse" for a in answers) and self._total(answers) == digest

    def _total(self, answers: Sequence[Answer]) -> int | None:
        """The digest of all that the workers hold together; None when two of them disagree."""
        try:
            return None if self._sharing is None else self._sharing.total([a["digests"] for a in answers])
        except DigestMismatch:
            return None

    # ── in the pause ──

    async def apply(self, prepared: Prepared, resume: bool, next_step: bool = True) -> float:
        """Load what was prepared between two steps of the engine; seconds in which nothing was generated.

        next_step: the RL step that this begins opens a cut KV budget again (rollout_plugin.py); without it no request may be in flight.
        Any exception leaves the model in pieces. The workers begin with their proofs at the end of the pause: later, the call that
        asks for them would wait for the first step, which computes the cache of every request in flight anew.
        Not AsyncLLM.pause_generation: that sleeps 20 ms at its end, for callers who expect all earlier tokens to be delivered by then.
        """
        request = prepared.request
        await self._llm.start_weight_update()  # nothing happens in it, so it need not lie in the pause
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)  # returns when the step under way is over
        begin_s = time.monotonic()
        await self._llm.update_weights(WeightTransferUpdateRequest({"version": request.version, "digest": request.digest}))
        await self._llm.finish_weight_update(str(request.version))
        if not await self._llm.reset_prefix_cache(reset_running_requests=next_step):
            raise Broken("the prefix cache still holds keys of the weights before", got="requests in flight", expected="none")
        self._updates += 1
        await self._begin("prove", self._updates % self._full_proof_every == 0)
        if resume:
            await self._llm.resume_generation()
        return time.monotonic() - begin_s

    # ── while generating again ──

    async def prove(self, prepared: Prepared) -> str:
        """The proof, as in messages.UpdateResult. Raises Broken when the model does not hold the trainer's bits."""
        try:
            answers = await self._answers("prove")
        except Refused as error:
            raise Broken(f"version {prepared.request.version} could not be proved", got=error) from error
        if self._sharing is None:
            return "partial" if any(a["proof"] == "partial" for a in answers) else "probe"
        if (found := self._total(answers)) != prepared.request.digest:
            raise Broken(
                f"the model does not hold version {prepared.request.version}",
                got="workers that disagree" if found is None else f"digest {found:#018x}",
                expected=f"{prepared.request.digest:#018x}",
            )
        return "digest"

    # ── while nothing is to be generated ──

    async def vacate(self) -> int:
        """Have all workers give the memory of their weights back; bytes. Raises Refused 409 where one does not.

        Even then the model must not run before the next `apply`, which loads all of it.
        """
        return sum(answer["bytes"] for answer in await self._step("vacate"))

    # ── the workers ──

    async def _describe(self) -> None:
        """Once per layout: what each worker holds, and whether it can be written in place. Raises Refused 409."""
        answers = await self._step("describe")
        self._sharing = _shared(answers)
        if self._sharing is not None:
            await self._step("share", [slots.tobytes() for slots in self._sharing.slots])
        self._is_described = True

    async def _step(self, name: str, *args: Any) -> list[Answer]:
        """Every worker's answer. Raises Refused 409 when one has a fault, or is not ready within STEP_DEADLINE_S."""
        await self._begin(name, *args)
        return await self._answers(name)

    async def _begin(self, name: str, *args: Any) -> None:
        _refuse_faults(name, await self._llm.collective_rpc("rose_begin", args=(name, list(args))))

    async def _answers(self, name: str) -> list[Answer]:
        end_s, wait_s = time.monotonic() + STEP_DEADLINE_S, FIRST_POLL_S
        while True:
            await asyncio.sleep(wait_s)
            answers: list[Answer] = await self._llm.collective_rpc("rose_answer")
            if None not in answers:
                _refuse_faults(name, answers)
                return answers
            if time.monotonic() > end_s:
                raise Refused(409, f"the workers do not {name}", got=f"no answer in {STEP_DEADLINE_S:g} s")
            wait_s = min(2 * wait_s, LONGEST_POLL_S)


def _refuse_faults(name: str, answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer["fault"] is not None:
            raise Refused(409, f"{name} refused", got=answer["fault"])


def _shared(answers: Sequence[Answer]) -> Sharing | None:
    """How the workers hold the policy together; None where it must be loaded anew each time, with the reason in the log."""
    reasons = [reason for answer in answers for reason in answer["reload"]]
    try:
        if not reasons:
            return share([from_bytes(answer["plan"]) for answer in answers], from_json(answers[0]["layout"]))
    except LayoutError as error:
        reasons = [str(error)]
    log.warning("every update loads the whole model: %s%s", "; ".join(reasons[:3]), "; …" if len(reasons) > 3 else "")
    return None
