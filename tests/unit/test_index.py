"""The index of tensors: round trips, merging, and tables that lie (written after FORMAT.md)."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import DataStatesError, FormatError, MissingKeyError, UnsupportedFormatError
from megatron_datastates.format.index import Index, build_index, index_name, merge_indexes
from megatron_datastates.format.values import DTYPES, Extent, Fragment, element_bytes
from tests.unit.by_hand import fragment, index_of
from tests.unit.test_codecs import flips

FILES = 4


@st.composite
def entries(draw):
    """Fragments with extents: any boxes within their tensors, anywhere in files."""
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
    return {key: list(entry.fragments(key)) for key, entry in index.tensors.items()}


@given(entries(), OBJECTS)
def test_indexes_round_trip(given_entries, objects):
    decoded = Index.decode(build_index(given_entries, objects).encode(), "it", FILES)
    wanted: dict[str, list[tuple[Fragment, Extent]]] = {}
    for item, extent in given_entries:
        wanted.setdefault(item.key, []).append((item, extent))
    assert contents(decoded) == wanted
    assert decoded.objects == objects


@given(entries(), OBJECTS)
def test_equal_indexes_have_equal_bytes(given_entries, objects):
    data = build_index(given_entries, objects).encode()
    keys = sorted({item.key for item, _ in given_entries}, reverse=True)
    regrouped = [pair for key in keys for pair in given_entries if pair[0].key == key]
    assert build_index(regrouped, dict(reversed(objects.items()))).encode() == data
    decoded = Index.decode(data, "it", FILES)
    assert Index(dict(decoded.tensors), decoded.objects).encode() == data


@given(st.lists(entries(), min_size=1, max_size=FILES))
def test_a_merged_index_holds_every_part_under_its_file(parts):
    parts = [[(i, e) for i, e in part if i.key not in {j.key for p in parts[:n] for j, _ in p}]
             for n, part in enumerate(parts)]  # fmt: skip
    merged = merge_indexes((build_index(part, {f"object {n}": 0}), n) for n, part in enumerate(parts))
    for number, part in enumerate(parts):
        for item, extent in part:
            assert (item, Extent(number, extent.offset, extent.bytes)) in contents(merged)[item.key]
    assert merged.objects == {f"object {n}": n for n in range(len(parts))}


def test_fragments_of_one_key_are_merged_in_the_order_of_files():
    parts = [index_of([(fragment("w", [4], [at], [2]), 0, 4096)]) for at in (2, 0)]
    assert merge_indexes((part, n) for n, part in enumerate(parts)).tensor("w").offsets.tolist() == [[2], [0]]


@pytest.mark.parametrize("other", [Fragment("w", "int8", (4,), (0,), (2,)), fragment("w", [5], [0], [2])])
def test_ranks_that_disagree_on_a_tensor_are_refused(other):
    parts = [build_index([(item, Extent(0, 4096, 2))], {}) for item in (fragment("w", [4], [2], [2]), other)]
    with pytest.raises(FormatError, match="'w' disagree"):
        merge_indexes((part, n) for n, part in enumerate(parts))
    with pytest.raises(FormatError, match="'w' disagree"):
        index_of([(fragment("w", [4], [2], [2]), 0, 4096), (other, 0, 8192)])


def test_an_object_stored_by_two_ranks_is_refused():
    with pytest.raises(FormatError, match="'x' is stored by the ranks of files 0 and 1"):
        merge_indexes((build_index([], {"x": 0}), n) for n in (0, 1))


def test_a_missing_tensor_is_named():
    with pytest.raises(MissingKeyError, match="'w'"):
        build_index([], {}).tensor("w")


def test_an_index_is_named_after_its_bytes():
    assert index_name(b"a") == index_name(b"a") != index_name(b"b")


# -- hostile bytes ----------------------------------------------------------------------------------------


def crafted(
    keys: list[tuple[int, ...]] | None = None,
    fragments: list[tuple[int, int, int]] | None = None,
    coordinates: list[int] | None = None,
    objects: list[tuple[int, int, int]] = [],  # noqa: B006
    names: bytes = b"w",
    counts: tuple[int, ...] | None = None,
    version: int = 1,
    features: tuple[int, int] = (0, 0),
) -> bytes:
    """An index of one tensor `w` of shape (4, 2), cut in two; anything can be replaced by a lie."""
    keys = [(0, 1, 5, 2, 0, 2, 0)] if keys is None else keys
    fragments = [(0, 4096, 4), (1, 4096, 4)] if fragments is None else fragments
    coordinates = [4, 2, 0, 0, 2, 2, 2, 0, 2, 2] if coordinates is None else coordinates
    found = (len(keys), len(fragments), len(coordinates), len(objects), len(names))
    head = struct.pack("<8sIIIIQQQQQ", b"DSINDEX\x01", version, *features, 0, *(counts or found))
    sections = [struct.pack("<QIHHQQQ", *key) for key in keys]
    sections += [struct.pack("<IIQQ", file, 0, offset, size) for file, offset, size in fragments]
    sections += [struct.pack("<q", value) for value in coordinates]
    sections += [struct.pack("<QII", *item) for item in objects]
    return b"".join([head, *sections, names])


def touch(data: bytes) -> None:
    """Decodes everything."""
    index = Index.decode(data, "it", FILES)
    for entry in index.tensors.values():
        list(entry.fragments("k"))


def test_an_index_written_after_the_document_is_read():
    data = crafted(objects=[(1, 2, 3)], names=b"wab")
    index = Index.decode(data, "it", FILES)
    first, second = index.tensor("w").fragments("w")
    assert first == (fragment("w", [4, 2], [0, 0], [2, 2]), Extent(0, 4096, 4))
    assert second == (fragment("w", [4, 2], [2, 0], [2, 2]), Extent(1, 4096, 4))
    assert index.objects == {"ab": 3}
    assert Index(dict(index.tensors), index.objects).encode() == data


LIES = {
    "a name behind the end": {"keys": [(1, 1, 5, 2, 0, 2, 0)]},
    "a name far behind the end": {"keys": [(2**64 - 1, 1, 5, 2, 0, 2, 0)]},
    "an absurdly long name": {"keys": [(0, 2**32 - 1, 5, 2, 0, 2, 0)]},
    "a name that is not UTF-8": {"names": b"\xff"},
    "a key twice": {"keys": [(0, 1, 5, 2, 0, 2, 0)] * 2},
    "an object twice": {"objects": [(0, 1, 0)] * 2},
    "an object's name behind the end": {"objects": [(1, 1, 0)]},
    "an object in no file": {"objects": [(0, 1, FILES)]},
    "a fragment in no file": {"fragments": [(0, 4096, 4), (FILES, 4096, 4)]},
    "too many dimensions": {"keys": [(0, 1, 5, 65, 0, 0, 0)], "coordinates": [1] * 65, "fragments": []},
    "fragments behind the table": {"keys": [(0, 1, 5, 2, 1, 2, 0)]},
    "fragments far behind the table": {"keys": [(0, 1, 5, 2, 2**64 - 1, 2, 0)]},
    "more fragments than the table": {"keys": [(0, 1, 5, 2, 0, 2**64 - 1, 0)]},
    "coordinates behind the table": {"keys": [(0, 1, 5, 2, 0, 2, 1)]},
    "coordinates far behind the table": {"keys": [(0, 1, 5, 2, 0, 2, 2**64 - 1)]},
    "a negative shape": {"coordinates": [-4, 2, 0, 0, 2, 2, 2, 0, 2, 2]},
    "a negative offset": {"coordinates": [4, 2, -1, 0, 2, 2, 2, 0, 2, 2]},
    "a negative fragment": {"coordinates": [4, 2, 0, 0, -2, -2, 2, 0, 2, 2]},
    "a fragment beyond its tensor": {"coordinates": [4, 2, 0, 0, 2, 2, 3, 0, 2, 2]},
    "an offset that overflows": {"coordinates": [4, 2, 2**63 - 1, 0, 2, 2, 2, 0, 2, 2]},
    "a size that overflows": {"coordinates": [4, 2, 1, 0, 2**63 - 1, 2, 2, 0, 2, 2]},
    "an end that overflows": {
        "coordinates": [4, 2, 1, 0, 2**63 - 1, 2, 2, 0, 2, 2],
        "fragments": [(0, 4096, 2**64 - 2), (1, 4096, 4)],
    },
    "a product that overflows to the size": {
        "coordinates": [2**62, 2**62, 0, 0, 2**61, 2**62, 0, 0, 1, 4],
        "fragments": [(0, 4096, 0), (0, 4096, 4)],
    },
    "an absurd global shape": {"coordinates": [2**62, 2**62, 0, 0, 2, 2, 2, 0, 2, 2]},
    "an absurd shape beside a zero": {
        "coordinates": [2**62, 0, 0, 0, 1, 0, 1, 0, 1, 0], "fragments": [(0, 4096, 0)] * 2
    },
    "too few bytes": {"fragments": [(0, 4096, 3), (1, 4096, 4)]},
    "too many bytes": {"fragments": [(0, 4096, 5), (1, 4096, 4)]},
    "absurdly many bytes": {"fragments": [(0, 4096, 2**64 - 1), (1, 4096, 4)]},
    "data in the header": {"fragments": [(0, 4095, 4), (1, 4096, 4)]},
    "a file offset that overflows": {"fragments": [(0, 2**64 - 4, 4), (1, 4096, 4)]},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_tables_that_lie_are_refused(lie):
    touch(crafted())
    with pytest.raises(FormatError):
        touch(crafted(**lie))


@pytest.mark.parametrize("section", range(5))
@pytest.mark.parametrize("count", [0, 3, 2**32, 2**61, 2**64 - 1])
def test_counts_that_do_not_add_up_to_the_size_are_refused(section, count):
    counts = [1, 2, 10, 1, 1]
    counts[section] = count
    with pytest.raises(FormatError, match="do not add up"):
        touch(crafted(objects=[(0, 1, 0)], counts=tuple(counts)))


def test_every_truncation_is_refused():
    data = crafted()
    for length in range(len(data)):
        with pytest.raises(FormatError):
            Index.decode(data[:length], "it", FILES)


def test_no_flipped_byte_raises_anything_but_our_errors():
    for data in flips(crafted(objects=[(0, 1, 0)])):
        try:
            touch(data)
        except DataStatesError:
            continue


@given(st.binary(max_size=300))
def test_random_tables_raise_nothing_but_our_errors(data):
    head = struct.pack("<8sIIII", b"DSINDEX\x01", 1, 0, 0, 0)
    try:
        touch(head + data)
    except DataStatesError:
        return
    assert not np.frombuffer(data[:40], np.uint64)[:4].any()  # names alone, without tables, do no harm


@pytest.mark.parametrize("code", [0, 23, 65535])
def test_an_unknown_dtype_is_told_from_damage(code):
    with pytest.raises(UnsupportedFormatError, match=f"'w'.* code {code}.*update"):
        touch(crafted(keys=[(0, 1, code, 2, 0, 2, 0)]))


def test_one_bad_tensor_leaves_the_others_readable():
    keys = [(0, 1, 5, 2, 0, 2, 0), (1, 1, 999, 2, 0, 2, 0)]
    index = Index.decode(crafted(keys=keys, names=b"wx"), "it", FILES)
    assert index.tensor("w").global_shape == (4, 2)


def test_a_later_version_and_unknown_incompatible_features_are_refused():
    for lie in ({"version": 2}, {"features": (1, 0)}):
        with pytest.raises(UnsupportedFormatError, match="update"):
            touch(crafted(**lie))


def test_unknown_compatible_features_are_ignored():
    touch(crafted(features=(0, 1 << 31)))
