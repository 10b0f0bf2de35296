"""Layouts of data files: the rules of FORMAT.md, for any fragments."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import Fragment
from megatron_datastates.pipeline.saving.plans import plan_state
from megatron_datastates.plan.layout import TailItem, align_up, place_objects, plan_layout
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from tests.support.fragments import fragments_of
from tests.unit.by_hand import fragment

MIB = 1 << 20
SIZES = st.one_of(st.integers(0, 200), st.sampled_from([MIB - 1, MIB, MIB + 1, 3 * MIB + 5]))
STATES = st.lists(st.tuples(SIZES, st.booleans()), max_size=12)


def items(keys):
    return [TailItem(Kind.OBJECT, key) for key in keys]


def plan(state: list[tuple[int, bool]], objects: tuple[str, ...] = ()):
    fragments = [fragment(f"t{i}", [size], [0], [size]) for i, (size, _) in enumerate(state)]
    return plan_layout(fragments, [eager for _, eager in state], items(objects))


def in_file_order(state, layout):
    """Returns (offset, bytes, eager, position) of every fragment, in the order of the file."""
    return [(offset, *state[i], i) for offset, i in zip(layout.offsets.tolist(), layout.order, strict=True)]


@given(STATES)
def test_every_fragment_has_its_place(state):
    assert sorted(plan(state).order) == list(range(len(state)))


@given(STATES)
def test_fragments_neither_overlap_nor_touch_the_header(state):
    layout = plan(state)
    at = 4096
    for offset, size, _, _ in in_file_order(state, layout):
        assert offset >= at
        at = offset + size
    assert layout.tensor_end >= at


@given(STATES)
def test_fragments_are_aligned_by_their_size_and_packed(state):
    layout = plan(state)
    at = 4096
    for offset, size, _, _ in in_file_order(state, layout):
        assert offset == align_up(at, 4096 if size >= MIB else 64)
        at = offset + size
    assert layout.tensor_end == align_up(at, 4096)


@given(STATES)
def test_eager_fragments_come_first_and_else_the_order_is_kept(state):
    order = [(not eager, position) for _, _, eager, position in in_file_order(state, plan(state))]
    assert order == sorted(order)


@given(STATES)
def test_the_index_says_where_the_fragments_are(state):
    layout = plan(state, ("x", "y"))
    index = Index.decode(layout.index, "it", 1)
    for offset, size, _, position in in_file_order(state, layout):
        (item, extent), = fragments_of(index.tensor(f"t{position}"))  # fmt: skip
        assert (extent.file, extent.offset, extent.bytes) == (0, offset, size)
        assert item.shape == (size,)
    assert index.objects == {"x": 0, "y": 0}


@given(STATES)
def test_equal_states_have_equal_layouts(state):
    one, other = plan(state), plan(list(state))
    assert (one.index, one.digest, one.order) == (other.index, other.digest, other.order)


BASE = [Fragment("a", "float32", (8, 4), (0, 0), (4, 4)), Fragment("b", "int8", (100,), (0,), (100,))]


@pytest.mark.parametrize(
    ("change", "value"),
    [("key", "c"), ("dtype", "int32"), ("global_shape", (9, 4)), ("offset", (4, 0)), ("shape", (3, 4))],
)
def test_any_change_of_structure_changes_the_digest(change, value):
    changed = [dataclasses.replace(BASE[0], **{change: value}), BASE[1]]
    assert plan_layout(changed, [False, False], ()).digest != plan_layout(BASE, [False, False], ()).digest


def test_a_change_of_eagerness_or_objects_changes_the_digest():
    digests = {plan_layout(BASE, eager, ()).digest for eager in ([True, False], [False, True])}
    digests |= {
        plan_layout(BASE, [False, False], items(keys)).digest for keys in (("x",), ("y",), ("x", "y"))
    }
    assert len(digests) == 5


def test_addresses_and_contents_do_not_change_the_digest():
    digests = set()
    keep = []
    for seed in range(3):
        tensors = {name: torch.full((100, 7), float(seed)) for name in ("a", "b")}
        keep.append(tensors)
        (state,) = TensorProvider(tensors, Mutability.NOW).entries()
        digests.add(plan_state(state, []).layout.digest)
    assert len(digests) == 1


def test_a_rank_without_fragments_has_an_empty_layout():
    layout = plan_layout([], [], ())
    assert layout.order == ()
    assert layout.tensor_end == 4096
    assert not Index.decode(layout.index, "it", 1).tensors


def test_fragments_of_one_key_that_disagree_are_refused():
    with pytest.raises(FormatError, match="'a' disagree"):
        plan_layout([BASE[0], Fragment("a", "int8", (8, 4), (4, 0), (4, 4))], [False, False], ())


def test_a_dtype_without_code_is_refused():
    with pytest.raises(FormatError, match="qint8"):
        plan_layout([Fragment("a", "qint8", (8,), (0,), (8,))], [False], ())


def test_two_objects_of_one_key_are_refused():
    with pytest.raises(FormatError, match="'x' is given twice"):
        plan_layout([], [], items(("y", "x", "x")))


@given(st.lists(st.integers(0, 500)), st.integers(1, 9).map(lambda n: n * 4096))
def test_objects_follow_each_other_from_the_begin_on(sizes, begin):
    offsets, end = place_objects(sizes, begin)
    at = begin
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset == align_up(at, 64)
        at = offset + size
    assert end == align_up(at, 4096)
