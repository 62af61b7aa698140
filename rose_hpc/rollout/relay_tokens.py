"""Tokens of relays that run on somebody else's node: each opens one worker's routes of the control API, and nothing else.

    issue(relay-3) ─▶ token ─▶ the relay polls ─▶ … ─▶ revoke(relay-3): it opens nothing any more

The run's own processes share the run's token; it never leaves the run's nodes. Only hashes are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


class RelayTokens:
    """One per run."""

    def __init__(self) -> None:
        self._hashes: dict[str, bytes] = {}

    def issue(self, worker_id: str) -> str:
        """A fresh token for a worker; an earlier one of its name opens nothing from now on."""
        token = secrets.token_urlsafe(32)
        self._hashes[worker_id] = _hash(token)
        return token

    def revoke(self, worker_id: str) -> None:
        """Its token opens nothing any more."""
        self._hashes.pop(worker_id, None)

    def owner_of(self, token: str) -> str | None:
        """The worker whose token it is, None for nobody's. All are compared, so that the time taken tells nothing."""
        wanted, found = _hash(token), None
        for worker_id, known in self._hashes.items():
            if hmac.compare_digest(known, wanted):
                found = worker_id
        return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
