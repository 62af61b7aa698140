"""Mixed into the workers of a rollout engine behind a gate: what they do for updates, and the return of held memory (kv_pages.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rose_hpc.coserve.kv_pages import block_ranges, give_back, read_held, whole_pages
from rose_hpc.errors import RoseError
from rose_hpc.weights.vllm_backend import RoseWorkerExtension, unexpected


class LentWorkerExtension(RoseWorkerExtension):
    """Worker of an engine on a lent device. Its methods answer with a fault, rather than raise: see vllm_backend.py."""

    model_runner: Any

    def rose_give_back(self, board: str) -> dict[str, Any]:
        """Give back the memory of the held blocks. {"fault": None, "bytes": so many}; 0 bytes where memory cannot be given back."""
        try:
            return {"fault": None, "bytes": self._give_back(Path(board))}
        except (OSError, RoseError) as error:
            return {"fault": str(error), "bytes": 0}
        except Exception as error:  # vLLM's layout is not as expected: serving goes on, and the memory stays
            return {**unexpected("rose-give-back", error), "bytes": 0}

    def _give_back(self, board: Path) -> int:
        config = self.model_runner.kv_cache_config
        caches: list[torch.Tensor] = self.model_runner.kv_caches
        if not caches or caches[0].device.type != "cpu":
            return 0
        held = read_held(board, config.num_blocks)
        storage = caches[0].untyped_storage()  # all layers share one
        return give_back(whole_pages(block_ranges(held, config.kv_cache_tensors), storage.data_ptr()))
