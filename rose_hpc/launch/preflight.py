"""What can be known to fail is found before anything starts: each check raises a UsageError with the remedy.

Checks need no engine and no torch; together they take milliseconds.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from rose_hpc.config import ControlConfig, EngineConfig, RunConfig, ServingConfig, TinyLlamaConfig, TinyModelConfig, WeightsConfig
from rose_hpc.coserve.engine import is_cpu_build
from rose_hpc.errors import ConfigError, EnvironmentFault
from rose_hpc.http_api import bind
from rose_hpc.weights.layout import ITEM_BYTES

MAX_SAFETENSORS_HEADER_BYTES = 100 << 20
LAUNCHER_DEADLINE_S = 5.0
EVERYWHERE = ("0.0.0.0", "::")


def check(config: RunConfig) -> None:
    """Everything that does not need the model to exist yet."""
    check_port(config.control)
    find_mpiexec(config.weights.mpiexec)
    check_arena_root(config.weights)
    check_sampling(config)
    if config.model.path is not None:
        check_model(config.model.path)
    policy = read_model_config(config.model.path) if config.model.tiny is None else tiny_shape(config.model.tiny)  # type: ignore[arg-type]
    check_engine(config.rollout.engine, policy)
    check_patience(config.rollout.engine, "rollout.engine", config.control.start_deadline_s, "control.start_deadline_s")
    if config.serving is not None:
        check_serving(config.serving)
        check_lent_engine(config.serving.rollout, config.rollout.engine, policy)
    if config.borrow is not None:
        check_lent_engine(config.borrow.engine, config.rollout.engine, policy, "borrow.engine")
        check_patience(config.borrow.engine, "borrow.engine", config.borrow.up_deadline_s, "borrow.up_deadline_s")
        check_reachable(config.control)


def check_patience(engine: EngineConfig, section: str, deadline_s: float, name: str) -> None:
    """Whoever waits for an engine must not give up before its own deadline."""
    if deadline_s < engine.start_deadline_s:
        raise ConfigError(
            "an engine may take longer to start than it is waited for",
            got=f"{name} = {deadline_s:g}",
            expected=f"at least {section}.start_deadline_s = {engine.start_deadline_s:g}",
            remedy=f"raise {name}, or lower {section}.start_deadline_s",
        )


def check_port(control: ControlConfig) -> None:
    """The control port must be free."""
    bind(control.host, control.port).close()


def check_reachable(control: ControlConfig) -> None:
    """Lending agents are told where the run is: an address of this machine, not "all of them"."""
    if control.host in EVERYWHERE:
        raise ConfigError(
            "lending agents cannot be told where the run is",
            got=f"control.host = {control.host!r}",
            expected="an address of this machine that their machines reach",
        )


def is_loopback(host: str) -> bool:
    """Whether this address leads to its own machine from wherever it is used: agents elsewhere cannot reach a run there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_mpiexec(command: str) -> str:
    """Path of the relays' launcher: as given, beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / command
    found = str(beside) if os.access(beside, os.X_OK) and beside.is_file() else shutil.which(command)
    if found is None:
        raise EnvironmentFault(
            "no MPI launcher",
            got=f"weights.mpiexec = {command!r}, not beside {sys.executable} and not on PATH",
            remedy="pip install mpich, or set weights.mpiexec",
        )
    return found


def launcher_flags(mpiexec: str) -> list[str]:
    """So that a relay that dies takes no other along: MPICH's hydra ends all ranks unless told otherwise. Others: their defaults."""
    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=LAUNCHER_DEADLINE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ["-disable-auto-cleanup"] if "HYDRA" in said else []


def check_arena_root(weights: WeightsConfig) -> None:
    """The arenas' file system must be there and writable."""
    if not weights.arena_root.is_dir() or not os.access(weights.arena_root, os.W_OK | os.X_OK):
        raise EnvironmentFault(
            "the arenas' folder cannot be written", got=weights.arena_root, remedy="set weights.arena_root to a writable folder in memory"
        )


def check_sampling(config: RunConfig) -> None:
    """A turn must fit into the engine's context."""
    if config.sampling.max_new_tokens >= config.rollout.engine.max_model_len:
        raise ConfigError(
            "a turn does not fit into the context",
            got=f"sampling.max_new_tokens = {config.sampling.max_new_tokens}",
            expected=f"less than rollout.engine.max_model_len = {config.rollout.engine.max_model_len}",
        )


def check_serving(serving: ServingConfig) -> None:
    """The lent device must exist and leave a core, the serving model must fit its engine, and the traffic its context."""
    ours = os.sched_getaffinity(0)
    if ours <= set(serving.device_cpus) and is_cpu_build():
        raise EnvironmentFault(
            "no core is left beside the lent device",
            got=f"serving.device_cpus = {serving.device_cpus} of {sorted(ours)}",
            expected="at least one other core",
            remedy="lend fewer cores, or leave out the section [serving]",
        )
    if set(serving.device_cpus) - ours:
        raise EnvironmentFault(
            "the lent device does not exist",
            got=f"serving.device_cpus = {serving.device_cpus}",
            expected=f"among {sorted(ours)}",
        )
    if serving.traffic.trace is not None and not serving.traffic.trace.is_file():
        raise ConfigError("the traffic's trace is missing", got=serving.traffic.trace)
    if serving.model is not None:
        check_model(serving.model)
    shape = tiny_shape(serving.tiny) if serving.model is None else read_model_config(serving.model)
    check_engine(serving.engine, shape, "serving.engine")
    longest = serving.traffic.prompt_tokens[1] + serving.traffic.output_tokens[1]
    if serving.traffic.trace is None and longest > serving.engine.max_model_len:
        raise ConfigError(
            "the traffic does not fit",
            got=f"{longest} tokens",
            expected=f"at most serving.engine.max_model_len = {serving.engine.max_model_len}",
        )


