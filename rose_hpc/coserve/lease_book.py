"""The lease book of one lent device: who may use it, on which terms, until when. Pure: no clock, no randomness, no files.

    free ──grant──▶ held ──┬─ the run is done ───────────▶ over: released ──┐
      ▲                    ├─ no renewal within the TTL ─▶ over: expired    │
      │                    ├─ the operator ──────────────▶ over: revoked    │
      │                    ├─ serving needs the memory ──▶ over: pressure   │
      │                    ├─ it took too much of it ────▶ over: memory     │
      │                    ├─ nothing protects serving ──▶ over: fault      │
      │                    └─ its engine ended ──────────▶ over: engine_lost│
      └────────────────────────── vacate: nothing of it runs any more ◀─────┘

Invariants, asserted by the tests
- One run per device: a lease is granted only while the device is free, and it is free only once what ran there is gone.
- A token opens its own lease and no other, while it is held; afterwards it is told why the lease is over.
- No renewal is worth more than the operator's max_ttl_s; a lease that nobody renews is over by then.
- A held lease's ceiling is within the operator's max_frac: terms that become tighter revoke it.
- A lease that is over stays over, for the first reason that it was given.
- Nothing is granted and nothing held while there is a hindrance, whatever the operator's terms.

It starts and ends nothing (lending.py), and hands out no tokens: whoever asks it brings one, of which only the hash is kept.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rose_hpc.errors import Refused

REMEMBERED = 64  # leases that are over, so that whoever still holds a token hears why it opens nothing
RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LEAST_FRAC = 0.01  # of a device: the least that MPS and the CPU controller can enforce


class Reason(enum.StrEnum):
    """Why a lease is over."""

    RELEASED = "released"
    PRESSURE = "pressure"
    REVOKED = "revoked"
    EXPIRED = "expired"
    MEMORY = "memory"
    FAULT = "fault"
    ENGINE_LOST = "engine_lost"


@dataclass(frozen=True, slots=True)
class Terms:
    """What the operator lends. models: resolved folders; devices: that one engine may span; max_frac: largest share to be granted."""

    models: frozenset[Path]
    devices: int = 1
    max_frac: float = 1.0
    max_ttl_s: float = 10.0
    is_gpu: bool = False
    unverified_tp: bool = False
    lending: bool = True


@dataclass(frozen=True, slots=True)
class Ask:
    """What a run asks for. model: resolved folder; host_bytes: of this machine's memory, the arena and all."""

    run_id: str
    model: Path
    tensor_parallel: int = 1
    ceiling_frac: float = 1.0
    ttl_s: float = 10.0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease. Times in seconds of the caller's clock. reason: None while it is held."""

    lease_id: str
    run_id: str
    ceiling_frac: float
    granted_s: float
    expires_s: float
    token_hash: bytes = field(repr=False)
    reason: Reason | None = None

    @property
    def held(self) -> bool:
        return self.reason is None


