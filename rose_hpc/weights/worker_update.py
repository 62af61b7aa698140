"""One worker's part in an update: from the node's arena into the running model, in three steps.

                  prepare                        apply                    prove
    serving w ──▶ prepared (serving w) ──pause──▶ serving v, unproved ──▶ serving v ──vacate──▶ nothing whole, its memory given back
       ▲  │ fault: nothing has changed                                                            └──prepare, apply (not SPARSE)──▶ …
       └──┘

    SPARSE  raw model at w, and the arena has all deltas from w: changed elements are collected in prepare, scattered in apply
    DENSE   raw model otherwise: prepare digests the image, apply copies this worker's part of it
    RELOAD  packed model: prepare digests the image, apply goes through vLLM's own loaders

prepare and prove do all reading, computing and checking, while the model serves. apply only copies. What prove does of a RELOAD uses the
model's own layers, so that it must not run beside them: `probing` does it in short steps instead.

Invariants
- Nothing is written to the model before the image was seen to be (version, digest, verified), under the arena's lock.
- DENSE and RELOAD load only bytes that this worker has digested, and keep the image locked from then on: DENSE to the end of apply,
  RELOAD, whose proof looks at the image again, to the end of that. A DENSE one may leave that to the proof, where nothing runs before.
- SPARSE tells before anything is written what the digests will be; who combines them (placement.Sharing) finds a damaged image or
  a damaged model there, and asks for DENSE.
- Every method that answers tells a fault by value. `apply` raises, and then the model is not whole any more.

It does not know vLLM: `Model` is what it needs of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch

from rose_hpc.errors import DigestMismatch, LayoutError, RoseError, WeightsError
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.destination import DestinationPlan, Ints, faults, to_bytes
from rose_hpc.weights.digest import digest_lanes
from rose_hpc.weights.layout import ImageLayout, to_json
from rose_hpc.weights.placement import MODULUS
from rose_hpc.weights.runtime_memory import Lanes
from rose_hpc.weights.runtime_weights import Patch, RuntimeWeights, add

SPARSE, DENSE, RELOAD = "sparse", "dense", "reload"
LOCK_DEADLINE_S = 10.0
MOST_CHANGED = 0.05  # of all lanes: with more, copying everything is as quick (at 3 % of 27 M elements on a CPU it was 11 ms against 12)

EXPECTED_FAULTS = (RoseError, OSError, ValueError, KeyError)  # the last two: a record or an image cut short


class Model(Protocol):
    """The worker's model, as an update sees it."""

    def trace(self, layout: ImageLayout) -> DestinationPlan:
        """The plan of this worker."""

    def packed(self) -> list[str]:
        """Layers whose parameters must not be written in place."""

    def weights(self, plan: DestinationPlan, layout: ImageLayout, slots: Ints) -> RuntimeWeights:
        """The parameters as the plan sees them."""

    def reload(self, layout: ImageLayout, image: Lanes) -> None:
        """Load all of it."""

    def probe(self, plan: DestinationPlan, layout: ImageLayout, image: Lanes, seed: int) -> Iterator[Any]:
        """What the layers compute with, compared to the image, in steps: see vllm_layers.probe."""

    def give_back(self) -> int:
        """Forget all weights, and give their memory back to the system as far as that can be done; bytes. The model stays loadable."""


Answer = dict[str, Any]


def answering(step: Callable[..., Answer]) -> Callable[..., Answer]:
    """What can be expected to go wrong is an answer: {"fault": why}."""

    @wraps(step)
    def by_value(*args: Any) -> Answer:
        try:
            return {"fault": None} | step(*args)
        except EXPECTED_FAULTS as error:
            return {"fault": f"{error}" if isinstance(error, RoseError) else repr(error)}

    return by_value


@dataclass(frozen=True)
class _Update:
    """An update that may be applied, or was. changed: elements of the image; digests: of the model afterwards, by slot."""

    version: int
    digest: int
    how: str
    changed: int
    digests: tuple[int, ...] = ()
    patch: Patch | None = None
    image: Lanes | None = None

    @property
    def answer(self) -> Answer:
        return {"how": self.how, "changed": self.changed, "digests": list(self.digests)}


