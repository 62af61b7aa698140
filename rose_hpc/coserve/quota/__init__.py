"""Quota: a rollout engine gets of the shared device only what the serving engine leaves, and no more than its ceiling.

Which one a device has is decided in choice.py, which is imported where that is asked: this package's __init__ knows no MPS.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rose_hpc.coserve.quota.base import GateOnly, Quota, pin
from rose_hpc.coserve.quota.cgroup import CgroupQuota
from rose_hpc.coserve.quota.sched_idle import SchedIdleQuota
from rose_hpc.errors import EnvironmentFault

__all__ = ["CgroupQuota", "GateOnly", "Quota", "SchedIdleQuota", "best_quota", "pin"]

log = logging.getLogger(__name__)


def best_quota(root: Path = Path("/sys/fs/cgroup")) -> Quota:
    """Of cores: cgroups where they are ours to change, else SCHED_IDLE. root: where cgroups are mounted."""
    try:
        return CgroupQuota(root)
    except EnvironmentFault as fault:
        log.warning("the rollout engine is confined by SCHED_IDLE: %s", fault)
        return SchedIdleQuota()
