"""The codec for images that live on a torch device (CUDA, or any other): the same messages, bit for bit, as codec.py.

What scales with the image is done on the device with plain torch ops: compare, find, subtract, scatter, digest. What scales with
the changes is done by the kernels of codec.py: the found positions and differences, 6 bytes each, come to the host and are coded
there. Images and pieces are int16 tensors: torch has no arithmetic for uint16, and differences wrap alike.

Digests are computed in int64, whose additions and multiplications wrap mod 2^64 like the reference's.
What it does not do: threads (the device is parallel), journals (arena.py), streams of CUDA other than the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights.codec import StreamDecoder, StreamEncoder
from rose_hpc.weights.codec_parts import Changes, Lanes, StreamMap
from rose_hpc.weights.digest import MODULUS
from rose_hpc.weights.routing import Stream
from rose_hpc.weights.wire import BucketHeader, Kind

_CHUNK_LANES = 1 << 22  # temporaries of 32 MiB (int64 per lane) each
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - MODULUS, 0x94D049BB133111EB - MODULUS  # as int64


def digest_lanes(first_lane: int, lanes: torch.Tensor) -> int:
    """digest.digest_lanes for an int16 tensor [n] on any device. first_lane: image lane of lanes[0]."""
    total = 0
    for start in range(0, len(lanes), _CHUNK_LANES):
        part = lanes[start : start + _CHUNK_LANES]
        where = torch.arange(first_lane + start, first_lane + start + len(part), dtype=torch.int64, device=lanes.device)
        total += _digest(where, part)
    return total % MODULUS


def _digest(where: torch.Tensor, bits: torch.Tensor) -> int:
    """Σ fin(lane << 16 | bits) of image lanes (int64) and their bits (int16)."""
    x = (where << 16) | (bits.to(torch.int64) & 0xFFFF)
    x = (x ^ _shifted_right(x, 30)) * _MIX_1
    x = (x ^ _shifted_right(x, 27)) * _MIX_2
    return int((x ^ _shifted_right(x, 31)).sum().item()) % MODULUS


def _shifted_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class _Where:
    """Stream lanes to image lanes on a device: a slice where one run holds them all, else an index tensor."""

    def __init__(self, lanes: StreamMap) -> None:
        self._map = lanes
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def slice_of(self, first: int, size: int) -> slice | None:
        run = int(np.searchsorted(self._map.stream_start, first, "right")) - 1
        if first + size > self._map.stream_start[run + 1]:
            return None
        start = first + int(self._map.image_start[run] - self._map.stream_start[run])
        return slice(start, start + size)

    def lanes_of(self, first: int, size: int, device: torch.device) -> torch.Tensor:
        """int64 [size]."""
        if device not in self._on:
            starts = torch.tensor(self._map.stream_start[1:], device=device)
            self._on[device] = (starts, torch.tensor(self._map.image_start - self._map.stream_start[:-1], device=device))
        ends, shift = self._on[device]
        lanes = torch.arange(first, first + size, dtype=torch.int64, device=device)
        return lanes + shift[torch.searchsorted(ends, lanes, right=True)]

    def chunks(self, first: int, size: int, device: torch.device) -> Iterator[tuple[int, int, slice | torch.Tensor]]:
        """(from, to, index into the image) of stream lanes first .. first + size, counted from `first`, in bounded pieces."""
        for low in range(0, size, _CHUNK_LANES):
            high = min(low + _CHUNK_LANES, size)
            held = self.slice_of(first + low, high - low)
            yield low, high, self.lanes_of(first + low, high - low, device) if held is None else held


def _check_image(lanes: StreamMap, image: torch.Tensor) -> None:
    if image.dtype != torch.int16 or image.ndim != 1 or not image.is_contiguous() or len(image) < lanes.image_end:
        raise LayoutError(
            "an image on a device is a contiguous tensor of lanes",
            got=f"{image.dtype}, shape {tuple(image.shape)}",
            expected=f"int16 [{lanes.image_end} at least]",
        )


class TorchStreamEncoder(StreamEncoder):
    """StreamEncoder whose image and pieces are int16 tensors on one device."""

    def __init__(self, stream: Stream, plan_id: int, bucket_bytes: int) -> None:
        super().__init__(stream, plan_id, bucket_bytes)
        self._where = _Where(self._map)

    def _check_image(self, image: Any, writable: bool) -> None:
        _check_image(self._map, image)

    def _as_lanes(self, piece: Any) -> Any:
        if piece.dtype != torch.int16 or piece.ndim != 1:
            raise WeightsError(
                "a piece of a stream is no tensor of lanes", got=f"{piece.dtype}, shape {tuple(piece.shape)}", expected="int16 [n]"
            )
        return piece

    def _scan(self, image: Any, part: Any, at: int, index: int, changes: Changes) -> None:
        first = index * self._map.bucket_lanes
        for low, high, where in self._where.chunks(at, len(part), image.device):
            old, new = image[where], part[low:high].to(image.device)
            found = torch.nonzero(old != new).flatten()
            before, after = old[found], new[found]
            lanes = where[found] if isinstance(where, torch.Tensor) else found + where.start
            change = _digest(lanes, after) - _digest(lanes, before)
            changes.extend(_noted(changes.most, found + (at + low - first), after - before, change))
            image[lanes] = after

    def _gather(self, image: Any, index: int) -> tuple[Lanes, int]:
        first, lanes = self._map.bucket(index)
        out = np.empty(lanes, np.uint16)
        digest = 0
        for low, high, where in self._where.chunks(first, lanes, image.device):
            part = image[where]
            out[low:high] = part.cpu().numpy().view(np.uint16)
            digest += digest_lanes(where.start, part) if isinstance(where, slice) else _digest(where, part)
        return out, digest % MODULUS


def _noted(most: int, positions: torch.Tensor, differences: torch.Tensor, digest: int) -> Changes:
    on_host = positions.to(torch.int32).cpu().numpy().view(np.uint32)
    return Changes(most, on_host, differences.cpu().numpy().view(np.uint16), count=len(on_host), digest=digest % MODULUS)


class TorchStreamDecoder(StreamDecoder):
    """StreamDecoder whose image is an int16 tensor on a device. `lanes` and `changes` give host arrays, as they do in codec.py."""

    def __init__(self, stream: Stream, bucket_bytes: int) -> None:
        super().__init__(stream, bucket_bytes)
        self._where = _Where(self._map)

    def apply(
        self, message: bytes | memoryview, image: Any, digest: bool = True, header: BucketHeader | None = None, in_order: bool = False
    ) -> int:
        """Decode on the host, scatter on the device; returns the digest change mod 2^64 (0 when digest is False).

        Nothing is written when the message cannot be decoded. Raises WeightsError (the message), LayoutError (the image, or in_order).
        """
        _check_image(self._map, image)
        if in_order:
            raise LayoutError("a device writes in no order", remedy="keep images that are journalled on the host")
        header, payload = self._open(message, header)
        if header.kind == Kind.DELTA:
            return _scatter(image, *self._changes(header, payload), digest)
        return self._scatter_dense(header, payload, image, digest)

    def _scatter_dense(self, header: BucketHeader, payload: memoryview, image: torch.Tensor, digest: bool) -> int:
        new = torch.from_numpy(np.frombuffer(payload, np.int16).copy())
        change = 0
        for low, high, where in self._where.chunks(header.first_lane, header.lanes, image.device):
            part = new[low:high].to(image.device)
            if digest:
                lanes = torch.arange(where.start, where.stop, device=image.device) if isinstance(where, slice) else where
                change += _digest(lanes, part) - _digest(lanes, image[where])
            image[where] = part
        return change % MODULUS


def _scatter(image: torch.Tensor, lanes: NDArray[np.int64], differences: Lanes, digest: bool) -> int:
    where = torch.from_numpy(lanes).to(image.device)
    before = image[where]
    after = before + torch.from_numpy(differences.view(np.int16)).to(image.device)
    image[where] = after
    return (_digest(where, after) - _digest(where, before)) % MODULUS if digest else 0
