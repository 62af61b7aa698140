"""Bringing a version to the executors: digests add up, damage is retried once, a liar stops the run."""

import asyncio
import math

import pytest

from rose_hpc.errors import DigestMismatch, RoseError, RunFailed
from rose_hpc.messages import PublishVersion, UpdateResult, VersionTransferred, VersionWritten
from rose_hpc.rollout.background import Background
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.delivery import Delivery
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.scheduler import RolloutScheduler
from rose_hpc.rollout.versions import Delivered, Follower, VersionSync


class ScriptedWorkers:
    """Answers for trainers and relays; `arrivals` gives the digest that the sink reports, try by try."""

    def __init__(self, arrivals):
        self.arrivals, self.generations = list(arrivals), []

    async def on_transfer(self, version):
        """What befalls during a transfer; tests put theirs in its place."""

    async def call(self, ids, command, kind, deadline_s):
        order = command(1)
        if isinstance(order, PublishVersion):
            return {w: VersionWritten(order.version, 2**63 + i, 100, 0.0) for i, w in enumerate(ids)}
        self.generations.append(order.generation)
        await self.on_transfer(order.version)
        digest = self.arrivals.pop(0)
        return {w: VersionTransferred(order.version, 0, 250, digest, digest == order.digest, 0.1) for w in ids}


class Agent:
    def __init__(self, digest=None, delay_s=0.0, failing=False, refused=(), status=409):
        self.digest, self.delay_s, self.failing, self.applied = digest, delay_s, failing, []
        self.refused, self.status = refused, status

    async def update(self, executor_id, request, deadline_s):
        await asyncio.sleep(self.delay_s)
        if self.failing:
            raise ExecutorError("the engine is gone")
        if request.version in self.refused:
            raise ExecutorError("refused", status=self.status)
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
    assert [t for t, _ in rows] == ["syncs", "syncs"]
    sink, executor = (row for _, row in rows)
    assert (sink["receiver"], sink["verified"], sink["image_bytes"], sink["wire_bytes"]) == ("relay-1", 1, 200, 250)
    assert sink["transfer_s"] == 0.1 and math.isnan(sink["apply_s"]) and math.isnan(sink["pause_s"])
    assert (executor["receiver"], executor["verified"], executor["image_bytes"], executor["wire_bytes"]) == ("a", 1, 0, 0)
    assert (executor["apply_s"], executor["pause_s"]) == (0.02, 0.03)


def test_a_damaged_image_raises_an_alarm_and_is_sent_again_as_a_new_generation():
    workers, rows, go = sync([99, TRUE])
    result = go()
    assert result.digest == TRUE and workers.generations == [1, 2] and result.wire_bytes == 500
    assert [r["kind"] for t, r in rows if t == "events"] == ["digest_mismatch"]
    assert [(r["receiver"], r["verified"]) for t, r in rows if t == "syncs"] == [("relay-1", 0), ("relay-1", 1), ("a", 1)]


def test_damage_twice_in_a_row_stops_the_run():
    _, rows, go = sync([99, 99])
    with pytest.raises(DigestMismatch, match="damaged"):
        go()
    assert [r["kind"] for t, r in rows if t == "events"] == ["digest_mismatch"] * 2
    assert [r["verified"] for t, r in rows if t == "syncs"] == [0, 0]


def test_an_engine_that_loaded_other_bits_is_recorded_as_unverified_and_stops_the_run():
    _, rows, go = sync([TRUE], Agent(digest=5))
    with pytest.raises(DigestMismatch, match="other weights"):
        go()
    assert rows[-1][1]["verified"] == 0


def delivery_over(dedicated, lent, workers=None):
    """A delivery to one dedicated and one opportunistic executor, whose scripted workers always succeed."""
    workers, rows = workers or ScriptedWorkers([TRUE] * 20), Rows()
    fleet = Fleet(RolloutScheduler(), lambda *event: rows.record("events", kind=event[0], subject=event[1]))
    sync = VersionSync(workers, ["trainer-0", "trainer-1"], ["relay-0"], {"relay-1": "dedicated", "relay-2": "opportunistic"}, rows, 1.0)
    delivery = Delivery(fleet, sync, Background())
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
        skipped = {(1, "lent"), (2, "lent")}
        assert set(received) == {(v, who) for v in range(4) for who in ("lent", "own", "relay-1", "relay-2")} - skipped
        assert len(received) == 14
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
        delivery, fleet, rows = delivery_over(Agent(), Agent())
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
        assert sum(r["wire_bytes"] for _, r in rows if "wire_bytes" in r) == 2 * 2 * 250  # the restart moved nothing

    asyncio.run(scenario())


def test_a_dedicated_executor_that_fails_to_apply_stops_the_run():
    async def scenario():
        delivery, _, _ = delivery_over(Agent(failing=True), Agent())
        with pytest.raises(RoseError, match="gone"):
            await delivery.deliver(0)
        await delivery.close()

    asyncio.run(scenario())


def test_a_version_that_reaches_an_arena_that_nobody_follows_from_is_recorded():
    async def scenario():
        delivery, fleet, rows = delivery_over(Agent(), Agent())
        fleet.leave("lent", "revoked")
        await delivery.deliver(0)
        await delivery.close()
        assert [r["receiver"] for t, r in rows if t == "syncs"] == ["relay-1", "relay-2", "own"]

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [409, 500, None])
def test_a_version_that_fails_while_a_newer_one_waits_does_not_lose_the_executor(status):
    async def scenario():
        lent = Agent(delay_s=0.05, refused={0}, status=status)
        delivery, fleet, _ = delivery_over(Agent(), lent)
        await delivery.deliver(0)
        await asyncio.sleep(0.01)  # version 0 is being applied
        await delivery.deliver(1)
        await asyncio.sleep(0.2)
        assert lent.applied == [1] and eligible(fleet) == {"own", "lent"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_version_that_is_refused_while_a_newer_one_is_on_its_way_does_not_lose_the_executor():
    async def scenario():
        workers = ScriptedWorkers([TRUE] * 20)
        lent = Agent(delay_s=0.02, refused={0})
        delivery, fleet, _ = delivery_over(Agent(), lent, workers)
        await delivery.deliver(0)
        workers.on_transfer = lambda version: asyncio.sleep(0.1)  # the sink has given version 0's place away; the refusal comes meanwhile
        await delivery.deliver(1)
        await asyncio.sleep(0.1)
        assert lent.applied == [1] and eligible(fleet) == {"own", "lent"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_version_that_is_refused_with_nothing_newer_loses_the_executor():
    async def scenario():
        delivery, fleet, _ = delivery_over(Agent(), Agent(refused={0}))
        await delivery.deliver(0)
        await asyncio.sleep(0.02)
        assert set(fleet.executors) == {"own"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_bug_in_following_is_noticed():
    async def scenario():
        background = Background()
        follower = Follower(Executor("lent", "opportunistic", object()), Rows(), background, print, print)
        follower.deliver(Delivered(0, TRUE))
        with pytest.raises(RunFailed, match="bringing versions to lent"):
            await asyncio.wait_for(background.beside(asyncio.sleep(60)), 5)

    asyncio.run(scenario())
