#!/bin/sh
# Start the relays of one run as the ranks of one MPI world, each under its keeper.
#
#   mpi/relay.sh LAUNCHER RANKS SPEC [LAUNCHER ARGUMENT ...]
#
#   LAUNCHER   mpiexec     MPICH's hydra (pip install mpich), on this machine or on the nodes of an allocation
#              srun-pmi2   Slurm with an MPI that speaks PMI-2 (MPICH)
#              srun-pmix   Slurm with an MPI that speaks PMIx (Open MPI); needs Slurm's pmix plug-in
#   RANKS      the number of relays; SPEC names as many nodes, and every rank checks that its world has that size
#   SPEC       the relays' JSON file, readable on every node
#
#   PYTHON     interpreter with rose_hpc (default: python3); MPIEXEC: hydra's mpiexec (default: mpiexec)
#
# Examples
#   PYTHON=.venv/bin/python MPIEXEC=.venv/bin/mpiexec mpi/relay.sh mpiexec 3 RUN/control/relays.json
#   mpi/relay.sh srun-pmi2 4 RUN/control/relays.json --nodes=4 --cpus-per-task=2
#
# A rank that dies takes no other along: hydra is told not to clean up, Slurm not to kill the step, and neither sees more than the keeper.

usage() { sed -n '2,/^# A rank/s/^# \{0,1\}//p' "$0" | sed '$d'; }

case "${1-}" in "" | -h | --help) usage; exit 0 ;; esac
[ $# -ge 3 ] || { usage >&2; exit 2; }
launcher=$1 ranks=$2 spec=$3
shift 3
python=${PYTHON:-python3}
set -- "$@" "$python" -m rose_hpc.weights.relay_keeper "$spec"

case "$launcher" in
mpiexec) exec "${MPIEXEC:-mpiexec}" -disable-auto-cleanup -n "$ranks" "$@" ;;
srun-pmi2) exec srun --mpi=pmi2 --ntasks="$ranks" --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 --wait=0 "$@" ;;
srun-pmix) exec srun --mpi=pmix --ntasks="$ranks" --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 --wait=0 "$@" ;;
*) echo "mpi/relay.sh: unknown launcher '$launcher': mpiexec, srun-pmi2 or srun-pmix" >&2; exit 2 ;;
esac
