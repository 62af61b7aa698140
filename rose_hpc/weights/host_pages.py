"""Gives memory pages of this process back to the kernel, while their addresses stay valid.

    resident ──madvise(MADV_DONTNEED)──▶ not resident; reads as zeros ──first write, one page fault a page──▶ resident

Invariants
- A page goes back only when all of it lies in what was named (asserted by the tests).
- Only memory of this process alone: tensors in shared memory, and those of devices, stay as they are.

It does not know what the memory holds: who calls it must be able to do without, or fill it again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable

import torch

Range = tuple[int, int]  # begin and end


def whole_pages(ranges: Iterable[Range], address: int, page_bytes: int = mmap.PAGESIZE) -> list[Range]:
    """The memory pages that lie entirely in these ranges of what begins at `address`, as ranges of addresses."""
    inner = ((-(-(address + a) // page_bytes) * page_bytes, (address + b) // page_bytes * page_bytes) for a, b in ranges)
    return [(begin, end) for begin, end in inner if begin < end]


def give_back(pages: Iterable[Range]) -> int:
    """Tell the kernel that what lies there may be forgotten (madvise(2), private anonymous memory); bytes. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    given = 0
    for begin, end in pages:
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"madvise of {end - begin} bytes")
        given += end - begin
    return given


def give_back_tensors(tensors: Iterable[torch.Tensor]) -> int:
    """Forget the values of these tensors, but for what shares a page with something else; bytes. Raises OSError.

    Of a tensor with gaps in it nothing is forgotten.
    """
    private = [t for t in tensors if t.device.type == "cpu" and t.is_contiguous() and not t.untyped_storage().is_shared()]
    mine = {(t.data_ptr(), t.nbytes) for t in private}
    return give_back(page for address, nbytes in mine for page in whole_pages([(0, nbytes)], address))


def trim() -> None:
    """Give back what objects that nobody needs any more have left behind: Python's garbage, and free pages of glibc's heap."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3); not in every libc
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))
