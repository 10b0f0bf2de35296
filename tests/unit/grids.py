"""What hypothesis draws for tests of resharding: shapes, ways to cut them into boxes, tensors of any bits."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from tests.unit.states import KNOWN_DTYPES, random_tensor

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offset, shape

DTYPES = st.sampled_from(KNOWN_DTYPES).map(lambda name: getattr(torch, name))
SHAPES = st.lists(st.one_of(st.integers(2, 9), st.integers(0, 9)), max_size=4).map(tuple)


@st.composite
def regular(draw: st.DrawFn, shape: Shape, prepended: int = 0) -> list[Box]:
    """Draws equal boxes; the axes that Megatron would prepend are cut into single elements."""
    sizes = [
        1 if axis < prepended else n // draw(st.sampled_from(divisors(n))) for axis, n in enumerate(shape)
    ]
    starts = itertools.product(*(range(0, n, k) if k else [0] for n, k in zip(shape, sizes, strict=True)))
    return [(start, tuple(sizes)) for start in starts]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0] or [1]


@st.composite
def rectilinear(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Draws a grid whose rows and columns have any sizes, zero included."""
    ranges = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
        ranges.append(list(itertools.pairwise([0, *cuts, size])))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*ranges)]


@st.composite
def partitions(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Draws boxes that form no grid: cut in two again and again, along any axis, anywhere."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, size[axis]))
        second = tuple(at + cut * (d == axis) for d, at in enumerate(offset))
        boxes.append((offset, tuple(cut if d == axis else n for d, n in enumerate(size))))
        boxes.append((second, tuple(n - cut if d == axis else n for d, n in enumerate(size))))
    return draw(st.permutations(boxes))


def grids(shape: Shape) -> st.SearchStrategy[list[Box]]:
    return st.one_of(regular(shape), rectilinear(shape), partitions(shape))


@st.composite
def slices(draw: st.DrawFn, shape: Shape) -> Box:
    """Draws one box in a shape."""
    ranges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns a box of a tensor, as a view."""
    return tensor[(*(slice(at, at + n) for at, n in zip(*box, strict=True)), ...)]


@st.composite
def targets(draw: st.DrawFn, dtype: torch.dtype, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a tensor of this shape, and the memory that it is a view of: axes in any order, with margins."""
    order = draw(st.permutations(range(len(shape))))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    whole = [before + n + after for n, (before, after) in zip(shape, margins, strict=True)]
    memory = random_tensor(dtype, tuple(whole[axis] for axis in order), seed=draw(st.integers(0, 9)))
    turned = memory.permute(sorted(range(len(order)), key=order.__getitem__))
    return part(turned, (tuple(before for before, _ in margins), shape)), memory
