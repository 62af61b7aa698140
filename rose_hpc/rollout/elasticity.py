"""How many leases a run should hold, and which: from what is left to sample, never from how busy it looks. Pure.

    forecast ─▶ finish_s(n leases) ─▶ wanted ┬─ more than held ─▶ undrain, then acquire (lowest KV use first)       at once
                                             └─ fewer, for release_after_s ─▶ drain (idle first, then highest KV use) ─idle─▶ release

A lease is worth taking if it ends the rollouts sooner by `worth_s`, its activation counted: it samples nothing until then. With a target,
no more are taken than reach it. Places count: a lease helps only trajectories that would have no dedicated place, so in the tail of a step,
when the dedicated executors hold all that live, none is worth anything and all are given back.

Hysteresis, so that a noisy forecast changes nothing:
- a held lease has paid its activation, and is kept while it is worth half of that, of KEEP_MARGIN times the work that is forecast;
- a surplus must have lasted `release_after_s` before the first lease is drained;
- a lease is held for `hold_s` at least, and between steps, when no trajectory lives, for `idle_s`.

    live ─draining─▶ draining ─no turn in flight─▶ released
      ▲─undrained────┘                                          free of cost: its engine is up

Invariants, asserted by the tests: never more than max_serving are held; nothing is acquired while a lease drains that could be kept;
what is released has no turn in flight; a swing of demand costs at most one acquisition and one release per lease.

Not driven by the controller yet: a run holds as many leases as its configuration says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rose_hpc.rollout.scheduling.events import Forecast

KEEP_MARGIN = 1.25
LONGEST_FRAC = 0.5  # of what the longest trajectory is forecast to need, it needs at least: one trajectory's forecast is rough
TARGET_MARGIN = 0.9  # of the time that is left: forecasts of a tail are short more often than long


@dataclass(frozen=True, slots=True)
class ElasticityTerms:
    """max_serving: leases at most. lease_places: of one lent executor. activation_s: from the question to its first turn.

    target_s: how long the rollouts of a step may take, None: as short as can be. worth_s: by which a lease must end them sooner.
    max_kv_frac: devices whose serving engine uses more of its KV cache are not asked.
    """

    max_serving: int
    lease_places: int = 16
    activation_s: float = 5.0
    target_s: float | None = None
    worth_s: float = 1.0
    release_after_s: float = 10.0
    hold_s: float = 30.0
    idle_s: float = 60.0
    max_kv_frac: float = 0.8


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease of the run, starting ones included. since_s: when it was asked for, on the policy's clock. kv_frac: serving's KV use."""

    name: str
    kv_frac: float
    in_flight: int
    since_s: float
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A device that could be asked. kv_frac: of its serving engine's KV cache in use, 0 to 1."""

    name: str
    kv_frac: float


@dataclass(frozen=True, slots=True)
class ElasticityPlan:
    """Names of devices. wanted: how many leases the forecast asks for."""

    wanted: int
    acquire: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    release: tuple[str, ...] = ()


