"""How a message travels as MPI messages, as pure functions: no MPI.

message of at most WHOLE_BYTES:   head = "W", content
longer:                           head = "P", sizes of the pieces (uint64 each); then every piece as an MPI message of its own
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from rose_hpc.errors import WeightsError

WHOLE_BYTES = 64 << 10
PIECE_BYTES = 8 << 20  # each that goes is progress: a slow link must show some within stall_s; far below the int count of MPI
HEAD_BYTES = 1 + WHOLE_BYTES  # at most
_WHOLE, _PIECES = b"W", b"P"


def to_travel(views: Sequence[memoryview]) -> list[memoryview]:
    """The head, then the pieces if there are any; without a copy of anything long."""
    total = sum(view.nbytes for view in views)
    if total <= WHOLE_BYTES:
        return [memoryview(_WHOLE + b"".join(views))]
    pieces = list(_pieces(views))
    return [memoryview(_PIECES + struct.pack(f"<{len(pieces)}Q", *(piece.nbytes for piece in pieces))), *pieces]


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Long views cut, short neighbours joined."""
    short: list[memoryview] = []
    for view in views:
        if view.nbytes < WHOLE_BYTES and len(short) < PIECE_BYTES // WHOLE_BYTES:
            short.append(view)
            continue
        if short:
            yield memoryview(b"".join(short))
            short = []
        for offset in range(0, view.nbytes, PIECE_BYTES):
            yield view[offset : offset + PIECE_BYTES]
    if short:
        yield memoryview(b"".join(short))


def read_head(head: memoryview, max_message_bytes: int) -> tuple[memoryview | None, list[int]]:
    """(the whole message or None, sizes of the pieces that follow). Raises WeightsError for what a peer may not send."""
    kind, rest = bytes(head[:1]), head[1:]
    whole = kind == _WHOLE
    if not whole and (kind != _PIECES or not rest.nbytes or rest.nbytes % 8):
        raise WeightsError("a message's head makes no sense", got=kind)
    sizes = [] if whole else [n for (n,) in struct.iter_unpack("<Q", rest)]
    total = rest.nbytes if whole else sum(sizes)
    if total > max_message_bytes:
        raise WeightsError("a message is announced as too long", got=f"{total} bytes", expected=f"at most {max_message_bytes}")
    if not all(0 < n <= PIECE_BYTES for n in sizes):
        raise WeightsError("a message has an impossible piece", got=max(sizes), expected=f"1 to {PIECE_BYTES} bytes")
    return (rest if whole else None), sizes
