"""Mixed into the workers of a rollout engine: what they do for updates, and the return of KV cache memory (kv_pages.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rose_hpc.coserve.kv_pages import block_ranges, read_held
from rose_hpc.errors import RoseError
from rose_hpc.weights.host_pages import give_back, whole_pages
from rose_hpc.weights.vllm_backend import RoseWorkerExtension, unexpected


class RolloutWorkerExtension(RoseWorkerExtension):
    """Worker of a rollout engine. Its methods answer with a fault, rather than raise: see vllm_backend.py."""

    model_runner: Any

    def rose_give_back(self, board: str | None) -> dict[str, Any]:
        """Give back the memory of the blocks that a board's gate holds; None: of all, when no request is left and no prefix remembered.

        {"fault": None, "bytes": so many}; 0 bytes where memory cannot be given back.
        """
        try:
            return {"fault": None, "bytes": self._give_back(None if board is None else Path(board))}
        except (OSError, RoseError) as error:
            return {"fault": str(error), "bytes": 0}
        except Exception as error:  # vLLM's layout is not as expected: serving goes on, and the memory stays
            return {**unexpected("rose-give-back", error), "bytes": 0}

    def _give_back(self, board: Path | None) -> int:
        config = self.model_runner.kv_cache_config
        caches: list[torch.Tensor] = self.model_runner.kv_caches
        if not caches or caches[0].device.type != "cpu":
            return 0
        if board is None:
            sizes = {s.data_ptr(): s.nbytes() for s in (cache.untyped_storage() for cache in caches)}
            return give_back(page for address, nbytes in sizes.items() for page in whole_pages([(0, nbytes)], address))
        held = read_held(board, config.num_blocks)
        storage = caches[0].untyped_storage()  # all layers share one
        return give_back(whole_pages(block_ranges(held, config.kv_cache_tensors), storage.data_ptr()))
