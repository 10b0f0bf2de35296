"""Indexes with false tables, made as FORMAT.md says and not by the code under test."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import DataStatesError, FormatError, UnsupportedFormatError
from megatron_datastates.format import tables
from megatron_datastates.format.index import Index
from megatron_datastates.format.values import Extent
from tests.support.fragments import fragments_of
from tests.unit.by_hand import fragment
from tests.unit.test_codecs import flips
from tests.unit.test_index import FILES, contents

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
    objects: list[tuple[int, ...]] = [],  # noqa: B006
    names: bytes | None = None,
    counts: tuple[int, ...] | None = None,
    version: int = 2,
    features: tuple[int, int] = (0, 0),
    files: int = 2,
) -> bytes:
    """Returns an index of one tensor `w` of shape (4, 2) in two fragments; arguments replace parts of it.

    Args:
        row: fields of the key table's row, which is there `rows` times.
        objects: bytes of the name, data file and kind (default: an object).
    """
    section = section_of(columns) if stored is None else stored
    fields = {"name": 1, "dtype": 5, "ndim": 2, "flags": 0}
    fields |= {"fragments": len(columns[0]), "stored": len(section)} | row
    digest = hashlib.sha256(section).digest()[:16]
    keys = struct.pack("<IHBBQQ", *fields.values()) + digest
    shapes = [4, 2] * rows if shapes is None else shapes
    names = b"w" * rows if names is None else names
    found = (rows, len(shapes), len(objects), len(names))
    head = struct.pack("<8sIIIIQQQQ", b"DSINDEX\x01", version, *features, files, *(counts or found))
    tables = [head, keys * rows, struct.pack(f"<{len(shapes)}q", *shapes)]
    objects = [item if version == 1 else (*item, 1)[:3] for item in objects]
    tables += [struct.pack(f"<{len(item)}I", *item) for item in objects]
    directory = b"".join([*tables, names])
    return directory + bytes(-len(directory) % 8) + section * rows


def touch(data: bytes) -> None:
    """Decodes all entries of an index."""
    index = Index.decode(data, "it", FILES)
    for key, entry in index.tensors.items():
        index.describe(key)
        if not entry.encoded:
            list(fragments_of(entry, key))


def steps_of(columns: list[list[int]]) -> bytes:
    """Returns a packed section."""
    steps = [[b - a for a, b in zip([0, *column], column, strict=False)] for column in columns]
    return zlib.compress(section_of(steps))


@pytest.mark.parametrize("version", [1, 2])
def test_an_index_made_as_the_document_says_is_read(version):
    data = crafted(objects=[(2, 1)], names=b"wab", version=version)
    index = Index.decode(data, "it", FILES)
    first, second = fragments_of(index.tensor("w"), "w")
    assert first == (fragment("w", [4, 2], [0, 0], [2, 2]), Extent(0, 4096, 4))
    assert second == (fragment("w", [4, 2], [2, 0], [2, 2]), Extent(1, 4096, 4))
    assert index.objects == {"ab": 1}
    assert Index(dict(index.tensors), index.objects).encode(version=version) == data


def test_streams_and_encoded_tensors_made_as_the_document_says_are_read():
    numbers = [*COLUMNS[:-1], [0, 2**32 - 1]]
    data = crafted(numbers, row={"flags": 1}, objects=[(2, 1), (1, 0, 2), (2, 0, 2)], names=b"wabaab")
    index = Index.decode(data, "it", FILES)
    entry = index.tensor("w")
    assert entry.encoded
    assert (entry.file_offsets.tolist(), entry.file_bytes.tolist()) == ([0, 2**32 - 1], [4, 4])
    assert (index.objects, index.streams) == ({"ab": 1}, {"a": 0, "ab": 0})
    assert Index(dict(index.tensors), index.objects, index.streams).encode() == data


def test_an_entry_of_an_unknown_kind_and_a_tensor_with_unknown_flags_are_refused():
    for kind in (0, 3, 2**32 - 1):
        with pytest.raises(UnsupportedFormatError, match=f"kind {kind}, .*update"):
            Index.decode(crafted(objects=[(1, 0, kind)], names=b"wa"), "it", FILES)
    index = Index.decode(crafted(row={"flags": 2}), "it", FILES)
    for ask in (index.tensor, index.describe):
        with pytest.raises(UnsupportedFormatError, match=r"'w'.*flags 0x2.*update"):
            ask("w")


def test_more_dimensions_than_a_byte_can_count_are_refused_in_format_1():
    for flags in (1, 255):
        with pytest.raises(FormatError, match="dimensions"):
            Index.decode(crafted(row={"flags": flags}, version=1), "it", FILES)


def test_a_packed_section_made_as_the_document_says_is_read():
    packed = Index.decode(crafted(stored=steps_of(COLUMNS)), "it", FILES)
    assert contents(packed) == contents(Index.decode(crafted(), "it", FILES))


def geometry(column: int, *values: int) -> dict[str, object]:
    """Returns arguments of `crafted` that replace one column."""
    return {"columns": [list(values) if n == column else part for n, part in enumerate(COLUMNS)]}


LIES = {
    "a longer name than there are names": {"row": {"name": 2}},
    "an absurdly long name": {"row": {"name": 2**32 - 1}},
    "names without a row": {"names": b"wx"},
    "a name that is not UTF-8": {"names": b"\xff"},
    "a key twice": {"rows": 2},
    "an object twice": {"objects": [(1, 0)] * 2, "names": b"waa"},
    "a stream twice": {"objects": [(1, 0, 2)] * 2, "names": b"waa"},
    "a number of an entry past the last": {**geometry(5, 0, 2**32), "row": {"flags": 1}},
    "an absurd number of an entry": {**geometry(5, 0, 2**64 - 1), "row": {"flags": 1}},
    "an object's name past the end": {"objects": [(2, 0)], "names": b"wa"},
    "an object in no file": {"objects": [(1, 2)], "names": b"wa"},
    "more data files than there are": {"files": FILES + 1},
    "absurdly many data files": {"files": 2**32 - 1},
    "a fragment in no file": geometry(4, 0, 2),
    "a file number that overflows": geometry(4, 0, 2**32),
    "too many dimensions": {"row": {"ndim": 65, "fragments": 0}, "shapes": [1] * 65, "stored": b""},
    "fewer sizes than dimensions": {"shapes": [4]},
    "more sizes than dimensions": {"shapes": [4, 2, 1]},
    "a section that ends past the file": {"row": {"stored": SIZE + 1}},
    "a section that ends before the file does": {"row": {"stored": SIZE - 1}},
    "a section far past the end": {"row": {"stored": 2**64 - 1}},
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
    "a packed section with bytes after it": {"stored": steps_of(COLUMNS) + b"x"},
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
def test_false_tables_are_refused(lie):
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


def test_a_section_that_claims_too_much_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(tables, "_expanded", None)
    with pytest.raises(FormatError, match="cannot hold"):
        touch(crafted(stored=b"x" * 50, row={"fragments": 50 * 1032 // 48 + 1}))


def test_unpacking_stops_at_what_a_section_claims():
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
def test_an_unknown_dtype_is_distinguished_from_damage(code):
    index = Index.decode(crafted(row={"dtype": code}), "it", FILES)
    for ask in (index.tensor, index.describe):
        with pytest.raises(UnsupportedFormatError, match=f"'w'.* code {code}.*update"):
            ask("w")


def test_a_later_version_and_unknown_incompatible_features_are_refused():
    for lie in ({"version": 3}, {"version": 0}, {"features": (1, 0)}):
        with pytest.raises(UnsupportedFormatError, match="update"):
            touch(crafted(**lie))


def test_unknown_compatible_features_are_ignored():
    touch(crafted(features=(0, 1 << 31)))
