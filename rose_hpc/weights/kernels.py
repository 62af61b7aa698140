"""Compiled loops of the codec and the digest (numba, no parallel layer, no Python objects, all run without the GIL).

One file on purpose: numba keys its on-disk cache by the file that a kernel is written in, so a kernel that inlined a function of
another file would go stale when that file changes. Arguments are normalised by the callers (read-only inputs, int64 scalars), so
that every kernel has ONE specialisation.

    scan_changes   old image, new lanes → positions, differences, their histogram, digest change; the image becomes the new one
    take_counts, choose_leaves, assign_codes   histogram of the differences → their codes, the codebook's bits
    encode_blocks  positions, differences → block table, gap stream, value stream
    read_codebook, index_blocks, decode_blocks, apply_blocks     the inverse, bounded whatever the payload holds
    gather_dense, scatter_dense, digest_span                     whole lanes

The format is described in docs/wire_format.md. Kernels that read a payload return a negative status (see STATUS_TEXT) instead of
raising; they never read outside of the payload nor write outside of the image. What they do not do: allocate by a peer's word.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK_CHANGES = 1024
BLOCK_RECORD_BYTES = 9  # first position u32, gap stream bytes u16, value stream bytes u16, Rice parameter u8
MAX_CODE_BITS = 12  # one look-up in a table of at most 4096 words decodes any code
MAX_LEAVES = 2048
UNARY_LIMIT = 20  # quotients from here on are escaped: the gap follows in 32 bits
ESCAPE_BITS = UNARY_LIMIT + 32
MAX_RICE = 28
PAYLOAD_PADDING = 16  # zero bytes at the end, so that a decoder may load whole words and check its bounds less often
GAP_BLOCK_BYTES = (BLOCK_CHANGES * ESCAPE_BITS + 7) // 8 + 8  # most that one block can take, and the last word's store
VALUE_BLOCK_BYTES = (BLOCK_CHANGES * 27 + 7) // 8 + 8
CODEBOOK_BYTES = MAX_LEAVES * 8
NEAR_RICE = 4  # below this, several changes share a cache line
SCAN_ROOM = 64  # changes that a turn of the scan may find

BAD_CODEBOOK, BAD_TABLE, BAD_GAPS, BAD_VALUES, BAD_POSITION = -1, -2, -3, -4, -5
STATUS_TEXT = {
    BAD_CODEBOOK: "the codebook is not a complete prefix code",
    BAD_TABLE: "the block table disagrees with the payload's size",
    BAD_GAPS: "a block's gap stream is longer or shorter than its table says",
    BAD_VALUES: "a block's value stream is longer or shorter than its table says",
    BAD_POSITION: "positions leave the bucket or do not increase",
}

_U = np.uint64
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_I1, _I16, _I32, _I64 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile on the first call; keep the machine code on disk where numba finds a folder that it may write."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)


_inline = numba.njit(nogil=True, inline="always")


def read_only(array: Any) -> Any:
    """A contiguous, aligned, read-only view (a copy where it must be), so that every caller's array has one type for numba."""
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view


# --- words at addresses: numba has no unaligned or vector loads, and no bit counts ---


def _loader(bits: int) -> Any:
    @intrinsic
    def load(_context, address):
        result = types.uint64 if bits == 64 else types.int64

        def generate(_context, builder, _signature, arguments):
            word = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            word.align = 1
            return word if bits == 64 else builder.zext(word, _I64)

        return result(types.int64), generate

    return load


def _storer(bits: int) -> Any:
    @intrinsic
    def store(_context, address, value):
        def generate(context, builder, _signature, arguments):
            word = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(word, builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64 if bits == 64 else types.int64), generate

    return store


_load16, _load32, _load64 = _loader(16), _loader(32), _loader(64)
_store16, _store32, _store64 = _storer(16), _storer(32), _storer(64)


def _differ(lanes: int, vector: int) -> Any:
    @intrinsic
    def differ(_context, a, b):
        """Bit mask of the uint16 lanes that differ: AVX-512, AVX2 or NEON compares, as LLVM finds."""

        def generate(_context, builder, _signature, arguments):
            kind = ir.VectorType(_I16, vector)
            mask = ir.Constant(_I64, 0)
            for first in range(0, lanes, vector):
                loads = []
                for address in arguments:
                    at = builder.add(address, ir.Constant(_I64, 2 * first))
                    loads.append(builder.load(builder.inttoptr(at, kind.as_pointer())))
                    loads[-1].align = 1
                bits = builder.zext(builder.bitcast(builder.icmp_unsigned("!=", *loads), ir.IntType(vector)), _I64)
                mask = builder.or_(mask, builder.shl(bits, ir.Constant(_I64, first)))
            return mask

        return types.uint64(types.int64, types.int64), generate

    return differ


