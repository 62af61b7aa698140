"""A relay's serving side: answers pulls from its arena, bucket by bucket, to any number of peers at once. Knows no commands.

    Pull ─▶ waiting ──arena is there──▶ Manifest sent ─▶ buckets as they come in ──all sent──▶ done
               └──deadline──▶ Refusal                        └──deadline without a bucket, or its own fetch failed──▶ Refusal

Invariants
- A bucket goes out verbatim as it was stored; one that this relay is itself receiving follows as soon as it is stored (the pipeline).
- A peer's slowness costs nobody else anything: at most `window_bytes` are queued for it, the rest stays in the arena.
- A keyframe of version w is version w to the last bit, also while newer versions are applied beneath it: what they overwrite is
  kept (`overwritten`) and put back into the buckets that go out. On a trainer's node, whose writers are other processes, the lock is
  held instead, and the trainer waits.

It does not connect to anybody and does not decide who pulls from whom (tree.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose_hpc.errors import RoseError, WeightsError
from rose_hpc.weights import wire
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.layout import Run, to_json
from rose_hpc.weights.relay_arena import RelayArena
from rose_hpc.weights.relay_messages import KEYFRAME, Manifest, Pull, Refusal, pack
from rose_hpc.weights.routing import Stream, to_bytes
from rose_hpc.weights.transport.base import Transport
from rose_hpc.weights.wire import LANE_BYTES

LOCK_DEADLINE_S = 5.0

Undo = tuple[NDArray[np.int64], NDArray[np.uint16]]  # image lanes, increasing, and the bits that were there


@dataclass
class _Session:
    """One pull being served.

    ready: (stream, bucket) that can be sent; coming: those that this relay has not got yet; undo: what was overwritten since it
    began, oldest first.
    """

    peer: str
    pull: Pull
    since_s: float
    ready: deque[tuple[int, int]] = field(default_factory=deque)
    coming: set[tuple[int, int]] = field(default_factory=set)
    announced: bool = False
    undo: list[Undo] = field(default_factory=list)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def is_keyframe(self) -> bool:
        return self.pull.base == KEYFRAME


class Serving:
    """All pulls of one relay. deadline_s: longest wait for the next bucket to come in."""

    def __init__(self, home: RelayArena, transport: Transport, window_bytes: int, deadline_s: float) -> None:
        self._home, self._transport, self._window_bytes, self._deadline_s = home, transport, window_bytes, deadline_s
        self._sessions: dict[str, _Session] = {}
        self._given_up: tuple[int, str] | None = None  # the last generation in which this relay failed, and why

    @property
    def is_sending(self) -> bool:
        """Whether a session waits only for its peer to take what is queued."""
        return any(s.ready for s in self._sessions.values())

    @property
    def sends_keyframes(self) -> bool:
        return any(s.is_keyframe and s.announced for s in self._sessions.values())

    def pulled(self, peer: str, pull: Pull, now_s: float) -> None:
        """A peer asks. A second pull of the same peer takes the first one's place."""
        self.forget(peer)
        self._sessions[peer] = _Session(peer, pull, now_s)

    def forget(self, peer: str) -> None:
        """The peer is gone."""
        if (session := self._sessions.pop(peer, None)) is not None:
            session.held.close()

    def stored(self, version: int, base: int, place: tuple[int, int]) -> None:
        """A bucket, (stream, index), of these deltas or this keyframe has come in: sessions that want it can send it."""
        for session in self._sessions.values():
            if place in session.coming and (session.pull.version, session.pull.base) == (version, base):
                session.coming.remove(place)
                session.ready.append(place)

    def given_up(self, generation: int, why: str) -> None:
        """This relay's own fetch has failed: who waits for the rest of it from here, or asks late, need not wait for the deadline."""
        self._given_up = (generation, why)

    def overwritten(self, undo: Iterable[Undo]) -> None:
        """The image has changed under the keyframes that are on their way."""
        for session in self._sessions.values():
            if session.is_keyframe and session.announced:
                session.undo.extend(undo)

    def pump(self, now_s: float) -> None:
        """Queue what can be queued; end sessions that are served, refused or too late."""
        for session in list(self._sessions.values()):
            try:
                if self._advance(session, now_s):
                    self.forget(session.peer)
                elif self._given_up is not None and self._given_up[0] == session.pull.generation and not self._window_is_full(session):
                    raise WeightsError("this relay could not get it", got=self._given_up[1])
                elif now_s - session.since_s > self._deadline_s:
                    raise WeightsError("this relay has not got it", got=f"no new bucket in {self._deadline_s:g} s")
            except RoseError as error:
                self._refuse(session, error)

    def close(self) -> None:
        for peer in list(self._sessions):
            self.forget(peer)

    def _refuse(self, session: _Session, error: RoseError) -> None:
        with contextlib.suppress(RoseError):  # not connected any more: then there is nobody to tell
            self._transport.send(session.peer, [pack(Refusal(session.pull.generation, session.pull.version, str(error)))])
        self.forget(session.peer)

    def _advance(self, session: _Session, now_s: float) -> bool:
        """Whether all has been queued. Raises RoseError where it cannot be served."""
        if not session.announced and not self._announce(session):
            return False
        arena = self._home.arena_here()
        while session.ready and not self._window_is_full(session):
            self._transport.send(session.peer, [self._message(arena, session, *session.ready.popleft())])
            session.since_s = now_s
        return not session.ready and not session.coming

    def _window_is_full(self, session: _Session) -> bool:
        return self._transport.queued_bytes(session.peer) >= self._window_bytes

    def _announce(self, session: _Session) -> bool:
        """Send the manifest; False while there is no arena here that could say."""
        arena = self._home.arena
        if arena is None:
            return False
        if (
            session.is_keyframe
            and not self._is_coming(session)
            and not self._home.is_source
            and arena.state().version < session.pull.version
        ):
            return False  # it may be on its way
        pull, plan = session.pull, arena.plan
        streams = {s.stream_id: s for s in plan.streams}
        if unknown := pull.have.keys() - streams.keys():
            raise WeightsError("no such stream", got=sorted(unknown)[:5], expected=f"0 to {len(streams) - 1}")
        if session.is_keyframe and not self._is_coming(session):
            self._hold(session, arena)
        elif not session.is_keyframe:
            self._check_kept(pull, arena)
        counts = {s: streams[s].buckets(arena.bucket_bytes) for s in sorted(pull.have)}
        has_plan = pull.plan == plan.fingerprint
        layout, plan_bytes = ("", b"") if has_plan else (to_json(arena.layout), to_bytes(plan))
        manifest = Manifest(pull.generation, pull.version, pull.base, counts, arena.bucket_bytes, layout, plan_bytes)
        self._transport.send(session.peer, [pack(manifest)])
        self._sort(session, arena, counts)
        session.announced = True
        return True

    def _sort(self, session: _Session, arena: Arena, counts: Mapping[int, int]) -> None:
        """What the peer wants, by whether it is here already."""
        have = {s: set(indices) for s, indices in session.pull.have.items()}
        wanted = [(s, i) for s, count in counts.items() for i in range(count) if i not in have[s]]
        if not session.is_keyframe:
            here = {(s, i) for s, indices in arena.stored(session.pull.version).items() for i in indices}
        elif self._home.incoming is not None and self._is_coming(session):
            here = self._home.incoming.written
        else:
            here = set(wanted)
        session.ready = deque(place for place in wanted if place in here)
        session.coming = set(wanted) - here

    def _check_kept(self, pull: Pull, arena: Arena) -> None:
        """Raises WeightsError for a delta that will not come in any more: its version is here without it, by a keyframe or pruned."""
        is_past = bool(arena.shards(pull.version)) if self._home.is_source else arena.state().version >= pull.version
        missing = [at for at in arena.missing(pull.version, list(pull.have)) if at[1] not in pull.have[at[0]]] if is_past else []
        if missing:
            raise WeightsError(f"the delta to version {pull.version} is not kept here", got=f"{len(missing)} buckets missing")

    def _is_coming(self, session: _Session) -> bool:
        """Whether the keyframe asked for is the one that this relay is itself receiving."""
        return self._home.incoming is not None and self._home.incoming.version == session.pull.version

    def _hold(self, session: _Session, arena: Arena) -> None:
        """Make sure that the image is, and stays, the version asked for. Raises WeightsError when it is another one."""
        if self._home.is_source:
            session.held.enter_context(arena.writing(LOCK_DEADLINE_S))
            found = {record.version for record in arena.newest_shards()}
            verified = True
        else:
            state = arena.state()
            found, verified = {state.version}, state.verified
        if found != {session.pull.version} or not verified:
            raise WeightsError("the keyframe asked for is not what lies here", got=sorted(found), expected=session.pull.version)

    def _message(self, arena: Arena, session: _Session, stream: int, index: int) -> bytes | memoryview:
        """One bucket that is here. Raises WeightsError when it has gone meanwhile: pruned, or given up."""
        if session.is_keyframe:
            return self._keyframe_bucket(arena.plan.streams[stream], session, index)
        message = arena.bucket(session.pull.version, stream, index)
        if message is None:
            what = f"the delta to version {session.pull.version} is not kept here"
            raise WeightsError(what, got=f"bucket {index} of stream {stream} has gone")
        return message

    def _keyframe_bucket(self, stream: Stream, session: _Session, index: int) -> bytes:
        message = self._home.dense_bucket(stream, session.pull.version, index)
        if not session.undo:
            return message
        header, payload = wire.unpack(message)
        lanes = np.frombuffer(payload, np.dtype("<u2")).copy()
        for undo in reversed(session.undo):
            _put_back(lanes, stream, header.first_lane, undo)
        return wire.pack(header, lanes.tobytes())


def _put_back(lanes: NDArray[np.uint16], stream: Stream, first_lane: int, undo: Undo) -> None:
    """Overwrite those lanes of a bucket that the undo names. lanes: uint16 [n], from first_lane of the stream's space on."""
    where, bits = undo
    for offset, run in _pieces(stream.runs, first_lane * LANE_BYTES, lanes.nbytes):
        first = run.offset_bytes // LANE_BYTES
        low, high = np.searchsorted(where, (first, run.end_bytes // LANE_BYTES))
        lanes[offset // LANE_BYTES + where[low:high] - first] = bits[low:high]


def _pieces(runs: Sequence[Run], start: int, nbytes: int) -> Iterable[tuple[int, Run]]:
    """The part [start, start + nbytes) of stream space as (offset in the part, image run)."""
    at = 0
    for run in runs:
        low, high = max(start, at), min(start + nbytes, at + run.nbytes)
        if low < high:
            yield low - start, Run(run.offset_bytes + low - at, high - low)
        at += run.nbytes
        if at >= start + nbytes:
            return
