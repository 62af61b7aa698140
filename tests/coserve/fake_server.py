"""A serving engine without vLLM: `fake_server.py SOCKET BOARD MODEL_DIR [WORKER…]`. It shows itself idle on a board, as our plug-in does.

It answers /health and /v1/models, and has a worker, which computes as vLLM's does; it says "up" once it listens.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

from rose_hpc.coserve.board import BoardWriter
from rose_hpc.http_api import serving, stop_signals


async def main(socket: Path, board: Path, model: Path, worker: list[str]) -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model.name, "root": str(model)}]})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    stop, shown = stop_signals(), BoardWriter(board, time.monotonic())
    process = subprocess.Popen(worker, stdout=subprocess.PIPE, text=True) if worker else None
    try:
        if process is not None and process.stdout is not None:
            await asyncio.to_thread(process.stdout.readline)  # it has initialised
        async with serving(app, lambda runner: web.UnixSite(runner, str(socket))):
            print("up", flush=True)
            await stop.wait()
    finally:
        if process is not None:
            process.kill()
            process.wait(10)
        shown.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
