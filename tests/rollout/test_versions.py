"""Bringing a version to the executors: digests add up, damage is retried once, a liar stops the run."""

import asyncio

import pytest

from rose_hpc.errors import DigestMismatch, RoseError
from rose_hpc.messages import PublishVersion, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.delivery import Delivery
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.scheduler import RolloutScheduler
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
    def __init__(self, digest=None, delay_s=0.0, failing=False):
        self.digest, self.delay_s, self.failing, self.applied = digest, delay_s, failing, []

    async def update(self, executor_id, request, deadline_s):
        await asyncio.sleep(self.delay_s)
        if self.failing:
            raise ExecutorError("the engine is gone")
        self.applied.append(request.version)
        return UpdateResult(request.version, request.digest if self.digest is None else self.digest, 0.02, 0.03)


class Rows(list):
    def record(self, table, **row):
        self.append((table, row))


TRUE = 1  # (2**63 + 0) + (2**63 + 1) mod 2**64


def sync(arrivals, agent=None):
    workers, rows = ScriptedWorkers(arrivals), Rows()
    keeper = VersionSync(workers, ["trainer-0", "trainer-1"], ["relay-0"], {"relay-1": "dedicated"}, rows, 1.0)
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


def delivery_over(dedicated, lent):
    """A delivery to one dedicated and one opportunistic executor, whose scripted workers always succeed."""
    workers, rows = ScriptedWorkers([TRUE] * 20), Rows()
    fleet = Fleet(RolloutScheduler(), lambda *event: rows.record("events", kind=event[0], subject=event[1]))
    sync = VersionSync(workers, ["trainer-0", "trainer-1"], ["relay-0"], {"relay-1": "dedicated", "relay-2": "opportunistic"}, rows, 1.0)
    delivery = Delivery(fleet, sync)
    for name, kind, agent in (("own", "dedicated", dedicated), ("lent", "opportunistic", lent)):
        executor = Executor(name, kind, agent)
        fleet.join(executor, 4)
        delivery.joined(executor)
    return delivery, fleet, rows


def eligible(fleet):
    return {e.executor_id for e in fleet.scheduler.snapshot(0.0).executors if e.eligible}


def test_training_does_not_wait_for_a_late_opportunistic_executor_which_is_not_eligible_until_it_has_caught_up():
    async def scenario():
        lent = Agent(delay_s=0.15)
        delivery, fleet, rows = delivery_over(Agent(), lent)
        begun = asyncio.get_running_loop().time()
        for version in range(4):
            await delivery.deliver(version)
            assert eligible(fleet) == {"own"}
        assert asyncio.get_running_loop().time() - begun < 0.12
        await asyncio.sleep(0.5)
        assert eligible(fleet) == {"own", "lent"}
        assert lent.applied == [0, 3]  # those in between were skipped
        await delivery.close()
        received = [(r["version"], r["receiver"]) for t, r in rows if t == "syncs"]
        assert sorted(received) == [(v, who) for v in range(4) for who in ("lent", "own")]
        assert all(r["verified"] for t, r in rows if t == "syncs")

    asyncio.run(scenario())


def test_an_opportunistic_executor_that_fails_to_apply_leaves_and_the_run_goes_on():
    async def scenario():
        delivery, fleet, _ = delivery_over(Agent(), Agent(failing=True))
        for version in range(3):
            await delivery.deliver(version)
            await asyncio.sleep(0.01)
        assert set(fleet.executors) == {"own"} and eligible(fleet) == {"own"}
        await delivery.close()

    asyncio.run(scenario())


def test_an_executor_that_was_restarted_gets_the_latest_version_at_once():
    async def scenario():
        delivery, fleet, _ = delivery_over(Agent(), Agent())
        await delivery.deliver(0)
        await delivery.deliver(1)
        again = Agent()
        executor = Executor("lent", "opportunistic", again)
        fleet.join(executor, 4)
        delivery.joined(executor)
        assert eligible(fleet) == {"own"}
        await asyncio.sleep(0.01)
        assert again.applied == [1] and eligible(fleet) == {"own", "lent"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_dedicated_executor_that_fails_to_apply_stops_the_run():
    async def scenario():
        delivery, _, _ = delivery_over(Agent(failing=True), Agent())
        with pytest.raises(RoseError, match="gone"):
            await delivery.deliver(0)
        await delivery.close()

    asyncio.run(scenario())