_differ64, _differ32, _differ8 = _differ(64, 32), _differ(32, 32), _differ(8, 8)


@intrinsic
def _trailing_zeros(_context, word):
    """Of a uint64; 64 when it is zero."""

    def generate(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(_I1, 0))

    return types.int64(types.uint64), generate


def _prefetcher(locality: int) -> Any:
    @intrinsic
    def prefetch(_context, address):
        def generate(context, builder, _signature, arguments):
            pointer = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            builder.call(function, [builder.inttoptr(arguments[0], pointer), *(ir.Constant(_I32, n) for n in (0, locality, 1))])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return prefetch


_prefetch_first, _prefetch_second = _prefetcher(3), _prefetcher(2)  # into that level of the cache; any address is allowed


@_inline
def _address(array):
    return np.int64(array.ctypes.data)  # signed: numba makes float64 of uint64 + int64


# --- digest ---


@_inline
def _finalise(x):
    x = (x ^ (x >> _U(30))) * _MIX_1
    x = (x ^ (x >> _U(27))) * _MIX_2
    return x ^ (x >> _U(31))


@_kernel
def digest_span(lanes, first_lane):
    """Σ fin(lane << 16 | bits) of consecutive lanes: uint64. lanes: uint16[n]; first_lane: int64."""
    total = _ZERO
    word = _U(first_lane) << _U(16)
    for i in range(lanes.size):
        total += _finalise(word | _U(lanes[i]))
        word += _U(65536)
    return total


@_kernel
def digest_runs(image, starts, sizes):
    """The same over runs of an image. image: uint16; starts, sizes: int64[runs], in lanes."""
    total = _ZERO
    for run in range(starts.size):
        word = _U(starts[run]) << _U(16)
        part = image[starts[run] : starts[run] + sizes[run]]
        for i in range(part.size):
            total += _finalise(word | _U(part[i]))
            word += _U(65536)
    return total


# --- runs: where stream space lies in the image ---


@_inline
def _run_at(stream_start, lane):
    """Index of the run that holds a stream lane. stream_start: int64[runs + 1]."""
    low, high = 0, stream_start.size - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if stream_start[middle] <= lane:
            low = middle
        else:
            high = middle
    return low


@_kernel
def gather_dense(image, stream_start, image_start, first, out):
    """Copy out.size stream lanes from `first` on; returns their digest."""
    run = _run_at(stream_start, first)
    total = _ZERO
    done = 0
    while done < out.size:
        skip = first + done - stream_start[run]
        count = min(stream_start[run + 1] - stream_start[run] - skip, out.size - done)
        source = image[image_start[run] + skip : image_start[run] + skip + count]
        word = _U(image_start[run] + skip) << _U(16)
        for i in range(count):
            out[done + i] = source[i]
            total += _finalise(word | _U(source[i]))
            word += _U(65536)
        done += count
        run += 1
    return total


@_kernel
def scatter_dense(lanes, image, stream_start, image_start, first, want_digest):
    """Write lanes (uint16[n]) at stream lanes from `first` on; returns (digest change, lanes that differed)."""
    run = _run_at(stream_start, first)
    total = _ZERO
    changed = 0
    done = 0
    while done < lanes.size:
        skip = first + done - stream_start[run]
        count = min(stream_start[run + 1] - stream_start[run] - skip, lanes.size - done)
        target = image[image_start[run] + skip : image_start[run] + skip + count]
        source = lanes[done : done + count]
        if want_digest:
            word = _U(image_start[run] + skip) << _U(16)
            for i in range(count):
                total += _finalise(word | _U(source[i])) - _finalise(word | _U(target[i]))
                changed += source[i] != target[i]
                word += _U(65536)
        for i in range(count):
            target[i] = source[i]
        done += count
        run += 1
    return total, changed


# --- scan ---


@_inline
def _record(mask, old, new, position, word, to, count, digest):
    """Note the lanes of a mask and write them into the old image.

    word: image lane of the mask's first bit << 16; to: addresses of positions, differences and histogram.
    """
    positions, differences, histogram = to
    while mask != _ZERO:
        j = _trailing_zeros(mask)
        mask &= mask - _ONE
        before, after = _load16(old + 2 * j), _load16(new + 2 * j)
        _store16(old + 2 * j, after)
        _store32(positions + 4 * count, position + j)
        _store16(differences + 2 * count, after - before)
        slot = histogram + 4 * ((after - before) & 0xFFFF)
        _store32(slot, _load32(slot) + 1)
        count += 1
        lane = _U(word + (j << 16))
        digest += _finalise(lane | _U(after)) - _finalise(lane | _U(before))
    return count, digest


