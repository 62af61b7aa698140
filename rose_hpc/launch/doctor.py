"""`rose-hpc doctor`: what this machine has of what a run needs, before one starts.

    each check ─▶ ok         it was tried, and works
                  degraded   it works less well than it could, or only a part of it; the remedy says what is lost
                  missing    it is not there, or does not work; what needs it is refused

A check never raises and never takes longer than its deadline; whatever is heavy or may hang is tried in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rose_hpc.coserve.engine import is_cpu_build
from rose_hpc.coserve.quota.cgroup import CgroupQuota
from rose_hpc.coserve.quota.mps_control import EXECUTABLE
from rose_hpc.errors import EnvironmentFault, RoseError
from rose_hpc.launch import preflight

OK, DEGRADED, MISSING = "ok", "degraded", "missing"
REAP_DEADLINE_S = 2.0
PROCESS_DEADLINE_S = 90.0  # vLLM's first import compiles and looks for hardware
LEAST_SHM_BYTES = 1 << 30
MPS_LIMITS = (
    "MPS does not isolate faults: a fatal fault of one client can end all clients of that GPU, the serving engine included; "
    "lend MIG devices, or nothing, where that must not happen. Not yet verified on a GPU"
)

ROUND_TRIP = """
from mpi4py import MPI
w = MPI.COMM_WORLD
assert w.size == 2, f'{w.size} separate worlds of one rank: launcher and mpi4py belong to different MPIs'
assert w.sendrecv(w.rank, 1 - w.rank, source=1 - w.rank) == 1 - w.rank
if w.rank == 0: print(MPI.Get_library_version().splitlines()[0].strip())
"""
SWMR = """
import h5py, sys
writer = h5py.File(sys.argv[1], "w", libver=("v110", "v110"), locking=False)
rows = writer.create_dataset("rows", (0,), maxshape=(None,), dtype="i8", chunks=(16,))
writer.swmr_mode = True
reader = h5py.File(sys.argv[1], "r", swmr=True, locking=False)
rows.resize((1,)); rows[0] = 7; rows.flush()
seen = reader["rows"]; seen.refresh()
assert seen[0] == 7
print(h5py.version.hdf5_version)
"""
GPUS = "from rose_hpc.coserve.quota.mps_devices import present_uuids; print(', '.join(present_uuids()))"
LOCKING = "import h5py, sys; h5py.File(sys.argv[1], 'w', locking=True).close()"


@dataclass(frozen=True)
class Finding:
    """found: what is here. remedy: "" where nothing need be done."""

    status: str
    found: str
    remedy: str = ""


def examine(run_root: Path, tell: Callable[[str], None] = lambda name: None) -> dict[str, Finding]:
    """All checks, in order. run_root: where run folders will be made. tell: called with each name before its check."""
    found = {}
    for name, check in _checks(run_root).items():
        tell(name)
        try:
            found[name] = check()
        except RoseError as fault:
            found[name] = Finding(MISSING, _line(fault))
        except Exception as error:  # the edge to whatever is installed: one broken part must not hide the others
            found[name] = Finding(MISSING, f"the check failed: {error!r}")
    return found


def _checks(run_root: Path) -> dict[str, Callable[[], Finding]]:
    return {
        "python": _python,
        "torch": lambda: _import("torch", "import torch; print(torch.__version__, 'with', torch.cuda.device_count(), 'GPUs')"),
        "vllm": lambda: _import("vllm", "import vllm; print(vllm.__version__)"),
        "mpi": _mpi,
        "hdf5": lambda: _hdf5(run_root),
        "shared_memory": _shared_memory,
        "cores": _cores,
        "cgroup": _cgroup,
        "gpu": _gpu,
        "mps": _mps,
        "slurm": _slurm,
    }


def _python() -> Finding:
    version = sys.version.split()[0]
    return Finding(OK, version) if sys.version_info >= (3, 11) else Finding(MISSING, version, "install Python 3.11 or later")


def _import(package: str, code: str) -> Finding:
    said = _run([sys.executable, "-c", code])
    if said.ok:
        build = " (CPU build)" if package == "vllm" and is_cpu_build() else ""
        return Finding(OK, said.last + build)
    return Finding(MISSING, said.last, "make setup; where it fails to import, its build and torch's do not belong together")


def _mpi() -> Finding:
    launcher = preflight.find_mpiexec("mpiexec")
    said = _run([launcher, "-n", "2", sys.executable, "-c", ROUND_TRIP], HYDRA_LAUNCHER="fork")
    if said.ok:
        return Finding(OK, f"{said.last}; two ranks exchanged a message through {launcher}")
    return Finding(MISSING, f"{launcher}: {said.last}", "pip install mpich mpi4py, or build mpi4py against the cluster's MPI")


def _hdf5(run_root: Path) -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix=".rose-doctor-", dir=run_root) as folder:
            swmr = _run([sys.executable, "-c", SWMR, f"{folder}/swmr.h5"])
            locks = _run([sys.executable, "-c", LOCKING, f"{folder}/locking.h5"])
    except OSError as error:
        return Finding(MISSING, f"{run_root} cannot be written: {error.strerror}", "give the folder of your runs with --runs")
    if not swmr.ok:
        return Finding(
            MISSING, f"no single-writer-multiple-reader file in {run_root}: {swmr.last}", "put run folders on another file system"
        )
    if not locks.ok:
        return Finding(
            DEGRADED, f"HDF5 {swmr.last}, without locks on {run_root}", "other programs need HDF5_USE_FILE_LOCKING=FALSE to read there"
        )
    return Finding(OK, f"HDF5 {swmr.last}")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    found = f"{free / (1 << 30):.1f} GiB free in /dev/shm"
    if free >= LEAST_SHM_BYTES:
        return Finding(OK, found)
    return Finding(DEGRADED, found, "enlarge it, or set weights.arena_root: an arena holds the weights and their last differences")


def _cores() -> Finding:
    cores = sorted(os.sched_getaffinity(0))
    found = f"{len(cores)} usable"
    return Finding(OK, found) if len(cores) > 1 else Finding(DEGRADED, found, "co-serving on CPUs needs a second core")


def _cgroup() -> Finding:
    try:
        quota = CgroupQuota()
    except EnvironmentFault as fault:
        return Finding(
            DEGRADED, _line(fault), "have the cpu controller delegated to you; until then SCHED_IDLE ranks threads of one cgroup only"
        )
    quota.close()
    return Finding(OK, quota.describe())


def _gpu() -> Finding:
    said = _run([sys.executable, "-c", GPUS])
    if not said.ok:
        return Finding(MISSING, said.last, "" if is_cpu_build() else "install the NVIDIA driver, or the CPU build of vLLM")
    return Finding(OK, said.last) if said.text.strip() else Finding(MISSING, "a driver, and no GPU")


def _mps() -> Finding:
    path = shutil.which(EXECUTABLE)
    if path is None:
        return Finding(
            MISSING, f"no {EXECUTABLE} on PATH. {MPS_LIMITS}", "" if is_cpu_build() else "install the driver's compute utilities"
        )
    return Finding(DEGRADED, f"{path}. {MPS_LIMITS}", "rose-hpc serve starts the daemon; a server attached later must run under it already")


def _slurm() -> Finding:
    if shutil.which("srun") is None:
        return Finding(MISSING, "no srun on PATH", "runs on this machine do not need it")
    types = _run(["srun", "--mpi=list"])
    accounting = "sacct" if shutil.which("sacct") else "no sacct"
    found = f"submitit {importlib.metadata.version('submitit')}, {accounting}, MPI types: {' '.join(types.text.split())}"
    return Finding(OK if types.ok else DEGRADED, found, "" if types.ok else "srun does not answer: is the controller up?")


def _line(fault: RoseError) -> str:
    return "; ".join(line.strip() for line in str(fault).splitlines())


@dataclass(frozen=True)
class _Said:
    ok: bool
    text: str

    @property
    def last(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else "(it said nothing)"


def _run(command: Sequence[str], **env: str) -> _Said:
    """A process and what it said; its group is ended at the deadline."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **env},
        process_group=0,
    )
    try:
        text, _ = process.communicate(timeout=PROCESS_DEADLINE_S)
        return _Said(process.returncode == 0, text)
    except subprocess.TimeoutExpired:
        return _Said(False, f"no answer within {PROCESS_DEADLINE_S:g} s")
    finally:
        _end_group(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(REAP_DEADLINE_S)  # what hangs in the kernel stays; it must not keep us


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, 9)
    except ProcessLookupError:
        return
