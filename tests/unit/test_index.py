"""The index of tensors: round trips, merging, and tables that lie (written after FORMAT.md)."""

from __future__ import annotations

import hashlib
import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import DataStatesError, FormatError, MissingKeyError, UnsupportedFormatError
from megatron_datastates.format import tables
from megatron_datastates.format.index import Index, build_index, index_entry, merge_indexes
from megatron_datastates.format.tables import Directory
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
    """What several ranks store: of one tensor each may have several fragments, or none."""
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


@given(parts())
def test_merging_is_the_same_as_taking_fragments_one_by_one(parts):
    ranks = [build_index(part, {f"object {n}": 0}) for n, part in enumerate(parts)]
    merged = merge_indexes((rank, n) for n, rank in enumerate(ranks))
    wanted: dict[str, list[tuple[Fragment, Extent]]] = {}
    for number, part in enumerate(parts):
        for item, extent in part:
            wanted.setdefault(item.key, []).append((item, Extent(number, extent.offset, extent.bytes)))
    assert contents(merged) == wanted
    assert merged.objects == {f"object {n}": n for n in range(len(parts))}
    received = [Index.decode(rank.encode(), "it", 1) for rank in ranks]
    again = merge_indexes((rank, n) for n, rank in enumerate(received))
    assert again.encode(packed=True) == merged.encode(packed=True)


@given(parts())
def test_every_ranks_own_index_can_be_had_again_from_the_stored_one(parts):
    own = [build_index(part, {f"object {n}": 0}).encode() for n, part in enumerate(parts)]
    merged = merge_indexes((Index.decode(data, "it", 1), n) for n, data in enumerate(own))
    stored = Index.decode(merged.encode(packed=True), "it", len(own))
    assert [stored.own_index(n) for n in range(len(own))] == own


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


def test_an_index_is_named_after_its_sections_too():
    places = [[(fragment("w", [99], [start], [5]), 0, 4096)] for start in (3, 7)]
    one, other = (index_entry(index_of(place).encode(packed=True)) for place in places)
    assert one.name != other.name
    assert one == index_entry(index_of(places[0]).encode(packed=True))


# -- sections on demand -----------------------------------------------------------------------------------


def opened(data: bytes, asked: list[tuple[int, int]]) -> Index:
    """An index of which only the directory was read; `asked` tells what else is."""

    def read(ranges):
        asked.extend(ranges)
        return [data[at : at + size] for at, size in ranges]

    directory = data[: index_entry(data).directory_bytes]
    return Index.from_directory(Directory(directory, "it", len(data)), FILES, read)


MANY = index_of([(fragment(key, [40], [at], [4]), 0, 4096 + at) for key in "abcd" for at in range(0, 40, 4)])


def test_what_is_preloaded_is_read_once_in_the_order_of_the_file():
    asked: list[tuple[int, int]] = []
    index = opened(MANY.encode(packed=True), asked)
    index.preload(["d", "a", "no such key", "c"])
    assert len(asked) == 3
    assert asked == sorted(asked)
    assert [list(index.tensor(key).fragments(key)) for key in "acd"] == [contents(MANY)[key] for key in "acd"]
    assert len(asked) == 3
    index.preload("abcd")
    assert len(asked) == 4


def test_keys_shapes_and_dtypes_are_known_from_the_directory_alone():
    asked: list[tuple[int, int]] = []
    index = opened(MANY.encode(packed=True), asked)
    assert list(index.tensors) == ["a", "b", "c", "d"]
    assert "a" in index.tensors and "e" not in index.tensors
    assert index.describe("b") == MANY.describe("b") == ("uint8", (40,))
    with pytest.raises(KeyError):
        index.describe("e")
    assert not asked


def test_a_damaged_section_is_told_when_its_tensor_is_asked_for():
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


# -- hostile bytes ----------------------------------------------------------------------------------------

COLUMNS = [[0, 2], [0, 0], [2, 2], [2, 2], [0, 1], [4096, 4096]]
SIZE = 8 * 6 * 2  # of their section


def section_of(columns: list[list[int]]) -> bytes:
    return b"".join(struct.pack("<Q", value % 2**64) for column in columns for value in column)


