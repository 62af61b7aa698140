"""`rose-hpc trace …`. Parses, calls, prints; holds no logic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from rose_hpc.config import Section, SloConfig, TrafficConfig
from rose_hpc.errors import ConfigError, UsageError
from rose_hpc.traffic.spec import ReplaySpec

app = typer.Typer(no_args_is_help=True, help="Traffic to serving engines.")

SectionT = TypeVar("SectionT", bound=Section)
DEFAULT = ReplaySpec(url="unix:/nowhere")


@app.callback()
def trace() -> None:
    """Traffic to serving engines."""


@app.command()
def replay(
    url: Annotated[str, typer.Argument(help="The server: http://HOST:PORT or unix:/PATH/TO.sock")],
    trace: Annotated[Path | None, typer.Option("--trace", help="Azure LLM (CSV), Mooncake (JSONL) or BurstGPT (CSV).")] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Gamma-distributed gaps and uniform lengths.")] = False,
    requests_per_s: Annotated[float, typer.Option(help="Synthetic: mean rate.")] = DEFAULT.traffic.requests_per_s,
    cv: Annotated[
        float, typer.Option(help="Synthetic: coefficient of variation of the gaps; 1 is Poisson.")
    ] = DEFAULT.traffic.burstiness_cv,
    prompt_tokens: Annotated[str, typer.Option(metavar="MIN:MAX", help="Synthetic: tokens of a prompt.")] = "{}:{}".format(
        *DEFAULT.traffic.prompt_tokens
    ),
    output_tokens: Annotated[str, typer.Option(metavar="MIN:MAX", help="Synthetic: tokens asked for.")] = "{}:{}".format(
        *DEFAULT.traffic.output_tokens
    ),
    time_scale: Annotated[float, typer.Option(help="Trace seconds × this = our seconds.")] = DEFAULT.traffic.time_scale,
    length_scale: Annotated[float, typer.Option(help="Trace tokens × this = our tokens, at least 1.")] = DEFAULT.traffic.length_scale,
    duration_s: Annotated[float | None, typer.Option(help="Send nothing that arrives later than this.")] = None,
    requests: Annotated[int | None, typer.Option(help="Send at most so many.")] = None,
    slo_ttft_s: Annotated[float, typer.Option(help="Objective: time to the first token.")] = DEFAULT.slo.ttft_s,
    slo_tpot_s: Annotated[float, typer.Option(help="Objective: mean time per token after the first.")] = DEFAULT.slo.tpot_s,
    out: Annotated[Path | None, typer.Option("--out", help="New HDF5 file with a row per request.")] = None,
    prompt_ids: Annotated[int, typer.Option(help="Prompts are random token ids below this.")] = DEFAULT.prompt_ids,
    start_deadline_s: Annotated[float, typer.Option(help="Longest wait for a healthy server.")] = DEFAULT.start_deadline_s,
    request_deadline_s: Annotated[
        float, typer.Option(help="From a request's arrival; later it counts as timed out.")
    ] = DEFAULT.request_deadline_s,
    drain_deadline_s: Annotated[
        float, typer.Option(help="Longest wait for requests in flight once told to stop.")
    ] = DEFAULT.drain_deadline_s,
    seed: Annotated[int, typer.Option(min=0)] = DEFAULT.traffic.seed,
    die_with_parent: Annotated[bool, typer.Option("--die-with-parent", help="Stop when the starting process ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last.")] = False,
) -> None:
    """Send requests to a serving engine open-loop: each when it is due, whatever became of the others.

    Goes on until a limit, the end of the trace, or SIGINT or SIGTERM, after which requests in flight may finish. A trace's times and
    lengths are scaled by one factor each. No request is dropped; one that is too long for the model is cut, and counted as cut.

    Example: rose-hpc trace replay http://127.0.0.1:8000 --synthetic --requests-per-s 5 --duration-s 60 --out serving.h5 --json
    """
    from rose_hpc import lifeline

    if (trace is None) != synthetic:
        raise UsageError("which requests?", expected="exactly one of --trace FILE and --synthetic")
    if die_with_parent:
        lifeline.die_with_parent()
    traffic: dict[str, Any] = {"trace": trace, "time_scale": time_scale, "length_scale": length_scale, "seed": seed}
    traffic |= {"requests_per_s": requests_per_s, "burstiness_cv": cv}
    traffic |= {"prompt_tokens": _span("--prompt-tokens", prompt_tokens), "output_tokens": _span("--output-tokens", output_tokens)}
    deadlines = {"start_deadline_s": start_deadline_s, "request_deadline_s": request_deadline_s, "drain_deadline_s": drain_deadline_s}
    limits = {"duration_s": duration_s, "requests": requests, "prompt_ids": prompt_ids}
    _replay(
        {
            "url": url,
            "traffic": _checked(TrafficConfig, traffic),
            "slo": _checked(SloConfig, {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s}),
            "out": out,
            **limits,
            **deadlines,
        },
        as_json,
    )


def _replay(spec: dict[str, Any], as_json: bool) -> None:
    import asyncio

    from rose_hpc.traffic.replay import run_replay

    summary = asyncio.run(run_replay(_checked(ReplaySpec, spec)))
    print(json.dumps(summary, indent=2) if as_json else _lines(summary))


def _span(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ConfigError(f"{option} cannot be read", got=text, expected="smallest:largest, for example 100:400")
    return int(match[1]), int(match[2])


def _checked(kind: type[SectionT], values: dict[str, Any]) -> SectionT:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise ConfigError("an option cannot be used", got="; ".join(problems)) from error


def _lines(summary: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        seconds = summary[name]
        return "–" if seconds is None else f"{1000 * seconds:,.1f} ms"

    rate = "–" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:,.1f}"
    counts = ", ".join(
        f"{summary[name]:,} {word}" for name, word in (("failed", "failed"), ("violations", "violated the SLO"), ("cut", "cut"))
    )
    lines = [f"{summary['requests']:,} requests: {counts}"]
    lines += [f"{kind.upper()}  " + "  ".join(f"P{p} {ms(f'{kind}_p{p}_s')}" for p in (50, 95, 99)) for kind in ("ttft", "tpot")]
    return "\n".join([*lines, f"{rate} tokens/s; requests were sent up to {ms('send_lag_p99_s')} late (P99)"])
