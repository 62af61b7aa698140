"""Memory that goes back to the kernel: exactly what was named, and only what is this process's own."""

from __future__ import annotations

import ctypes
import mmap

import torch

from rose_hpc.weights.host_pages import give_back, give_back_tensors, trim, whole_pages

LARGE = 1 << 20  # elements: pages of its own from malloc


def test_what_is_given_back_reads_as_zeros_and_the_rest_as_before() -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    given = give_back(whole_pages([(mmap.PAGESIZE // 2, 4 * mmap.PAGESIZE + 1)], address))
    assert given == 3 * mmap.PAGESIZE
    assert memory[mmap.PAGESIZE : 4 * mmap.PAGESIZE] == bytes(given)
    assert set(memory[: mmap.PAGESIZE]) == set(memory[4 * mmap.PAGESIZE :]) == {ord("x")}


def test_a_tensor_loses_its_values_and_not_its_place_and_is_counted_once() -> None:
    tensor = torch.ones(LARGE)
    address = tensor.data_ptr()
    given = give_back_tensors([tensor, tensor.view(-1, 2)[:, :].reshape(-1)])
    assert tensor.nbytes - 2 * mmap.PAGESIZE <= given <= tensor.nbytes
    assert int(tensor.count_nonzero()) <= 2 * mmap.PAGESIZE // tensor.element_size()
    tensor.fill_(3)
    assert tensor.data_ptr() == address and bool((tensor == 3).all())


def test_shared_memory_parts_of_tensors_and_tensors_with_gaps_stay_as_they_are() -> None:
    whole, gaps, shared = torch.ones(LARGE), torch.ones(LARGE), torch.ones(LARGE).share_memory_()
    assert give_back_tensors([gaps[::2], shared, torch.ones(8)]) == 0
    given = give_back_tensors([whole[: LARGE // 2]])
    assert 0 < given <= whole.nbytes // 2 and bool((whole[LARGE // 2 :] == 1).all())
    assert bool((gaps == 1).all()) and bool((shared == 1).all())


def test_trimming_returns_what_many_small_objects_left_behind() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(32 << 10) for _ in range(2000)]  # below malloc's threshold for mappings of their own
    for block in blocks:
        ctypes.memset(block, 1, 32 << 10)
    last, *others = reversed(blocks)  # the last one keeps the heap's end where it is
    for block in others:
        libc.free(block)
    before = resident_bytes()
    trim()
    assert before - resident_bytes() > 0.5 * len(blocks) * (32 << 10)
    libc.free(last)
