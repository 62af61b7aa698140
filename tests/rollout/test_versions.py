"""Bringing a version to the executors: digests add up, damage is retried once, a liar stops the run."""

import asyncio

import pytest

from rose_hpc.errors import DigestMismatch
from rose_hpc.messages import PublishVersion, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.rollout.collector import Executor
from rose_hpc.rollout.versions import VersionSync


class ScriptedWorkers:
    """Answers for trainers and relays; `arrivals` gives the digest that the sink reports, try by try."""

    def __init__(self, arrivals):
        self.arrivals, self.generations = list(arrivals), []

    async def call(self, ids, command, kind, deadline_s):
        order = command(1)
        if isinstance(order, PublishVersion):
            return {w: VersionWritten(order.version, 2**63 + i, 100, 0.0) for i, w in enumerate(ids)}
        self.generations.append(order.generation)
        digest = self.arrivals.pop(0)
        return {w: VersionTransferred(order.version, 0, 250, digest, digest == order.digest, 0.1) for w in ids}


class Agent:
    def __init__(self, digest=None):
        self.digest = digest

    async def update(self, executor_id, request, deadline_s):
        return UpdateResult(request.version, request.digest if self.digest is None else self.digest, 0.02, 0.03)


class Rows(list):
    def record(self, table, **row):
        self.append((table, row))


TRUE = 1  # (2**63 + 0) + (2**63 + 1) mod 2**64


def sync(arrivals, agent=None):
    workers, rows = ScriptedWorkers(arrivals), Rows()
    keeper = VersionSync(workers, ["trainer-0", "trainer-1"], ["relay-0"], ["relay-1"], rows, 1.0)
    executor = Executor("a", "dedicated", agent if agent is not None else Agent())
    return workers, rows, lambda: asyncio.run(keeper.sync(7, [executor]))


def test_the_digests_of_the_ranks_add_up_and_a_verified_version_is_recorded():
    _, rows, go = sync([TRUE])
    result = go()
    assert (result.version, result.digest, result.wire_bytes) == (7, TRUE, 250)
    ((table, row),) = rows
    assert table == "syncs" and row["verified"] == 1 and row["image_bytes"] == 200 and row["wire_bytes"] == 250


def test_a_damaged_image_raises_an_alarm_and_is_sent_again_as_a_new_generation():
    workers, rows, go = sync([99, TRUE])
    assert go().digest == TRUE and workers.generations == [1, 2]
    assert [(t, r.get("kind")) for t, r in rows] == [("events", "digest_mismatch"), ("syncs", None)]


def test_damage_twice_in_a_row_stops_the_run():
    _, rows, go = sync([99, 99])
    with pytest.raises(DigestMismatch, match="damaged"):
        go()
    assert [r["kind"] for _, r in rows] == ["digest_mismatch"] * 2


def test_an_engine_that_loaded_other_bits_is_recorded_as_unverified_and_stops_the_run():
    _, rows, go = sync([TRUE], Agent(digest=5))
    with pytest.raises(DigestMismatch, match="other weights"):
        go()
    assert rows[-1][1]["verified"] == 0
