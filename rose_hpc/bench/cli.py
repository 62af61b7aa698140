"""`rose-hpc bench …`. Parses, calls, prints; holds no logic."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Timed claims, measured side by side on this machine.")

DEFAULT_IMAGE_MB = 768  # ten arenas and images of it fit into 10 GB; what a version costs whatever its size is small against it
DEFAULT_REPEATS = 5


@app.callback()
def bench() -> None:
    """Timed claims, measured side by side on this machine."""


@app.command()
def weights(
    skip_link: Annotated[bool, typer.Option("--skip-link", help="Only the codec; the link needs root, ip and tc.")] = False,
    image_mb: Annotated[
        int, typer.Option(min=250, help="Least size of the policy that crosses the link, in MiB; 13 times as much shared memory is used.")
    ] = DEFAULT_IMAGE_MB,
    repeats: Annotated[int, typer.Option(min=1, help="Timings are the best of so many, interleaved.")] = DEFAULT_REPEATS,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last.")] = False,
) -> None:
    """Measure the weight transfer engine: its codec against memcpy, COO, zstd and the entropy bound; its speed over a narrow link.

    The codec part takes its values from real consecutive versions of SmolLM2-135M, made here. The link part joins two network namespaces
    by a shaped link and brings versions of a policy with the shapes of Qwen3-0.6B (fewer layers) from four trainer ranks to 1, 2, 4 and 8
    receivers, against dense and COO transfers; and versions of a 25 M policy into a real engine that generates meanwhile.
    Give it the machine alone: it takes some minutes, and other load falsifies it.

    Example: rose-hpc bench weights --json
    """
    from rose_hpc.bench.table import render
    from rose_hpc.bench.weights import BenchOptions, run

    report = run(BenchOptions(link=not skip_link, image_bytes=image_mb << 20, repeats=repeats, seed=seed))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        typer.echo(render(report))
