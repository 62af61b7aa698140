"""A version's way to the executors: digests add up, opportunistic arenas and executors follow, a liar stops the run."""

import asyncio
import math

import pytest

from rose_hpc.errors import DigestMismatch, RoseError, RunFailed, TransferTimeout, UsageError
from rose_hpc.messages import UpdateResult, VersionWritten
from rose_hpc.rollout.background import Background
from rose_hpc.rollout.client import ExecutorError
from rose_hpc.rollout.delivery import Delivery
from rose_hpc.rollout.fleet import Executor, Fleet
from rose_hpc.rollout.scheduler import RolloutScheduler
from rose_hpc.rollout.versions import Delivered, Follower, VersionSync


class ScriptedTrainers:
    async def call(self, ids, command, kind, deadline_s):
        order = command(1)
        return {w: VersionWritten(order.version, 2**63 + i, 100, 0.0, order.version - 1, {i: 7}) for i, w in enumerate(ids)}


class ScriptedDistribution:
    """Arenas that get what they are to get; tests put their own `on_bring` in its place."""

    def __init__(self):
        self.published, self.brought, self.up = [], [], {"relay-1", "relay-2"}
        self.doubted = []

    def holds(self, relay):
        return max((v for r, v in self.brought if r == relay), default=-1)

    def doubt(self, relay, why):
        self.doubted.append(relay)

    async def on_bring(self, relay, version):
        """What befalls while a version is brought."""

    def publish(self, published):
        self.published.append(published)

    def sinks(self, kind):
        return {"dedicated": ["relay-1"], "opportunistic": ["relay-2"]}[kind]

    def is_up(self, relay):
        return relay in self.up

    async def bring(self, relays, version):
        for relay in relays:
            await self.on_bring(relay, version)
            self.brought.append((relay, version))
        return 250 * len(relays)


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
        digest = request.digest if self.digest is None else self.digest
        return UpdateResult(request.version, digest, 0.02, 0.03, how="sparse", proof="digest", changed=9)


class Rows(list):
    def record(self, table, **row):
        self.append((table, row))


TRUE = 1  # (2**63 + 0) + (2**63 + 1) mod 2**64


def sync(agent=None):
    distribution, rows = ScriptedDistribution(), Rows()
    keeper = VersionSync(ScriptedTrainers(), ["trainer-0", "trainer-1"], distribution, rows, 1.0)
    executor = Executor("a", "dedicated", agent if agent is not None else Agent(), "relay-1")
    return distribution, rows, lambda: asyncio.run(keeper.sync(7, [executor]))


def test_the_digests_of_the_ranks_add_up_and_an_update_is_recorded():
    distribution, rows, go = sync()
    result = go()
    assert (result.version, result.digest, result.wire_bytes) == (7, TRUE, 250)
    (found,) = distribution.published
    assert (found.version, found.base, found.digest, found.image_bytes, found.stream_bytes) == (7, 6, TRUE, 200, {0: 7, 1: 7})
    ((table, row),) = rows
    assert (table, row["receiver"], row["verified"], row["wire_bytes"], row["how"], row["proof"]) == (
        "syncs",
        "a",
        1,
        0,
        "sparse",
        "digest",
    )
    assert (row["apply_s"], row["pause_s"], row["changes"]) == (0.02, 0.03, 9) and math.isnan(row["transfer_s"])


class RefusedOnce(Agent):
    """Finds the arena wrong the first time."""

    async def update(self, executor_id, request, deadline_s):
        self.refused = {request.version} if not self.applied and self.refused == () else set()
        return await super().update(executor_id, request, deadline_s)


def test_an_arena_that_an_engine_finds_wrong_is_doubted_brought_again_and_loaded():
    agent = RefusedOnce()
    distribution, rows, go = sync(agent)
    assert go().version == 7
    assert distribution.doubted == ["relay-1"] and distribution.brought == [("relay-1", 7)] * 2 and agent.applied == [7]
    assert [r["receiver"] for t, r in rows if t == "syncs"] == ["a"]


def test_an_engine_that_refuses_a_sound_arena_again_stops_the_run():
    distribution, _, go = sync(Agent(refused={7}))
    with pytest.raises(ExecutorError):
        go()
    assert distribution.doubted == ["relay-1"]


def test_an_engine_that_loaded_other_bits_is_recorded_as_unverified_and_stops_the_run():
    _, rows, go = sync(Agent(digest=5))
    with pytest.raises(DigestMismatch, match="other weights"):
        go()
    assert rows[-1][1]["verified"] == 0


def test_an_inactive_engine_that_only_noted_a_version_has_not_loaded_it():
    class Inactive(Agent):
        async def update(self, executor_id, request, deadline_s):
            return UpdateResult(request.version, request.digest, 0.0, 0.0, how="noted", proof="none", changed=0)

    distribution, rows, go = sync(Inactive())
    with pytest.raises(ExecutorError, match="is inactive"):
        go()
    assert rows[-1][1]["verified"] == 0 and distribution.doubted == []


def delivery_over(dedicated, lent):
    """A delivery to one dedicated and one opportunistic executor, whose arenas get everything."""
    distribution, rows = ScriptedDistribution(), Rows()
    fleet = Fleet(RolloutScheduler(), lambda *event: rows.record("events", kind=event[0], subject=event[1]))
    sync = VersionSync(ScriptedTrainers(), ["trainer-0", "trainer-1"], distribution, rows, 1.0)
    delivery = Delivery(fleet, sync, Background())
    for name, kind, agent, relay in (("own", "dedicated", dedicated, "relay-1"), ("lent", "opportunistic", lent, "relay-2")):
        executor = Executor(name, kind, agent, relay)
        fleet.join(executor, 4)
        delivery.joined(executor)
    return delivery, fleet, rows, distribution


