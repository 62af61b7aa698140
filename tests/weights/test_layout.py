"""Image layout: parameters tile the image, slices become exact byte runs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Box, Run, Runs, build_layout, from_json, grid_runs, merge, runs_of, to_json

shapes = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=0, max_size=5)


@given(shapes, st.sampled_from(["float32", "bfloat16"]))
def test_parameters_tile_the_image_without_gap_or_overlap(shapes, dtype):
    layout = build_layout(((f"p{i}", s) for i, s in enumerate(shapes)), dtype)
    at = 0
    for spec in layout.parameters:
        assert spec.offset_bytes == at
        at += spec.nbytes
    assert at == layout.image_bytes


@given(shapes)
def test_a_layout_survives_json_and_keeps_its_fingerprint(shapes):
    layout = build_layout(((f"p{i}", s) for i, s in enumerate(shapes)), "bfloat16")
    again = from_json(to_json(layout))
    assert again == layout and again.fingerprint == layout.fingerprint


def test_layouts_that_differ_have_different_fingerprints():
    base = build_layout([("a", (2, 3))], "float32")
    others = [build_layout([("a", (3, 2))], "float32"), build_layout([("b", (2, 3))], "float32"), build_layout([("a", (2, 3))], "bfloat16")]
    assert len({x.fingerprint for x in [base, *others]}) == 4


@st.composite
def sliced(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    starts = [draw(st.integers(0, n)) for n in shape]
    sizes = [draw(st.integers(0, n - s)) for n, s in zip(shape, starts, strict=True)]
    return tuple(shape), Box(tuple(starts), tuple(sizes))


@given(sliced(), st.integers(0, 3))
def test_the_runs_of_a_box_cover_exactly_its_elements(sliced, before):
    shape, box = sliced
    layout = build_layout([("before", (before,)), ("p", shape)], "float32")
    spec = layout.by_name["p"]
    covered = np.zeros(layout.image_bytes // 4, bool)
    runs = runs_of(spec, box)
    for run in runs:
        assert run.nbytes > 0 and not covered[run.offset_bytes // 4 : run.end_bytes // 4].any()
        covered[run.offset_bytes // 4 : run.end_bytes // 4] = True
    wanted = np.zeros(shape, bool)
    wanted[tuple(slice(s, s + n) for s, n in zip(box.starts, box.sizes, strict=True))] = True
    assert (covered[before:].reshape(shape) == wanted).all() and not covered[:before].any()
    assert runs == merge(runs)


def test_a_box_outside_the_parameter_is_refused():
    spec = build_layout([("p", (4, 4))], "float32").parameters[0]
    for box in (Box((0, 0), (5, 1)), Box((-1, 0), (1, 1)), Box((0,), (1,))):
        with pytest.raises(LayoutError):
            runs_of(spec, box)


def test_overlapping_runs_are_refused():
    with pytest.raises(LayoutError, match="overlap"):
        merge([Run(0, 8), Run(4, 8)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"dtype":"float32"}',
        '{"dtype":"int8","parameters":[]}',
        '{"dtype":"float32","parameters":[["a",[-1]]]}',
        '{"dtype":"float32","parameters":[["a",[1]],["a",[1]]]}',
        '{"dtype":"float32","parameters":[["",[1]]]}',
        '{"dtype":"float32","parameters":[["a",["x"]]]}',
    ],
)
def test_a_layout_from_a_peer_that_makes_no_sense_is_refused(text):
    with pytest.raises(LayoutError):
        from_json(text)


# ── many runs ──

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=8)


def positions(runs):
    return [k for r in runs for k in range(r.offset_bytes, r.end_bytes)]


def as_runs(pairs):
    return Runs([a for a, _ in pairs], [n for _, n in pairs])


@given(ranges)
def test_runs_in_arrays_are_a_sequence_of_runs(pairs):
    runs, listed = as_runs(pairs), [Run(a, n) for a, n in pairs]
    assert runs == listed and tuple(listed) == runs and list(runs) == listed and len(runs) == len(listed)
    assert Runs.of(listed) == runs and Runs.of(runs) is runs and hash(Runs.of(listed)) == hash(runs)
    assert [runs[k] for k in range(len(listed))] == listed and runs[1:] == listed[1:]
    assert (runs == [*listed, Run(0, 1)]) is False


@given(ranges)
def test_runs_know_their_concatenation(pairs):
    runs = as_runs(pairs)
    assert runs.nbytes == len(positions(runs)) and runs.expanded().tolist() == positions(runs)
    assert runs.starts_in_concatenation().tolist() == [sum(n for _, n in pairs[:k]) for k in range(len(pairs))]
    assert positions(runs.joined_neighbours()) == positions(runs)
    assert all(a.end_bytes != b.offset_bytes for a, b in itertools.pairwise(runs.joined_neighbours()))


@given(ranges, st.integers(0, 50), st.integers(0, 50))
def test_a_span_of_runs_is_that_span_of_their_concatenation(pairs, low, high):
    runs = as_runs(pairs)
    assert positions(runs.span(min(low, runs.nbytes), min(high, runs.nbytes))) == positions(runs)[low:high]


@given(ranges)
def test_merged_runs_are_sorted_apart_and_hold_the_same_bytes(pairs):
    runs = as_runs(pairs)
    if len(set(positions(runs))) < runs.nbytes:
        with pytest.raises(LayoutError, match="overlap"):
            runs.merged()
        return
    merged = runs.merged()
    assert positions(merged) == sorted(positions(runs)) and merged.is_sorted()
    assert all(a.end_bytes < b.offset_bytes for a, b in itertools.pairwise(merged)) and merge(runs) == merged


def test_runs_cannot_be_changed_and_do_not_freeze_what_they_were_made_of():
    offsets, sizes = np.array([0, 8]), np.array([4, 4])
    runs = Runs(offsets, sizes)
    with pytest.raises(ValueError, match="read-only"):
        runs.offsets[0] = 1
    assert offsets.flags.writeable


def test_sizes_that_do_not_match_the_offsets_are_refused():
    with pytest.raises(LayoutError):
        Runs([0, 8], [4])


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    return tuple(shape), [draw(st.lists(st.integers(0, n - 1), unique=True)) for n in shape]


@given(grids(), st.integers(0, 3))
def test_the_runs_of_a_grid_end_to_end_are_the_local_tensor_flattened(grid, before):
    shape, indices = grid
    layout = build_layout([("before", (before,)), ("p", shape)], "bfloat16")
    runs = grid_runs(layout.by_name["p"], [Runs(index, [1] * len(index)) for index in indices])
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    elements = [k for r in runs for k in range(r.offset_bytes // 2 - before, r.end_bytes // 2 - before)]
    assert elements == full[np.ix_(*indices)].reshape(-1).tolist()
    assert all(a.end_bytes != b.offset_bytes for a, b in itertools.pairwise(runs))