def crafted(
    columns: list[list[int]] = COLUMNS,
    stored: bytes | None = None,
    row: dict[str, int] = {},  # noqa: B006
    rows: int = 1,
    shapes: list[int] | None = None,
    objects: list[tuple[int, int]] = [],  # noqa: B006
    names: bytes | None = None,
    counts: tuple[int, ...] | None = None,
    version: int = 1,
    features: tuple[int, int] = (0, 0),
    files: int = 2,
) -> bytes:
    """An index of one tensor `w` of shape (4, 2), cut in two; anything can be replaced by a lie.

    `row` are fields of the key table's row, of which there are `rows`.
    """
    section = section_of(columns) if stored is None else stored
    fields = {"name": 1, "dtype": 5, "ndim": 2, "fragments": len(columns[0]), "stored": len(section)} | row
    digest = hashlib.sha256(section).digest()[:16]
    keys = struct.pack("<IHHQQ", *fields.values()) + digest
    shapes = [4, 2] * rows if shapes is None else shapes
    names = b"w" * rows if names is None else names
    found = (rows, len(shapes), len(objects), len(names))
    head = struct.pack("<8sIIIIQQQQ", b"DSINDEX\x01", version, *features, files, *(counts or found))
    tables = [head, keys * rows, struct.pack(f"<{len(shapes)}q", *shapes)]
    tables += [struct.pack("<II", *item) for item in objects]
    directory = b"".join([*tables, names])
    return directory + bytes(-len(directory) % 8) + section * rows


def touch(data: bytes) -> None:
    """Decodes everything."""
    index = Index.decode(data, "it", FILES)
    for key, entry in index.tensors.items():
        index.describe(key)
        list(entry.fragments(key))


def steps_of(columns: list[list[int]]) -> bytes:
    """A packed section."""
    steps = [[b - a for a, b in zip([0, *column], column, strict=False)] for column in columns]
    return zlib.compress(section_of(steps))


def test_an_index_written_after_the_document_is_read():
    data = crafted(objects=[(2, 1)], names=b"wab")
    index = Index.decode(data, "it", FILES)
    first, second = index.tensor("w").fragments("w")
    assert first == (fragment("w", [4, 2], [0, 0], [2, 2]), Extent(0, 4096, 4))
    assert second == (fragment("w", [4, 2], [2, 0], [2, 2]), Extent(1, 4096, 4))
    assert index.objects == {"ab": 1}
    assert Index(dict(index.tensors), index.objects).encode() == data


def test_a_packed_section_written_after_the_document_is_read():
    packed = Index.decode(crafted(stored=steps_of(COLUMNS)), "it", FILES)
    assert contents(packed) == contents(Index.decode(crafted(), "it", FILES))


def geometry(column: int, *values: int) -> dict[str, object]:
    """Other numbers in one column."""
    return {"columns": [list(values) if n == column else part for n, part in enumerate(COLUMNS)]}


