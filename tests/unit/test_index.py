"""The index of tensors: round trips, merging, and sections that are read on demand."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import FormatError, MissingKeyError, UnsupportedFormatError, similar_keys
from megatron_datastates.format.index import Index, build_index, index_entry
from megatron_datastates.format.merging import merge_indexes
from megatron_datastates.format.tables import Directory
from megatron_datastates.format.values import DTYPES, Extent, Fragment, element_bytes
from tests.support.fragments import fragments_of
from tests.unit.by_hand import fragment, index_of

FILES = 4


@st.composite
def entries(draw):
    """Draws fragments with extents: any boxes within their tensors, anywhere in files."""
    found = []
    for key in draw(st.lists(st.text(max_size=12), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        for _ in range(draw(st.integers(1, 4))):
            offset = tuple(draw(st.integers(0, size)) for size in shape)
            part = tuple(draw(st.integers(0, size - at)) for at, size in zip(offset, shape, strict=True))
            size = math.prod(part) * element_bytes(dtype)
            extent = Extent(draw(st.integers(0, FILES - 1)), draw(st.integers(4096, 2**61)), size)
            found.append((Fragment(key, dtype, shape, offset, part), extent))
    return found


OBJECTS = st.dictionaries(st.text(max_size=12), st.integers(0, FILES - 1), max_size=4)


def contents(index: Index) -> dict[str, list[tuple[Fragment, Extent]]]:
    return {key: list(fragments_of(entry, key)) for key, entry in index.tensors.items()}


@given(entries(), OBJECTS, st.booleans())
def test_indexes_round_trip(given_entries, objects, packed):
    decoded = Index.decode(build_index(given_entries, objects).encode(packed=packed), "it", FILES)
    wanted: dict[str, list[tuple[Fragment, Extent]]] = {}
    for item, extent in given_entries:
        wanted.setdefault(item.key, []).append((item, extent))
    assert contents(decoded) == wanted
    assert decoded.objects == objects


@given(entries(), OBJECTS, st.booleans())
def test_equal_indexes_have_equal_bytes(given_entries, objects, packed):
    data = build_index(given_entries, objects).encode(packed=packed)
    keys = sorted({item.key for item, _ in given_entries}, reverse=True)
    regrouped = [pair for key in keys for pair in given_entries if pair[0].key == key]
    assert build_index(regrouped, dict(reversed(objects.items()))).encode(packed=packed) == data
    decoded = Index.decode(data, "it", FILES)
    assert Index(dict(decoded.tensors), decoded.objects).encode(packed=packed) == data


@st.composite
def parts(draw):
    """Draws what several ranks store: each may have several fragments of a tensor, or none."""
    found = [[] for _ in range(draw(st.integers(1, FILES)))]
    for key in draw(st.lists(st.text(max_size=12), unique=True, max_size=4)):
        dtype, shape = (
            draw(st.sampled_from(sorted(DTYPES))),
            tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        )
        for rank in draw(st.lists(st.integers(0, len(found) - 1), max_size=6)):
            offset = tuple(draw(st.integers(0, size)) for size in shape)
            part = tuple(draw(st.integers(0, size - at)) for at, size in zip(offset, shape, strict=True))
            item = Fragment(key, dtype, shape, offset, part)
            found[rank].append((item, Extent(0, draw(st.integers(4096, 2**61)), item.bytes)))
    return found


def merged_index(*ranks: Index) -> Index:
    own = [rank.encode() for rank in ranks]
    return merge_indexes(Directory(data, "it", len(data)) for data in own)


@given(parts())
def test_a_merged_index_has_the_fragments_of_all_ranks_in_order(parts):
    ranks = [build_index(part, {f"object {n}": 0}) for n, part in enumerate(parts)]
    merged = merged_index(*ranks)
    wanted: dict[str, list[tuple[Fragment, Extent]]] = {}
    for number, part in enumerate(parts):
        for item, extent in part:
            wanted.setdefault(item.key, []).append((item, Extent(number, extent.offset, extent.bytes)))
    assert contents(merged) == wanted
    assert merged.objects == {f"object {n}": n for n in range(len(parts))}


@given(parts())
def test_every_ranks_own_index_can_be_made_again_from_the_stored_one(parts):
    own = [build_index(part, {f"object {n}": 0}).encode() for n, part in enumerate(parts)]
    merged = merge_indexes(Directory(data, "it", len(data)) for data in own)
    stored = Index.decode(merged.encode(packed=True), "it", len(own))
    assert [stored.own_index(n) for n in range(len(own))] == own


def test_fragments_of_one_key_are_merged_in_the_order_of_files():
    parts = [index_of([(fragment("w", [4], [at], [2]), 0, 4096)]) for at in (2, 0)]
    assert merged_index(*parts).tensor("w").offsets.tolist() == [[2], [0]]


@pytest.mark.parametrize("other", [Fragment("w", "int8", (4,), (0,), (2,)), fragment("w", [5], [0], [2])])
def test_ranks_that_disagree_on_a_tensor_are_refused(other):
    parts = [build_index([(item, Extent(0, 4096, 2))], {}) for item in (fragment("w", [4], [2], [2]), other)]
    with pytest.raises(FormatError, match="'w' disagree"):
        merged_index(*parts)
    with pytest.raises(FormatError, match="'w' disagree"):
        index_of([(fragment("w", [4], [2], [2]), 0, 4096), (other, 0, 8192)])


def test_an_object_stored_by_two_ranks_is_refused():
    with pytest.raises(
        FormatError, match="'x' is stored by two ranks, in the data files 0 and 1: put the rank into"
    ):
        merged_index(build_index([], {"x": 0}), build_index([], {"x": 0}))


def test_a_missing_tensor_is_named():
    with pytest.raises(MissingKeyError, match="'w'"):
        build_index([], {}).tensor("w")


def test_the_name_of_an_index_depends_on_its_sections():
    places = [[(fragment("w", [99], [start], [5]), 0, 4096)] for start in (3, 7)]
    one, other = (index_entry(index_of(place).encode(packed=True)) for place in places)
    assert one.name != other.name
    assert one == index_entry(index_of(places[0]).encode(packed=True))


# -- sections on demand -----------------------------------------------------------------------------------


def opened(data: bytes, asked: list, *, whole: bool = False) -> Index:
    """Returns an index of which only the directory was read.

    Args:
        asked: lists what else is read: ranges, or (`whole`) the list of ranges of each call.
    """

    def read(ranges):
        asked.append(ranges) if whole else asked.extend(ranges)
        return [data[at : at + size] for at, size in ranges]

    directory = data[: index_entry(data).directory_bytes]
    return Index.from_directory(Directory(directory, "it", len(data)), FILES, read)


MANY = index_of([(fragment(key, [40], [at], [4]), 0, 4096 + at) for key in "abcd" for at in range(0, 40, 4)])


def test_preloaded_sections_are_read_once_in_the_order_of_the_file():
    asked: list[tuple[int, int]] = []
    index = opened(MANY.encode(packed=True), asked)
    index.preload(["d", "a", "no such key", "c"])
    assert len(asked) == 3
    assert asked == sorted(asked)
    assert [list(fragments_of(index.tensor(key), key)) for key in "acd"] == [
        contents(MANY)[key] for key in "acd"
    ]
    assert len(asked) == 3
    index.preload("abcd")
    assert len(asked) == 4


HUNDREDS = index_of([(fragment(f"w{key:03}", [4], [0], [4]), 0, 4096 + 4 * key) for key in range(500)])


def test_entries_that_are_asked_for_one_by_one_are_read_many_at_a_time():
    asked: list[list[tuple[int, int]]] = []
    index = opened(HUNDREDS.encode(), asked, whole=True)
    for key in list(index.tensors)[:3]:
        index.tensor(key)
    assert [len(ranges) for ranges in asked] == [1, 1, 1], "of few tensors, no others are read"
    assert contents(index) == contents(HUNDREDS)
    assert len(asked) < 20
    assert sum(map(len, asked)) == 500


def test_entries_that_are_read_ahead_may_be_damaged():
    data = bytearray(HUNDREDS.encode())
    data[-1] ^= 1
    index = opened(bytes(data), [])
    keys = list(index.tensors)
    assert [index.tensor(key).global_shape for key in keys[:-1]] == [(4,)] * 499
    with pytest.raises(FormatError, match="it: the section of 'w499' is damaged"):
        index.tensor(keys[-1])


def test_keys_shapes_and_dtypes_are_known_from_the_directory_alone():
    asked: list[tuple[int, int]] = []
    index = opened(MANY.encode(packed=True), asked)
    assert list(index.tensors) == ["a", "b", "c", "d"]
    assert "a" in index.tensors and "e" not in index.tensors
    assert index.describe("b") == MANY.describe("b") == ("uint8", (40,))
    with pytest.raises(KeyError):
        index.describe("e")
    assert not asked


def test_a_damaged_section_is_refused_when_its_tensor_is_requested():
    data = bytearray(MANY.encode(packed=True))
    data[-1] ^= 1
    index = opened(bytes(data), [])
    index.preload("abc")
    for _ in range(2):
        with pytest.raises(FormatError, match="it: the section of 'd' is damaged: its SHA-256 differs"):
            index.tensor("d")


def test_sections_are_packed_where_that_makes_them_smaller():
    plain, packed = MANY.encode(), MANY.encode(packed=True)
    assert len(packed) < len(plain) / 2
    single = index_of([(fragment("w", [], [], []), 0, 0x123456789ABCDEF0)])
    assert single.encode(packed=True) == single.encode()


def test_one_bad_tensor_leaves_the_others_readable():
    data = bytearray(MANY.encode())
    dtype_of_second_row = struct.calcsize("<8sIIIIQQQQ") + 40 + 4
    data[dtype_of_second_row : dtype_of_second_row + 2] = struct.pack("<H", 999)
    index = Index.decode(bytes(data), "it", FILES)
    assert index.tensor("a").global_shape == index.tensor("c").global_shape == (40,)
    with pytest.raises(UnsupportedFormatError):
        index.tensor("b")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("model.layers.1.weight", " (it has 'decoder.layers.1.weight')"),
        ("embeding", " (it has 'embedding')"),
        ("x", ""),
    ],
)
def test_a_key_that_is_not_there_is_named_with_similar_ones(key: str, named: str) -> None:
    assert similar_keys(key, ["decoder.layers.1.weight", "decoder.layers.1.bias", "embedding"]) == named
    assert similar_keys(key, []) == ""