@_inline
def _differ_step(step, old, new):
    if step == 64:
        return _differ64(old, new)
    if step == 32:
        return _differ32(old, new)
    if step == 8:
        return _differ8(old, new)
    return _ONE if _load16(old) != _load16(new) else _ZERO


@_inline
def _scan_run(old, new, size, position, lane, to, count, limit, digest):
    """scan_changes for `size` consecutive lanes at the addresses old and new. Returns (lanes done, count, digest)."""
    at, stop = 0, size & ~63
    while at < stop:
        mask = _differ64(old + 2 * at, new + 2 * at)
        while mask == _ZERO and at + 64 < stop:  # a loop of its own, that keeps all it needs in registers
            at += 64
            mask = _differ64(old + 2 * at, new + 2 * at)
        if count > limit:
            return at, count, digest
        word = (lane + at) << 16
        count, digest = _record(mask, old + 2 * at, new + 2 * at, position + at, word, to, count, digest)
        at += 64
    # The rest in steps of 64, 32, 8 or 1 lanes, of which the last goes back to end at the run's end: lanes that were seen before are
    # equal by then and are not noted twice.
    step = 64 if size >= 64 else (32 if size >= 32 else (8 if size >= 8 else 1))
    while at < size:
        if count > limit:
            return at, count, digest
        at = min(at, size - step)
        mask = _differ_step(step, old + 2 * at, new + 2 * at)
        word = (lane + at) << 16
        count, digest = _record(mask, old + 2 * at, new + 2 * at, position + at, word, to, count, digest)
        at += step
    return size, count, digest


@_kernel
def scan_changes(image, lanes, stream_start, image_start, first, bucket_first, positions, differences, histogram, count):
    """Find what differs, note it and update the image.

    lanes: uint16[n], new values of stream lanes first .. first + n; positions: uint32, differences: uint16, filled from `count` on,
    positions counted from bucket_first; histogram: int32[65536], differences are added to it. Counting them here costs nothing, for
    the scan waits for memory. Stops early when fewer than SCAN_ROOM entries are free.
    Returns (lanes done, count, digest change).
    """
    digest = _ZERO
    limit = positions.size - SCAN_ROOM
    to = (_address(positions), _address(differences), _address(histogram))
    run = _run_at(stream_start, first)
    done = 0
    while done < lanes.size:
        skip = first + done - stream_start[run]
        size = min(stream_start[run + 1] - stream_start[run] - skip, lanes.size - done)
        lane = image_start[run] + skip
        old, new, position = _address(image) + 2 * lane, _address(lanes) + 2 * done, first + done - bucket_first
        seen, count, digest = _scan_run(old, new, size, position, lane, to, count, limit, digest)
        done += seen
        if seen < size:
            break
        run += 1
    return done, count, digest


# --- codebook: a dyadic partition of the 65536 differences, and a prefix code over its parts ---
#
# A part (leaf) is an interval [base, base + 2^extra). A difference is coded as its leaf's code and `extra` raw bits. Frequent
# differences become leaves of their own, the long tail shares wide ones: no escapes, so that decoding has no branch.

_SPLIT_BITS, _LEAF_BITS, _EMPTY_BITS = 1.0, 6.0, 2.0  # what a node of the tree costs in the codebook


@_inline
def _leaf_cost(count, extra, total):
    """Bits that a leaf takes: its own, its symbols', and what a code that is shorter than fair takes from the others."""
    fair = total / (1 << MAX_CODE_BITS)
    squeeze = 1.44 * (fair - count) if count < fair else 0.0
    return _LEAF_BITS + count * (math.log2(total) - math.log2(count) + extra) + squeeze


@_inline
def _choose_splits(symbols, counts, leaf_penalty, split):
    """Cheapest tree, bottom up over the nodes that hold symbols. split: uint8[131072], set for these nodes (heap order)."""
    total = 0
    for i in range(symbols.size):
        total += counts[i]
    nodes, weight = symbols.astype(np.int64), counts.astype(np.int64)
    cost = np.empty(symbols.size, np.float64)
    for i in range(symbols.size):
        cost[i] = _leaf_cost(weight[i], 0, total) + leaf_penalty
        split[65536 + nodes[i]] = 0
    size = symbols.size
    for extra in range(1, 17):
        kept = 0
        i = 0
        while i < size:
            parent = nodes[i] >> 1
            divided, sum_ = _SPLIT_BITS + cost[i], weight[i]
            if i + 1 < size and nodes[i + 1] >> 1 == parent:
                divided += cost[i + 1]
                sum_ += weight[i + 1]
                i += 1
            else:
                divided += _EMPTY_BITS
            whole = _leaf_cost(sum_, extra, total) + leaf_penalty
            nodes[kept], weight[kept], cost[kept] = parent, sum_, min(whole, divided)
            split[(65536 >> extra) + parent] = divided < whole
            kept += 1
            i += 1
        size = kept


