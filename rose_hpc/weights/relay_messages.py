"""What relays say to each other: three small messages in MessagePack, and buckets as they are stored (wire.py).

    sink ─ Pull ─▶ parent                 these streams of this version; I have these buckets of them already
    sink ◀─ Manifest ─ parent             what is coming; the layout and the routing plan where the sink has none
    sink ◀─ bucket × n ─ parent           verbatim, in any order
    sink ◀─ Refusal ─ parent              instead, or in the middle: it cannot be had here

The first four bytes tell a message (MAGIC) from a bucket (wire.MAGIC). No pickle; sizes are bounded by the transport.
"""

from __future__ import annotations

import msgspec

from rose_hpc.errors import WeightsError

MAGIC = b"RSC1"
KEYFRAME = -1  # base of a version whose buckets are all dense


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """generation: of the command that this belongs to; the other side ignores what belongs to none of its own."""

    generation: int
    version: int


class Pull(_Said, frozen=True):
    """base: of the deltas wanted, −1 for a keyframe. have: stream → indices of its buckets that need not be sent.

    plan: fingerprint of the routing plan that the sink has, "" for none.
    """

    base: int
    have: dict[int, list[int]]
    plan: str


class Manifest(_Said, frozen=True):
    """buckets: stream → how many it has. layout: canonical JSON, plan: bytes of the routing plan; both empty where the sink has them."""

    base: int
    buckets: dict[int, int]
    bucket_bytes: int
    layout: str
    plan: bytes


class Refusal(_Said, frozen=True):
    """why: for people to read."""

    why: str


Said = Pull | Manifest | Refusal


def pack(message: Said) -> bytes:
    """MAGIC and MessagePack."""
    return MAGIC + msgspec.msgpack.encode(message)


def is_control(message: memoryview) -> bool:
    """Whether these bytes are a message of this module rather than a bucket."""
    return bytes(message[: len(MAGIC)]) == MAGIC


def unpack(message: memoryview) -> Said:
    """Inverse of `pack`. Raises WeightsError when the bytes are no message."""
    try:
        return msgspec.msgpack.decode(message[len(MAGIC) :], type=Said)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WeightsError("a peer sent what is no message", got=error) from error
