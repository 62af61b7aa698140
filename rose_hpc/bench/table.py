"""The report of `rose-hpc bench weights` as text: what a person wants to compare, one row per measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SPEEDS = {
    "encode": "encode",
    "apply": "apply",
    "apply_undigested": "no digest",
    "digest": "digest",
    "coo_encode": "COO encode",
    "coo_apply": "COO apply",
}


def render(report: dict[str, Any]) -> str:
    """Plain text, at most 140 columns."""
    parts = [_codec(report["codec"])]
    if report["link"] is not None:
        parts.append(_link(report["link"]))
    return "\n\n".join([*parts, f"{report['wall_s']:.0f} s"])


def _codec(codec: dict[str, Any]) -> str:
    rows = [(f"{100 * r['density']:g} % {r['positions']}", r) for r in codec["synthetic"]]
    rows += [(f"lr {r['learning_rate']:g}, step {r['step'] + 1}", r) for r in codec["real"]]
    head = ["update", "changed", "bits/value", "MB", "bytes/bound", "COO", "zstd 3", "dense", *_SPEEDS.values()]
    title = f"Codec, one core, image of {codec['image_bytes'] / 1e6:.0f} MB; bytes over the entropy bound, speeds over memcpy"
    scaling, threads = codec["scaling"]["rows"], codec["scaling"]["threads"]
    more = [
        f"{threads} threads, {100 * r['density']:g} % changed: encode × {r['encode_speedup']:.2f}, apply × {r['apply_speedup']:.2f}"
        for r in scaling
    ]
    return "\n".join([title, aligned([head, *(_codec_row(name, row) for name, row in rows)]), *more])


def _codec_row(name: str, r: dict[str, Any]) -> list[str]:
    sizes = [f"{100 * r['changed_frac']:.2f} %", f"{r['value_entropy_bits']:.2f}", f"{r['bytes'] / 1e6:.2f}"]
    zstd = f"{r['zstd_3']['bytes_over_entropy']:.2f}" if "zstd_3" in r else ""
    ratios = [f"{r['bytes_over_entropy']:.3f}", f"{r['coo_bytes_over_entropy']:.2f}", zstd, f"{r['dense_bytes_over_entropy']:.0f}"]
    return [name, *sizes, *ratios, *(f"{r[f'{speed}_over_memcpy']:.2f}" for speed in _SPEEDS)]


def _link(link: dict[str, Any]) -> str:
    head = ["way", "Gb/s", "delay", "receivers", "changed", "s", "MB over the link"]
    title = f"Link, 4 trainer ranks, image of {link['image_bytes'] / 1e6:.0f} MB; from the command to publish to the last receiver"
    wrong = f"{link['mismatches']} lanes differ from the trainer's, {len(link['faults'])} faults on the way"
    return "\n".join([title, aligned([head, *map(_link_row, link["rows"])]), wrong, "", *_engine(link["engine"])])


def _link_row(r: dict[str, Any]) -> list[str]:
    case = [r["way"], f"{r['bits_per_s'] / 1e9:g}", f"{1e3 * r['delay_s']:g} ms" if r["delay_s"] else ""]
    return [*case, str(r["receivers"]), f"{100 * r['density']:g} %", f"{r['seconds']:.4f}", f"{r['bytes'] / 1e6:.2f}"]


def _engine(engine: dict[str, Any]) -> list[str]:
    title = f"A real engine of {engine['parameters'] / 1e6:.1f} M parameters that generates meanwhile"
    rows = [
        f"{100 * r['density']:g} % changed: pause {1e3 * r['pause_median_s']:.1f} ms, at worst {1e3 * r['pause_worst_s']:.1f} ms "
        f"of {r['versions']} versions; from the command to the proof {1e3 * r['update_median_s']:.0f} ms"
        for r in engine["rows"]
    ]
    return [title, *rows]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first, *others = zip(*rows, strict=True)
    columns = [[cell.ljust(widths[0]) for cell in first]]
    columns += [[cell.rjust(width) for cell in column] for column, width in zip(others, widths[1:], strict=True)]
    return "\n".join("  ".join(cells) for cells in zip(*columns, strict=True))
