"""Which GPUs are meant, as UUIDs: what Slurm or a user says by number changes its meaning under MPS. Not yet verified on a GPU.

Numbers count as NVML counts, in the order of the bus. vLLM reads CUDA_VISIBLE_DEVICES in the same way (platforms/cuda.py), and takes
UUIDs too. MIG devices have no number: they are named by their full UUID.
"""

from __future__ import annotations

from collections.abc import Sequence

import pynvml

from rose_hpc.coserve.quota.mps_node import UUID, checked_devices
from rose_hpc.errors import ConfigError, EnvironmentFault


def visible_uuids(visible: str | None, present: Sequence[str]) -> tuple[str, ...]:
    """What a value of CUDA_VISIBLE_DEVICES means. None: all. present: UUIDs of the node's GPUs, by number.

    Raises ConfigError for a number or a beginning of a UUID that means none or several of them, and where nothing is left.
    """
    names = list(present) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return checked_devices([_uuid(name, present) for name in names])


def _uuid(name: str, present: Sequence[str]) -> str:
    if UUID.fullmatch(name):
        return name
    numbered = [uuid for number, uuid in enumerate(present) if name == str(number)]
    found = numbered or [uuid for uuid in present if name.startswith("GPU-") and uuid.startswith(name)]
    if len(found) != 1:
        raise ConfigError(
            "no such GPU, or several", got=name, expected=f"a number or UUID of {', '.join(present) or 'none: no GPU is here'}"
        )
    return found[0]


def present_uuids() -> list[str]:
    """Of the GPUs that this process may use. Raises EnvironmentFault: no NVIDIA driver, or it does not answer."""
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise EnvironmentFault("the node's GPUs cannot be listed", got=error, expected="a working NVIDIA driver") from error
