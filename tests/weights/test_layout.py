"""Image layout: parameters tile the image, slices become exact byte runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.errors import LayoutError
from rose_hpc.weights.layout import Box, Run, build_layout, from_json, merge, runs_of, to_json

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
