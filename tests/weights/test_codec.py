"""The codec: lossless for any bits, runs and choppings; near the entropy bound; safe whatever a payload holds."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights import kernels
from rose_hpc.weights.codec import StreamDecoder, StreamEncoder
from rose_hpc.weights.digest import MODULUS, digest_lanes, digest_runs
from rose_hpc.weights.kernels import PAYLOAD_PADDING
from rose_hpc.weights.layout import Run, Runs
from rose_hpc.weights.routing import Stream
from rose_hpc.weights.wire import HEADER_BYTES, BucketHeader, Kind, pack, unpack

PLAN = 77
FORMAT = Path(__file__).parents[2] / "docs" / "wire_format.md"

# ── docs/wire_format.md, followed in plain Python ────────────────────────────────────────────────────────────────────


class Bits:
    """Bits from the least significant of byte 0 on."""

    def __init__(self, content):
        self.content, self.at = bytes(content), 0

    def take(self, count):
        value = 0
        for i in range(count):
            value |= (self.content[self.at >> 3] >> (self.at & 7) & 1) << i
            self.at += 1
        return value

    def whole(self):
        return (self.at + 7) // 8 == len(self.content)


def read_tree(bits, start=0, extra=16):
    """[(start, extra, length)] of the intervals with codes."""
    if bits.take(1):
        return read_tree(bits, start, extra - 1) + read_tree(bits, start + (1 << extra - 1), extra - 1)
    return [(start, extra, bits.take(4))] if bits.take(1) else []


def read_codes(leaves):
    """code as text → (start, extra)."""
    codes, number = {}, 0
    for length in range(13):
        number <<= 1
        for start, extra, own in leaves:
            if own == length:
                codes[format(number, f"0{length}b") if length else ""] = (start, extra)
                number += 1
    return codes


def reference_decode(message):
    """(positions, differences) of a DELTA message."""
    header, payload = unpack(message)
    tree_end = 4 + int.from_bytes(payload[:2], "little")
    tree = Bits(payload[4:tree_end])
    codes = read_codes(read_tree(tree))
    assert tree.whole() and bytes(payload[2:4]) == b"\0\0"
    blocks = -(-header.changes // 1024)
    table = [payload[tree_end + 9 * b : tree_end + 9 * b + 9] for b in range(blocks)]
    gap_bytes, value_bytes = ([int.from_bytes(t[at : at + 2], "little") for t in table] for at in (4, 6))
    at = tree_end + 9 * blocks
    gap_streams, value_streams = [], []
    for sizes, streams in ((gap_bytes, gap_streams), (value_bytes, value_streams)):
        for size in sizes:
            streams.append(Bits(payload[at : at + size]))
            at += size
    assert at + 16 == len(payload)
    positions, differences = [], []
    for b in range(blocks):
        count = min(1024, header.changes - 1024 * b)
        position, k = int.from_bytes(table[b][:4], "little"), table[b][8]
        for i in range(count):
            if i:
                position += 1 + reference_gap(gap_streams[b], k)
            positions.append(position)
            differences.append(reference_difference(value_streams[b], codes))
        assert gap_streams[b].whole() and value_streams[b].whole()
    return positions, differences


def reference_gap(bits, k):
    for quotient in range(20):
        if bits.take(1):
            return (quotient << k) | bits.take(k)
    return bits.take(32)


def reference_difference(bits, codes):
    code = ""
    while code not in codes:
        code += str(bits.take(1))
    start, extra = codes[code]
    return start + bits.take(extra)


# ── what is coded ────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def updates(draw, max_lanes=6000):
    """(stream, old image, new image, bucket_bytes, where to cut the pieces): arbitrary bits, changed in all kinds of ways."""
    lanes = draw(st.integers(1, max_lanes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = np.unique([*rng.integers(0, lanes + 1, draw(st.integers(0, 40))).tolist(), 0, lanes])
    keep = rng.random(len(edges) - 1) < draw(st.sampled_from([0.5, 1.0]))
    keep[rng.integers(len(keep))] = True
    runs = [Run(2 * int(a), 2 * int(b - a)) for a, b, kept in zip(edges[:-1], edges[1:], keep, strict=True) if kept]
    old = rng.integers(0, 1 << 16, lanes, np.uint16)
    new = old + np.where(rng.random(lanes) < draw(st.sampled_from([0, 0.001, 0.03, 0.3, 0.6, 1])), differences(draw, rng, lanes), 0)
    cuts = sorted(draw(st.lists(st.integers(0, lanes), max_size=5)))
    return Stream(draw(st.integers(0, 3)), 0, runs), old, new.astype(np.uint16), 2 * draw(st.integers(1, 4000)), cuts


def differences(draw, rng, lanes):
    kind = draw(st.sampled_from(["one", "signs", "tail", "uniform", "sign bit"]))
    if kind == "one":
        return np.ones(lanes, np.uint16)
    if kind == "signs":
        return rng.choice(np.array([1, 65535], np.uint16), lanes)
    if kind == "tail":
        return np.clip(rng.standard_cauchy(lanes) * 4, -30000, 30000).astype(np.int16).view(np.uint16)
    return np.full(lanes, 0x8000, np.uint16) if kind == "sign bit" else rng.integers(0, 1 << 16, lanes, np.uint16)


def slices(stream):
    return [slice(r.offset_bytes // 2, r.end_bytes // 2) for r in stream.runs]


def in_stream_space(stream, image):
    return np.concatenate([image[s] for s in slices(stream)])


def updated(stream, old, new):
    """The old image with the stream's lanes new."""
    image = old.copy()
    for s in slices(stream):
        image[s] = new[s]
    return image


