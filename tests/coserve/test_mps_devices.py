"""Which GPUs a value of CUDA_VISIBLE_DEVICES means."""

from __future__ import annotations

import shutil

import pytest

from rose_hpc.coserve.quota.mps_devices import present_uuids, visible_uuids
from rose_hpc.errors import ConfigError, EnvironmentFault

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-aabbbbbb-0000-0000-0000-000000000000"
MIG = "MIG-cccccccc-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("visible", "meant"),
    [(None, (A, B)), ("1", (B,)), ("1,0", (B, A)), (f" {A} ", (A,)), ("GPU-aab", (B,)), (f"0,{B},", (A, B)), (MIG, (MIG,))],
)
def test_numbers_beginnings_and_uuids_mean_a_gpu(visible: str | None, meant: tuple[str, ...]) -> None:
    assert visible_uuids(visible, [A, B]) == meant


@pytest.mark.parametrize("visible", ["2", "-1", "GPU-aa", "GPU-ff", "a", "01", "", ",", "0,0", f"0,{A}"])
def test_what_means_none_or_several_or_one_twice_is_refused(visible: str) -> None:
    with pytest.raises(ConfigError):
        visible_uuids(visible, [A, B])


def test_without_a_driver_that_is_said() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is an NVIDIA driver here")
    with pytest.raises(EnvironmentFault, match="cannot be listed"):
        present_uuids()


@pytest.mark.gpu
def test_the_gpus_of_the_node_have_uuids() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver here")
    assert visible_uuids(None, present_uuids())
