"""The bucket message: every field where docs/wire_format.md says, every fault noticed."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import WeightsError
from rose_hpc.weights.wire import HEADER_BYTES, MAX_BUCKET_BYTES, MAX_VERSION, BucketHeader, Kind, pack, peek, plan_id, unpack

HEADER = BucketHeader(Kind.DELTA, 8, 7, stream_id=2, index=1, first_lane=64, lanes=64, changes=3, payload_bytes=5, plan=0x0123456789ABCDEF)
MESSAGE = pack(HEADER, b"12345")

u32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    BucketHeader,
    kind=st.just(Kind.DELTA),
    version=st.integers(0, MAX_VERSION),
    base=st.integers(0, MAX_VERSION),
    stream_id=u32,
    index=u32,
    first_lane=st.integers(0, MAX_VERSION),
    lanes=st.integers(50, MAX_BUCKET_BYTES // 2),
    changes=st.integers(1, 50),
    payload_bytes=st.just(0),
    plan=st.integers(0, 2**64 - 1),
)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "4s", b"RSW1"),
        (4, "<H", 1),
        (6, "<H", 0),
        (8, "<q", 8),
        (16, "<q", 7),
        (24, "<I", 2),
        (28, "<I", 1),
        (32, "<Q", 64),
        (40, "<Q", 0x0123456789ABCDEF),
        (48, "<I", 64),
        (52, "<I", 3),
        (56, "<I", 5),
        (60, "<I", zlib.crc32(MESSAGE[:60] + b"12345")),
        (64, "5s", b"12345"),
    ],
)
def test_every_field_lies_where_the_format_says(offset, form, value):
    assert struct.unpack_from(form, MESSAGE, offset) == (value,)


@given(headers, st.binary(min_size=1, max_size=99))
def test_unpack_undoes_pack(header, payload):
    got, content = unpack(pack(header, payload))
    assert (replace(got, checksum=0), bytes(content)) == (replace(header, payload_bytes=len(payload)), payload)


def test_every_flipped_bit_is_noticed():
    for bit in range(8 * len(MESSAGE)):
        damaged = bytearray(MESSAGE)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(WeightsError):
            unpack(bytes(damaged))


@pytest.mark.parametrize("message", [b"", MESSAGE[:HEADER_BYTES], MESSAGE[:-1], MESSAGE + b"\0", MESSAGE[:63]])
def test_a_truncated_or_longer_message_is_refused(message):
    with pytest.raises(WeightsError):
        unpack(message)


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": MAX_VERSION + 1},
        {"base": -2},
        {"base": -1},
        {"stream_id": 2**32},
        {"index": -1},
        {"first_lane": -1},
        {"plan": 2**64},
        {"lanes": 0},
        {"lanes": MAX_BUCKET_BYTES // 2 + 1},
        {"lanes": 2},
        {"changes": 0},
        {"changes": 65},
        {"kind": Kind.DENSE},
    ],
)
def test_impossible_headers_are_neither_written_nor_read(change):
    with pytest.raises(WeightsError):
        pack(replace(HEADER, **change), b"12345")


def test_an_impossible_header_with_a_right_checksum_is_refused():
    for offset, form, value in ((48, "<I", 0), (52, "<I", 65), (8, "<q", -1), (6, "<H", 2), (4, "<H", 2)):
        message = bytearray(MESSAGE)
        struct.pack_into(form, message, offset, value)
        struct.pack_into("<I", message, 60, zlib.crc32(message[64:], zlib.crc32(message[:60])))
        with pytest.raises(WeightsError):
            unpack(bytes(message))


def test_a_dense_bucket_has_all_its_lanes_and_may_be_of_a_keyframe():
    header = replace(HEADER, kind=Kind.DENSE, base=-1, lanes=3, changes=3)
    assert unpack(memoryview(pack(header, b"abcdef")))[0].base == -1
    with pytest.raises(WeightsError):
        pack(header, b"abcd")


def test_a_delta_bucket_without_changes_is_empty():
    assert unpack(pack(replace(HEADER, changes=0), b""))[1] == b""
    with pytest.raises(WeightsError):
        pack(replace(HEADER, changes=0), b"1")


def test_peek_believes_the_header_and_nothing_else_looks_like_one():
    assert peek(MESSAGE[:-2]) == (8, 7)
    assert peek(b"RSW2" + MESSAGE[4:]) is None
    assert peek(MESSAGE[:20]) is None


def test_the_plan_id_is_the_fingerprints_beginning():
    assert plan_id("0123456789abcdef" + 48 * "0") == 0x0123456789ABCDEF