def encode(stream, old, new, bucket_bytes, cuts=(), threads=1):
    """(messages, image that was updated in place)."""
    image = old.copy()
    content = in_stream_space(stream, new)
    pieces = np.split(content, [min(c, len(content)) for c in cuts])
    return list(StreamEncoder(stream, PLAN, bucket_bytes, threads).encode_delta(image, pieces, 8, 7)), image


def whole(lanes):
    return Stream(0, 0, [Run(0, 2 * lanes)])


# ── lossless ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(updates())
def test_an_update_arrives_bit_for_bit_and_the_digest_with_it(update):
    stream, old, new, bucket_bytes, cuts = update
    expected = updated(stream, old, new)
    encoded, image = encode(stream, old, new, bucket_bytes, cuts)
    assert np.array_equal(image, expected)
    assert [e.index for e in encoded] == list(range(stream.buckets(bucket_bytes)))
    assert sum(e.changes for e in encoded) == np.count_nonzero(old != expected)
    decoder, received = StreamDecoder(stream, bucket_bytes), old.copy()
    assert [decoder.apply(e.message, received) for e in encoded] == [e.digest_change for e in encoded]
    assert np.array_equal(received, expected)
    assert (digest_lanes(0, old) + sum(e.digest_change for e in encoded)) % MODULUS == digest_lanes(0, expected)
    for e in encoded:
        assert len(e.message) - HEADER_BYTES <= 2 * unpack(e.message)[0].lanes


@settings(max_examples=30, deadline=None)
@given(updates())
def test_lanes_and_changes_say_what_apply_does(update):
    stream, old, new, bucket_bytes, _ = update
    encoded, expected = encode(stream, old, new, bucket_bytes)
    decoder, received = StreamDecoder(stream, bucket_bytes), old.copy()
    for e in encoded:
        header, payload = unpack(e.message)
        lanes = decoder.lanes(e.message, header)
        assert (np.diff(lanes) > 0).all()
        if header.kind == Kind.DENSE:
            received[lanes] = np.frombuffer(payload, np.uint16)
        else:
            same, differences = decoder.changes(e.message)
            assert np.array_equal(lanes, same)
            received[lanes] += differences
    assert np.array_equal(received, expected)


