#!/bin/sh
# One rank of any program under hydra, so that the others outlive it (relays have their keeper for that).
#
#   mpiexec -disable-auto-cleanup -n RANKS mpi/rank.sh COMMAND [ARGUMENT ...]
#
# Example
#   mpiexec -disable-auto-cleanup -n 3 mpi/rank.sh python program.py
#
# Even so, hydra ends every rank when a process that it started itself is ended by a signal; here that process is this shell, which
# reports a killed program as an ordinary exit status. It also tells survivors by SIGUSR1, which MPI handles, but a shell must ignore.

case "${1-}" in "" | -h | --help) sed -n '2,/^# Even so/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;; esac
trap '' USR1
"$@"
exit $?
