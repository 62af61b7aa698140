"""Training rows as bytes: what does not add up is refused."""

import numpy as np
import pytest
from msgspec import structs

from rose_hpc.errors import ControlError
from rose_hpc.messages import Row, pack_rows, unpack_rows

PACKED = pack_rows([Row(np.arange(n, dtype=np.int32), np.ones(n, np.uint8), np.zeros(n, np.float32), 0.5) for n in (3, 2)])


@pytest.mark.parametrize("field", ["lengths", "token_ids", "rollout_logprobs", "advantages"])
def test_bytes_that_cut_an_item_are_refused(field):
    with pytest.raises(ControlError, match="cut short"):
        unpack_rows(structs.replace(PACKED, **{field: getattr(PACKED, field)[:-1]}))


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ControlError, match="do not add up"):
        unpack_rows(structs.replace(PACKED, token_ids=PACKED.token_ids[:-4]))
