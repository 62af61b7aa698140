from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer
from typer.testing import CliRunner

from rose_hpc.errors import RoseError, UsageError
from rose_hpc.metrics import Run
from rose_hpc.traffic.cli import app

WAIT_S = 30.0


def replay(*arguments: str) -> tuple[str, list[int]]:
    """Standard output of a successful `replay` against a fake server, and how many tokens each request asked for."""

    async def scenario() -> tuple[str, list[int]]:
        server = FakeServer()
        async with server.on_tcp() as url:
            command = [sys.executable, "-c", "from rose_hpc.traffic.cli import app; app()", "replay", url, *arguments]
            client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            try:
                out, _ = await asyncio.wait_for(client.communicate(), WAIT_S)
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
            assert client.returncode == 0
            return out.decode(), [r.body["max_tokens"] for r in server.received]

    return asyncio.run(scenario())


def test_one_json_object_comes_last_and_the_file_holds_the_requests(tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    options = ["--requests", "6", "--requests-per-s", "50", "--output-tokens", "3:4", "--prompt-tokens", "5:5", "--out", str(out)]
    text, asked = replay("--synthetic", "--json", "--die-with-parent", *options)
    summary = json.loads(text)
    assert (summary["requests"], summary["failed"]) == (6, 0)
    assert set(asked) <= {3, 4} and len(asked) == 6
    assert list(Run(out).serving_requests["new_tokens"]) == asked


def test_a_trace_is_scaled_by_the_options(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,480,100\n2023-11-16 18:18:03,40,200\n")
    text, asked = replay("--trace", str(trace), "--time-scale", "0.005", "--length-scale", "0.1")
    assert asked == [10, 20]
    assert "2 requests: 0 failed" in text and "TTFT  P50" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["http://127.0.0.1:1"], "exactly one of --trace"),
        (["http://127.0.0.1:1", "--synthetic", "--trace", "x.csv"], "exactly one of --trace"),
        (["127.0.0.1:1", "--synthetic"], "http://HOST:PORT"),
        (["http://127.0.0.1:1", "--synthetic", "--prompt-tokens", "100"], "--prompt-tokens"),
        (["http://127.0.0.1:1", "--synthetic", "--prompt-tokens", "9:3"], "prompt_tokens must be [smallest, largest]"),
        (["http://127.0.0.1:1", "--synthetic", "--requests-per-s", "0"], "requests_per_s"),
        (["http://127.0.0.1:1", "--synthetic", "--slo-ttft-s", "-1"], "ttft_s"),
        (["http://127.0.0.1:1", "--synthetic", "--requests", "0"], "requests"),
        (["http://127.0.0.1:1", "--trace", "absent.csv"], "absent.csv"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert isinstance(result.exception, UsageError) and isinstance(result.exception, RoseError)
    assert named in str(result.exception)


def test_the_help_has_an_example() -> None:
    assert "Example: rose-hpc trace replay" in CliRunner().invoke(app, ["replay", "--help"]).output
