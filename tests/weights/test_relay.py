"""Relays over an in-memory transport: what arrives is what was published, and lies are caught."""

import queue
import threading

import numpy as np
import pytest
import torch

from rose_hpc.errors import RoseError, TransferTimeout, WeightsError
from rose_hpc.messages import TransferVersion, encode
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.digest import combine, digest_image
from rose_hpc.weights.publisher import WeightPublisher
from rose_hpc.weights.relay import HEADER, Pull, Relay, RelayNode, RelaySpec


class QueueTransport:
    """A seam: messages between threads. `tamper(message)` may change what this rank sends."""

    def __init__(self, rank, boxes, tamper=lambda m: m):
        self.rank, self.size, self._boxes, self._tamper = rank, len(boxes), boxes, tamper
        self.sent_bytes = self.received_bytes = 0

    def send(self, peer, content, deadline_s):
        content = self._tamper(bytes(content))
        if content is None:
            return
        self.sent_bytes += len(content)
        self._boxes[peer][self.rank].put(content)

    def receive(self, peer, max_bytes, deadline_s):
        try:
            content = self._boxes[self.rank][peer].get(timeout=deadline_s)
        except queue.Empty:
            raise TransferTimeout("nothing came") from None
        if len(content) > max_bytes:
            raise WeightsError("too long")
        self.received_bytes += len(content)
        return memoryview(content)


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(37, 8, generator=g), "b": torch.randn(5, generator=g), "c": torch.randn(3, 3, 3, generator=g)}


def world_of(tmp_path, roles, tamper=lambda m: m, bucket_bytes=256, deadline_s=5.0):
    nodes = [RelayNode(name=f"{role}{i}", role=role, arena=tmp_path / f"arena{i}") for i, role in enumerate(roles)]
    spec = RelaySpec(
        control_dir=tmp_path, nodes=nodes, bucket_bytes=bucket_bytes, retained_versions=2, deadline_s=deadline_s, lease_ttl_s=5
    )
    boxes = [[queue.Queue() for _ in nodes] for _ in nodes]
    return [Relay(spec, QueueTransport(r, boxes, tamper if roles[r] == "source" else lambda m: m)) for r in range(len(nodes))]


