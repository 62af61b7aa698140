"""A real engine process on a tiny random Qwen3, its arena, and the reference model that says what it should have answered."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose_hpc.config import EngineConfig
from rose_hpc.coserve.processes import remove_shared_memory, worker_groups
from rose_hpc.coserve.specs import EngineOffer, EngineSpec
from rose_hpc.messages import EngineHealth, GenerateRequest, GenerateResult, UpdateRequest, UpdateResult, decode, encode
from rose_hpc.weights.arena import Arena
from rose_hpc.weights.publisher import WeightPublisher

TOKEN = "token-of-the-tests"
VOCABULARY = 64
START_DEADLINE_S = 120
CONTEXT = 4096
CONFIG = EngineConfig(kv_cache_bytes=16 << 20, max_concurrency=8, max_model_len=CONTEXT)


def make_policy(seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    """A random policy whose distributions are far from uniform and differ between seeds."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float().eval()


class Policies:
    """The published versions: writes them into the arena and remembers the model of each."""

    def __init__(self, folder: Path, tied: bool = True) -> None:
        self.arena, self.model_dir, self._tied = folder / "arena", folder / "model", tied
        self.models: dict[int, Qwen3ForCausalLM] = {}
        make_policy(0, tied).config.save_pretrained(self.model_dir)

    @property
    def newest(self) -> int:
        return max(self.models, default=0)

    def publish(self) -> UpdateRequest:
        """Commit the next version; the update that asks for it."""
        version = self.newest + 1
        self.models[version] = make_policy(version, self._tied)
        shard = WeightPublisher(self.models[version], self.arena, 0, 1, "float32").publish(version)
        Arena.open(self.arena).commit(version, shard.digest)
        return UpdateRequest(version, shard.digest)

    @torch.no_grad()
    def logprobs(self, version: int, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
        """What the version gives to each of the tokens after the prompt and the tokens before it."""
        logits = self.models[version](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits / temperature, dim=-1)
        return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    def worst_error(self, prompt: list[int], result: GenerateResult, temperature: float = 1.0) -> float:
        """Largest |engine − reference| over the sampled tokens, each judged by the version reported for it."""
        versions = set(result.policy_versions)
        reference = {v: self.logprobs(v, prompt, result.token_ids, temperature) for v in versions}
        pairs = zip(result.logprobs, result.policy_versions, strict=True)
        return max(abs(logprob - reference[version][i]) for i, (logprob, version) in enumerate(pairs))


def offer(policies: Policies, executor_id: str, tensor_parallel: int = 1) -> EngineOffer:
    engine = CONFIG.model_copy(update={"tensor_parallel": tensor_parallel})
    return EngineOffer(executor_id=executor_id, model_dir=policies.model_dir, arena=policies.arena, engine=engine, seed=1)


class RunningEngine:
    """`python -m rose_hpc.coserve.engine` and a client on its socket. `close` ends it, whatever state it is in."""

    def __init__(self, folder: Path, policies: Policies, tensor_parallel: int = 1) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="rose-test-")  # short: AF_UNIX allows 107 bytes
        (folder / "token").write_text(TOKEN)
        self.socket = Path(self._sockets.name) / "e.sock"
        spec = EngineSpec(**offer(policies, "e0", tensor_parallel).model_dump(), socket=self.socket, token_file=folder / "token")
        (folder / "engine.json").write_text(spec.model_dump_json())
        self.log = folder / "engine.log"
        self.groups: set[str] = set()
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "rose_hpc.coserve.engine", str(folder / "engine.json")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.http = httpx.Client(base_url="http://engine", transport=transport, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        self._await_health()

    def _await_health(self) -> None:
        try:
            wait_until(lambda: self.process.poll() is not None or self._answers(), START_DEADLINE_S, "the engine's start")
            if self.process.poll() is not None:
                raise RuntimeError(f"engine ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            self.groups |= worker_groups(self.socket.parent)
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, message: msgspec.Struct | None = None) -> httpx.Response:
        return self.http.post(path, content=b"" if message is None else encode(message))

    def health(self) -> EngineHealth:
        return decode(self.http.get("/health").content, EngineHealth)

    def generate(self, request: GenerateRequest) -> GenerateResult:
        response = self.post("/generate", request)
        assert response.status_code == 200, response.text
        return decode(response.content, GenerateResult)

    def update(self, request: UpdateRequest) -> UpdateResult:
        response = self.post("/update", request)
        assert response.status_code == 200, response.text
        return decode(response.content, UpdateResult)

    def close(self) -> None:
        self.http.close()
        for process in [*family(self.process.pid), *([psutil.Process(self.process.pid)] if self.process.poll() is None else [])]:
            kill(process)
        self.process.wait(10)
        remove_shared_memory(self.groups)
        self._sockets.cleanup()


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def family(pid: int) -> list[psutil.Process]:
    """All descendants of a process; psutil knows a process by pid and start time, so that a recycled pid is not taken for it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} took more than {deadline_s:g} s")
        time.sleep(0.05)


def turn(request_id: str, prompt: list[int], max_new_tokens: int, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, max_new_tokens, temperature, list(stop))
