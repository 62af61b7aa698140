"""The end of a quota of cgroups whose group cannot be removed: a folder of version 2 whose files rmdir(2) does not take along."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_hpc.coserve.quota import CgroupQuota
from rose_hpc.coserve.quota.mps_control import try_lock
from rose_hpc.errors import EnvironmentFault


def test_a_group_that_cannot_be_removed_is_left_unlocked_to_the_next_owner(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc" / str(os.getpid())
    for folder in (root, proc):
        folder.mkdir(parents=True)
    for name, text in (("controllers", "cpu"), ("subtree_control", "cpu"), ("procs", "")):
        (root / f"cgroup.{name}").write_text(text)
    (proc / "cgroup").write_text("0::/\n")
    quota = CgroupQuota(root, proc.parent)
    (group,) = root.glob("rose-quota-*")
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        quota.close()
    heir = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert try_lock(heir)
    finally:
        os.close(heir)
