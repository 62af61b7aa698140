"""What one trainer rank is told when it starts: a JSON file that the launcher writes and the rank reads once.

Light on purpose: the launcher imports this module and must not pay for torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rose_hpc.config import Dtype, Section, TrainConfig


class TrainerSpec(Section):
    """One rank of one attempt. Everything but `rank` is the same on every rank."""

    rank: int = Field(..., ge=0)
    world_size: int = Field(..., ge=1)
    ranks_per_node: int | None = Field(None, ge=1, description="ranks that share a node's GPUs; None: all of them")
    control_dir: Path
    model_dir: Path = Field(..., description="Hugging Face folder; only its weights and config.json are read")
    arena: Path = Field(..., description="trainer-side arena folder of this node")
    rendezvous: Path = Field(..., description="file through which the ranks meet; must not exist before the first of them starts")
    checkpoints_dir: Path
    train: TrainConfig
    temperature: float = Field(..., gt=0, description="the engines sample at this temperature")
    wire_dtype: Dtype
    retained_versions: int = Field(..., ge=2)
    bucket_bytes: int = Field(..., ge=4096)
    seed: int = Field(..., ge=0)
    resume: bool = Field(..., description="start from the newest complete checkpoint, where there is one")
    lease_ttl_s: float = Field(..., gt=0)

    @model_validator(mode="after")
    def _rank_in_world(self) -> TrainerSpec:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")
        return self

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this node, which are numbered one after the other."""
        return self.rank % self.local_world_size

    @property
    def local_world_size(self) -> int:
        return self.world_size if self.ranks_per_node is None else self.ranks_per_node
