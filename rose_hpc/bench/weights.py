"""`rose-hpc bench weights`: runs the parts one after the other and puts their figures into one report.

    real versions (SmolLM2-135M) ─▶ codec on one core ─▶ codec on two ─▶ link (namespaces, relays, baselines, one real engine)

The field names under `codec` and `link` are an interface; rows of every measurement come beside them.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rose_hpc.bench import real_versions
from rose_hpc.bench.part import run_part
from rose_hpc.errors import EnvironmentFault
from rose_hpc.weights.arena_home import ArenaHome

PACKAGES, EXTRA = ("gguf", "zstandard"), "'rose_hpc[bench]'"
ARENA_ROOT = Path("/dev/shm")
DEADLINES_S = {"real": 420.0, "codec": 900.0, "scaling": 300.0, "link": 1200.0}

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchOptions:
    """link: measure it, too; image_bytes: of the policy that crosses it; repeats: best of so many; seed: of all that is drawn."""

    link: bool
    image_bytes: int
    repeats: int
    seed: int


def run(options: BenchOptions) -> dict[str, Any]:
    """The report. Raises EnvironmentFault where the machine lacks something, before anything long has run."""
    from rose_hpc.bench import shaped_link

    _check_installed()
    if options.link:
        shaped_link.check_possible()
    started = time.monotonic()
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        with _Progress() as say, ArenaHome(ARENA_ROOT) as home:
            report = _measure(options, home, say)
    finally:
        signal.signal(signal.SIGTERM, before)
    return report | {"wall_s": time.monotonic() - started}


def _check_installed() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise EnvironmentFault("the benchmark's packages are not installed", got=f"no {', '.join(missing)}", remedy=f"pip install {EXTRA}")
    real_versions.find_gguf()


def _measure(options: BenchOptions, home: ArenaHome, say: Say) -> dict[str, Any]:
    from rose_hpc.bench import codec_bench

    def part(name: str, **spec: Any) -> Any:
        return run_part(name, spec, DEADLINES_S[name], say, {"TMPDIR": str(home.tmp)})

    real, common = str(home.path / "real"), {"repeats": options.repeats, "seed": options.seed}
    say("making real versions of SmolLM2-135M")
    part("real", folder=real)
    codec = part("codec", real=real, **common)
    scaling = part("scaling", real=real, **common)
    report: dict[str, Any] = {"codec": codec_bench.summary(codec) | codec | {"scaling": scaling}, "link": None}
    if options.link:
        report["link"] = part("link", real=real, home=str(home.path), image_bytes=options.image_bytes, **common)
    return report


class _Progress:
    """One status line on a terminal, plain lines elsewhere; all on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("starting")

    def __enter__(self) -> Say:
        if self._console.is_terminal:
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(f"{text} …", markup=False, highlight=False, soft_wrap=True)


def _unwind(number: int, _: object) -> None:
    sys.exit(128 + number)
