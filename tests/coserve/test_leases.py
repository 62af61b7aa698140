"""The lease book: its invariants under any sequence of events, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose_hpc.coserve.lease_book import REMEMBERED, Ask, Lease, LeaseBook, Reason, Terms
from rose_hpc.errors import Refused

MODEL = Path("/models/policy")
TERMS = Terms(models=frozenset({MODEL}), devices=2, max_frac=0.5, max_ttl_s=10.0)
ASK = Ask("run-a", MODEL, ceiling_frac=0.5, ttl_s=5.0, host_bytes=100)
PLENTY = 1 << 40


def granted(book: LeaseBook, ask: Ask = ASK, name: str = "1", now_s: float = 0.0) -> Lease:
    return book.grant(ask, f"lease-{name}", f"token-{name}", PLENTY, now_s)


def status_of(refused: pytest.ExceptionInfo[Refused]) -> int:
    return refused.value.status


class AnyLife(RuleBasedStateMachine):
    """Grants, renewals, ends and changes of the terms in any order, on a clock that only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now_s, self.count = LeaseBook(TERMS), 0.0, 0
        self.tokens: dict[str, str] = {}
        self.reasons: dict[str, Reason] = {}
        self.renewed_s = 0.0

    @rule(s=st.floats(0, 12))
    def time_passes(self, s: float) -> None:
        self.now_s += s
        self.book.expire(self.now_s)

    @rule(ceiling=st.floats(0.01, 1.0), ttl_s=st.floats(0.1, 1e6))
    def somebody_asks(self, ceiling: float, ttl_s: float) -> None:
        self.book.expire(self.now_s)
        was_free, terms, self.count = self.book.current is None and not self.book.hindrance, self.book.terms, self.count + 1
        name = str(self.count)
        try:
            lease = granted(self.book, Ask(f"run-{name}", MODEL, 1, ceiling, ttl_s), name, self.now_s)
        except Refused as refused:
            assert not was_free or not terms.lending or ceiling > terms.max_frac
            if not was_free and ceiling <= terms.max_frac and terms.lending and not self.book.hindrance:
                assert self.book.current is not None and self.book.current.run_id in str(refused)
            return
        assert was_free and terms.lending and ceiling <= terms.max_frac
        self.tokens[lease.lease_id], self.renewed_s = f"token-{name}", self.now_s

    @precondition(lambda self: self.book.current is not None)
    @rule(ttl_s=st.floats(0.1, 1e6))
    def the_run_renews(self, ttl_s: float) -> None:
        assert self.book.current is not None
        lease_id = self.book.current.lease_id
        try:
            self.book.renew(lease_id, ttl_s, self.now_s)
            self.renewed_s = self.now_s
        except Refused as refused:
            assert refused.status == 410 and not self.book.current.held

    @precondition(lambda self: self.book.current is not None)
    @rule(reason=st.sampled_from(Reason))
    def it_ends(self, reason: Reason) -> None:
        assert self.book.current is not None
        self.book.end(self.book.current.lease_id, reason)

    @precondition(lambda self: self.book.current is not None)
    @rule()
    def it_is_cleared(self) -> None:
        assert self.book.current is not None
        before = self.book.current
        self.book.vacate(before.lease_id)
        assert (self.book.current is None) == (not before.held)

    @rule(lending=st.none() | st.booleans(), max_frac=st.none() | st.floats(0.01, 1.0))
    def the_operator_changes_terms(self, lending: bool | None, max_frac: float | None) -> None:
        self.book.change(lending, max_frac)

    @rule(why=st.sampled_from(["", "", "the daemon has died"]))
    def what_protects_serving_fails_or_is_put_right(self, why: str) -> None:
        self.book.hinder(why)

    @invariant()
    def a_held_lease_is_within_the_terms_and_was_renewed(self) -> None:
        lease = self.book.current
        if lease is not None and lease.held:
            assert self.book.terms.lending and not self.book.hindrance and lease.ceiling_frac <= self.book.terms.max_frac
            assert self.renewed_s < lease.expires_s <= self.renewed_s + TERMS.max_ttl_s

    @invariant()
    def only_the_held_lease_opens_and_reasons_stay(self) -> None:
        for lease_id, token in self.tokens.items():
            try:
                assert self.book.opened(token, self.now_s).lease_id == lease_id
                assert lease_id not in self.reasons
            except Refused as refused:
                lease = self.book.find(lease_id)
                if lease is not None:
                    assert refused.status == 410 and lease.reason is not None and lease.reason.value in str(refused)
                    assert self.reasons.setdefault(lease_id, lease.reason) == lease.reason


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_lease_is_over_when_nobody_renews_it_and_a_renewal_is_worth_at_most_the_operators_time() -> None:
    book = LeaseBook(TERMS)
    lease = granted(book)
    assert lease.expires_s == 5.0
    assert book.renew(lease.lease_id, 1e9, 4.0).expires_s == 14.0
    assert book.opened("token-1", 13.9).held
    with pytest.raises(Refused, match="is over: expired") as refused:
        book.opened("token-1", 14.0)
    assert status_of(refused) == 410


