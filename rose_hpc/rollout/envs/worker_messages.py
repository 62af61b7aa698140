"""What the controller and its environment workers say to each other, over the worker's standard input and output.

    controller ── WorkerSpec ──▶ worker ── Started | NotStarted ──▶
               ── Play, one at a time ──▶ ── PlayedAgain …, Played | Faulted ──▶

A Play holds the whole episode so far, its recipe: environments repeat themselves, so that any worker can take up any episode
by playing it again. A worker that holds the episode at that very place only plays the last action.

A frame: 4 bytes of length, little-endian, then MessagePack. The peer may have gone mad: a length beyond MAX_FRAME_BYTES and bytes
that are no message are refused before anything is done with them.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import TypeVar

import msgspec

from rose_hpc.errors import ControlError
from rose_hpc.messages import Message, decode, encode
from rose_hpc.rollout.envs.base import MAX_OBSERVATION_CHARS

MAX_FRAME_BYTES = 64 << 20  # an episode's actions, or an observation in UTF-8
NOTHING_SEEN = b""
_LENGTH = struct.Struct("<I")

T = TypeVar("T")
assert 4 * MAX_OBSERVATION_CHARS < MAX_FRAME_BYTES


class WorkerSpec(Message, frozen=True):
    """What a worker is told first. config: the section [env], as JSON."""

    config: str


class Started(Message, frozen=True, tag=True):
    """The worker can make the environment."""


class NotStarted(Message, frozen=True, tag=True):
    """It cannot, and ends. usage: the user can put it right."""

    what: str
    usage: bool


class Play(Message, frozen=True):
    """Play the last action of this episode; with no action, begin it.

    slot: which instance; it plays one episode at a time. episode: unique in the slot. seen: `saw` over the observations before the
    last action, NOTHING_SEEN where there is none. instances: most that the worker keeps, this one included.
    """

    slot: int
    episode: int
    seed: int
    actions: list[str]
    seen: bytes
    instances: int = 1


class Played(Message, frozen=True, tag=True):
    """What it led to (StepResult); after a reset reward is 0, done and success are false."""

    observation: str
    reward: float
    done: bool
    success: bool


class PlayedAgain(Message, frozen=True, tag=True):
    """One more action of the recipe has been played again; each has the deadline of its own."""


class Faulted(Message, frozen=True, tag=True):
    """The environment failed this episode."""

    reason: str


Greeting = Started | NotStarted
Answer = Played | Faulted
AnswerOrProgress = Answer | PlayedAgain


def saw(seen: bytes, observation: str) -> bytes:
    """Digest of all observations so far: one more."""
    return hashlib.blake2b(seen + observation.encode(), digest_size=16).digest()


def frame(message: msgspec.Struct) -> bytes:
    """The message as it travels. Raises ControlError: it is too long."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ControlError("a message to or from an environment is too long", got=len(body), expected=f"at most {MAX_FRAME_BYTES} bytes")
    return _LENGTH.pack(len(body)) + body


async def read_frame(stream: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message. Raises asyncio.IncompleteReadError at the end of the stream, ControlError for what is no such message."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ControlError("malformed frame", got=f"{length} bytes announced", expected=f"at most {MAX_FRAME_BYTES}")
    return decode(await stream.readexactly(length), kind)
