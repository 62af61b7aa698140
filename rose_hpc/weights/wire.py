"""The bucket message: a fixed header and a payload, documented byte by byte in docs/wire_format.md. Pure.

A bucket is at most `bucket_bytes` of one stream's space. Its message describes itself, is stored and forwarded verbatim, and is
checked in full before anything in it is believed: magic, format version, kind, sizes, checksum.

What it does not do: read the payload (codec.py), or compare plan, stream and version with what the receiver waits for (arena.py).
The checksum finds faults of memory and links; it is not a signature: transports authenticate.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

from rose_hpc.errors import WeightsError

MAGIC = b"RSW1"
FORMAT_VERSION = 1
LANE_BYTES = 2
MAX_BUCKET_BYTES = 1 << 30  # positions inside a bucket fit 29 bits; a peer cannot ask for more memory than this
MAX_VERSION = (1 << 63) - 1
NO_BASE = -1
_MAX_U32 = (1 << 32) - 1

_FIELDS = struct.Struct("<4sHHqqIIQQIII")  # all that the checksum covers, besides the payload
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Kind(IntEnum):
    """What the payload is: coded changes against the base, or every lane's bits."""

    DELTA = 0
    DENSE = 1


@dataclass(frozen=True)
class BucketHeader:
    """Header of one bucket of one version.

    version, base: policy versions; base is −1 in a keyframe. first_lane: in stream space; lanes: uint16 lanes of the bucket;
    changes: coded changes (DELTA) or `lanes` (DENSE); plan: `plan_id` of the routing plan; payload_bytes and checksum (CRC-32
    of the header's other fields and the payload) are computed by `pack`.
    """

    kind: Kind
    version: int
    base: int
    stream_id: int
    index: int
    first_lane: int
    lanes: int
    changes: int
    payload_bytes: int
    plan: int
    checksum: int = 0


def plan_id(fingerprint: str) -> int:
    """The header's `plan` field: the first 8 bytes of RoutingPlan.fingerprint (SHA-256, hexadecimal), read as a big-endian number."""
    return int(fingerprint[:16], 16)


def pack(header: BucketHeader, *payload: bytes | bytearray | memoryview) -> bytes:
    """One message; the payload may come in parts, of bytes. payload_bytes and checksum are computed, whatever the header holds.

    Raises WeightsError when the message could not be read back: a number out of its range, sizes that disagree.
    """
    header = replace(header, payload_bytes=sum(map(len, payload)))
    _check(header)
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        header.kind,
        header.version,
        header.base,
        header.stream_id,
        header.index,
        header.first_lane,
        header.plan,
        header.lanes,
        header.changes,
        header.payload_bytes,
    )
    checksum = zlib.crc32(fields)
    for part in payload:
        checksum = zlib.crc32(part, checksum)
    return b"".join((fields, _CHECKSUM.pack(checksum), *payload))


def unpack(message: memoryview | bytes) -> tuple[BucketHeader, memoryview]:
    """Header and payload (a view into the message) of one whole message.

    Raises WeightsError: too short, wrong magic, unknown format version or kind, numbers out of range, sizes that disagree, wrong
    checksum.
    """
    view = memoryview(message).cast("B")
    if len(view) < HEADER_BYTES:
        raise WeightsError("a bucket message is shorter than its header", got=f"{len(view)} bytes", expected=f"{HEADER_BYTES} at least")
    magic, format_version, kind, *numbers = _FIELDS.unpack_from(view)
    if magic != MAGIC or format_version != FORMAT_VERSION:
        raise WeightsError(
            "not a bucket message of this format", got=f"{magic!r}, format {format_version}", expected=f"{MAGIC!r}, format {FORMAT_VERSION}"
        )
    if kind not in tuple(Kind):
        raise WeightsError("unknown kind of bucket", got=kind, expected=", ".join(f"{k.value} ({k.name})" for k in Kind))
    version, base, stream_id, index, first_lane, plan, lanes, changes, payload_bytes = numbers
    (checksum,) = _CHECKSUM.unpack_from(view, _FIELDS.size)
    header = BucketHeader(Kind(kind), version, base, stream_id, index, first_lane, lanes, changes, payload_bytes, plan, checksum)
    _check(header)
    payload = view[HEADER_BYTES:]
    if len(payload) != payload_bytes:
        raise WeightsError("a bucket message is truncated or too long", got=f"{len(payload)} bytes", expected=f"{payload_bytes} bytes")
    actual = zlib.crc32(payload, zlib.crc32(view[: _FIELDS.size]))
    if actual != checksum:
        raise WeightsError("a bucket message is damaged: its checksum is wrong", got=f"{actual:#010x}", expected=f"{checksum:#010x}")
    return header, payload


def peek(message: memoryview | bytes) -> tuple[int, int] | None:
    """(version, base) that a message claims, unchecked; None when it does not even begin like a bucket message."""
    view = memoryview(message).cast("B")
    if len(view) < HEADER_BYTES or view[: len(MAGIC)] != MAGIC:
        return None
    _, _, _, version, base, *_ = _FIELDS.unpack_from(view)
    return version, base


def _check(header: BucketHeader) -> None:
    """The numbers are possible and agree with each other, whoever wrote them."""
    lanes, changes, dense = header.lanes, header.changes, header.kind == Kind.DENSE
    bounds = (
        ("version", header.version, 0, MAX_VERSION),
        ("base", header.base, NO_BASE, MAX_VERSION),
        ("stream id", header.stream_id, 0, _MAX_U32),
        ("index", header.index, 0, _MAX_U32),
        ("first lane", header.first_lane, 0, MAX_VERSION),
        ("plan", header.plan, 0, (1 << 64) - 1),
        ("lanes", lanes, 1, MAX_BUCKET_BYTES // LANE_BYTES),
        ("changes", changes, lanes if dense else 0, lanes),
        ("payload size", header.payload_bytes, lanes * LANE_BYTES if dense else 0, lanes * LANE_BYTES),
    )
    for what, value, least, most in bounds:
        if not least <= value <= most:
            raise WeightsError(f"a bucket header's {what} is out of range", got=value, expected=f"{least} to {most}")
    if not dense and (header.base == NO_BASE or (changes == 0) != (header.payload_bytes == 0)):
        raise WeightsError(
            "a delta bucket without a base, or whose changes and payload disagree",
            got=f"base {header.base}, {changes} changes in {header.payload_bytes} bytes",
            expected="a base, and a payload exactly when there are changes",
        )
