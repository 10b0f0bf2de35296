"""Where a save is sampled, computed apart from the engine: an oracle for tests of the tripwire.

Places are ranges of offsets in the file, in its order. The n-th save of an engine, from 0, has the seed
`sample_seed` + n.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.native.harness import KIB, Copy

SAMPLE, LOOK = 64, 16 * KIB
MOST_DEVICE_COPIES, MOST_GRIDS, ROWS_PER_GRID = 128, 16, 128
LEAST_ROW_STEP, LEAST_GRID = 4 * KIB, 256 * KIB
BLOCK = SAMPLE * (MOST_DEVICE_COPIES + MOST_GRIDS * ROWS_PER_GRID)  # page-locked memory of one save's samples


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def scatter(seed: int, number: int) -> int:
    return _mix((_mix(seed) + number) & ((1 << 64) - 1))


def sample_in(copy: Copy, begin: int, end: int, seed: int) -> range:
    """Returns the 64 bytes around a random one of [begin, end), as far as its row goes."""
    middle = begin + scatter(seed, begin) % (end - begin)
    row = copy.offset + (middle - copy.offset) // copy.row_bytes * copy.row_bytes
    low, high = max(begin, row), min(end, row + copy.row_bytes)
    first = max(low, min(middle - SAMPLE // 2, high - SAMPLE))
    return range(first, min(first + SAMPLE, high))


def host_samples(copy: Copy, chunk_bytes: int, seed: int) -> list[range]:
    """Returns one sample in each chunk of the copy."""
    end = copy.offset + copy.source.nbytes
    borders = [copy.offset, *range((copy.offset // chunk_bytes + 1) * chunk_bytes, end, chunk_bytes), end]
    return [sample_in(copy, a, b, seed) for a, b in itertools.pairwise(borders)]


def looks(copy: Copy, chunk_bytes: int, seed: int) -> list[range]:
    """Returns the second look's samples: one in each 16 KiB of each chunk of the copy."""
    end, at, found = copy.offset + copy.source.nbytes, copy.offset, []
    while at < end:
        chunk_end = min(end, (at // chunk_bytes + 1) * chunk_bytes)
        found += [sample_in(copy, a, min(a + LOOK, chunk_end), seed) for a in range(at, chunk_end, LOOK)]
        at = chunk_end
    return found


def device_samples(copies: Sequence[Copy], seed: int) -> list[range]:
    """Returns rows of grids on large copies; of the others one each, or one in each group of neighbours."""
    shares = _grid_shares(copies, seed)
    single = [i for i, share in enumerate(shares) if share == 0]
    groups = min(len(single), MOST_DEVICE_COPIES - (len(copies) - len(single)))
    chosen = set()
    for group in range(groups):
        begin, end = group * len(single) // groups, (group + 1) * len(single) // groups
        chosen.add(single[begin + scatter(seed, group) % (end - begin)])
    found = []
    for i, copy in enumerate(copies):
        if shares[i]:
            found += _grid(copy, shares[i], seed)
        elif i in chosen:
            found.append(sample_in(copy, copy.offset, copy.offset + copy.source.nbytes, seed))
    return found


def _grid_shares(copies: Sequence[Copy], seed: int) -> list[int]:
    sizes = [copy.source.nbytes if copy.source.ndim == 1 else 0 for copy in copies]
    sizes = [size if size >= LEAST_GRID else 0 for size in sizes]
    step = sum(sizes) // MOST_GRIDS + 1
    points = range(scatter(seed, 0) % step, sum(sizes), step)
    before = 0
    shares = []
    for size in sizes:
        shares.append(sum(before <= point < before + size for point in points))
        before += size
    return shares


def _grid(copy: Copy, share: int, seed: int) -> list[range]:
    size = copy.source.nbytes
    rows = share * ROWS_PER_GRID - scatter(seed, copy.offset) % (share * ROWS_PER_GRID // 8)
    rows = min(rows, size // LEAST_ROW_STEP)
    step = size // rows
    first = scatter(seed, copy.offset + 1) % (size - (rows - 1) * step - SAMPLE + 1)
    return [range(at, at + SAMPLE) for at in range(copy.offset + first, copy.offset + size, step)][:rows]
