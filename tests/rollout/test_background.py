"""Tasks beside the loop: a failure is told at once, a clean-up is not cut short."""

import asyncio

import pytest

from rose_hpc.errors import RunFailed
from rose_hpc.rollout.background import Background, uninterrupted


async def fail():
    raise ValueError("a bug")


def test_a_background_task_that_raises_fails_the_run_at_once_and_cancels_the_work():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def scenario():
        background = Background()
        asyncio.get_running_loop().call_later(0.02, lambda: background.spawn(fail(), "following lent-0"))
        with pytest.raises(RunFailed, match="following lent-0 failed") as failure:
            await asyncio.wait_for(background.beside(work()), 5)
        assert "a bug" in str(failure.value) and ended == [True]

    asyncio.run(scenario())


def test_a_task_that_failed_before_the_work_began_is_told_too():
    async def scenario():
        background = Background()
        background.spawn(fail(), "welcoming agents")
        await asyncio.sleep(0.01)
        with pytest.raises(RunFailed, match="welcoming agents"):
            await asyncio.wait_for(background.beside(asyncio.sleep(60)), 5)

    asyncio.run(scenario())


def test_tasks_that_end_or_are_cancelled_disturb_nobody():
    async def scenario():
        background = Background()
        background.spawn(asyncio.sleep(0), "short")
        background.spawn(asyncio.sleep(60), "long").cancel()
        assert await background.beside(asyncio.sleep(0.02, "done")) == "done"

    asyncio.run(scenario())


def test_what_must_not_be_interrupted_runs_to_its_end_however_often_it_is_cancelled():
    steps = []

    async def clean_up():
        steps.append("begun")
        await asyncio.sleep(0.1)
        steps.append("ended")

    async def run():
        try:
            await asyncio.sleep(60)
        finally:
            await uninterrupted(clean_up())

    async def scenario():
        task = asyncio.create_task(run())
        for _ in range(3):
            await asyncio.sleep(0.02)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == ["begun", "ended"]

    asyncio.run(scenario())


def test_a_cancelled_clean_up_does_not_hide_why_the_run_failed():
    async def run():
        try:
            raise RunFailed("the reason")
        finally:
            await uninterrupted(asyncio.sleep(0.05))

    async def scenario():
        task = asyncio.create_task(run())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(RunFailed, match="the reason"):
            await task

    asyncio.run(scenario())