@settings(max_examples=30, deadline=None)
@given(updates(), st.data())
def test_a_prefix_of_the_changes_is_told_by_the_digest_and_nothing_else_is(update, data):
    stream, old, new, bucket_bytes, _ = update
    for e in encode(stream, old, new, bucket_bytes)[0]:
        header, _ = unpack(e.message)
        if header.kind == Kind.DENSE:
            continue
        lanes, differences = StreamDecoder(stream, bucket_bytes).changes(e.message)
        applied = data.draw(st.integers(0, len(lanes)))
        image = old.copy()
        image[lanes[:applied]] += differences[:applied]

        def count(image=image, lanes=lanes, differences=differences):
            change = (digest_lanes(0, image) - digest_lanes(0, old)) % MODULUS
            return kernels.count_applied(kernels.read_only(image), lanes, differences, np.uint64(change))

        assert count() == applied
        if applied + 1 < len(lanes):
            image[lanes[applied + 1 : applied + 2]] += differences[applied + 1 : applied + 2]  # a hole: no prefix
            assert count() == -1


@settings(max_examples=40, deadline=None)
@given(updates(max_lanes=2500))
def test_the_format_followed_by_the_letter_gives_the_changes(update):
    stream, old, new, bucket_bytes, _ = update
    for e in encode(stream, old, new, bucket_bytes)[0]:
        header, _ = unpack(e.message)
        assert (header.version, header.base, header.stream_id, header.plan) == (8, 7, stream.stream_id, PLAN)
        before, after = (in_stream_space(stream, x)[header.first_lane : header.first_lane + header.lanes] for x in (old, new))
        if header.kind == Kind.DENSE:
            assert np.array_equal(np.frombuffer(unpack(e.message)[1], np.uint16), after)
        elif header.changes:
            positions, found = reference_decode(e.message)
            assert positions == np.flatnonzero(before != after).tolist()
            assert found == (after - before)[positions].tolist()
            lanes, same = StreamDecoder(stream, bucket_bytes).changes(e.message)
            where = np.concatenate([np.arange(s.start, s.stop) for s in slices(stream)])
            assert lanes.tolist() == where[header.first_lane + np.array(positions)].tolist() and same.tolist() == found


@settings(max_examples=30, deadline=None)
@given(updates())
def test_how_the_pieces_are_chopped_changes_nothing(update):
    stream, old, new, bucket_bytes, cuts = update
    image, reused = old.copy(), np.zeros(len(old), np.uint16)

    def pieces():
        for part in np.split(in_stream_space(stream, new), cuts):
            reused[: len(part)] = part
            yield reused[: len(part)]

    assert list(StreamEncoder(stream, PLAN, bucket_bytes).encode_delta(image, pieces(), 8, 7)) == encode(stream, old, new, bucket_bytes)[0]


def test_threads_and_one_thread_write_the_same_messages_and_apply_alike():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 1_300_000, np.uint16)
    new = old + (rng.random(len(old)) < 0.05).astype(np.uint16)
    new[-300_000:] = rng.integers(0, 1 << 16, 300_000, np.uint16)  # goes dense
    stream = whole(len(old))
    one, _ = encode(stream, old, new, 1_400_000)
    three, image = encode(stream, old, new, 1_400_000, threads=3)
    assert one == three and np.array_equal(image, new)
    received, decoder = old.copy(), StreamDecoder(stream, 1_400_000, threads=3)
    assert [decoder.apply(e.message, received) for e in one] == [e.digest_change for e in one]
    assert np.array_equal(received, new)
    assert [unpack(e.message)[0].kind for e in one] == [Kind.DELTA, Kind.DENSE]
    keyframe = [list(StreamEncoder(stream, PLAN, 1_400_000, n).encode_dense(new, 8)) for n in (1, 3)]
    assert keyframe[0] == keyframe[1] and len(keyframe[0]) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_one_encoder_codes_version_after_version(threads):
    """Its scratch memory carries nothing over: sparse, dense, interrupted and unchanged versions in turn."""
    rng = np.random.default_rng(9)
    stream, image = whole(700_000), rng.integers(0, 1 << 16, 700_000, np.uint16)
    encoder = StreamEncoder(stream, PLAN, 1_200_000, threads)
    for density in (0.01, 1.0, 0.3, 0.0, 0.02, 0.9, 0.001):
        old, new = image.copy(), image + (rng.random(len(image)) < density) * rng.integers(0, 50, len(image), np.uint16)
        with pytest.raises(WeightsError):
            list(encoder.encode_delta(image.copy(), [new[:650_000]], 8, 7))
        again = list(encoder.encode_delta(image, [new], 8, 7))
        assert again == encode(stream, old, new, 1_200_000)[0] and np.array_equal(image, new)


