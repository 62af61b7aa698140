"""Broadcast of one buffer over the ranks of a world: our pipelined trees from Isend/Irecv, against MPI_Bcast and a chain.

    mpiexec -n 4 .venv/bin/python mpi/bcast_tree.py --mib 1,16,64 --fanouts 1,2,4 --chunk-mib 2 --json

Every method moves the same bytes from rank 0 to all others and is timed from a barrier to the last rank's end; the best of the
repetitions counts, after a warm-up. `planned` is the shape that the tree planner (rose_hpc/weights/tree.py) chooses from latency and
bandwidth as measured between rank 0 and rank 1 in the same run. It only measures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI

from rose_hpc.weights.tree import CostModel, LinkCost, Member, plan_trees, predicted_s

MIB = 1 << 20
AHEAD = 4  # chunks that a receiver has asked for in advance
Parents = Mapping[int, int]  # rank → the rank it receives from


def k_ary(ranks: int, fanout: int) -> dict[int, int]:
    """A complete tree by rank; fanout 1 is the chain, ranks − 1 the star."""
    return {rank: (rank - 1) // fanout for rank in range(1, ranks)}


def widest(parents: Parents) -> int:
    """The largest number of children."""
    return max(Counter(parents.values()).values())


def planned(ranks: int, nbytes: int, cost: CostModel) -> tuple[dict[int, int], float]:
    """(the planner's tree for ranks of one partition, the seconds it predicts)."""
    names = [f"rank-{rank:03d}" for rank in range(ranks)]
    members = [Member(name, "here", name, (0,) if i == 0 else (), () if i == 0 else (0,)) for i, name in enumerate(names)]
    plan = plan_trees(members, {0: nbytes}, cost)
    parents = {names.index(child): names.index(of[0]) for child, of in plan.parents.items()}
    return parents, predicted_s(plan, members, {0: nbytes}, cost)


def broadcast(comm: MPI.Comm, buffer: np.ndarray, parents: Parents, chunk_bytes: int) -> None:
    """Receive chunk after chunk from the parent, pass each on to every child as soon as it is there."""
    rank = comm.Get_rank()
    children = [child for child, parent in parents.items() if parent == rank]
    chunks = [buffer[i : i + chunk_bytes] for i in range(0, len(buffer), chunk_bytes)]
    sends: list[MPI.Request] = []
    incoming = [] if rank == 0 else [comm.Irecv([chunk, MPI.BYTE], source=parents[rank], tag=1) for chunk in chunks[:AHEAD]]
    for i, chunk in enumerate(chunks):
        if rank:
            wait_for(incoming[i])
            if i + AHEAD < len(chunks):
                incoming.append(comm.Irecv([chunks[i + AHEAD], MPI.BYTE], source=parents[rank], tag=1))
        sends += [comm.Isend([chunk, MPI.BYTE], dest=child, tag=1) for child in children]
    for request in sends:
        wait_for(request)


def wait_for(request: MPI.Request) -> None:
    """As MPI's own wait, but the core is yielded: there may be more ranks than cores."""
    while not request.Test():
        os.sched_yield()


def seconds(comm: MPI.Comm, run: Callable[[], None], repetitions: int) -> float:
    """Best time from a common start to the end of the last rank."""
    best = float("inf")
    for _ in range(repetitions):
        comm.Barrier()
        begun = time.perf_counter()
        run()
        best = min(best, comm.allreduce(time.perf_counter() - begun, MPI.MAX))
    return best


def link_cost(comm: MPI.Comm) -> LinkCost:
    """Latency and bandwidth between ranks 0 and 1, the same on every rank."""
    big, small = np.zeros(32 * MIB, np.uint8), np.zeros(1, np.uint8)

    def ping(buffer: np.ndarray) -> float:
        best = float("inf")
        for _ in range(6):
            begun = time.perf_counter()
            for step in range(2):
                if comm.Get_rank() == step:
                    wait_for(comm.Isend([buffer, MPI.BYTE], dest=1 - step, tag=2))
                elif comm.Get_rank() == 1 - step:
                    wait_for(comm.Irecv([buffer, MPI.BYTE], source=step, tag=2))
            best = min(best, (time.perf_counter() - begun) / 2)
        return best

    latency_s, big_s = comm.bcast((ping(small), ping(big)))
    return LinkCost(latency_s, len(big) / max(big_s - latency_s, 1e-9))


def measure(comm: MPI.Comm, nbytes: int, fanouts: list[int], chunk_bytes: int, repetitions: int, link: LinkCost) -> list[dict[str, object]]:
    """One row per method."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    plan, predicted = planned(ranks, nbytes, CostModel(link, link, chunk_bytes))
    shapes = {"chain" if fanout == 1 else f"{fanout}-ary": k_ary(ranks, fanout) for fanout in fanouts if fanout < ranks}
    shapes["planned"] = plan
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = content.copy() if rank == 0 else np.zeros(nbytes, np.uint8)

    def run(method: str) -> Callable[[], None]:
        if method == "MPI_Bcast":
            return lambda: comm.Bcast([buffer, MPI.BYTE], root=0)
        return lambda: broadcast(comm, buffer, shapes[method], chunk_bytes)

    rows = []
    for method in ["MPI_Bcast", *shapes]:
        if rank:
            buffer[:] = 0
        run(method)()  # warm-up, and proof
        if not comm.allreduce(bool(np.array_equal(buffer, content)), MPI.LAND):
            sys.exit(f"bcast_tree: {method} of {nbytes} bytes did not arrive")
        best_s = seconds(comm, run(method), repetitions)
        row: dict[str, object] = {"mib": nbytes / MIB, "ranks": ranks, "method": method, "seconds": best_s}
        row |= {"gb_per_s": nbytes / best_s / 1e9, "fanout": widest(shapes[method]) if method in shapes else None}
        rows.append(row | {"predicted_s": predicted if method == "planned" else None})
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="1,4,16,64,256", help="sizes in MiB (default: %(default)s)")
    parser.add_argument("--fanouts", default="1,2,4", help="k of the k-ary trees; 1 is the chain (default: %(default)s)")
    parser.add_argument("--chunk-mib", type=float, default=2.0, help="what a rank receives before it passes it on (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="the best of so many counts (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    return parser.parse_args()


def main() -> int:
    options, comm = arguments(), MPI.COMM_WORLD
    if comm.Get_size() < 2:
        sys.stderr.write("bcast_tree: one rank has nobody to send to; run it under mpiexec -n 2 … 8\n")
        return 2
    link, chunk_bytes = link_cost(comm), int(options.chunk_mib * MIB)
    fanouts = [int(k) for k in options.fanouts.split(",")]
    rows = []
    for mib in options.mib.split(","):
        rows += measure(comm, int(float(mib) * MIB), fanouts, chunk_bytes, options.repetitions, link)
    if comm.Get_rank() == 0:
        report(rows, link, options.json)
    return 0


def report(rows: list[dict[str, object]], link: LinkCost, as_json: bool) -> None:
    print(f"{rows[0]['ranks']} ranks; link: {link.latency_s * 1e6:.1f} µs, {link.bytes_per_s / 1e9:.1f} GB/s")
    print(f"{'MiB':>6}  {'method':<10} {'fan-out':>7} {'seconds':>9} {'GB/s':>7} {'over MPI_Bcast':>14}")
    reference = {row["mib"]: row["seconds"] for row in rows if row["method"] == "MPI_Bcast"}
    for row in rows:
        ratio = float(str(row["seconds"])) / float(str(reference[row["mib"]]))
        print(
            f"{row['mib']:>6g}  {row['method']:<10} {row['fanout'] or '':>7} {row['seconds']:>9.4f} {row['gb_per_s']:>7.2f} {ratio:>14.2f}"
        )
    if as_json:
        print(json.dumps({"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
