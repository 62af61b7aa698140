"""What `make setup` runs so that no step has to compile."""

from rose_hpc.weights.arena import Arena
from rose_hpc.weights.warm_up import CHANGED, warm_up


def test_the_warm_up_ends_with_a_verified_version(tmp_path):
    warm_up(tmp_path)
    state = Arena.open(tmp_path / "sink").state()
    assert state.version == len(CHANGED) and state.verified
