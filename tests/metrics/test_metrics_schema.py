from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_hpc.metrics.schema import STEPS, TABLES, Column, MetricsError, Table, Value, table


def values_of(column: Column) -> st.SearchStrategy[Value]:
    dtype = np.dtype(column.dtype)
    if dtype.kind == "f":
        return st.floats(width=32)
    if dtype.kind == "S":
        return st.text(max_size=dtype.itemsize + 5)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def tables_with_rows(draw: st.DrawFn) -> tuple[Table, dict[str, Value]]:
    chosen = draw(st.sampled_from(list(TABLES.values())))
    return chosen, {c.name: draw(values_of(c)) for c in chosen.columns}


# Hypothesis builds its table of Unicode on first use, which takes longer than it allows an example to take.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@UNHURRIED
@given(tables_with_rows())
def test_a_checked_row_survives_the_pipe_and_fits_the_file(case: tuple[Table, dict[str, Value]]) -> None:
    chosen, values = case
    row = json.loads(json.dumps(chosen.row(values)))
    stored = chosen.array([row])[0]
    for column, value in zip(chosen.columns, row, strict=True):
        if isinstance(value, str):
            assert stored[column.name].decode() == value.rstrip("\0")
        else:
            assert stored[column.name] == value or math.isnan(value)


@UNHURRIED
@given(st.text(max_size=80), st.integers(3, 64))
def test_a_text_is_cut_only_where_it_does_not_fit_and_between_characters(text: str, size_bytes: int) -> None:
    cut = str(Column("c", f"S{size_bytes}", "text", "any").check(text))
    assert len(cut.encode()) <= size_bytes
    if len(text.encode()) <= size_bytes:
        assert cut == text
    else:
        assert cut.endswith("…") and text.startswith(cut[:-1])


def test_every_column_has_a_unit_and_a_description() -> None:
    for each in TABLES.values():
        assert each.description
        assert len(set(each.column_names)) == len(each.columns)
        assert all(c.unit and c.description for c in each.columns)


def test_absent_floats_become_nan_and_absent_counts_are_refused() -> None:
    with pytest.raises(MetricsError, match="optimizer_steps"):
        STEPS.row({"step": 1})
    event = TABLES["events"].row({"kind": "checkpoint"})
    assert math.isnan(float(event[0])) and event[1:] == ["checkpoint", "", ""]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "x", "colour": "red"}, "colour"),
        ({"kind": 3}, "kind"),
        ({"kind": "x", "time_s": "now"}, "time_s"),
        ({"kind": None}, "kind"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_the_name_of_its_column(values: dict[str, object], named: str) -> None:
    with pytest.raises(MetricsError, match=named):
        TABLES["events"].row(values)


def test_a_count_outside_its_type_is_refused() -> None:
    with pytest.raises(MetricsError, match="out of range"):
        Column("digest", "u8", "1", "any").check(-1)


def test_numpy_scalars_are_taken_as_numbers() -> None:
    assert Column("n", "i8", "1", "any").check(np.int32(7)) == 7
    assert Column("n", "u1", "bool", "any").check(np.bool_(True)) == 1
    assert Column("x", "f4", "1", "any").check(np.float32(0.5)) == 0.5


def test_an_unknown_table_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(MetricsError, match="trajectories"):
        table("epochs")
