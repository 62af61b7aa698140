from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rose_hpc.bench.cli import app
from rose_hpc.bench.part import run_part
from rose_hpc.bench.table import render
from rose_hpc.errors import RunFailed


def test_the_help_has_an_example() -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, ["weights", "--help"]).stdout)
    assert "Example: rose-hpc bench weights --json" in shown and "--skip-link" in shown


def test_an_image_below_the_smallest_is_refused() -> None:
    assert CliRunner().invoke(app, ["weights", "--image-mb", "100"]).exit_code == 2


def test_a_part_that_fails_says_why() -> None:
    with pytest.raises(RunFailed, match=r"Traceback|KeyError"):
        run_part("unknown", {}, 60.0, lambda _: None)


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, rose_hpc.bench.cli; sys.exit(any(m in sys.modules for m in ('torch', 'numba', 'zstandard', 'gguf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_shows_every_row() -> None:
    speeds = {f"{name}_over_memcpy": 1.5 for name in ("encode", "apply", "apply_undigested", "digest", "coo_encode", "coo_apply")}
    sizes = {"changed_frac": 0.003, "value_entropy_bits": 4.0, "bytes": 700_000, "bytes_over_entropy": 1.02}
    sizes |= {"coo_bytes_over_entropy": 3.0, "dense_bytes_over_entropy": 300.0}
    synthetic = {"density": 0.003, "positions": "iid", "zstd_3": {"bytes_over_entropy": 2.0}} | sizes | speeds
    real = {"learning_rate": 1e-6, "step": 0} | sizes | speeds
    scaling = {"threads": 2, "rows": [{"density": 0.03, "encode_speedup": 1.9, "apply_speedup": 1.8}]}
    codec = {"image_bytes": 269_000_000, "synthetic": [synthetic], "real": [real], "scaling": scaling}
    way = {"way": "engine", "bits_per_s": 1e9, "receivers": 8, "density": 0.003, "delay_s": 0.001, "seconds": 0.05, "bytes": 1_500_000}
    pauses = {"density": 0.03, "versions": 8, "pause_median_s": 0.012, "pause_worst_s": 0.0213, "update_median_s": 0.3}
    engine = {"parameters": 25_700_000, "rows": [pauses]}
    link = {"image_bytes": 538_000_000, "rows": [way], "mismatches": 0, "faults": [], "engine": engine}
    text = render({"codec": codec, "link": link, "wall_s": 301.0})
    for part in (
        "0.3 % iid",
        "lr 1e-06, step 1",
        "2 threads, 3 % changed: encode × 1.90",
        "engine",
        "0.0500",
        "1 ms",
        "at worst 21.3 ms",
        "301 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 140