@_inline
def _collect_leaves(symbols, counts, split, bases, extras, weights):
    """Leaves that hold symbols, in order of their base. Returns how many, or −1 when they are more than the arrays hold."""
    leaves = 0
    i = 0
    while i < symbols.size:
        extra, node = 16, 1
        while split[node] != 0:
            extra -= 1
            node = (65536 + symbols[i]) >> extra
        if leaves == bases.size:
            return -1
        bases[leaves], extras[leaves], weights[leaves] = (symbols[i] >> extra) << extra, extra, 0
        while i < symbols.size and symbols[i] >> extra == bases[leaves] >> extra:
            weights[leaves] += counts[i]
            i += 1
        leaves += 1
    return leaves


@_inline
def _code_lengths(weights, order, lengths):
    """Length-limited Huffman code: Moffat and Katajainen's in-place lengths (WADS 1995), then a repair of what is too long.

    order: the weights' indices by increasing weight.
    """
    size = weights.size
    if size == 1:
        lengths[0] = 0
        return
    a = np.empty(size, np.int64)
    for i in range(size):
        a[i] = weights[order[i]]
    _huffman_depths(a)
    limit = 1 << MAX_CODE_BITS
    kraft = 0
    for i in range(size):
        a[i] = min(a[i], MAX_CODE_BITS)
        kraft += limit >> a[i]
    i = 0
    while kraft > limit:  # lengthen the rarest codes that may grow
        while a[i] == MAX_CODE_BITS:
            i += 1
        a[i] += 1
        kraft -= limit >> a[i]
    for j in range(size - 1, -1, -1):  # and give back what is left, to the most frequent first
        while a[j] > 1 and kraft + (limit >> a[j]) <= limit:
            kraft += limit >> a[j]
            a[j] -= 1
    for j in range(size):
        lengths[order[j]] = a[j]


@_inline
def _huffman_depths(a):
    """Weights, increasing, to code lengths, decreasing, in place. a: int64[n >= 2]."""
    n = a.size
    a[0] += a[1]
    root, leaf = 0, 2
    for next_ in range(1, n - 1):
        if leaf >= n or a[root] < a[leaf]:
            a[next_] = a[root]
            a[root] = next_
            root += 1
        else:
            a[next_] = a[leaf]
            leaf += 1
        if leaf >= n or (root < next_ and a[root] < a[leaf]):
            a[next_] += a[root]
            a[root] = next_
            root += 1
        else:
            a[next_] += a[leaf]
            leaf += 1
    a[n - 2] = 0
    for next_ in range(n - 3, -1, -1):
        a[next_] = a[a[next_]] + 1
    available, used, depth = 1, 0, 0
    root, next_ = n - 2, n - 1
    while available > 0:
        while root >= 0 and a[root] == depth:
            used += 1
            root -= 1
        while available > used:
            a[next_] = depth
            next_ -= 1
            available -= 1
        available = 2 * used
        depth += 1
        used = 0


@_inline
def _canonical_codes(lengths, codes):
    """Codes in order of (length, leaf), written from the least significant bit on."""
    code = 0
    for length in range(1, MAX_CODE_BITS + 1):
        code <<= 1
        for i in range(lengths.size):
            if lengths[i] == length:
                reverse = 0
                for bit in range(length):
                    reverse |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[i] = reverse
                code += 1


@_inline
def _write_tree(symbols, split, lengths, out):
    """Pre-order: 1 = split, 01 and 4 bits = leaf with its code length, 00 = a part without symbols. Returns bytes written."""
    out[:] = 0
    stack = np.empty(64, np.int64)
    stack[0] = 1
    depth, bit, i, leaf = 1, 0, 0, 0
    while depth > 0:
        depth -= 1
        node = stack[depth]
        extra = 16
        while (node >> (16 - extra)) > 1:
            extra -= 1
        end = ((node + 1) << extra) - 65536
        if i == symbols.size or symbols[i] >= end:
            bit += 2
        elif split[node] != 0:
            out[bit >> 3] |= 1 << (bit & 7)
            bit += 1
            stack[depth], stack[depth + 1] = 2 * node + 1, 2 * node
            depth += 2
        else:
            value = 2 | lengths[leaf] << 2
            for j in range(6):
                out[bit >> 3] |= ((value >> j) & 1) << (bit & 7)
                bit += 1
            leaf += 1
            while i < symbols.size and symbols[i] < end:
                i += 1
    return (bit + 7) >> 3


