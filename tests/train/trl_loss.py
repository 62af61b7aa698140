"""TRL's own code for the GRPO loss and the overlong punishment, run on given tensors.

TRL is installed without what it depends on (accelerate, datasets, pyarrow), so it cannot be imported. Its `GRPOTrainer._compute_loss` is
taken from the installed source file and called on a stand-in of the trainer that holds the settings that the method reads; the method
itself is not touched.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def trl_folder() -> Path:
    """Where TRL lies; the test is skipped where it does not."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("TRL is not installed: pip install --no-deps trl==1.16.0")
    return Path(found.submodule_search_locations[0])


def method(path: Path, class_name: str, name: str) -> Callable[..., Any]:
    """One method of a class in a source file, compiled alone. Its globals: torch, and the reductions that its metrics use."""
    (owner,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    (found,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names[name]


def trl_loss(loss_type: str, new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, **settings: float) -> Tensor:
    """TRL's loss of one minibatch on one process. new, old, rollout, mask [B, T]; advantages [B].

    settings: clip_low, clip_high, importance_cap (mode token_truncate), max_completion_length.
    """
    compute_loss = method(trl_folder() / "trainer" / "grpo_trainer.py", "GRPOTrainer", "_compute_loss")
    ratio = torch.exp((old - rollout) * mask).clamp(max=settings["importance_cap"])
    one = torch.ones(new.shape[0], 1, dtype=torch.long)
    inputs = {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": torch.zeros(new.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": mask.sum(),
    }
    return compute_loss(_trainer(loss_type, new, settings), None, inputs)


def _trainer(loss_type: str, new: Tensor, settings: dict[str, float]) -> SimpleNamespace:
    """Of what `_compute_loss` reads: our settings, TRL's defaults, one process, no accumulation."""
    return SimpleNamespace(
        loss_type=loss_type,
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        max_completion_length=settings["max_completion_length"],
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        importance_sampling_level="token",
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, torch.zeros_like(new), None),
    )


def trl_overlong_punishment(limit_tokens: int, cache_tokens: int) -> Callable[[list[list[int]]], list[float]]:
    """TRL's reward function of DAPO's eq. 13."""
    path = trl_folder() / "rewards" / "other_rewards.py"
    spec = importlib.util.spec_from_file_location("trl_other_rewards", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_soft_overlong_punishment(limit_tokens, cache_tokens)