def test_a_second_run_hears_who_has_the_device_also_while_it_is_cleared() -> None:
    book = LeaseBook(TERMS)
    lease = granted(book)
    for _ in range(2):
        with pytest.raises(Refused, match="run run-a has it") as refused:
            granted(book, Ask("run-b", MODEL, ceiling_frac=0.1), "2")
        assert status_of(refused) == 409
        book.end(lease.lease_id, Reason.REVOKED)
    book.vacate(lease.lease_id)
    assert granted(book, Ask("run-b", MODEL, ceiling_frac=0.1), "2").run_id == "run-b"


@pytest.mark.parametrize(
    ("ask", "terms", "free_bytes", "status", "said"),
    [
        (Ask("run-a", Path("/models/other")), TERMS, PLENTY, 403, "not on the operator's list"),
        (Ask("run-a", MODEL, tensor_parallel=3), TERMS, PLENTY, 400, "expected: 1 to 2"),
        (Ask("run-a", MODEL, tensor_parallel=0), TERMS, PLENTY, 400, "does not fit the devices"),
        (Ask("run-a", MODEL, ceiling_frac=0.6), TERMS, PLENTY, 409, "more than is lent"),
        (Ask("run-a", MODEL, ceiling_frac=1.5), TERMS, PLENTY, 400, "no share of a device"),
        (Ask("run-a", MODEL, ceiling_frac=float("nan")), TERMS, PLENTY, 400, "no share of a device"),
        (Ask("run-a", MODEL, ceiling_frac=0.009), TERMS, PLENTY, 400, "expected: 0.01 to 1"),
        (Ask("run-a", MODEL, ceiling_frac=0.5, ttl_s=0), TERMS, PLENTY, 400, "cannot be renewed"),
        (Ask("run-a", MODEL, ceiling_frac=0.5, ttl_s=float("inf")), TERMS, PLENTY, 400, "cannot be renewed"),
        (Ask("run/../a", MODEL), TERMS, PLENTY, 400, "unusable run id"),
        (ASK, TERMS, 99, 507, "too little host memory"),
        (ASK, Terms(frozenset({MODEL}), lending=False), PLENTY, 409, "does not lend"),
        (Ask("run-a", MODEL, tensor_parallel=2), Terms(frozenset({MODEL}), devices=2, is_gpu=True), PLENTY, 409, "--unverified-tp"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_granted_is_refused_and_changes_nothing(ask: Ask, terms: Terms, free_bytes: int, status: int, said: str) -> None:
    book = LeaseBook(terms)
    with pytest.raises(Refused, match=said) as refused:
        book.grant(ask, "lease-1", "token-1", free_bytes, 0.0)
    assert status_of(refused) == status
    assert book.current is None
    with pytest.raises(Refused, match="missing or wrong"):
        book.opened("token-1", 0.0)


def test_tensor_parallelism_on_gpus_is_the_operators_to_allow() -> None:
    book = LeaseBook(Terms(frozenset({MODEL}), devices=2, is_gpu=True, unverified_tp=True))
    assert granted(book, Ask("run-a", MODEL, tensor_parallel=2)).held


def test_less_to_lend_revokes_a_lease_of_more_and_spares_one_of_less() -> None:
    book = LeaseBook(TERMS)
    lease = granted(book, Ask("run-a", MODEL, ceiling_frac=0.3))
    book.change(max_frac=0.3)
    assert book.current is not None and book.current.held
    book.change(max_frac=0.2)
    assert book.find(lease.lease_id) == book.current and book.current.reason == Reason.REVOKED
    with pytest.raises(Refused, match="max_frac"):
        book.change(max_frac=1.2)


def test_a_hindrance_ends_the_lease_and_nothing_is_granted_until_it_is_gone() -> None:
    book = LeaseBook(TERMS)
    lease = granted(book)
    book.hinder("the daemon has died")
    assert book.current is not None and book.current.reason == Reason.FAULT
    book.vacate(lease.lease_id)
    with pytest.raises(Refused, match="the daemon has died") as refused:
        granted(book, name="2")
    assert status_of(refused) == 409
    book.hinder("")
    assert granted(book, name="3").held


def test_no_token_is_kept_or_shown() -> None:
    book = LeaseBook(TERMS)
    lease = granted(book)
    assert "token" not in repr(lease) and b"token-1" not in lease.token_hash


def test_a_token_of_long_ago_is_simply_unknown() -> None:
    book = LeaseBook(TERMS)
    for i in range(REMEMBERED + 1):
        lease = granted(book, name=str(i))
        book.end(lease.lease_id, Reason.RELEASED)
        book.vacate(lease.lease_id)
    for token, status in (("token-0", 401), ("token-1", 410), ("", 401)):
        with pytest.raises(Refused) as refused:
            book.opened(token, 0.0)
        assert status_of(refused) == status
