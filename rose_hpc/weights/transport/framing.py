"""Authentication of TCP connections and their frames, as pure functions and scripts: no sockets, no clock, no randomness.

Handshake of one connection, all messages of fixed size (RFC 2104 HMAC with SHA-256):

    initiator ─ Hello: streams, index, session, instance, nonce, both names ─▶ acceptor
    initiator ◀─ Challenge: instance, nonce ─ acceptor
    initiator ─ HMAC(key, "initiator" ‖ Hello ‖ Challenge) ─▶ acceptor                the acceptor reveals nothing before this
    initiator ◀─ HMAC(key, "acceptor" ‖ Hello ‖ Challenge) ─ acceptor

Frame: header (40 bytes) ‖ HMAC(frame key, "H" ‖ header) ‖ content ‖ HMAC(frame key, "C" ‖ header ‖ content)

The frame key is HMAC(key, direction ‖ Hello ‖ Challenge): it binds both names, both nonces and the direction. The header holds the
frame's sequence number, so that what was flipped, forged, replayed, left out or reordered fails a tag. The header has a tag of its
own: no length is believed, and no memory taken, before it is known to come from the peer.

A message longer than CHUNK_BYTES travels as several frames, which may take different connections; chunk k lies at k × CHUNK_BYTES.

It does not encrypt: whoever reads the network reads the weights.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from hmac import compare_digest

from rose_hpc.errors import WeightsError

MAGIC = b"RST1"
CHUNK_BYTES = 1 << 20
MAX_STREAMS = 16
NAME_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 80, 16, 32, 32
MIN_KEY_BYTES = 32

_HELLO = struct.Struct(f"<4sBB{ID_BYTES}s{ID_BYTES}s{NONCE_BYTES}s{NAME_BYTES}s{NAME_BYTES}s")
_CHALLENGE = struct.Struct(f"<4s{ID_BYTES}s{NONCE_BYTES}s")
_HEADER = struct.Struct("<5Q")
HEADER_BYTES = _HEADER.size + TAG_BYTES  # with its tag


class Tampered(WeightsError):
    """What arrived is not what this peer sent, or not in the place where it sent it."""


class Refused(WeightsError):
    """A handshake that leads to no connection."""


def check_name(name: str) -> bytes:
    """The name as it travels. Raises WeightsError unless it has 1 to NAME_BYTES bytes of UTF-8 and no NUL."""
    raw = name.encode()
    if not 0 < len(raw) <= NAME_BYTES or b"\0" in raw:
        raise WeightsError("not a peer name", got=repr(name), expected=f"1 to {NAME_BYTES} bytes of UTF-8 without NUL")
    return raw


def key_for(secret: bytes, peer: str) -> bytes:
    """The key of one peer at the relay whose secret this is (32 bytes): it opens the door under that peer's name and no other."""
    return hmac.new(secret, b"rose-hpc peer " + peer.encode(), "sha256").digest()


