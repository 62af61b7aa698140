from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from bench_policy import write_policy
from transformers import AutoConfig, AutoModelForCausalLM

from rose_hpc.bench.link_engine import PARAMETERS, SIZES, hugging_face_config
from rose_hpc.bench.link_image import LinkImage, link_policy
from rose_hpc.bench.link_rank import truth
from rose_hpc.errors import LayoutError

SHAPES = [("a", (8, 6)), ("b", (4,)), ("c", (12, 5))]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "real", [("w", (7, 11))])


def test_the_ranks_rows_make_up_the_image(real: Path) -> None:
    image = LinkImage(SHAPES, real)
    dumps = [image.rows_of(rank, 4) for rank in range(4)]
    assert np.array_equal(truth(dumps, image), image.bits()) and image.nbytes == 2 * (48 + 4 + 60)


def test_the_real_bits_are_repeated(real: Path) -> None:
    bits = LinkImage(SHAPES, real).bits()
    assert np.array_equal(bits[:77], np.load(real / "image.npy")) and np.array_equal(bits[77:], bits[: len(bits) - 77])


def test_rows_that_do_not_divide_are_refused(real: Path) -> None:
    with pytest.raises(LayoutError):
        LinkImage([("a", (6, 4))], real).rows_of(0, 4)


@pytest.mark.parametrize("nbytes", [1, 250 << 20, 768 << 20, 2 << 30])
def test_a_policy_is_as_large_as_asked_and_at_most_a_layer_larger(nbytes: int) -> None:
    shapes = link_policy(nbytes)
    layer = sum(math.prod(shape) for name, shape in shapes if ".layers.0." in name)
    size = 2 * sum(math.prod(shape) for _, shape in shapes)
    assert nbytes <= size and (not layer or size < nbytes + 2 * layer)
    assert all(shape[0] % 4 == 0 for _, shape in shapes)


def test_names_and_shapes_are_those_of_the_model_that_the_engine_loads(tmp_path: Path) -> None:
    import torch

    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(SIZES)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == SIZES.shapes()
    assert 25e6 < PARAMETERS < 26e6