class WorkerUpdate:
    """The steps, in their order, one update at a time. Answers are dicts of plain values: they travel between processes.

    `fault` in every answer: why it could not be done, or None.
    """

    def __init__(self, arena: Path, model: Model) -> None:
        self._path, self._model = arena, model
        self._opened: tuple[tuple[int, int], Arena] | None = None
        self._layout: ImageLayout | None = None
        self._plan: DestinationPlan | None = None
        self._described: Answer | None = None
        self._weights: RuntimeWeights | None = None
        self._running: _Update | None = None  # what is in the model; None: nothing whole
        self._prepared: _Update | None = None
        self._lock = ExitStack()  # the image's, see the module's invariants

    @answering
    def describe(self) -> Answer:
        """{"plan": bytes, "layout": JSON, "reload": why the model cannot be written in place; [] where it can}."""
        layout = self._arena().layout
        if self._described is None or self._layout is None or layout.fingerprint != self._layout.fingerprint:
            self._layout, self._weights, self._running = layout, None, None
            self._described = self._describe(layout)
        return self._described

    def _describe(self, layout: ImageLayout) -> Answer:
        self._plan = self._model.trace(layout)
        packed = [f"{name} does not compute with its parameters as they were loaded" for name in self._model.packed()]
        return {"plan": to_bytes(self._plan), "layout": to_json(layout), "reload": [*packed, *faults(self._plan, layout)]}

    @answering
    def share(self, slots: Ints) -> Answer:
        """From now on write in place. slots: placement.Sharing's of this worker."""
        if self._plan is None or self._layout is None:
            raise WeightsError("no plan to share", remedy="describe comes first")
        self._weights = self._model.weights(self._plan, self._layout, slots)
        return {}

    @answering
    def prepare(self, version: int, digest: int, dense: bool, look: bool = True) -> Answer:
        """{"how", "changed", "digests": what the slots' digests will be, [] where that is not known}. dense: not SPARSE.

        look: digest the image; else a DENSE update is known to be sound only by its proof, before which the model must not run.
        Faults: the arena does not hold exactly this version, verified; its bits are not the trainer's; its lock is taken.
        """
        self.release()
        arena = self._arena()
        self._lock.enter_context(arena.reading(LOCK_DEADLINE_S))
        try:
            self._check_state(arena, version, digest)
            self._prepared = (None if dense else self._sparse(arena, version, digest)) or self._whole(arena, version, digest, look)
        finally:
            if self._prepared is None or self._prepared.how == SPARSE:
                self._lock.close()
        return self._prepared.answer

    def _check_state(self, arena: Arena, version: int, digest: int) -> None:
        state = arena.state()
        if (state.version, state.digest, state.verified) != (version, digest, True):
            raise WeightsError(
                f"{self._path} does not hold version {version} of the trainer",
                got=f"version {state.version}, digest {state.digest:#018x}, {'' if state.verified else 'not '}verified",
                expected=f"digest {digest:#018x}",
                remedy="transfer the version first",
            )
        if self._layout is None or arena.layout.fingerprint != self._layout.fingerprint:
            raise LayoutError(f"{self._path} holds another layout than the one described", remedy="describe it again")

    def _sparse(self, arena: Arena, version: int, digest: int) -> _Update | None:
        """None: not possible, or not worth it."""
        if self._weights is None or self._running is None or not self._running.digests:
            return None
        lanes = arena.changed_lanes(self._running.version, version)
        image = arena.image()
        if lanes is None or len(lanes) > MOST_CHANGED * len(image):
            return None
        try:
            patch = self._weights.patch(image, lanes)
        except (MemoryError, torch.OutOfMemoryError):  # the lists lie where the weights do
            return None
        return _Update(version, digest, SPARSE, patch.image_elements, tuple(add(self._running.digests, patch.change)), patch)

    def _whole(self, arena: Arena, version: int, digest: int, look: bool) -> _Update:
        image, how = arena.image(), RELOAD if self._weights is None else DENSE
        if (look or how == RELOAD) and (found := digest_lanes(0, image)) != digest:
            raise DigestMismatch(
                f"the image of version {version} in {self._path} is not what the trainer published",
                got=f"digest {found:#018x}",
                expected=f"{digest:#018x}",
                remedy="transfer a keyframe; if it happens again, suspect this node's memory",
            )
        return _Update(version, digest, how, len(image) * 2 // arena.layout.item_bytes, image=image)

    def has_prepared(self, version: int, digest: int) -> bool:
        """Whether `apply` would write this version."""
        return self._prepared is not None and (self._prepared.version, self._prepared.digest) == (version, digest)

    def apply(self, version: int, digest: int) -> None:
        """Write what was prepared. Raises WeightsError, with the model untouched, when that is another version or nothing."""
        update = self._prepared
        if update is None or not self.has_prepared(version, digest):
            raise WeightsError(f"version {version} was not prepared", got=None if update is None else update.version)
        self._prepared = None
        self._running = None
        if update.patch is not None and self._weights is not None:
            self._weights.apply(update.patch)
        elif self._weights is not None and update.image is not None:
            self._weights.copy_all(update.image)
            self._lock.close()
        elif update.image is not None and self._layout is not None:
            self._model.reload(self._layout, update.image)
        self._running = update

    @property
    def is_probed(self) -> bool:
        """Whether what was applied is to be proved by `probing`, not by `prove`."""
        return self._running is not None and self._running.how == RELOAD

    @answering
    def prove(self, full: bool) -> Answer:
        """{"proof": "digest", "digests": of the slots, read from the model}, for the caller to combine.

        full: of everything; otherwise a SPARSE update reads back only what it changed.
        """
        update = self._running
        if update is None or self._weights is None:
            raise WeightsError("nothing to prove", remedy="apply comes first")
        digests = self._weights.digests() if full or update.patch is None else self._read_back(update, update.patch)
        self._running = replace(update, digests=tuple(digests), patch=None, image=None)
        return {"proof": "digest", "digests": digests}

    def probing(self) -> Iterator[Answer | None]:
        """For reloaded weights: None after each short step, then {"proof": "probe", or "partial" where layers cannot be read back}.

        Fault: layers compute with other values than the image's.
        """
        answer: Answer | None = None
        steps = self._probe()
        while answer is None:
            answer = self._probe_step(steps)
            if answer is not None:
                self._lock.close()
            yield answer

    def _probe_step(self, steps: Iterator[Any]) -> Answer | None:
        try:
            found = next(steps)
        except EXPECTED_FAULTS as error:
            return {"fault": str(error)}
        return None if found is None else self._judged(found)

    def _probe(self) -> Iterator[Any]:
        update = self._running
        if update is None or update.image is None or self._plan is None or self._layout is None:
            raise WeightsError("reloaded weights are proved once, after apply", remedy="prepare another version first")
        self._running = replace(update, image=None)
        yield from self._model.probe(self._plan, self._layout, update.image, update.version)

    @answering
    def _judged(self, found: Any) -> Answer:
        if found.faults:
            raise DigestMismatch("layers do not compute with the image's weights", got=", ".join(found.faults[:5]))
        return {"proof": "partial" if found.unknown else "probe", "digests": []}

    def _read_back(self, update: _Update, patch: Patch) -> list[int]:
        change = self._weights.applied_change(patch) if self._weights is not None else []
        return add([(d - c) % MODULUS for d, c in zip(update.digests, patch.change, strict=True)], change)

    @answering
    def vacate(self) -> Answer:
        """{"bytes": given back}: nothing whole is in the model from here on, also where this fails on the way."""
        self._running = None
        return self.release() | {"bytes": self._model.give_back()}

    def release(self) -> Answer:
        """Forget what was prepared and let go of the image."""
        self._prepared = None
        self._lock.close()
        return {"fault": None}

    def _arena(self) -> Arena:
        """Opened anew when it was made again: a new Arena maps the image again, which costs its page faults."""
        try:
            found = os.stat(self._path / "layout.json")
        except FileNotFoundError as error:
            raise WeightsError("no arena here", got=self._path, remedy="the node's relay makes it with the first version") from error
        identity = (found.st_dev, found.st_ino)
        if self._opened is None or self._opened[0] != identity:
            self._opened = (identity, Arena.open(self._path))
        return self._opened[1]