@_kernel
def count_differences(differences, histogram):
    """Add differences (uint16[n]) to a histogram, int32[65536]."""
    for i in range(differences.size):
        histogram[differences[i]] += 1


@_kernel
def take_counts(histogram, symbols, counts):
    """Which differences occur, increasing, and how often; the histogram is zero after. All int32[65536]. Returns how many."""
    distinct, at = 0, _address(histogram)
    for group in range(0, 65536, 8):  # most differences do not occur
        word = at + 4 * group
        if _load64(word) | _load64(word + 8) | _load64(word + 16) | _load64(word + 24) == _ZERO:
            continue
        for symbol in range(group, group + 8):
            symbols[distinct], counts[distinct] = symbol, histogram[symbol]
            distinct += histogram[symbol] != 0
            histogram[symbol] = 0
    return distinct


@_kernel
def choose_leaves(symbols, counts, split, leaves):
    """The codebook's partition. symbols, counts: int32[distinct >= 1]; split: uint8[131072], set where it matters;
    leaves: int64[3, MAX_LEAVES], filled with base, extra and weight. Returns how many leaves.
    """
    penalty, size = 0.0, -1
    while size < 0:
        _choose_splits(symbols, counts, penalty, split)
        size = _collect_leaves(symbols, counts, split, leaves[0], leaves[1], leaves[2])
        penalty = 2.0 * penalty + 16.0
    return size


@_kernel
def assign_codes(symbols, counts, split, leaves, order, codes, out):
    """Codes of all differences that occur, and the codebook.

    leaves: int64[3, size], from choose_leaves; order: int64[size], by increasing weight; codes: uint32[65536], set for those that
    occur (27 bits of code and raw bits, then 5 of their number); out: uint8[CODEBOOK_BYTES].
    Returns (bytes of the codebook, bits of all differences coded).
    """
    bases, extras, size = leaves[0], leaves[1], leaves.shape[1]
    lengths, prefix = np.zeros(size, np.int64), np.zeros(size, np.int64)
    _code_lengths(leaves[2], order, lengths)
    _canonical_codes(lengths, prefix)
    leaf, bits = 0, 0
    for i in range(symbols.size):
        while symbols[i] >= bases[leaf] + (1 << extras[leaf]):
            leaf += 1
        width = lengths[leaf] + extras[leaf]
        codes[symbols[i]] = prefix[leaf] | (symbols[i] - bases[leaf]) << lengths[leaf] | width << 27
        bits += width * counts[i]
    return _write_tree(symbols, split, lengths, out), bits


@_kernel
def read_codebook(tree, table):
    """Decoding table of a codebook. tree: uint8[n], exactly the codebook; table: uint32[4096].

    An entry: base (16 bits), code and raw bits together (5), code bits (4), raw bits (5). Returns the table's index bits or a status.
    """
    bases, extras, lengths = np.empty(MAX_LEAVES, np.int64), np.empty(MAX_LEAVES, np.int64), np.empty(MAX_LEAVES, np.int64)
    stack = np.empty(64, np.int64)
    stack[0] = 1
    depth, bit, leaves, limit = 1, 0, 0, 8 * tree.size
    while depth > 0:
        depth -= 1
        node = stack[depth]
        extra = 16
        while (node >> (16 - extra)) > 1:
            extra -= 1
        if bit >= limit:
            return BAD_CODEBOOK
        if (tree[bit >> 3] >> (bit & 7)) & 1:
            bit += 1
            if extra == 0:
                return BAD_CODEBOOK
            stack[depth], stack[depth + 1] = 2 * node + 1, 2 * node
            depth += 2
            continue
        bit += 1
        if bit >= limit:
            return BAD_CODEBOOK
        full = (tree[bit >> 3] >> (bit & 7)) & 1
        bit += 1
        if full:
            if bit + 4 > limit or leaves == MAX_LEAVES:
                return BAD_CODEBOOK
            length = 0
            for j in range(4):
                length |= np.int64((tree[bit >> 3] >> (bit & 7)) & 1) << j
                bit += 1
            bases[leaves], extras[leaves], lengths[leaves] = (node << extra) - 65536, extra, length
            leaves += 1
    if leaves == 0 or (bit + 7) >> 3 != tree.size:
        return BAD_CODEBOOK
    return _fill_table(bases[:leaves], extras[:leaves], lengths[:leaves], table)


