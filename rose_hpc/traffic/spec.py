"""What a replay is told: by the command line, or in a JSON file by a launcher. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rose_hpc.config import Section, SloConfig, TrafficConfig


class ReplaySpec(Section):
    """One replay: which server, which requests, how many of them, and where the record goes."""

    url: str = Field(..., description="http://HOST:PORT or unix:/PATH/TO.sock")
    traffic: TrafficConfig = TrafficConfig()
    slo: SloConfig = SloConfig()
    duration_s: float | None = Field(None, gt=0, description="send nothing that arrives later than this")
    requests: int | None = Field(None, ge=1, description="send at most so many")
    out: Path | None = Field(None, description="new HDF5 file, for example RUN/serving.h5")
    prompt_ids: int = Field(256, ge=1, description="prompts are of token ids below this; every byte-level vocabulary has 256")
    start_deadline_s: float = Field(300, gt=0, description="longest wait for a healthy server")
    request_deadline_s: float = Field(120, gt=0, description="from a request's arrival; then it counts as timed out")
    drain_deadline_s: float = Field(30, gt=0, description="once told to stop: longest wait for requests in flight")