def test_a_forked_child_has_threads_of_its_own():
    old = np.zeros(1 << 20, np.uint16)
    stream, new = whole(len(old)), old + np.uint16(1)
    encoder = StreamEncoder(stream, PLAN, 1 << 21, threads=2)
    before = list(encoder.encode_delta(old.copy(), [new], 8, 7))
    child = os.fork()
    if child == 0:
        os._exit(0 if list(encoder.encode_delta(old.copy(), [new], 8, 7)) == before else 1)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_hundred_thousand_short_runs_are_one_stream():
    lanes, number = 1 << 20, np.arange(100_000)
    stream = Stream(0, 0, Runs(20 * number, 2 * (1 + number % 9)))
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, lanes, np.uint16)
    new = old + (rng.random(lanes) < 0.01).astype(np.uint16)
    encoded, image = encode(stream, old, new, 300_000)
    received, decoder = old.copy(), StreamDecoder(stream, 300_000)
    assert sum(decoder.apply(e.message, received) for e in encoded) % MODULUS == sum(e.digest_change for e in encoded) % MODULUS
    assert np.array_equal(image, updated(stream, old, new)) and np.array_equal(received, image)


def test_gaps_of_every_size_and_lone_changes_survive():
    lanes = 1 << 23
    old = np.zeros(lanes, np.uint16)
    for positions in ([0], [lanes - 1], [0, lanes - 1], np.unique([*range(500), *(1 << np.arange(23)), lanes - 1])):
        encoded, image = encode(whole(lanes), old, np.bincount(positions, minlength=lanes).astype(np.uint16), 2 * lanes)
        found, differences = StreamDecoder(whole(lanes), 2 * lanes).changes(encoded[0].message)
        assert found.tolist() == list(positions) and (differences == 1).all() and image.sum() == len(positions)


def test_nan_payloads_and_signed_zeros_are_bits_like_others():
    old = np.array([0x0000, 0x8000, 0x7FC1, 0xFFFF, 0x7F80] * 100, np.uint16)
    new = np.roll(old, 1)
    assert np.array_equal(encode(whole(500), old, new, 1000)[1], new)


# ── keyframes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(updates())
def test_a_keyframe_brings_any_image_to_its_bits(update):
    stream, old, new, bucket_bytes, _ = update
    encoder, decoder, received = StreamEncoder(stream, PLAN, bucket_bytes), StreamDecoder(stream, bucket_bytes), old.copy()
    keyframe = list(encoder.encode_dense(new, 8))
    changes = [decoder.apply(e.message, received) for e in keyframe]
    assert np.array_equal(received, updated(stream, old, new))
    assert sum(e.digest_change for e in keyframe) % MODULUS == digest_runs(new, stream.runs)
    assert (digest_lanes(0, old) + sum(changes)) % MODULUS == digest_lanes(0, received)
    header, payload = unpack(keyframe[-1].message)
    assert (header.kind, header.base, header.changes) == (Kind.DENSE, -1, header.lanes)
    assert encoder.dense_bucket(new, 8, header.index) == keyframe[-1]
    assert np.array_equal(np.frombuffer(payload, np.uint16), in_stream_space(stream, new)[header.first_lane :])


# ── size ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

LANES = 2 << 20


def iid(rng, density):
    return np.flatnonzero(rng.random(LANES) < density)


def clustered(rng, density):
    """Clusters of about 30 lanes, half of whose lanes change."""
    starts = rng.integers(0, LANES - 60, int(LANES * density / 30))
    return np.unique((starts[:, None] + np.cumsum(rng.integers(1, 3, (len(starts), 30)), axis=1)).ravel())


