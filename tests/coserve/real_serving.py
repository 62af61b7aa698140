"""A serving engine that a test may shape (its KV cache, its scheduler class), and on its core a rollout engine whose policies it keeps.

The stock ones, which come up again after a kill: coserve_harness.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from coserve_harness import PLACES, TINY, Process, Rollout, share_a_core
from engine_harness import Policies, turn, wait_until
from serving_specs import serving_spec

from rose_hpc.config import EngineConfig, GateConfig, SloConfig, TinyLlamaConfig
from rose_hpc.coserve.gate import GateStats, read_gate_stats
from rose_hpc.coserve.serving_process import serving_command, serving_environment
from rose_hpc.messages import AbortRequest, GenerateResult, encode
from rose_hpc.models.llama import make_tiny_llama

HERE = Path(__file__).parent
VOCABULARY = 64  # of both models, as far as prompts go
LONG = 4000  # tokens: many seconds of work


class ShapedServing(Process):
    """Stock vLLM server with our plug-in flags. scheduler: another class, of a module in this folder."""

    def __init__(self, folder: Path, board: Path, model: TinyLlamaConfig, engine: EngineConfig, scheduler: str = "") -> None:
        folder.mkdir(mode=0o700)
        make_tiny_llama(folder / "model", model, seed=0)
        spec = serving_spec(folder, model_dir=folder / "model", socket=folder / "s", board=board, engine=engine)
        command = serving_command(spec)
        if scheduler:
            command[command.index("--scheduler-cls") + 1] = scheduler
        search = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(command, serving_environment(spec) | {"PYTHONPATH": search}, spec.socket, folder / "log", {})

    def complete(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens that one request got; its prompt is like no other. Raises httpx.HTTPError when it failed."""
        prompt = [random.randrange(VOCABULARY) for _ in range(prompt_tokens)]
        body = {"model": "model", "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        response = self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        return int(response.json()["usage"]["completion_tokens"])


class SharedCore:
    """Both engines, up, with weights applied, and rollout turns from threads. kv_cache_bytes: of the serving engine."""

    def __init__(self, folder: Path, slo: SloConfig, gate: GateConfig, kv_cache_bytes: int = 32 << 20) -> None:
        self.board, self.policies = folder / "board", Policies(folder)
        update = self.policies.publish()
        engine = EngineConfig(dtype="bfloat16", max_model_len=1024, kv_cache_bytes=kv_cache_bytes, max_concurrency=PLACES)
        self.serving = ShapedServing(folder / "serving", self.board, TINY, engine)
        self.rollout = Rollout(folder / "rollout", self.policies, self.board, slo, gate)
        self.rollout_log = folder / "rollout" / "log"
        self._threads = ThreadPoolExecutor(2 * PLACES)
        try:
            self.serving.await_health()
            self.rollout.await_health()
            self.rollout.http.post("/update", content=encode(update)).raise_for_status()
            share_a_core(self.serving, self.rollout)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> GateStats:
        found = read_gate_stats(self.board)
        assert found is not None
        return found

    def ask(self, name: str, count: int, tokens: int, prompt_tokens: int = 6) -> list[Future[GenerateResult]]:
        """So many turns under way; number i has prompt(i, prompt_tokens)."""
        begun = self.stats.steps
        turns = [turn(f"{name}-{i}", prompt(i, prompt_tokens), tokens) for i in range(count)]
        asked = [self._threads.submit(self.rollout.generate, each) for each in turns]
        try:
            wait_until(lambda: self.stats.steps > begun + 5 or any(f.done() for f in asked), 20, "the first steps")
        except TimeoutError as error:
            raise RuntimeError(f"{self.stats}; the rollout engine's log ends:\n{self.rollout_log.read_text()[-6000:]}") from error
        refused = [f for f in asked if f.done() and f.exception() is not None]
        assert not refused, (refused[0].exception(), self.rollout_log.read_text()[-6000:])
        return asked

    def abort(self, name: str, count: int) -> None:
        """The turns that `ask` has named so."""
        self.rollout.http.post("/abort", content=encode(AbortRequest([f"{name}-{i}" for i in range(count)]))).raise_for_status()

    @contextmanager
    def rolling(self, name: str, count: int, prompt_tokens: int = 6) -> Iterator[list[Future[GenerateResult]]]:
        """Turns are in flight inside of it, and aborted after it."""
        asked = self.ask(name, count, LONG - prompt_tokens, prompt_tokens)
        try:
            yield asked
        finally:
            self.abort(name, count)
            for future in asked:
                future.result(30)

    def close(self) -> None:
        self.rollout.close()
        self.serving.close()
        self._threads.shutdown()


def prompt(number: int, tokens: int = 6) -> list[int]:
    """The prompts of different numbers have no beginning in common."""
    return [(7 * number + j * (number + 1)) % VOCABULARY for j in range(tokens)]