@_inline
def _fill_table(bases, extras, lengths, table):
    index_bits, kraft = 0, 0
    for i in range(lengths.size):
        if lengths[i] > MAX_CODE_BITS or (lengths[i] == 0 and lengths.size > 1):
            return BAD_CODEBOOK
        index_bits = max(index_bits, lengths[i])
        kraft += (1 << MAX_CODE_BITS) >> lengths[i]
    if kraft != 1 << MAX_CODE_BITS:
        return BAD_CODEBOOK
    prefix = np.zeros(lengths.size, np.int64)
    _canonical_codes(lengths, prefix)
    for i in range(lengths.size):
        entry = np.uint32(bases[i] | (lengths[i] + extras[i]) << 16 | lengths[i] << 21 | extras[i] << 25)
        for at in range(prefix[i], 1 << index_bits, 1 << lengths[i]):
            table[at] = entry
    return index_bits


# --- blocks of changes ---


@_inline
def _rice_parameter(gaps, size):
    """The parameter that codes these gaps in the fewest bits. gaps: uint32[>= size]."""
    total = 0
    for i in range(size):
        total += gaps[i]
    top = 0
    while max(size, 1) << (top + 1) <= total:
        top += 1
    best, best_bits = 0, 1 << 62
    for k in range(min(top + 1, MAX_RICE), -1, -1):
        bits = 0
        for i in range(size):
            quotient = gaps[i] >> np.uint32(k)
            bits += quotient + np.uint32(k + 1) if quotient < np.uint32(UNARY_LIMIT) else np.uint32(ESCAPE_BITS)
        if bits < best_bits:
            best, best_bits = k, bits
        elif 2 * bits > 3 * best_bits:
            break
    return best