def check_lent_engine(lent: EngineConfig, dedicated: EngineConfig, policy: dict[str, int], section: str = "serving.rollout") -> None:
    """The opportunistic engine must take whatever turn a dedicated one takes."""
    check_engine(lent, policy, section)
    if lent.max_model_len < dedicated.max_model_len:
        raise ConfigError(
            "the opportunistic engine has a shorter context than the dedicated one",
            got=f"{section}.max_model_len = {lent.max_model_len}",
            expected=f"at least rollout.engine.max_model_len = {dedicated.max_model_len}",
        )


def check_model(path: Path) -> None:
    """The policy's folder must hold a configuration, weights and a tokenizer."""
    if not path.is_dir():
        raise ConfigError(
            "the model is missing",
            got=f"model.path = {path}",
            expected="a folder in Hugging Face format",
            remedy="rose-hpc model tiny --out DIR makes a small one",
        )
    for wanted in ("config.json", "*.safetensors", "tokenizer*.json"):
        if not any(path.glob(wanted)):
            raise ConfigError(
                "the model folder is incomplete", got=f"{path} without {wanted}", expected="config.json, *.safetensors and a tokenizer"
            )


def read_model_config(path: Path) -> dict[str, int]:
    """The figures of config.json that sizing needs. Raises ConfigError when they are absent."""
    try:
        tree = json.loads((path / "config.json").read_text())
        heads = int(tree["num_attention_heads"])
        return {
            "layers": int(tree["num_hidden_layers"]),
            "kv_heads": int(tree.get("num_key_value_heads", heads)),
            "head_dim": int(tree.get("head_dim") or tree["hidden_size"] // heads),
            "max_positions": int(tree["max_position_embeddings"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}/config.json cannot be used", got=repr(error), expected="the configuration of a decoder-only transformer"
        ) from error


def tiny_shape(tiny: TinyModelConfig | TinyLlamaConfig) -> dict[str, int]:
    """The same figures for a tiny model that does not exist yet."""
    return {"layers": tiny.layers, "kv_heads": tiny.kv_heads, "head_dim": tiny.head_dim, "max_positions": sys.maxsize}


def check_engine(engine: EngineConfig, model: dict[str, int], section: str = "rollout.engine") -> None:
    """The context must be one that the model has, and the KV budget must hold one sequence of that length."""
    if engine.max_model_len > model["max_positions"]:
        raise ConfigError(
            "the context is longer than the model's",
            got=f"{section}.max_model_len = {engine.max_model_len}",
            expected=f"at most {model['max_positions']}",
        )
    needed = least_kv_bytes(engine, model)
    if engine.kv_cache_bytes < needed:
        raise ConfigError(
            "the KV budget does not hold one sequence",
            got=f"{section}.kv_cache_bytes = {engine.kv_cache_bytes}",
            expected=f"at least {needed} for max_model_len = {engine.max_model_len}",
            remedy="raise kv_cache_bytes or lower max_model_len",
        )


def least_kv_bytes(engine: EngineConfig, model: dict[str, int]) -> int:
    """KV bytes per rank for one sequence of max_model_len, in whole blocks, and the one block that vLLM keeps for itself."""
    heads = max(1, model["kv_heads"] // engine.tensor_parallel)
    block_bytes = 2 * model["layers"] * heads * model["head_dim"] * ITEM_BYTES[engine.dtype] * engine.block_size
    return (math.ceil(engine.max_model_len / engine.block_size) + 1) * block_bytes


def check_arena_space(config: RunConfig, model_dir: Path) -> None:
    """Room for the image and the kept deltas of every node's arena, before the start instead of in the middle."""
    image_bytes = parameter_count(model_dir) * ITEM_BYTES[config.weights.wire_dtype]
    arenas = 2 if config.serving is None else 3
    needed = arenas * arena_bytes(config, model_dir)
    room = shutil.disk_usage(config.weights.arena_root).free
    if room < needed:
        raise EnvironmentFault(
            f"{config.weights.arena_root} is too small for the arenas",
            got=f"{room} bytes free",
            expected=f"{needed} bytes: {arenas} arenas, each an image of {image_bytes} bytes and {config.weights.retained_versions} deltas",
            remedy="free it, set weights.arena_root, or lower weights.retained_versions",
        )


def arena_bytes(config: RunConfig, model_dir: Path) -> int:
    """Most that one node's arena takes: the image and the kept deltas, none of which is larger than the image."""
    return parameter_count(model_dir) * ITEM_BYTES[config.weights.wire_dtype] * (1 + config.weights.retained_versions)


def parameter_count(model_dir: Path) -> int:
    """Elements of all tensors, read from the headers of the safetensors files (8 bytes of length, then JSON)."""
    total = 0
    for file in sorted(model_dir.glob("*.safetensors")):
        total += sum(math.prod(entry["shape"]) for name, entry in _safetensors_header(file).items() if name != "__metadata__")
    return total


def _safetensors_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            if size > MAX_SAFETENSORS_HEADER_BYTES:
                raise ConfigError(f"{file} is not a safetensors file", got=f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(f.read(size))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"{file} is not a safetensors file", got=repr(error)) from error
    return header