class LeaseBook:
    """See the module's docstring. All methods take the time as `now_s`, of any clock that goes forward."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.hindrance = ""  # why nothing can be lent at all, "" while it can
        self._current: Lease | None = None  # the device is its, also while it is being cleared
        self._past: deque[Lease] = deque(maxlen=REMEMBERED)

    @property
    def current(self) -> Lease | None:
        """Whose the device is: held, or over and not yet vacated. None: free."""
        return self._current

    def grant(self, ask: Ask, lease_id: str, token: str, free_bytes: int, now_s: float) -> Lease:
        """A lease from now on. free_bytes: what this machine can give. Raises Refused: nothing has changed."""
        self.expire(now_s)
        check_ask(ask, self.terms)
        self._check_free()
        if ask.host_bytes > free_bytes:
            raise Refused(507, "too little host memory", got=f"{ask.host_bytes} bytes asked for", expected=f"at most {free_bytes}")
        expires_s = now_s + granted_s(ask.ttl_s, self.terms.max_ttl_s)
        self._current = Lease(lease_id, ask.run_id, ask.ceiling_frac, now_s, expires_s, hash_of(token))
        return self._current

    def _check_free(self) -> None:
        if not self.terms.lending:
            raise Refused(409, "the operator does not lend this device now", remedy="ask again later, or another agent")
        if self.hindrance:
            raise Refused(409, "this device cannot be lent now", got=self.hindrance, remedy="ask again later, or another agent")
        if self._current is not None:
            holder = self._current
            what = "the device is lent" if holder.held else "the device is being cleared"
            raise Refused(
                409,
                f"{what}: run {holder.run_id} has it",
                expected="one run per device",
                remedy="wait until it is free, or ask another agent",
            )

    def opened(self, token: str, now_s: float) -> Lease:
        """The held lease that the token opens. Raises Refused: 401 it opens none; 410 the lease is over."""
        self.expire(now_s)
        wanted, found = hash_of(token), None
        for lease in self._known():  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(lease.token_hash, wanted):
                found = lease
        if found is None:
            raise Refused(401, "bearer token missing or wrong")
        if found.reason is not None:
            raise Refused(410, f"lease {found.lease_id} is over: {found.reason.value}", remedy="ask for a new lease")
        return found

    def renew(self, lease_id: str, ttl_s: float, now_s: float) -> Lease:
        """Hold it for ttl_s from now, at most the operator's max_ttl_s. Raises Refused: 400 no such time; 410 it is over."""
        worth_s = granted_s(ttl_s, self.terms.max_ttl_s)
        self.expire(now_s)
        lease = self._current
        if lease is None or lease.lease_id != lease_id or not lease.held:
            raise Refused(410, f"lease {lease_id} is over", remedy="ask for a new lease")
        self._current = replace(lease, expires_s=now_s + worth_s)
        return self._current

    def expire(self, now_s: float) -> None:
        """End the lease whose time is up."""
        if self._current is not None and self._current.held and now_s >= self._current.expires_s:
            self.end(self._current.lease_id, Reason.EXPIRED)

    def end(self, lease_id: str, reason: Reason) -> None:
        """It is over from now on; nothing where it is already. The device is free only after `vacate`."""
        if self._current is not None and self._current.lease_id == lease_id and self._current.held:
            self._current = replace(self._current, reason=reason)

    def vacate(self, lease_id: str) -> None:
        """Nothing of a lease that is over runs on the device any more."""
        if self._current is not None and self._current.lease_id == lease_id and not self._current.held:
            self._past.append(self._current)
            self._current = None

    def find(self, lease_id: str) -> Lease | None:
        """A lease by its id, also one that is over and still remembered."""
        return next((lease for lease in self._known() if lease.lease_id == lease_id), None)

    def change(self, lending: bool | None = None, max_frac: float | None = None) -> None:
        """New terms, of which None stays as it is; a held lease that they do not allow is revoked. Raises Refused 400."""
        if max_frac is not None:
            check_frac(max_frac, "max_frac")
        self.terms = replace(
            self.terms,
            lending=self.terms.lending if lending is None else lending,
            max_frac=self.terms.max_frac if max_frac is None else max_frac,
        )
        lease = self._current
        if lease is not None and (not self.terms.lending or lease.ceiling_frac > self.terms.max_frac):
            self.end(lease.lease_id, Reason.REVOKED)

    def hinder(self, why: str) -> None:
        """Serving is not protected any more, and why; "": it is again. A held lease is over."""
        self.hindrance = why
        if why and self._current is not None:
            self.end(self._current.lease_id, Reason.FAULT)

    def _known(self) -> Iterator[Lease]:
        yield from self._past
        if self._current is not None:
            yield self._current


def check_ask(ask: Ask, terms: Terms) -> None:
    """Whether the terms allow it at all, whoever has the device now. Raises Refused."""
    if RUN_ID.fullmatch(ask.run_id) is None:
        raise Refused(400, "unusable run id", got=repr(ask.run_id[:80]), expected=RUN_ID.pattern)
    granted_s(ask.ttl_s, terms.max_ttl_s)
    check_frac(ask.ceiling_frac, "ceiling_frac")
    if ask.host_bytes < 0:
        raise Refused(400, "unusable size", got=f"{ask.host_bytes} bytes", expected="at least 0")
    if ask.model not in terms.models:
        allowed = ", ".join(sorted(map(str, terms.models))) or "none"
        raise Refused(403, "this model is not on the operator's list", got=ask.model, expected=f"one of: {allowed}")
    _check_tensor_parallel(ask.tensor_parallel, terms)
    if ask.ceiling_frac > terms.max_frac:
        raise Refused(
            409,
            "more than is lent",
            got=f"ceiling_frac {ask.ceiling_frac:g}",
            expected=f"at most {terms.max_frac:g}",
            remedy="ask for less",
        )


def _check_tensor_parallel(tensor_parallel: int, terms: Terms) -> None:
    if not 1 <= tensor_parallel <= terms.devices:
        raise Refused(
            400, "tensor parallelism does not fit the devices", got=tensor_parallel, expected=f"1 to {terms.devices}, the devices lent here"
        )
    if tensor_parallel > 1 and terms.is_gpu and not terms.unverified_tp:
        raise Refused(
            409,
            "tensor parallelism beside a serving engine is not verified on GPUs: two NCCL groups on shared SMs can deadlock",
            got=tensor_parallel,
            expected=1,
            remedy="the operator can allow it: rose-hpc serve --unverified-tp",
        )


def granted_s(asked_s: float, at_most_s: float) -> float:
    """What a renewal is worth: no peer can hold a device for longer than its operator allows. Raises Refused 400: no such time."""
    if not (math.isfinite(asked_s) and asked_s > 0):
        raise Refused(400, "lease cannot be renewed", got=f"{asked_s} s", expected="more than 0 s, and finite")
    return min(asked_s, at_most_s)


def check_frac(frac: float, name: str) -> None:
    """Raises Refused 400: not a share of a device."""
    if not LEAST_FRAC <= frac <= 1:
        raise Refused(400, f"{name} is no share of a device", got=frac, expected=f"{LEAST_FRAC:g} to 1")


def hash_of(token: str) -> bytes:
    """What the book keeps of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