class ElasticityPolicy:
    """See the module's docstring. now_s: seconds on any clock that does not go back; ask it about once a second."""

    def __init__(self, terms: ElasticityTerms) -> None:
        self._terms = terms
        self._deadline_s: float | None = None
        self._surplus_since_s: float | None = None
        self._idle_since_s: float | None = None

    def step_began(self, now_s: float) -> None:
        """The rollouts of a step have begun: the target counts from here."""
        self._deadline_s = None if self._terms.target_s is None else now_s + self._terms.target_s

    def plan(self, forecast: Forecast, held: Sequence[HeldLease], offers: Sequence[Offer], now_s: float) -> ElasticityPlan:
        """What to do now. held: all leases of the run; what was released and is still there, without."""
        terms = self._terms
        left_s = None if self._deadline_s is None else self._deadline_s - now_s
        wanted = wanted_leases(forecast, terms, len(held), left_s)
        kept = max(kept_leases(forecast, terms, len(held), left_s), wanted)
        live = [lease for lease in held if not lease.draining]
        draining = sorted((lease for lease in held if lease.draining), key=_by_kv)
        undrain = draining[: max(wanted - len(live), 0)]
        missing = wanted - len(live) - len(undrain)
        free = sorted((o for o in offers if o.kv_frac <= terms.max_kv_frac), key=_by_kv)
        acquire = free[: max(min(missing, terms.max_serving - len(held)), 0)] if missing > 0 else []
        drain = self._surplus(forecast, live, kept, now_s)
        gone = [lease for lease in draining[len(undrain) :] if lease.in_flight == 0]
        return ElasticityPlan(wanted, _names(acquire), _names(undrain), _names(drain), _names(gone))

    def _surplus(self, forecast: Forecast, live: Sequence[HeldLease], kept: int, now_s: float) -> list[HeldLease]:
        """Leases that have been too many for long enough."""
        terms = self._terms
        self._idle_since_s = None if forecast.live else (now_s if self._idle_since_s is None else self._idle_since_s)
        if len(live) <= kept:
            self._surplus_since_s = None
            return []
        if self._surplus_since_s is None:
            self._surplus_since_s = now_s
        if now_s - self._surplus_since_s < terms.release_after_s:
            return []
        if self._idle_since_s is not None and now_s - self._idle_since_s < terms.idle_s:
            return []
        old = [lease for lease in live if now_s - lease.since_s >= terms.hold_s]
        old.sort(key=lambda lease: (lease.in_flight > 0, -lease.kv_frac, lease.name))
        return old[: len(live) - kept]


def wanted_leases(forecast: Forecast, terms: ElasticityTerms, held: int, left_s: float | None = None) -> int:
    """How many leases are worth having. held: those that need no activation. left_s: until the target, None: there is none."""
    if left_s is not None:
        for n in range(terms.max_serving + 1):
            if finish_s(forecast, terms, n, held) <= TARGET_MARGIN * left_s:
                return n
    return _worthwhile(forecast, terms, held, terms.worth_s, 1.0)


def kept_leases(forecast: Forecast, terms: ElasticityTerms, held: int, left_s: float | None = None) -> int:
    """How many of the leases that are held are worth keeping."""
    if left_s is not None:
        for n in range(held):
            if finish_s(forecast, terms, n, held, KEEP_MARGIN) <= TARGET_MARGIN * left_s:
                return n
    return min(_worthwhile(forecast, terms, held, 0.5 * terms.worth_s, KEEP_MARGIN), held)


def _worthwhile(forecast: Forecast, terms: ElasticityTerms, held: int, worth_s: float, margin: float) -> int:
    """The most leases of which the last one still ends the rollouts sooner by worth_s."""
    times = [finish_s(forecast, terms, n, held, margin) for n in range(terms.max_serving + 1)]
    return max((n for n in range(1, len(times)) if times[n - 1] - times[n] >= worth_s), default=0)


def finish_s(forecast: Forecast, terms: ElasticityTerms, leases: int, held: int, margin: float = 1.0) -> float:
    """Seconds until all is sampled with so many leases, `held` of which are active. margin: times the work that is forecast.

    Dedicated places are taken first, and no more places work than trajectories live. Never less than the longest trajectory surely needs.
    """
    live = margin * forecast.live
    at_home = min(forecast.places["dedicated"], live)
    lent = min(leases * terms.lease_places, live - at_home)
    active = min(held * terms.lease_places, lent)
    home_rate, lent_rate = (forecast.place_tokens_per_s[kind] for kind in ("dedicated", "opportunistic"))
    rate = at_home * home_rate + lent * lent_rate
    if rate <= 0.0:
        return 0.0 if live == 0 else float("inf")
    late_tokens = (lent - active) * lent_rate * terms.activation_s  # what those that are not active yet will not have sampled
    return max((margin * forecast.remaining_tokens + late_tokens) / rate, LONGEST_FRAC * forecast.longest_s)


def _by_kv(device: HeldLease | Offer) -> tuple[float, str]:
    return device.kv_frac, device.name


def _names(devices: Sequence[HeldLease | Offer]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)