@_kernel
def encode_blocks(positions, differences, codes, table, gap_stream, value_stream):
    """Code a bucket's changes.

    table: uint8[blocks * BLOCK_RECORD_BYTES]; gap_stream, value_stream: uint8, GAP_BLOCK_BYTES and VALUE_BLOCK_BYTES per block.
    Returns (bytes of the gap stream, bytes of the value stream).
    """
    gaps = np.empty(BLOCK_CHANGES, np.uint32)
    gap_at, value_at, record = _address(gap_stream), _address(value_stream), _address(table)
    for block in range(table.size // BLOCK_RECORD_BYTES):
        start = block * BLOCK_CHANGES
        size = min(BLOCK_CHANGES, positions.size - start)
        for i in range(size - 1):
            gaps[i] = positions[start + i + 1] - positions[start + i] - np.uint32(1)
        k = _rice_parameter(gaps, size - 1)
        gap_bytes = _write_gaps(gaps, size - 1, k, gap_at)
        value_bytes = _write_values(differences, start, size, codes, value_at)
        _store32(record, np.int64(positions[start]))
        _store16(record + 4, gap_bytes)
        _store16(record + 6, value_bytes)
        table[block * BLOCK_RECORD_BYTES + 8] = k
        record += BLOCK_RECORD_BYTES
        gap_at += gap_bytes
        value_at += value_bytes
    return gap_at - _address(gap_stream), value_at - _address(value_stream)


@_inline
def _write_gaps(gaps, size, k, address):
    """Golomb-Rice: quotient in unary (zeros, then a one), k low bits. Returns bytes written; the last word spills up to 8 more."""
    word, filled, at = _ZERO, _ZERO, address
    low = (_ONE << _U(k)) - _ONE
    for i in range(size):
        gap = _U(gaps[i])
        quotient = gap >> _U(k)
        if quotient < _U(UNARY_LIMIT):
            code, bits = (_ONE | (gap & low) << _ONE) << quotient, quotient + _U(k + 1)
        else:
            code, bits = gap << _U(UNARY_LIMIT), _U(ESCAPE_BITS)
        word |= code << filled
        filled += bits
        _store64(at, word)
        at += np.int64(filled >> _U(3))
        word >>= filled & _U(56)
        filled &= _U(7)
    _store64(at, word)
    return at - address + (np.int64(filled) + 7 >> 3)


@_inline
def _write_values(differences, start, size, codes, address):
    word, filled, at = _ZERO, _ZERO, address
    for i in range(start, start + size):
        code = _U(codes[differences[i]])
        word |= (code & _U((1 << 27) - 1)) << filled
        filled += code >> _U(27)
        _store64(at, word)
        at += np.int64(filled >> _U(3))
        word >>= filled & _U(56)
        filled &= _U(7)
    _store64(at, word)
    return at - address + (np.int64(filled) + 7 >> 3)


@_kernel
def index_blocks(payload, table_at, lanes, first, gap_at, value_at, rice):
    """Where every block lies. first, gap_at, value_at: int64[blocks + 1]; rice: int64[blocks].

    first[blocks] = lanes: a block's positions lie below the next one's first. Returns 0 or a status.
    """
    blocks = rice.size
    record = _address(payload) + table_at
    gap_at[0] = table_at + blocks * BLOCK_RECORD_BYTES
    if gap_at[0] + PAYLOAD_PADDING > payload.size:
        return BAD_TABLE
    values = 0
    for i in range(blocks):
        first[i] = _load32(record)
        gap_at[i + 1] = gap_at[i] + _load16(record + 4)
        values += _load16(record + 6)
        rice[i] = payload[table_at + i * BLOCK_RECORD_BYTES + 8]
        if rice[i] > MAX_RICE or first[i] >= lanes or (i > 0 and first[i] <= first[i - 1]):
            return BAD_TABLE
        record += BLOCK_RECORD_BYTES
    first[blocks] = lanes
    value_at[0] = gap_at[blocks]
    record = _address(payload) + table_at
    for i in range(blocks):
        value_at[i + 1] = value_at[i] + _load16(record + 6)
        record += BLOCK_RECORD_BYTES
    return 0 if value_at[blocks] + PAYLOAD_PADDING == payload.size else BAD_TABLE


@_inline
def _two_values(base, bit, entries, index):
    """Two differences from one word: two codes and their raw bits are at most 54 bits. Returns (first, second, bit behind each)."""
    window = _load64(base + (bit >> 3)) >> _U(bit & 7)
    entry = _load32(entries + 4 * np.int64(window & index))
    one = entry + np.int64((window >> _U((entry >> 21) & 15)) & ((_ONE << _U(entry >> 25)) - _ONE))
    taken = (entry >> 16) & 31
    window >>= _U(taken)
    entry = _load32(entries + 4 * np.int64(window & index))
    two = entry + np.int64((window >> _U((entry >> 21) & 15)) & ((_ONE << _U(entry >> 25)) - _ONE))
    return one, two, bit + taken, bit + taken + ((entry >> 16) & 31)


@_inline
def _next_position(base, bit, position, k, low):
    """(position behind the next gap, bit behind it)."""
    window = _load64(base + (bit >> 3)) >> _U(bit & 7)
    quotient = _trailing_zeros(window)
    if quotient < UNARY_LIMIT:
        return position + 1 + (quotient << k) + np.int64((window >> _U(quotient + 1)) & low), bit + quotient + 1 + k
    return position + 1 + np.int64((window >> _U(UNARY_LIMIT)) & _U(0xFFFFFFFF)), bit + ESCAPE_BITS


@_inline
def _decode_block(payload, index, block, size, table, index_bits, positions, values, image, fetch):
    """Decode one block into positions (int64) and values (uint16); meanwhile fetch the cache lines of image lanes `fetch`.

    positions, values, fetch: BLOCK_CHANGES + 1 entries. Two changes a turn, so that the two streams' chains of dependent loads
    run side by side; a turn begins inside its streams and reads at most PAYLOAD_PADDING bytes behind them.
    Returns the last position or a status.
    """
    first, gap_at, value_at, rice = index
    base, entries, target = _address(payload), _address(table), _address(image)
    gap_bit, gap_stop, value_bit, value_stop = gap_at[block] << 3, gap_at[block + 1] << 3, value_at[block] << 3, value_at[block + 1] << 3
    k = rice[block]
    near = rice[max(block - 1, 0)] < NEAR_RICE
    low, mask = (_ONE << _U(k)) - _ONE, _U((1 << index_bits) - 1)
    position = first[block]
    for i in range(0, size - 1, 2):
        if value_bit > value_stop:
            return BAD_VALUES
        if gap_bit > gap_stop:
            return BAD_GAPS
        one, two, _, value_bit = _two_values(base, value_bit, entries, mask)
        values[i], values[i + 1] = one, two
        if near:
            _prefetch_first(target + 2 * fetch[i])
            _prefetch_first(target + 2 * fetch[i + 1])
        else:
            _prefetch_second(target + 2 * fetch[i])
            _prefetch_second(target + 2 * fetch[i + 1])
        positions[i] = position
        position, gap_bit = _next_position(base, gap_bit, position, k, low)
        positions[i + 1] = position
        if i + 2 < size:
            position, gap_bit = _next_position(base, gap_bit, position, k, low)
    if size & 1:
        if value_bit > value_stop:
            return BAD_VALUES
        one, _, value_bit, _ = _two_values(base, value_bit, entries, mask)
        values[size - 1], positions[size - 1] = one, position
    if (gap_bit + 7) >> 3 != gap_at[block + 1]:
        return BAD_GAPS
    if (value_bit + 7) >> 3 != value_at[block + 1]:
        return BAD_VALUES
    return position


@_inline
def _to_image(positions, size, offset, run, stream_start, image_start):
    """Positions in the bucket to image lanes, in place. offset: the bucket's first stream lane. Returns the last run."""
    i = 0
    while i < size:
        shift = offset + image_start[run] - stream_start[run]
        end = stream_start[run + 1] - offset
        while i < size and positions[i] < end:
            positions[i] += shift
            i += 1
        run += 1
    return run - 1


@_kernel
def decode_blocks(payload, changes, index, begin, end, table, index_bits, offset, stream_start, image_start, lanes, values):
    """Decode blocks begin .. end into image lanes (int64) and differences (uint16). index: of `index_blocks`. Returns 0 or a status."""
    first = index[0]
    no_fetch = np.zeros(BLOCK_CHANGES, np.int64)
    run = _run_at(stream_start, offset + first[begin])
    for block in range(begin, end):
        size = min(BLOCK_CHANGES, changes - block * BLOCK_CHANGES)
        at = (block - begin) * BLOCK_CHANGES
        to_lanes, to_values = lanes[at : at + size], values[at : at + size]
        last = _decode_block(payload, index, block, size, table, index_bits, to_lanes, to_values, payload, no_fetch)
        if last < 0:
            return last
        if last >= first[block + 1]:
            return np.int64(BAD_POSITION)
        run = _to_image(to_lanes, size, offset, run, stream_start, image_start)
    return np.int64(0)


@_inline
def _add_to_image(image, lanes, values, size, want_digest):
    """Add values to the image's lanes; values become the new bits. Returns the digest change."""
    target = _address(image)
    total = _ZERO
    if want_digest:
        before = np.empty(BLOCK_CHANGES, np.uint16)
        for i in range(size):
            old = _load16(target + 2 * lanes[i])
            before[i] = old
            values[i] += np.uint16(old)
            _store16(target + 2 * lanes[i], np.int64(values[i]))
        for i in range(size):
            word = _U(lanes[i]) << _U(16)
            total += _finalise(word | _U(values[i])) - _finalise(word | _U(before[i]))
    else:
        for i in range(size):
            at = target + 2 * lanes[i]
            _store16(at, _load16(at) + np.int64(values[i]))
    return total


@_kernel
def apply_blocks(payload, changes, index, begin, end, table, index_bits, offset, stream_start, image_start, image, want_digest):
    """Decode blocks begin .. end and add them to the image. Returns (0 or a status, digest change).

    A block is added after its successor was decoded, and its cache lines are fetched meanwhile: that hides the memory's latency.
    """
    first = index[0]
    lanes, values = np.zeros((2, BLOCK_CHANGES), np.int64), np.empty((2, BLOCK_CHANGES), np.uint16)
    run = _run_at(stream_start, offset + first[begin])
    total = _ZERO
    pending = 0
    for block in range(begin, end):
        size = min(BLOCK_CHANGES, changes - block * BLOCK_CHANGES)
        now, before = block & 1, 1 - (block & 1)
        last = _decode_block(payload, index, block, size, table, index_bits, lanes[now], values[now], image, lanes[before])
        if last < 0:
            return last, total
        if last >= first[block + 1]:
            return np.int64(BAD_POSITION), total
        run = _to_image(lanes[now], size, offset, run, stream_start, image_start)
        total += _add_to_image(image, lanes[before], values[before], pending, want_digest)
        pending = size
    total += _add_to_image(image, lanes[(end - 1) & 1], values[(end - 1) & 1], pending, want_digest)
    return np.int64(0), total


@_kernel
def count_applied(image, lanes, differences, change):
    """How many of a bucket's changes are in the image, given what they have changed its digest by. −1: no number of them.

    lanes: int64[n], in the order in which they were added; differences: uint16[n]; change: uint64.
    """
    total = _ZERO
    for i in range(lanes.size):
        if total == change:
            return i
        bits = image[lanes[i]]
        word = _U(lanes[i]) << _U(16)
        total += _finalise(word | _U(bits)) - _finalise(word | _U(np.uint16(bits - differences[i])))
    return lanes.size if total == change else -1


@_kernel
def add_changes(image, lanes, differences):
    """Add differences to the image's lanes, one after the other. Returns the digest change."""
    total = _ZERO
    for i in range(lanes.size):
        old = image[lanes[i]]
        new = np.uint16(old + differences[i])
        image[lanes[i]] = new
        word = _U(lanes[i]) << _U(16)
        total += _finalise(word | _U(new)) - _finalise(word | _U(old))
    return total