def eligible(fleet):
    return {e.executor_id for e in fleet.scheduler.snapshot(0.0).executors if e.eligible}


def test_training_does_not_wait_for_a_late_opportunistic_executor_which_is_not_eligible_until_it_has_caught_up():
    async def scenario():
        lent = Agent(delay_s=0.15)
        delivery, fleet, rows, _ = delivery_over(Agent(), lent)
        begun = asyncio.get_running_loop().time()
        for version in range(4):
            await delivery.deliver(version)
            await asyncio.sleep(0.005)
            assert eligible(fleet) == {"own"}
        assert asyncio.get_running_loop().time() - begun < 0.12
        await asyncio.sleep(0.5)
        assert eligible(fleet) == {"own", "lent"}
        assert lent.applied == [0, 3]  # those in between were skipped
        await delivery.close()
        received = [(r["version"], r["receiver"]) for t, r in rows if t == "syncs"]
        assert sorted(received) == sorted([(v, "own") for v in range(4)] + [(0, "lent"), (3, "lent")])

    asyncio.run(scenario())


def test_training_does_not_wait_for_a_slow_opportunistic_arena_which_skips_what_came_and_went():
    async def scenario():
        delivery, fleet, _, distribution = delivery_over(Agent(), Agent())

        async def slow(relay, version):
            await asyncio.sleep(0.15 if relay == "relay-2" else 0)

        distribution.on_bring = slow
        begun = asyncio.get_running_loop().time()
        for version in range(4):
            await delivery.deliver(version)
            await asyncio.sleep(0.005)
        assert asyncio.get_running_loop().time() - begun < 0.12 and eligible(fleet) == {"own"}
        await asyncio.sleep(0.5)
        assert eligible(fleet) == {"own", "lent"}
        assert [v for relay, v in distribution.brought if relay == "relay-2"] == [0, 3]
        await delivery.close()

    asyncio.run(scenario())


def test_an_opportunistic_arena_that_cannot_be_reached_is_tried_again_and_costs_the_run_nothing():
    async def scenario():
        delivery, fleet, rows, distribution = delivery_over(Agent(), Agent())
        failures = [TransferTimeout("silent"), DigestMismatch("damaged"), UsageError("a relay of another owner says so")]

        async def failing(relay, version):
            if relay == "relay-2" and failures:
                raise failures.pop()

        distribution.on_bring = failing
        distribution.up.discard("relay-2")
        await delivery.deliver(0)
        await asyncio.sleep(0.1)
        assert eligible(fleet) == {"own"} and len(failures) == 3
        distribution.up.add("relay-2")
        await asyncio.sleep(2.5)
        assert eligible(fleet) == {"own", "lent"}
        assert [r["subject"] for t, r in rows if t == "events" and r["kind"] == "arena_late"] == ["relay-2"] * 3
        await delivery.close()

    asyncio.run(scenario())


def test_an_opportunistic_executor_that_fails_to_apply_leaves_and_the_run_goes_on():
    async def scenario():
        delivery, fleet, _, _ = delivery_over(Agent(), Agent(failing=True))
        for version in range(3):
            await delivery.deliver(version)
            await asyncio.sleep(0.01)
        assert set(fleet.executors) == {"own"} and eligible(fleet) == {"own"}
        await delivery.close()

    asyncio.run(scenario())


def test_an_executor_that_was_restarted_gets_the_latest_version_at_once_and_nothing_moves():
    async def scenario():
        delivery, fleet, _, distribution = delivery_over(Agent(), Agent())
        for version in range(2):
            await delivery.deliver(version)
            await asyncio.sleep(0.01)
        brought, again = list(distribution.brought), Agent()
        executor = Executor("lent", "opportunistic", again, "relay-2")
        fleet.join(executor, 4)
        delivery.joined(executor)
        assert eligible(fleet) == {"own"}
        await asyncio.sleep(0.01)
        assert again.applied == [1] and eligible(fleet) == {"own", "lent"} and distribution.brought == brought
        await delivery.close()

    asyncio.run(scenario())


def test_a_dedicated_executor_that_fails_to_apply_stops_the_run():
    async def scenario():
        delivery, _, _, _ = delivery_over(Agent(failing=True), Agent())
        with pytest.raises(RoseError, match="gone"):
            await delivery.deliver(0)
        await delivery.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [409, 500, None])
def test_a_version_that_fails_while_a_newer_one_waits_does_not_lose_the_executor(status):
    async def scenario():
        lent = Agent(delay_s=0.05, refused={0}, status=status)
        delivery, fleet, _, _ = delivery_over(Agent(), lent)
        await delivery.deliver(0)
        await asyncio.sleep(0.01)  # version 0 is being applied
        await delivery.deliver(1)
        await asyncio.sleep(0.2)
        assert lent.applied == [1] and eligible(fleet) == {"own", "lent"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_version_that_is_refused_while_a_newer_one_is_on_its_way_does_not_lose_the_executor():
    async def scenario():
        lent = Agent(delay_s=0.02, refused={0})
        delivery, fleet, _, distribution = delivery_over(Agent(), lent)
        await delivery.deliver(0)
        await asyncio.sleep(0.005)

        async def slow(relay, version):
            await asyncio.sleep(0.1)  # the arena is being brought to the next version; the refusal comes meanwhile

        distribution.on_bring = slow
        await delivery.deliver(1)
        await asyncio.sleep(0.2)
        assert lent.applied == [1] and eligible(fleet) == {"own", "lent"}
        await delivery.close()

    asyncio.run(scenario())


def test_a_version_that_is_refused_with_nothing_newer_loses_the_executor():
    async def scenario():
        delivery, fleet, _, _ = delivery_over(Agent(), Agent(refused={0}))
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