def ulps(rng, count):
    """Mostly ±1 with a long tail: what an optimiser's step does to bf16 weights around zero. Entropy: about 4 bits."""
    size = np.floor(2.0 ** np.minimum(rng.exponential(1.5, count), 12)).astype(np.int64)
    return (size * rng.choice([-1, 1], count)).astype(np.int16).view(np.uint16)


def bound_bytes(differences):
    """n · (H(p) + p · Hv) / 8: i.i.d. positions, empirical entropy of the differences."""
    p = len(differences) / LANES
    share = np.unique(differences, return_counts=True)[1] / len(differences)
    value_bits = float(-(share * np.log2(share)).sum())
    return LANES * (-p * math.log2(p) - (1 - p) * math.log2(1 - p) + p * value_bits) / 8


@pytest.mark.parametrize("place", [iid, clustered])
@pytest.mark.parametrize(("density", "most"), [(0.001, 1.10), (0.003, 1.06), (0.01, 1.05), (0.03, 1.05), (0.1, 1.05)])
def test_bytes_stay_near_the_entropy_bound(place, density, most):
    """`most` leaves room for the codebook, which weighs more in this small image than in a bucket of 128 MiB."""
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, LANES, np.uint16)
    where = place(rng, density)
    change = ulps(rng, len(where))
    new = old.copy()
    new[where] += change
    encoded, _ = encode(whole(LANES), old, new, 2 * LANES)
    assert len(encoded[0].message) <= most * bound_bytes(change)


def test_what_cannot_be_coded_smaller_goes_dense():
    rng = np.random.default_rng(2)
    old, new = rng.integers(0, 1 << 16, (2, LANES), np.uint16)
    for changed in (new, np.where(rng.random(LANES) < 0.97, new, old)):
        encoded, image = encode(whole(LANES), old, changed, LANES)
        assert [unpack(e.message)[0].kind for e in encoded] == [Kind.DENSE] * 2 and np.array_equal(image, changed)
        assert sum(len(e.message) for e in encoded) == 2 * LANES + 2 * HEADER_BYTES
        assert sum(e.changes for e in encoded) == np.count_nonzero(old != changed)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pieces_that_are_not_the_stream_are_refused():
    image, encoder = np.zeros(100, np.uint16), StreamEncoder(whole(100), PLAN, 80)
    for pieces in ([image[:99]], [image, image[:1]], [image.astype(np.uint32)], [image.reshape(10, 10)], []):
        with pytest.raises(WeightsError):
            list(encoder.encode_delta(np.zeros(100, np.uint16), pieces, 8, 7))


def test_images_and_sizes_that_cannot_work_are_refused():
    image = np.zeros(100, np.uint16)
    read_only = image.copy()
    read_only.flags.writeable = False
    message = StreamEncoder(whole(100), PLAN, 80).dense_bucket(image, 1, 0).message
    for bad in (image[:99], image.astype(np.int16), np.zeros(200, np.uint16)[::2], read_only):
        with pytest.raises(LayoutError):
            StreamDecoder(whole(100), 80).apply(message, bad)
    for bucket_bytes in (0, 3, 1 << 31):
        with pytest.raises(LayoutError):
            StreamEncoder(whole(100), PLAN, bucket_bytes)
    with pytest.raises(LayoutError):
        StreamDecoder(Stream(0, 0, [Run(1, 2)]), 80)
    with pytest.raises(WeightsError):
        StreamEncoder(whole(100), PLAN, 80).dense_bucket(image, 1, 3)


def test_a_bucket_of_another_stream_or_size_is_refused():
    image = np.zeros(100, np.uint16)
    message = StreamEncoder(whole(100), PLAN, 80).dense_bucket(image, 1, 1).message
    for decoder in (StreamDecoder(Stream(1, 0, [Run(0, 200)]), 80), StreamDecoder(whole(100), 90), StreamDecoder(whole(70), 80)):
        with pytest.raises(WeightsError):
            decoder.apply(message, image)
    with pytest.raises(WeightsError, match="no differences"):
        StreamDecoder(whole(100), 80).changes(message)


