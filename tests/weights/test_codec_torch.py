"""The codec for tensors writes and applies the same messages as the one for arrays, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights import codec_torch
from rose_hpc.weights.codec import StreamDecoder, StreamEncoder
from rose_hpc.weights.codec_torch import TorchStreamDecoder, TorchStreamEncoder
from rose_hpc.weights.digest import digest_lanes
from rose_hpc.weights.layout import Run
from rose_hpc.weights.routing import Stream
from rose_hpc.weights.wire import Kind, unpack

LANES = 60_000
BUCKET_BYTES = 40_000
STREAMS = {
    "whole": Stream(0, 0, [Run(0, 2 * LANES)]),
    "two runs": Stream(1, 0, [Run(100, 50_000), Run(60_000, 40_002)]),
    "short runs": Stream(2, 0, [Run(40 * i, 2 * (1 + i % 15)) for i in range(3000)]),
}
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]),
    ],
)
streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)


def tensor(lanes, device):
    return torch.from_numpy(lanes.view(np.int16).copy()).to(device)


def lanes_of(image):
    return image.cpu().numpy().view(np.uint16)


def update(density):
    """Arbitrary bits before; after it ±1, wrapping, and arbitrary bits, at some lanes."""
    rng = np.random.default_rng(int(1000 * density))
    old = rng.integers(0, 1 << 16, LANES, np.uint16)
    change = np.where(
        rng.random(LANES) < 0.9, rng.choice(np.array([1, 65535], np.uint16), LANES), rng.integers(0, 1 << 16, LANES, np.uint16)
    )
    return old, np.where(rng.random(LANES) < density, old + change, old).astype(np.uint16)


def in_stream_space(stream, image):
    return np.concatenate([image[r.offset_bytes // 2 : r.end_bytes // 2] for r in stream.runs])


@devices
@streams
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_tensors_and_arrays_are_coded_alike(device, stream, density):
    old, new = update(density)
    content = in_stream_space(stream, new)
    on_host, on_device = old.copy(), tensor(old, device)
    expected = list(StreamEncoder(stream, 5, BUCKET_BYTES).encode_delta(on_host, [content], 8, 7))
    pieces = [tensor(part, device) for part in np.split(content, [7, 7, 30_001])]
    assert list(TorchStreamEncoder(stream, 5, BUCKET_BYTES).encode_delta(on_device, pieces, 8, 7)) == expected
    assert np.array_equal(lanes_of(on_device), on_host)
    received, decoder = tensor(old, device), TorchStreamDecoder(stream, BUCKET_BYTES)
    assert [decoder.apply(e.message, received) for e in expected] == [e.digest_change for e in expected]
    assert np.array_equal(lanes_of(received), on_host)


@devices
@streams
def test_keyframes_are_alike(device, stream):
    old, new = update(1.0)
    expected = list(StreamEncoder(stream, 5, BUCKET_BYTES).encode_dense(new, 8))
    assert list(TorchStreamEncoder(stream, 5, BUCKET_BYTES).encode_dense(tensor(new, device), 8)) == expected
    received, decoder, on_host = tensor(old, device), TorchStreamDecoder(stream, BUCKET_BYTES), old.copy()
    changes = [decoder.apply(e.message, received) for e in expected]
    assert changes == [StreamDecoder(stream, BUCKET_BYTES).apply(e.message, on_host) for e in expected]
    assert np.array_equal(lanes_of(received), on_host)
    assert decoder.apply(expected[0].message, received, digest=False) == 0


@devices
def test_the_digest_is_the_same_across_its_chunks(device, monkeypatch):
    monkeypatch.setattr(codec_torch, "_CHUNK_LANES", 1000)
    old, new = update(0.3)
    assert codec_torch.digest_lanes(12_345, tensor(old, device)) == digest_lanes(12_345, old)
    received, stream = tensor(old, device), STREAMS["two runs"]
    for e in TorchStreamEncoder(stream, 5, BUCKET_BYTES).encode_delta(
        tensor(old, device), [tensor(in_stream_space(stream, new), device)], 8, 7
    ):
        assert TorchStreamDecoder(stream, BUCKET_BYTES).apply(e.message, received) == e.digest_change
    assert np.array_equal(in_stream_space(stream, lanes_of(received)), in_stream_space(stream, new))


def test_images_and_pieces_of_another_kind_are_refused():
    stream = STREAMS["whole"]
    encoder = TorchStreamEncoder(stream, 5, BUCKET_BYTES)
    for bad in (torch.zeros(LANES), torch.zeros(LANES - 1, dtype=torch.int16), torch.zeros(2 * LANES, dtype=torch.int16)[::2]):
        with pytest.raises(LayoutError):
            list(encoder.encode_dense(bad, 8))
    image = torch.zeros(LANES, dtype=torch.int16)
    for pieces in ([image[:-1]], [image.float()], [image, image[:1]]):
        with pytest.raises(WeightsError):
            list(encoder.encode_delta(image.clone(), pieces, 8, 7))


def test_a_damaged_message_leaves_the_image_as_it_was():
    old, new = update(0.01)
    stream = STREAMS["whole"]
    message = next(TorchStreamEncoder(stream, 5, BUCKET_BYTES).encode_delta(tensor(old, "cpu"), [tensor(new, "cpu")], 8, 7)).message
    image = tensor(old, "cpu")
    assert unpack(message)[0].kind == Kind.DELTA
    with pytest.raises(WeightsError):
        TorchStreamDecoder(stream, BUCKET_BYTES).apply(message[:-1] + b"\1", image)
    assert np.array_equal(lanes_of(image), old)
