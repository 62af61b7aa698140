"""What a relay needs from a transport: ordered, bounded messages between numbered peers, every wait with a deadline."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """A fixed set of peers 0 … size−1 for one generation. Messages between two peers arrive in order and whole.

    sent_bytes, received_bytes: counted payload of all messages so far, headers of the transport itself not included.
    """

    rank: int
    size: int
    sent_bytes: int
    received_bytes: int

    def send(self, peer: int, content: bytes | memoryview, deadline_s: float) -> None:
        """Deliver one message. Raises TransferTimeout when the peer has not taken it within the deadline."""
        ...

    def receive(self, peer: int, max_bytes: int, deadline_s: float) -> memoryview:
        """The peer's next message. Raises TransferTimeout when none came, WeightsError when it is longer than max_bytes."""
        ...