def transfer(relays, command):
    """Run every relay's part in its own thread; a list of results or errors by rank."""
    results = [None] * len(relays)

    def part(rank):
        try:
            results[rank] = relays[rank].transfer(command)
        except RoseError as error:
            results[rank] = error

    threads = [threading.Thread(target=part, args=(r,)) for r in range(len(relays))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()
    return results


def publish(tmp_path, ranks_on_node, version, seed=0):
    """Publish with plain tensors: rank 0 owns everything; its node is arena0."""
    return combine(
        [
            WeightPublisher(tensors(seed), tmp_path / "arena0", r, ranks_on_node, "float32").publish(version).digest
            for r in range(ranks_on_node)
        ]
    )


def test_every_sink_holds_the_published_bits_and_bytes_are_counted(tmp_path):
    digest = publish(tmp_path, 2, version=4)
    results = transfer(world_of(tmp_path, ["source", "sink", "sink"]), TransferVersion(1, 1, 4, digest))
    image_bytes = sum(t.numel() * 4 for t in tensors(0).values())
    for rank in (1, 2):
        assert results[rank].verified and results[rank].digest == digest and results[rank].received_bytes >= image_bytes
        arena = Arena.open(tmp_path / f"arena{rank}")
        image = arena.map_version(4)
        for spec in arena.layout.parameters:
            got = image[spec.offset_bytes : spec.offset_bytes + spec.nbytes].view(np.float32).reshape(spec.shape)
            assert (got == tensors(0)[spec.name].numpy()).all()
    assert results[0].sent_bytes >= 2 * image_bytes


def flip_payload(message):
    """Damage the last byte of every bucket."""
    return message[:-1] + bytes([message[-1] ^ 1]) if message[:4] == b"RSE1" else message


def test_a_flipped_bit_is_detected_and_never_committed_and_a_clean_retry_heals(tmp_path):
    digest = publish(tmp_path, 1, version=1)
    results = transfer(world_of(tmp_path, ["source", "sink"], flip_payload), TransferVersion(1, 1, 1, digest))
    assert not results[1].verified and Arena.open(tmp_path / "arena1").versions() == []
    results = transfer(world_of(tmp_path, ["source", "sink"]), TransferVersion(2, 2, 1, digest))
    assert results[1].verified and Arena.open(tmp_path / "arena1").versions() == [1]


def replay_other_version(message):
    if message[:4] != b"RSE1":
        return message
    magic, generation, version, offset, nbytes = HEADER.unpack_from(message)
    return HEADER.pack(magic, generation, version - 1, offset, nbytes) + message[HEADER.size :]


@pytest.mark.parametrize(
    "tamper",
    [replay_other_version, lambda m: m[:-3] if m[:4] == b"RSE1" else m, lambda m: m[:2], lambda m: m + b"\0" if m[:4] == b"RSE1" else m],
    ids=["replayed", "truncated", "rubbish", "too long"],
)
def test_a_message_that_is_not_what_was_asked_for_fails_the_transfer(tmp_path, tamper):
    digest = publish(tmp_path, 1, version=5)
    results = transfer(world_of(tmp_path, ["source", "sink"], tamper, deadline_s=0.5), TransferVersion(1, 1, 5, digest))
    assert isinstance(results[1], RoseError)
    assert not (tmp_path / "arena1" / "v5.json").exists()


def test_a_silent_source_is_a_timeout_not_a_hang(tmp_path):
    digest = publish(tmp_path, 1, version=0)
    results = transfer(world_of(tmp_path, ["source", "sink"], lambda m: None, deadline_s=0.2), TransferVersion(1, 1, 0, digest))
    assert isinstance(results[1], TransferTimeout) and isinstance(results[0], TransferTimeout)


def test_the_buckets_of_several_sinks_take_turns(tmp_path):
    digest, sent = publish(tmp_path, 1, version=0), []
    relays = world_of(tmp_path, ["source", "sink", "sink"])
    source = relays[0]._transport
    deliver = source.send

    def send(peer, content, deadline_s):
        if content[:4] == b"RSE1":
            sent.append(peer)
        deliver(peer, content, deadline_s)

    source.send = send
    results = transfer(relays, TransferVersion(1, 1, 0, digest))
    assert results[1].verified and results[2].verified
    assert len(sent) > 4 and sent == [1, 2] * (len(sent) // 2)


@pytest.mark.parametrize("run", [(0, 0), (0, -4), (-4, 4), (0, 260)], ids=["empty", "negative", "before the image", "over a bucket"])
def test_a_source_refuses_to_send_what_is_no_bucket(tmp_path, run):
    digest = publish(tmp_path, 1, version=0)
    relays = world_of(tmp_path, ["source", "sink"])
    relays[1]._transport.send(0, encode(Pull(1, 0, [run])), 1.0)
    with pytest.raises(WeightsError):
        relays[0].transfer(TransferVersion(1, 1, 0, digest))


def test_a_version_that_was_never_published_is_an_error(tmp_path):
    publish(tmp_path, 1, version=0)
    results = transfer(world_of(tmp_path, ["source", "sink"], deadline_s=0.2), TransferVersion(1, 1, 7, 0))
    assert "no shard" in str(results[0])


def test_the_bfloat16_wire_carries_the_bits_of_the_rounded_weights(tmp_path):
    source = {"w": torch.tensor([[-0.0, float("nan")], [1.0 + 2**-9, 3e38]])}
    shard = WeightPublisher(source, tmp_path / "arena0", 0, 1, "bfloat16").publish(0)
    results = transfer(world_of(tmp_path, ["source", "sink"]), TransferVersion(1, 1, 0, shard.digest))
    assert results[1].verified
    arena = Arena.open(tmp_path / "arena1")
    bits = torch.from_numpy(arena.map_version(0).view(np.int16).copy())
    assert (bits == source["w"].bfloat16().reshape(-1).view(torch.int16)).all()
    assert digest_image(arena.layout, arena.map_version(0)) == shard.digest
