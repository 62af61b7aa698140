"""The controller's worker pool: commands delivered again until answered, replies gathered, failures told."""

import asyncio

import pytest

from rose_hpc.errors import RunFailed, UsageError
from rose_hpc.messages import CheckpointSaved, PublishVersion, Stop, VersionWritten, WorkerFailed, WorkerUp
from rose_hpc.rollout.workers import NoReply, WorkerPool

WRITTEN = VersionWritten(version=3, digest=1, shard_bytes=4, write_s=0.1, base=2, streams={0: 4})


def pool_of(*names):
    pool = WorkerPool()
    for name in names:
        pool.greet(name, WorkerUp(world_size=len(names)))
    return pool


def publish(call_id):
    return PublishVersion(call_id, version=3)


def test_a_command_is_delivered_at_every_poll_until_it_is_answered():
    async def scenario():
        pool = pool_of("trainer-0")
        call = asyncio.create_task(pool.call(["trainer-0"], publish, VersionWritten, 5))
        first = await pool.next_command("trainer-0", 1)
        assert await pool.next_command("trainer-0", 1) == first
        pool.take_reply("trainer-0", first.call_id, WRITTEN)
        assert await call == {"trainer-0": WRITTEN}
        assert await pool.next_command("trainer-0", 0.01) is None
        pool.take_reply("trainer-0", first.call_id, WRITTEN)  # a duplicate
        pool.take_reply("trainer-0", 99, WRITTEN)

    asyncio.run(scenario())


def test_a_poll_wakes_up_when_a_command_comes():
    async def scenario():
        pool = pool_of("relay-0")
        poll = asyncio.create_task(pool.next_command("relay-0", 10))
        await asyncio.sleep(0.01)
        call = asyncio.create_task(pool.call(["relay-0"], publish, VersionWritten, 5))
        command = await asyncio.wait_for(poll, 1)
        pool.take_reply("relay-0", command.call_id, WRITTEN)
        await call

    asyncio.run(scenario())


@pytest.mark.parametrize(("usage", "kind"), [(False, RunFailed), (True, UsageError)])
def test_one_failed_worker_fails_the_call_at_once(usage, kind):
    async def scenario():
        pool = pool_of("trainer-0", "trainer-1")
        call = asyncio.create_task(pool.call(["trainer-0", "trainer-1"], publish, VersionWritten, 60))
        command = await pool.next_command("trainer-1", 1)
        pool.take_reply("trainer-1", command.call_id, WorkerFailed("out of luck", usage))
        with pytest.raises(kind, match="trainer-1: out of luck"):
            await asyncio.wait_for(call, 1)

    asyncio.run(scenario())


def test_a_silent_worker_is_named_after_the_deadline():
    async def scenario():
        pool = pool_of("trainer-0", "trainer-1")
        call = asyncio.create_task(pool.call(["trainer-0", "trainer-1"], publish, VersionWritten, 0.1))
        command = await pool.next_command("trainer-0", 1)
        pool.take_reply("trainer-0", command.call_id, WRITTEN)
        with pytest.raises(RunFailed, match="trainer-1"):
            await call

    asyncio.run(scenario())


def test_an_answer_of_another_kind_is_refused():
    async def scenario():
        pool = pool_of("trainer-0")
        call = asyncio.create_task(pool.call(["trainer-0"], publish, VersionWritten, 5))
        command = await pool.next_command("trainer-0", 1)
        pool.take_reply("trainer-0", command.call_id, CheckpointSaved(1, 0.1))
        with pytest.raises(RunFailed, match="another answer"):
            await call

    asyncio.run(scenario())


def test_missing_workers_are_named_and_an_early_failure_is_told_instead():
    async def scenario():
        pool = pool_of("trainer-0")
        with pytest.raises(RunFailed, match="relay-0"):
            await pool.wait_for(["trainer-0", "relay-0"], 0.05)
        waiting = asyncio.create_task(pool.wait_for(["relay-0"], 30))
        await asyncio.sleep(0)
        pool.take_reply("relay-9", -1, WorkerFailed("no MPI here", True))
        with pytest.raises(UsageError, match="no MPI here"):
            await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())


def test_a_worker_that_greets_again_keeps_its_command_and_the_caller_its_answer():
    async def scenario():
        pool = pool_of("trainer-0")
        call = asyncio.create_task(pool.call(["trainer-0"], publish, VersionWritten, 5))
        await asyncio.sleep(0)
        pool.greet("trainer-0", WorkerUp(world_size=1))
        command = await pool.next_command("trainer-0", 1)
        pool.take_reply("trainer-0", command.call_id, WRITTEN)
        assert await asyncio.wait_for(call, 1) == {"trainer-0": WRITTEN}

    asyncio.run(scenario())


def test_a_failure_that_was_reported_outside_of_any_call_fails_the_next_call_at_once():
    async def scenario():
        pool = pool_of("trainer-0")
        pool.take_reply("trainer-0", -1, WorkerFailed("the lease has expired"))
        with pytest.raises(RunFailed, match="the lease has expired"):
            await asyncio.wait_for(pool.call(["trainer-0"], publish, VersionWritten, 60), 1)

    asyncio.run(scenario())


def test_whoever_waits_for_a_worker_that_is_forgotten_hears_so_at_once_and_it_can_be_asked_no_more():
    async def scenario():
        pool = pool_of("relay-9")
        call = asyncio.create_task(pool.call(["relay-9"], publish, VersionWritten, 60))
        await asyncio.sleep(0)
        pool.forget("relay-9")
        pool.forget("relay-9")
        with pytest.raises(NoReply, match="relay-9 is gone"):
            await asyncio.wait_for(call, 1)
        assert pool.greeting("relay-9") is None
        with pytest.raises(KeyError):
            await pool.next_command("relay-9", 0.01)
        with pytest.raises(NoReply, match="gone"):
            await asyncio.wait_for(pool.call(["relay-9"], publish, VersionWritten, 60), 1)

    asyncio.run(scenario())


def test_a_worker_that_has_been_heard_of_lately_is_not_taken_for_gone():
    async def scenario():
        pool = pool_of("relay-9")
        await asyncio.sleep(0.1)
        await pool.next_command("relay-9", 0.01)
        pool.forget("relay-9", silent_s=0.1)
        assert pool.greeting("relay-9") is not None
        await asyncio.sleep(0.15)
        pool.forget("relay-9", silent_s=0.1)
        assert pool.greeting("relay-9") is None

    asyncio.run(scenario())


def test_stopping_reaches_everybody():
    async def scenario():
        pool = pool_of("trainer-0", "relay-0")
        pool.stop_all()
        assert all([isinstance(await pool.next_command(w, 0.1), Stop) for w in ("trainer-0", "relay-0")])

    asyncio.run(scenario())
