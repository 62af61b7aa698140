"""Whether serving is still protected while its device is lent, asked again and again; and calls that block, off the event loop.

every POLL_S ──▶ device.fault() ─┬─ nothing ──▶ lend
                                 └─ why not ──▶ the lease is over; nothing is lent until it is healthy again, which is told
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rose_hpc.coserve.device import Device
from rose_hpc.errors import RunFailed

POLL_S = 2.0

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What it returns or raises. Cancelled, it waits for the call's end all the same: whoever then cleans up finds nothing half done."""
    calling = asyncio.create_task(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.gather(calling, return_exceptions=True)
        raise


async def until_protected(device: Device, tell: Callable[[str], object], poll_s: float = POLL_S) -> None:
    """Returns once nothing is wrong. tell: gets what is, once."""
    told = False
    while why := await asyncio.to_thread(device.fault):
        if not told:
            tell(why)
        told = True
        await asyncio.sleep(poll_s)


async def while_protected(device: Device, poll_s: float = POLL_S) -> None:
    """Raises RunFailed once something is wrong; returns never."""
    while not (why := await asyncio.to_thread(device.fault)):
        await asyncio.sleep(poll_s)
    raise RunFailed("serving is not protected any more", got=why)


async def report_faults(device: Device, hinder: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Tell `hinder` what is wrong, "" for nothing, each time; returns never."""
    while True:
        hinder(await asyncio.to_thread(device.fault))
        await asyncio.sleep(poll_s)
