"""The command line: `rose-hpc COMMAND --help`. Parses, calls, prints; holds no logic.

Exit status: 0 done, 2 where the user can put it right, 1 otherwise, 128 + signal after a signal.
"""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rose_hpc import config as configuration
from rose_hpc.bench.cli import app as bench_app
from rose_hpc.coserve.serve_cli import lend, serve
from rose_hpc.errors import RoseError
from rose_hpc.traffic.cli import app as trace_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Agentic RL post-training on Slurm clusters, with rollouts that borrow idle serving GPUs.",
)
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
app.add_typer(model_app, name="model")
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.command()(serve)
app.command()(lend)


class Family(enum.StrEnum):
    """Architectures that `model tiny` can make."""

    QWEN3 = "qwen3"
    LLAMA = "llama"


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, last.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file, for example configs/quickstart.toml")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=v", help="Override one value; may be repeated.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="New folder for the run. Default: runs/NAME-TIME.")] = None,
) -> None:
    """Train on this machine: controller, trainer ranks, relays, agent and engine, all started, watched and stopped.

    Example: rose-hpc run configs/quickstart.toml --set seed=1 --run-dir runs/first
    """
    from rose_hpc.launch import local

    loaded = configuration.load(config, overrides)
    folder = run_dir if run_dir is not None else Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    _show_report(local.run(loaded, folder).path)


@app.command()
def resume(run_dir: Annotated[Path, typer.Argument(help="Folder of an interrupted run")]) -> None:
    """Go on with an interrupted run from its last checkpoint.

    Example: rose-hpc resume runs/first
    """
    from rose_hpc.launch import local

    _show_report(local.resume(run_dir).path)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Run folder, or one metrics file")], as_json: JsonFlag = False) -> None:
    """Summarise a run, also while it goes on or after it was killed.

    Example: rose-hpc report runs/first --json
    """
    _show_report(run_dir, as_json)


def _show_report(run_dir: Path, as_json: bool = False) -> None:
    from rose_hpc.metrics.report import render_text, report_json
    from rose_hpc.metrics.run import Run

    if as_json:
        print(json.dumps(report_json(Run(run_dir)), indent=2))
    else:
        Console().print(render_text(Run(run_dir)))


@app.command()
def doctor(
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders will be made.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Say what this machine has of what runs need, and what to do about the rest. Exit status 1 where Python, vLLM, MPI or HDF5 is missing.

    Example: rose-hpc doctor --runs runs
    """
    from rose_hpc.launch.doctor import MISSING, examine

    console = Console(stderr=True)
    found = examine(runs, lambda name: console.print(f"[dim]looking at {name}[/dim]"))
    if as_json:
        print(json.dumps({"checks": {name: asdict(finding) for name, finding in found.items()}}, indent=2))
    else:
        for name, finding in found.items():
            print(f"{name:14} {finding.status:9} {finding.found}{f'; remedy: {finding.remedy}' if finding.remedy else ''}")
    sys.exit(any(found[name].status == MISSING for name in ("python", "torch", "vllm", "mpi", "hdf5")))


@model_app.command("tiny")
def model_tiny(
    out: Annotated[Path, typer.Option("--out", help="New folder for the model.")],
    family: Annotated[Family, typer.Option("--family", help="qwen3: a warmed-up policy; llama: a random serving model.")] = Family.QWEN3,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    config: Annotated[Path | None, typer.Option("--config", help="Take shapes and environment from this TOML or JSON file.")] = None,
) -> None:
    """Make a small model with its own tokenizer. Offline and seeded. A Qwen3 is warmed up by imitation of a noisy expert.

    Example: rose-hpc model tiny --out models/tiny --seed 1
    """
    loaded = None if config is None else configuration.load(config)
    if family is Family.LLAMA:
        from rose_hpc.models.llama import make_tiny_llama

        lent = loaded is not None and loaded.serving is not None
        make_tiny_llama(out, loaded.serving.tiny if lent else configuration.TinyLlamaConfig(), seed)
    else:
        from rose_hpc.models.tiny import make_tiny_qwen3

        tiny = loaded.model.tiny if loaded is not None and loaded.model.tiny is not None else configuration.TinyModelConfig()
        make_tiny_qwen3(out, tiny, loaded.env if loaded is not None else configuration.EnvConfig(), seed)
    print(out)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except RoseError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