def check_key(key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise WeightsError("a key is too short", got=f"{len(key)} bytes", expected=f"at least {MIN_KEY_BYTES} random bytes")
    return bytes(key)


# ── handshake ──


@dataclass(frozen=True, slots=True)
class Hello:
    """What an initiator says of one of its connections.

    session: the same in all `streams` connections that belong together, index counts them; instance: of this process's transport,
    new after every restart.
    """

    streams: int
    index: int
    session: bytes
    instance: bytes
    nonce: bytes
    initiator: str
    acceptor: str

    def pack(self) -> bytes:
        names = check_name(self.initiator), check_name(self.acceptor)
        return _HELLO.pack(MAGIC, self.streams, self.index, self.session, self.instance, self.nonce, *names)

    @staticmethod
    def unpack(raw: bytes) -> Hello:
        """Raises Refused for anything but a Hello of this protocol."""
        magic, streams, index, session, instance, nonce, initiator, acceptor = _HELLO.unpack(raw)
        if magic != MAGIC or not 1 <= streams <= MAX_STREAMS or index >= streams:
            raise Refused("not a weight transport's opening")
        try:
            names = [name.rstrip(b"\0").decode() for name in (initiator, acceptor)]
            for name in names:
                check_name(name)
        except (UnicodeDecodeError, WeightsError):
            raise Refused("an opening without proper names") from None
        return Hello(streams, index, session, instance, nonce, names[0], names[1])


@dataclass(frozen=True, slots=True)
class Agreed:
    """One authenticated connection. send_key, receive_key: frame keys of the two directions, seen from here."""

    hello: Hello
    peer: str
    peer_instance: bytes
    send_key: bytes
    receive_key: bytes


Script = Generator[tuple[bytes, int], bytes, Agreed]  # yields (what to write, how many bytes to read next), is sent those bytes


def initiate(hello: Hello, key: bytes) -> Script:
    """The initiator's side. Raises Refused when the acceptor does not prove that it holds the key."""
    opening = hello.pack()
    challenge = yield opening, _CHALLENGE.size
    magic, instance, _ = _CHALLENGE.unpack(challenge)
    if magic != MAGIC:
        raise Refused("what listens there is not a weight transport")
    transcript = opening + challenge
    answer = yield _mac(key, b"initiator", transcript), TAG_BYTES
    if not compare_digest(answer, _mac(key, b"acceptor", transcript)):
        raise Refused(f"what listens there does not hold the key of {hello.acceptor!r}")
    return Agreed(hello, hello.acceptor, instance, *_frame_keys(key, transcript))


def accept(name: str, instance: bytes, nonce: bytes, key_of: Callable[[str], bytes | None]) -> Script:
    """The acceptor's side. Raises Refused for a Hello to somebody else, an unknown initiator or a wrong proof."""
    opening = yield b"", _HELLO.size
    hello = Hello.unpack(opening)
    if not compare_digest(hello.acceptor.encode(), name.encode()):
        raise Refused(f"{hello.initiator!r} looks for another peer", got=repr(hello.acceptor), expected=repr(name))
    challenge = _CHALLENGE.pack(MAGIC, instance, nonce)
    transcript = opening + challenge
    proof = yield challenge, TAG_BYTES
    key = key_of(hello.initiator)
    if key is None or not compare_digest(proof, _mac(key, b"initiator", transcript)):
        raise Refused(f"{hello.initiator!r} does not hold the key")
    yield _mac(key, b"acceptor", transcript), 0
    return Agreed(hello, hello.initiator, hello.instance, *reversed(_frame_keys(key, transcript)))


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"rose-hpc tcp " + role + b"\0" + transcript, "sha256")


def _frame_keys(key: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """(initiator to acceptor, acceptor to initiator)."""
    return _mac(key, b"frames to acceptor", transcript), _mac(key, b"frames to initiator", transcript)


# ── frames ──


@dataclass(frozen=True, slots=True)
class Header:
    """sequence: of the frame on its connection; message: number on the session; the rest in bytes of that message."""

    sequence: int
    message: int
    total_bytes: int
    offset: int
    nbytes: int


class Sealer:
    """Numbers and authenticates the frames of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        self._sequence = 0

    def seal(self, message: int, total_bytes: int, offset: int, content: Sequence[memoryview]) -> tuple[bytes, bytes]:
        """What travels before and after the content, which is one chunk of a message."""
        header = _HEADER.pack(self._sequence, message, total_bytes, offset, sum(view.nbytes for view in content))
        self._sequence += 1
        head, body = self._mac.copy(), self._mac.copy()
        head.update(b"H" + header)
        body.update(b"C" + header)
        for view in content:
            body.update(view)
        return header + head.digest(), body.digest()


class Opener:
    """Checks the frames of one direction of one connection: open() a header, update() with the content, close() with the tag."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        self._body = self._mac
        self._sequence = 0

    def open(self, raw: memoryview) -> Header:
        """raw: HEADER_BYTES long. Raises Tampered."""
        packed, tag = bytes(raw[: _HEADER.size]), bytes(raw[_HEADER.size :])
        head = self._mac.copy()
        head.update(b"H" + packed)
        if not compare_digest(head.digest(), tag):
            raise Tampered("a frame header is not authentic: changed, forged or out of step")
        header = Header(*_HEADER.unpack(packed))
        if header.sequence != self._sequence:
            raise Tampered("a frame is replayed, left out or reordered", got=f"frame {header.sequence}", expected=f"frame {self._sequence}")
        self._sequence += 1
        self._body = self._mac.copy()
        self._body.update(b"C" + packed)
        return header

    def update(self, content: memoryview) -> None:
        self._body.update(content)

    def close(self, tag: memoryview) -> None:
        """Raises Tampered."""
        if not compare_digest(self._body.digest(), bytes(tag)):
            raise Tampered("a frame's content is not authentic: changed or forged")
