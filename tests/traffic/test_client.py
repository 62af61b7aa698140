from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path

import pytest
from fake_server import MAX_MODEL_LEN, FakeServer
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import ConfigError, EnvironmentFault
from rose_hpc.traffic.client import (
    EventLines,
    RequestFailed,
    ServedModel,
    Target,
    TokenTimes,
    await_model,
    count_tokens,
    open_session,
    parse_target,
)

STREAM = b': comment\n\ndata: {"a": 1}\n\ndata:{"b": "' + "ü".encode() * 40 + b'"}\r\n\r\nevent: x\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    lines = EventLines()
    events = [event for start, end in itertools.pairwise(bounds) for event in lines.feed(STREAM[start:end])]
    assert events == [b'{"a": 1}', b'{"b": "' + "ü".encode() * 40 + b'"}', b"[DONE]"]


def test_tokens_are_counted_by_their_ids() -> None:
    assert count_tokens(b'{"choices": [{"text": "ab", "token_ids": [7, 8, 9]}]}') == 3
    assert count_tokens(b'{"choices": [{"text": "", "token_ids": []}]}') == 0
    assert count_tokens(b'{"choices": [{"text": "", "token_ids": null, "finish_reason": "length"}]}') == 0
    assert count_tokens(b'{"choices": [], "usage": {"completion_tokens": 3}}') == 0
    assert count_tokens(b"[DONE]") == 0


@pytest.mark.parametrize("event", [b'{"error": {"message": "boom"}}', b'{"choices": [{"text": "ab"}]}', b"[]"])
def test_an_event_that_brings_no_tokens_but_should_is_a_failure(event: bytes) -> None:
    with pytest.raises(RequestFailed):
        count_tokens(event)


def test_time_per_token_leaves_out_the_first_and_counts_merged_ones() -> None:
    times = TokenTimes()
    assert math.isnan(times.tpot_s) and math.isnan(times.first_s)
    times.arrived(0, 1.0)
    times.arrived(1, 2.0)
    assert times.first_s == 2.0 and math.isnan(times.tpot_s)
    times.arrived(3, 2.5)
    times.arrived(0, 9.0)
    times.arrived(1, 4.0)
    assert (times.count, times.first_s, times.tpot_s) == (5, 2.0, 0.5)


def test_addresses_are_tcp_or_a_unix_socket() -> None:
    assert parse_target("http://gpu-1:8000/") == Target("http://gpu-1:8000")
    assert parse_target("unix:/run/serving.sock") == Target("http://localhost", "/run/serving.sock")


@pytest.mark.parametrize("url", ["gpu-1:8000", "http://", "http://gpu-1/v1", "unix:relative.sock", ""])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="unix:/PATH"):
        parse_target(url)


async def model_at(url: str, deadline_s: float) -> ServedModel:
    async with open_session(parse_target(url)) as session:
        return await await_model(session, deadline_s)


def test_the_model_is_what_the_server_says_once_it_is_healthy() -> None:
    async def scenario() -> ServedModel:
        server = FakeServer(healthy=False)
        async with server.on_tcp() as url:
            waiting = asyncio.create_task(model_at(url, 10))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            server.healthy = True
            return await waiting

    assert asyncio.run(scenario()) == ServedModel("fake", MAX_MODEL_LEN)


def test_a_server_that_is_not_healthy_in_time_is_reported_with_its_last_answer(tmp_path: Path) -> None:
    async def unhealthy() -> None:
        async with FakeServer(healthy=False).on(tmp_path / "s") as url:
            await model_at(url, 0.3)

    with pytest.raises(EnvironmentFault, match="HTTP 503"):
        asyncio.run(unhealthy())
    with pytest.raises(EnvironmentFault, match="No such file"):
        asyncio.run(model_at(f"unix:{tmp_path}/absent.sock", 0.3))