def sample(changes_density=0.05, lanes=40_000):
    rng = np.random.default_rng(4)
    old = rng.integers(0, 1 << 16, lanes, np.uint16)
    where = np.flatnonzero(rng.random(lanes) < changes_density)
    new = old.copy()
    new[where] += ulps(rng, len(where))
    return old, new, encode(whole(lanes), old, new, 2 * lanes)[0][0].message


OLD, NEW, SAMPLE = sample()
GUARD = 4096


def survives(message):
    """Apply, or refuse with WeightsError; either way nothing outside of the image is touched."""
    room = np.full(len(OLD) + 2 * GUARD, 0xABCD, np.uint16)
    image = room[GUARD:-GUARD]
    image[:] = OLD
    decoder = StreamDecoder(whole(len(OLD)), 2 * len(OLD))
    try:
        decoder.apply(message, image)
        lanes, _ = decoder.changes(message)
        decoded = True
    except WeightsError:
        decoded = False
    assert (room[:GUARD] == 0xABCD).all() and (room[-GUARD:] == 0xABCD).all()
    if decoded:
        assert (np.diff(lanes) > 0).all() and 0 <= lanes[0] <= lanes[-1] < len(OLD)
    return decoded


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 3))
def test_damaged_payloads_with_right_checksums_are_decoded_in_bounds_or_refused(damages, where):
    header, payload = unpack(SAMPLE)
    damaged = bytearray(payload)
    tree_end = 4 + damaged[0] + 256 * damaged[1]
    for at, value in damages:  # anywhere, in the codebook, in the block table, near the end
        spot = (at, at % tree_end, tree_end + at % 18, len(damaged) - PAYLOAD_PADDING - 1 - at % 64)[where]
        damaged[spot % len(damaged)] = value
    survives(pack(header, damaged))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.binary(min_size=1, max_size=300))
def test_payloads_out_of_nothing_are_decoded_in_bounds_or_refused(changes, content):
    survives(pack(replace(unpack(SAMPLE)[0], changes=changes), content))


def test_lengthened_shortened_and_miscounted_payloads_are_refused():
    header, payload = unpack(SAMPLE)
    assert survives(SAMPLE)
    for cut in (1, 5, 16, 17, 500, len(payload) - 3):
        assert not survives(pack(header, payload[:-cut]))
    assert not survives(pack(header, bytes(payload) + b"\0"))
    for changes in (1, header.changes - 1, header.changes + 1, header.changes + 1024, header.lanes):
        assert not survives(pack(replace(header, changes=changes), payload))


def test_positions_behind_the_bucket_or_not_increasing_are_refused():
    header, payload = unpack(SAMPLE)
    tree_end = 4 + payload[0] + 256 * payload[1]
    for block, first in ((0, len(OLD) - 1), (0, 2**32 - 1), (1, 0), (1, len(OLD) - 1)):
        damaged = bytearray(payload)
        damaged[tree_end + 9 * block : tree_end + 9 * block + 4] = first.to_bytes(4, "little")
        assert not survives(pack(header, damaged))


# ── the documented example ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_the_documentation_is_what_the_codec_writes_and_reads():
    text = FORMAT.read_text()
    rows = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE)
    documented = bytes.fromhex("".join(rows))
    stream = Stream(2, 0, [Run(0, 256)])
    old, new = np.zeros((2, 128), np.uint16)
    positions, changes = [3, 4, 20, 21, 40, 63], [1, 1, 65535, 1, 512, 1]
    new[64 + np.array(positions)] = changes
    written = list(StreamEncoder(stream, 0x0123456789ABCDEF, 128).encode_delta(old.copy(), [new], 8, 7))[1]
    assert written.message == documented
    assert unpack(documented)[0] == BucketHeader(
        Kind.DELTA, 8, 7, 2, 1, 64, 64, 6, len(documented) - 64, 0x0123456789ABCDEF, int.from_bytes(documented[60:64], "little")
    )
    assert reference_decode(documented) == (positions, changes)
    assert StreamDecoder(stream, 128).changes(documented)[0].tolist() == [64 + p for p in positions]
