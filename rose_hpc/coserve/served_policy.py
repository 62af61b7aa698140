"""Which policy version a rollout engine serves, if any, and how that changes: one change at a time, whoever asks.

    no weights ──update──▶ serving v ──update──▶ serving v' …          (generate is refused before the first update)
                              │ ▲
                        pause │ │ resume                               (requests freeze and go on)
                              ▼ │
                            paused ──update──▶ paused                  (an update leaves a pause of the caller's as it is)
    any ──deactivate──▶ inactive ──activate──▶ serving or paused       (inactive: no weights, no KV cache; generate is refused)
    any ──load fails half-way, or is not proved──▶ broken              (final: nothing is answered, and the process ends)

Invariants
- Every token is sampled from π_v given KV entries computed by π_v, v being the version reported for it: an update recomputes
  the KV cache of requests in flight and drops the prefix cache.
- A refused update changes nothing: the old version goes on serving. A refused activation leaves the engine inactive.
- Answers wait for the proof of an update that they may be part of. An activation lets nothing run before its proof, which can so be
  the only look at the bits: one pass over the weights less, and where it fails the engine has no weights again.
- Versions never go back: an activation loads none older than what served before, or than what an update has noted meanwhile.

How weights come and are proved is weight_update.py's, where memory goes residency.py's, requests are vllm_engine.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from vllm.v1.engine.async_llm import AsyncLLM

from rose_hpc.coserve.residency import newest_in, residency_of
from rose_hpc.coserve.weight_update import Broken, Prepared, WeightUpdate
from rose_hpc.http_api import Refused
from rose_hpc.messages import ActivateRequest, Deactivated, UpdateRequest, UpdateResult

NO_VERSION = -1
REST_DEADLINE_S, REST_POLL_S = 60.0, 0.005  # beside a busy serving engine the core may hardly run
NOTED, UNPROVED = "noted", "none"  # how an inactive engine takes an update, and what proves it


class ServedPolicy:
    """One engine's. end_requests: ends those in flight, and returns when none is left; it is not to take new ones while inactive."""

    def __init__(self, llm: AsyncLLM, arena: Path, end_requests: Callable[[], Awaitable[None]]) -> None:
        self._llm, self._arena, self._end_requests = llm, arena, end_requests
        self._control = asyncio.Lock()
        self._update = WeightUpdate(llm)
        self._residency = residency_of(llm, self._update)
        self._active = True
        self._paused = False
        self._serving: UpdateResult | None = None  # what is in the model
        self._loaded = NO_VERSION  # the newest that was in the model
        self._latest = UpdateRequest(NO_VERSION, 0)  # the newest that was in the model, or that an update has noted
        self._proved = asyncio.Event()  # cleared from an update's pause to its proof
        self._proved.set()
        self.load_failed = asyncio.Event()

    @property
    def version(self) -> int:
        """What serves; −1: nothing."""
        return NO_VERSION if self._serving is None else self._serving.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def active(self) -> bool:
        return self._active

    def check_serving(self) -> None:
        """Raises Refused 409 where no request can be taken."""
        if not self._active:
            raise Refused(409, "this engine is inactive", remedy="activate it first")
        if self._serving is None:
            raise Refused(409, "no policy version applied yet", remedy="send an update first")

    async def proved(self) -> None:
        """Returns when all that was sampled so far may leave: for ever waiting where the proof fails, as then this process ends."""
        await self._proved.wait()

    async def pause(self) -> None:
        """Freeze all requests, new ones included, between two steps."""
        async with self._control:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def resume(self) -> None:
        """Go on where `pause` stopped; inactive: when it is active again."""
        async with self._control:
            if self._active:
                await self._llm.resume_generation()
            self._paused = False

    # ── weights ──

    async def update(self, request: UpdateRequest) -> UpdateResult:
        """Serve another version. The same version and digest again: the earlier result, at once. Inactive: it is only noted.

        Raises Refused 409: not newer, not in the arena, or not the trainer's bits; the old version goes on serving.
        """
        async with self._control:
            self._check_newer(request)
            if not self._active:
                return await self._note(request)
            if self._serving is not None and request == self._latest:
                return self._serving
            begin_s = time.monotonic()
            return await self._load(await self._update.prepare(request), begin_s)

    def _check_newer(self, request: UpdateRequest) -> None:
        if request != self._latest and request.version <= self._latest.version:
            raise Refused(409, "not newer than the serving version", got=request, expected=f"{self._latest}, or a newer one")

    async def _note(self, request: UpdateRequest) -> UpdateResult:
        """Whether the bits are the trainer's is looked at when they are loaded."""
        there = await asyncio.to_thread(newest_in, self._arena)
        if there != request and there.version <= request.version:
            raise Refused(409, f"{self._arena} does not hold version {request.version}", got=there, expected=request)
        self._latest = request
        return UpdateResult(request.version, request.digest, 0.0, 0.0, proof=UNPROVED, how=NOTED, changed=0)

    async def _load(self, prepared: Prepared, begin_s: float) -> UpdateResult:
        """Load what was prepared, and prove that it is what runs now; an inactive engine is still paused at the end.

        A failure in here leaves weights in the model that must not serve: no answer leaves any more, and the process ends. Only where
        nothing could have run yet, and only the proof failed, that is a refusal.
        """
        request = prepared.request
        self._proved.clear()
        try:
            if not self._active and self._residency is not None:
                await self._residency.come_back()
            resume, next_step = self._active and not self._paused, request.version > self._loaded
            pause_s = await self._update.apply(prepared, resume, next_step)
            proof = await self._update.prove(prepared)
        except Exception as error:  # the edge to vLLM, which raises bare Exception for what failed in another process
            if isinstance(error, Broken) and not self._active:
                await self._forget(error)
            self.load_failed.set()
            raise Refused(500, f"loading version {request.version} failed; this engine ends", got=error) from error
        self._proved.set()
        self._latest, self._loaded = request, request.version
        apply_s = time.monotonic() - begin_s
        self._serving = UpdateResult(request.version, request.digest, apply_s, pause_s, proof, prepared.how, prepared.changed)
        return self._serving

    async def _forget(self, error: Broken) -> NoReturn:
        """Weights that nothing has run with and that cannot be proved go again. Raises Refused 409."""
        self._proved.set()
        if self._residency is not None:
            await self._residency.leave()
        raise Refused(
            409, "the engine stays inactive", got=error, remedy="transfer a keyframe; if it happens again, suspect this node's memory"
        )

    # ── activity ──

    async def deactivate(self) -> Deactivated:
        """Take no requests, end those in flight, and give the memory of weights and KV cache back. Again: what is left of it.

        Raises Refused: 409 where this engine cannot, or a worker does not, 503 when it does not come to rest. But for the first it is
        inactive then, and calling again tries again.
        """
        if self._residency is None:
            raise Refused(409, "this engine cannot give its memory back", got="no sleep mode", expected="an engine on a lent device")
        async with self._control:
            begin_s = time.monotonic()
            self._active, self._serving = False, None
            try:
                async with asyncio.timeout(REST_DEADLINE_S):
                    await self._come_to_rest()
                    given_back_bytes = await self._residency.leave()
            except TimeoutError as error:
                raise Refused(503, "the engine does not come to rest", expected=f"within {REST_DEADLINE_S:g} s") from error
            return Deactivated(given_back_bytes, time.monotonic() - begin_s)

    async def _come_to_rest(self) -> None:
        """No request in flight, no step under way nor to come, and no remembered prefix, whose keys would be gone."""
        await self._end_requests()
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)  # returns when the step under way is over
        while not await self._llm.reset_prefix_cache():
            await asyncio.sleep(REST_POLL_S)

    async def activate(self, request: ActivateRequest) -> UpdateResult:
        """Load a version from the arena and serve it. Active already: the earlier result, at once.

        Raises Refused 409, and it stays as it was: not in the arena, not the trainer's bits, older than a version before; or active
        with another version, which an update can change.
        """
        async with self._control:
            if self._active:
                return self._already(request)
            begin_s = time.monotonic()
            result = await self._load(await self._prepare_for(request), begin_s)
            if not self._paused:
                await self._llm.resume_generation()
            self._active = True
            return result

    def _already(self, request: ActivateRequest) -> UpdateResult:
        if self._serving is None or request.version not in (NO_VERSION, self._serving.version):
            raise Refused(409, "this engine is active", got=self.version, expected=request.version, remedy="send an update")
        return self._serving

    async def _prepare_for(self, request: ActivateRequest) -> Prepared:
        """Raises Refused 409. An arena that goes on to its next version meanwhile is looked at again."""
        while True:
            wanted = await self._wanted(request)
            try:
                return await self._update.prepare(wanted, look=False)
            except Refused:
                if await self._wanted(request) == wanted:
                    raise

    async def _wanted(self, request: ActivateRequest) -> UpdateRequest:
        if request.version == NO_VERSION:
            wanted = await asyncio.to_thread(newest_in, self._arena)
        else:
            wanted = UpdateRequest(request.version, request.digest)
        self._check_newer(wanted)
        return wanted
