"""An arena's folder and its three small files: layout.json, plan.bin, state.json.

Invariants
- layout.json appears last: a folder with it has an image and a journal whose blocks are all allocated.
- Making the arena that another process is making waits for it; making it again joins it.
- Making it on a file system without room leaves a folder with nothing but the empty lock file.
- state.json and plan.bin change by rename: who reads them gets the old or the new.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena_files import WatchedFile, allocate_file, check_folder, make_folder, read_file, remove_file, sweep, write_file
from rose_hpc.weights.arena_journal import JOURNAL_BYTES
from rose_hpc.weights.arena_locks import ImageLock
from rose_hpc.weights.bucket_plan import BucketPlan
from rose_hpc.weights.layout import ImageLayout, from_json, to_json
from rose_hpc.weights.routing import RoutingPlan, from_bytes, to_bytes

LAYOUT, IMAGE, STATE, LOCK, JOURNAL, PLAN = "layout.json", "image", "state.json", "image.lock", "journal", "plan.bin"
NOTHING = -1  # the version of an image that is none
OPEN_POLL_S = 0.02
MAX_PLAN_BYTES = 1 << 30
_BUCKET_BYTES = struct.Struct("<Q")


@dataclass(frozen=True)
class ArenaState:
    """Which version the image is; −1: none. digest: of the streams that it holds. verified: the digest is the trainer's."""

    version: int
    digest: int
    verified: bool


EMPTY = ArenaState(NOTHING, 0, False)


# ── the folder ──


def create_folder(path: Path, layout: ImageLayout, deadline_s: float) -> None:
    """Make the arena, or see that the one here has this layout.

    Raises LayoutError: another layout, or an empty one; EnvironmentFault: no room; WeightsError: not a folder of this user;
    TransferTimeout: somebody else is making it for longer than deadline_s.
    """
    if layout.image_bytes == 0:
        raise LayoutError("a layout without parameters has no image")
    make_folder(path)
    with ImageLock(path / LOCK).exclusive(deadline_s):
        found = read_layout(path)
        if found is None:
            _fill(path, layout)
        elif found.fingerprint != layout.fingerprint:
            raise LayoutError(f"{path} holds another layout", got=found.fingerprint[:12], expected=layout.fingerprint[:12])


def _fill(path: Path, layout: ImageLayout) -> None:
    """Without layout.json there is no arena: what else lies here was left by one who was killed."""
    sweep(path)
    try:
        for name, nbytes in ((IMAGE, layout.image_bytes), (JOURNAL, JOURNAL_BYTES)):
            remove_file(path / name)
            allocate_file(path / name, nbytes)
        write_file(path / LAYOUT, [to_json(layout).encode()])
    except BaseException:
        for name in (IMAGE, JOURNAL):
            remove_file(path / name)
        raise


def open_folder(path: Path, deadline_s: float) -> ImageLayout:
    """The layout of the arena at path, waiting up to deadline_s for it. Raises WeightsError: none there, or not of this user alone."""
    end_s = time.monotonic() + deadline_s
    while (layout := read_layout(path)) is None:
        if time.monotonic() >= end_s:
            raise WeightsError("no arena here", got=f"{path} without {LAYOUT} after {deadline_s:g} s")
        time.sleep(OPEN_POLL_S)
    check_folder(path)
    return layout


def read_layout(path: Path) -> ImageLayout | None:
    """The layout, or None while there is none."""
    content = read_file(path / LAYOUT)
    return None if content is None else from_json(content.decode())


# ── state.json ──


class StateFile:
    """What the image is, and which of its bytes are meant: BucketPlan.covers, "" where it is nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE
        self._file = WatchedFile(self._path, _parsed_state)

    def read(self) -> tuple[ArenaState, str]:
        return self._file.read()

    def write(self, state: ArenaState, covers: str) -> None:
        """From here on the image is this."""
        write_file(self._path, [json.dumps({**asdict(state), "covers": covers}).encode()])


def _parsed_state(content: bytes | None) -> tuple[ArenaState, str]:
    if content is None:
        return EMPTY, ""
    tree = json.loads(content)
    covers = tree.pop("covers")
    return ArenaState(**tree), covers


# ── plan.bin ──


class PlanFile:
    """The routing plan and the size of buckets; read anew when another process has changed it."""

    def __init__(self, folder: Path, layout: ImageLayout) -> None:
        self._path, self._layout = folder / PLAN, layout
        self._file = WatchedFile(self._path, self._parsed, MAX_PLAN_BYTES)

    def read(self) -> BucketPlan | None:
        """None before the first `write`. Raises LayoutError when the file is not a plan of this layout."""
        return self._file.read()

    def _parsed(self, content: bytes | None) -> BucketPlan | None:
        if content is None:
            return None
        if len(content) < _BUCKET_BYTES.size:
            raise LayoutError("not a routing plan", got=f"{self._path} cut short")
        bucket_bytes = _BUCKET_BYTES.unpack_from(content)[0]
        return BucketPlan(from_bytes(content[_BUCKET_BYTES.size :], self._layout.image_bytes), bucket_bytes)

    def write(self, plan: RoutingPlan, bucket_bytes: int) -> None:
        write_file(self._path, [_BUCKET_BYTES.pack(bucket_bytes), to_bytes(plan)])


def check_plan(plan: RoutingPlan, bucket_bytes: int, image_bytes: int) -> None:
    """Raises LayoutError: buckets of an impossible size, streams that overlap, cut a lane, or leave the image."""
    if bucket_bytes % 4 or not 4 <= bucket_bytes <= wire.MAX_BUCKET_BYTES:
        raise LayoutError("buckets of an impossible size", got=bucket_bytes, expected=f"a multiple of 4 up to {wire.MAX_BUCKET_BYTES}")
    runs = BucketPlan(plan, bucket_bytes).runs(tuple(range(len(plan.streams))))
    if len(runs) and (int(runs.offsets[0]) < 0 or int(runs.ends[-1]) > image_bytes):
        raise LayoutError("the plan leaves the image", got=f"{runs[0]} to {runs[-1]}", expected=f"inside {image_bytes} bytes")
    if any(((s.runs.offsets | s.runs.sizes) % wire.LANE_BYTES).any() for s in plan.streams):
        raise LayoutError("the plan cuts lanes", expected=f"multiples of {wire.LANE_BYTES} bytes")