LIES = {
    "a longer name than there are names": {"row": {"name": 2}},
    "an absurdly long name": {"row": {"name": 2**32 - 1}},
    "names of nobody": {"names": b"wx"},
    "a name that is not UTF-8": {"names": b"\xff"},
    "a key twice": {"rows": 2},
    "an object twice": {"objects": [(1, 0)] * 2, "names": b"waa"},
    "an object's name behind the end": {"objects": [(2, 0)], "names": b"wa"},
    "an object in no file": {"objects": [(1, 2)], "names": b"wa"},
    "more data files than there are": {"files": FILES + 1},
    "absurdly many data files": {"files": 2**32 - 1},
    "a fragment in no file": geometry(4, 0, 2),
    "a file number that overflows": geometry(4, 0, 2**32),
    "too many dimensions": {"row": {"ndim": 65, "fragments": 0}, "shapes": [1] * 65, "stored": b""},
    "fewer sizes than dimensions": {"shapes": [4]},
    "more sizes than dimensions": {"shapes": [4, 2, 1]},
    "a section that ends behind the file": {"row": {"stored": SIZE + 1}},
    "a section that ends before the file does": {"row": {"stored": SIZE - 1}},
    "a section far behind the end": {"row": {"stored": 2**64 - 1}},
    "sections that overflow to the size": {"rows": 2, "row": {"stored": 2**63 + SIZE}, "names": b"wx"},
    "sections of two tensors in one place": {"rows": 2, "row": {"stored": SIZE // 2}, "names": b"wx"},
    "more fragments than the section": {"row": {"fragments": 3}},
    "fewer fragments than the section": {"row": {"fragments": 1}},
    "no fragments but a section": {"row": {"fragments": 0}},
    "absurdly many fragments": {"row": {"fragments": 2**64 - 1}},
    "fragments that overflow to the size": {"row": {"fragments": 2**60 + 2}},
    "a packed section of something else": {"stored": b"x" * 40},
    "a packed section of too much": {"stored": steps_of([[*part, 7] for part in COLUMNS])},
    "a packed section of too little": {"stored": steps_of(COLUMNS)[:-5]},
    "a packed section and more": {"stored": steps_of(COLUMNS) + b"x"},
    "a packed section without its checksum": {"stored": steps_of(COLUMNS)[:-4] + b"1234"},
    "a negative shape": {"shapes": [-4, 2]},
    "a negative offset": geometry(0, -1, 2),
    "a negative fragment": geometry(2, -2, 2),
    "a fragment beyond its tensor": geometry(2, 2, 3),
    "an offset beyond its tensor": geometry(0, 5, 2),
    "an offset that overflows": geometry(0, 2**63 - 1, 2),
    "a size that overflows": geometry(2, 2**63 - 1, 2),
    "an absurd global shape": {"shapes": [2**62, 2**62]},
    "an absurd global shape of no elements": {"shapes": [2**62, 0], "columns": [[], [], [], [], [], []]},
    "data in the header": geometry(5, 4095, 4096),
    "a file offset that overflows": geometry(5, 2**64 - 4, 4096),
    "a file offset beyond all files": geometry(5, 2**62, 4096),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_tables_that_lie_are_refused(lie):
    touch(crafted())
    with pytest.raises(FormatError):
        touch(crafted(**lie))


@pytest.mark.parametrize("table", range(4))
@pytest.mark.parametrize("count", [0, 30, 2**32, 2**61, 2**64 - 1])
def test_counts_that_do_not_add_up_to_the_size_are_refused(table, count):
    counts = [1, 2, 1, 2]
    counts[table] = count
    touch(crafted(objects=[(1, 0)], names=b"wa"))
    with pytest.raises(FormatError, match="do not add up"):
        touch(crafted(objects=[(1, 0)], names=b"wa", counts=tuple(counts)))


def test_a_section_is_not_unpacked_if_its_bytes_cannot_hold_what_it_claims(monkeypatch):
    monkeypatch.setattr(tables, "_expanded", None)
    with pytest.raises(FormatError, match="cannot hold"):
        touch(crafted(stored=b"x" * 50, row={"fragments": 50 * 1032 // 48 + 1}))


def test_a_section_is_not_unpacked_beyond_what_it_claims():
    bomb = zlib.compress(bytes(64 << 20), 9)
    data = crafted(stored=bomb, row={"fragments": len(bomb) // 48 + 1})
    tracemalloc.start()
    with pytest.raises(FormatError, match="does not unpack"):
        touch(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("stored", [None, steps_of(COLUMNS)], ids=["plain", "packed"])
def test_every_truncation_is_refused(stored):
    data = crafted(stored=stored)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            Index.decode(data[:length], "it", FILES)


@pytest.mark.parametrize("stored", [None, steps_of(COLUMNS)], ids=["plain", "packed"])
def test_no_flipped_byte_raises_anything_but_our_errors(stored):
    for data in flips(crafted(stored=stored, objects=[(1, 0)], names=b"wa")):
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
    assert not np.frombuffer(data[:32], np.uint64).any()  # without tables and names


@given(st.binary(max_size=120), st.integers(0, 8), st.integers(0, 3))
def test_random_sections_raise_nothing_but_our_errors(stored, fragments, ndim):
    try:
        touch(crafted(stored=stored, row={"fragments": fragments, "ndim": ndim}, shapes=[4] * ndim))
    except DataStatesError:
        return
    assert len(stored) == fragments == 0


@pytest.mark.parametrize("code", [0, 23, 65535])
def test_an_unknown_dtype_is_told_from_damage(code):
    index = Index.decode(crafted(row={"dtype": code}), "it", FILES)
    for ask in (index.tensor, index.describe):
        with pytest.raises(UnsupportedFormatError, match=f"'w'.* code {code}.*update"):
            ask("w")


def test_one_bad_tensor_leaves_the_others_readable():
    data = bytearray(MANY.encode())
    dtype_of_second_row = struct.calcsize("<8sIIIIQQQQ") + 40 + 4
    data[dtype_of_second_row : dtype_of_second_row + 2] = struct.pack("<H", 999)
    index = Index.decode(bytes(data), "it", FILES)
    assert index.tensor("a").global_shape == index.tensor("c").global_shape == (40,)
    with pytest.raises(UnsupportedFormatError):
        index.tensor("b")


def test_a_later_version_and_unknown_incompatible_features_are_refused():
    for lie in ({"version": 2}, {"features": (1, 0)}):
        with pytest.raises(UnsupportedFormatError, match="update"):
            touch(crafted(**lie))


def test_unknown_compatible_features_are_ignored():
    touch(crafted(features=(0, 1 << 31)))
