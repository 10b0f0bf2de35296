"""Footers with valid checksums and false contents."""

from __future__ import annotations

import struct
import zlib

import pytest

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.values import BLOCK_BYTES

DATA_BYTES = 2 * BLOCK_BYTES
MIB = 1 << 20


def crafted(
    entries: bytes = b"",
    count: int = 0,
    checksums: bytes = b"",
    checksum_count: int = 0,
    data_bytes: int = DATA_BYTES,
    block_bytes: int = BLOCK_BYTES,
    total: int = 4096,
    offset: int | None = None,
    claimed_total: int | None = None,
    version: int = 2,
    group: int = 0,
) -> bytes:
    """Returns a footer with valid checksums, made as FORMAT.md says and not by the code under test."""
    fields = struct.pack(
        "<8sIIIIQQQII", b"DSFOOT\x00\x01", version, 0, 0, block_bytes, data_bytes, 5, 1, 0, 1
    )
    fields += struct.pack("<Q", count) if version == 1 else struct.pack("<II", count, group)
    fields += struct.pack("<Q16s", checksum_count, bytes(16))
    body = (fields + entries + checksums).ljust(total - 36, b"\0")
    at = data_bytes if offset is None else offset
    end = len(body) + 36 if claimed_total is None else claimed_total
    trailer = struct.pack("<8sQQII", b"DSTAIL\x00\x01", at, end, zlib.crc32(body), 0)
    return body + trailer + struct.pack("<I", zlib.crc32(trailer))


def stored_1(key: bytes, offset: int, size: int, length: int | None = None) -> bytes:
    """Returns the record of an object in format 1."""
    return struct.pack("<QQI", offset, size, len(key) if length is None else length) + key


def stored(
    key: bytes,
    offset: int,
    size: int,
    length: int | None = None,
    logical: int | None = None,
    kind: int = 1,
    codec: int = 0,
    item: int = 0,
    frames: tuple[int, ...] = (),
    frame_count: int | None = None,
) -> bytes:
    """Returns the record of an entry: without codec unless arguments say otherwise."""
    logical, length = size if logical is None else logical, len(key) if length is None else length
    counted = len(frames) if frame_count is None else frame_count
    fields = struct.pack("<QQQBBHIII", offset, size, logical, kind, codec, item, length, counted, 0)
    return fields + bytes(range(32)) + key + struct.pack(f"<{len(frames)}I", *frames)


def test_a_footer_made_as_the_document_says_is_read():
    entries = stored(b"key", 4096, 10)
    entries += stored(b"key", 4160, 30, logical=MIB + 40, kind=2, codec=1, frames=(10, 20))
    entries += stored(b"", 4224, 8, kind=3, codec=2, item=4, frames=(8,))
    entries += stored(b"odd", 4288, 5, logical=99, kind=2, codec=77, frames=(1, 2, 3))
    data = crafted(entries, 4, bytes(range(8)), 2, group=9)
    footer = Footer.decode(data, "it")
    one, two, odd = footer.objects["key"], footer.streams["key"], footer.streams["odd"]
    assert (one.offset, one.stored_bytes, one.bytes, one.codec, one.frame_sizes) == (4096, 10, 10, 0, ())
    assert (two.offset, two.stored_bytes, two.bytes, two.codec) == (4160, 30, MIB + 40, 1)
    assert (two.frame_sizes, two.sha256) == ((10, 20), bytes(range(32)))
    (fragment,) = footer.fragments
    assert (fragment.name, fragment.codec, fragment.item_bytes, fragment.bytes) == ("", 2, 4, 8)
    assert (odd.codec, odd.frame_sizes) == (77, (1, 2, 3))  # reading it is refused, and nothing else
    assert footer.block_checksums == bytes(range(8))
    assert footer.group == 9
    assert footer.encode() == data


def test_a_footer_of_format_1_is_read():
    data = crafted(stored_1(b"key", 4096, 10), 1, bytes(range(8)), 2, version=1)
    footer = Footer.decode(data, "it")
    assert (footer.objects["key"].offset, footer.objects["key"].bytes) == (4096, 10)
    assert footer.block_checksums == bytes(range(8))
    assert (footer.streams, footer.fragments, footer.group) == ({}, [], 0)
    assert footer.encode() == data


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "entry",
    [
        (DATA_BYTES, 1),
        (4096, 2**62 - 1),
        (2**64 - 1, 2**62 - 1),
        (DATA_BYTES - 1, 2),
        (0, 8),  # the header
        (4095, 1),
    ],
)
def test_an_entry_outside_the_data_is_refused(entry, version):
    record = stored_1 if version == 1 else stored
    with pytest.raises(FormatError, match="leaves the data"):
        Footer.decode(crafted(record(b"key", *entry), 1, version=version), "it")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("length", [2**32 - 1, 4096])
def test_a_name_that_leaves_the_footer_is_refused(version, length):
    record = stored_1 if version == 1 else stored
    with pytest.raises(FormatError, match="longer than the footer"):
        Footer.decode(crafted(record(b"key", 4096, 1, length), 1, version=version), "it")


FALSE_SIZES = {
    "no codec but a frame": {"frames": (10,)},
    "no codec and other logical bytes": {"logical": 11},
    "too few frames": {"codec": 1, "logical": MIB + 1, "frames": (10,)},
    "too many frames": {"codec": 1, "frames": (5, 5)},
    "frames that do not add up": {"codec": 1, "frames": (9,)},
    "a frame without bytes": {"codec": 1, "logical": 2 * MIB, "frames": (0, 10)},
    "a frame longer than it decodes to": {"codec": 1, "logical": 9, "frames": (10,)},
    "no frames": {"codec": 1, "frames": ()},
    "no logical bytes": {"codec": 1, "logical": 0, "frames": (10,)},
    "items of no bytes": {"codec": 2, "frames": (10,)},
    "absurdly many logical bytes": {"codec": 1, "logical": 2**62, "frames": (10,)},
    "logical bytes that need more frames than there can be": {
        "codec": 1,
        "logical": 2**62 - 1,
        "frames": (10,),
    },
    "a fragment with a name": {"kind": 3},
    "more frames than the footer": {"codec": 1, "frames": (10,), "frame_count": 2**32 - 1},
    # 88 bytes of the footer and 75 of the entry precede frames of 4 bytes; 4060 bytes precede the trailer.
    "one frame more than the footer has room for": {"codec": 1, "frames": (10,), "frame_count": 975},
    "absurdly many logical bytes in an unknown codec": {"codec": 77, "logical": 2**62},
}


@pytest.mark.parametrize("lie", FALSE_SIZES.values(), ids=FALSE_SIZES)
def test_an_entry_that_contradicts_itself_is_refused(lie):
    Footer.decode(crafted(stored(b"key", 4096, 10), 1), "it")
    with pytest.raises(FormatError, match="damaged"):
        Footer.decode(crafted(stored(b"key", 4096, 10, **lie), 1), "it")


@pytest.mark.parametrize("kind", [0, 4, 255])
def test_an_entry_of_an_unknown_kind_makes_the_file_unreadable(kind):
    with pytest.raises(UnsupportedFormatError, match=f"kind {kind}, .*update"):
        Footer.decode(crafted(stored(b"key", 4096, 10, kind=kind), 1), "it")


def test_objects_and_streams_may_share_names():
    both = stored(b"key", 4096, 10) + stored(b"key", 4160, 10, kind=2)
    assert set(Footer.decode(crafted(both, 2), "it").streams) == {"key"}
    with pytest.raises(FormatError, match="twice"):
        Footer.decode(crafted(both + stored(b"key", 4224, 10, kind=2), 3), "it")


@pytest.mark.parametrize(
    ("version", "count"), [(1, 1000), (1, 2**32), (1, 2**64 - 1), (2, 1000), (2, 2**32 - 1)]
)
def test_an_absurd_count_of_entries_is_refused(version, count):
    with pytest.raises(FormatError, match="more than it has room for"):
        Footer.decode(crafted(stored(b"key", 4096, 1), count, version=version), "it")


def test_entries_that_end_past_the_footer_are_refused():
    with pytest.raises(FormatError, match="within its entries"):
        Footer.decode(crafted(stored(b"k" * 3900, 4096, 1), 2), "it")


def test_an_object_named_twice_is_refused():
    with pytest.raises(FormatError, match="twice"):
        Footer.decode(crafted(stored(b"key", 4096, 1) + stored(b"key", 8192, 1), 2), "it")


def test_a_name_that_is_not_utf8_is_refused():
    with pytest.raises(FormatError, match="UTF-8"):
        Footer.decode(crafted(stored(b"key\xff", 4096, 1), 1), "it")


@pytest.mark.parametrize("count", [1, 3, 1000, 2**62, 2**64 - 1])
def test_a_count_of_checksums_that_does_not_fit_the_data_is_refused(count):
    with pytest.raises(FormatError, match=f"{count} checksums for {DATA_BYTES} bytes"):
        Footer.decode(crafted(checksums=bytes(8), checksum_count=count), "it")


def test_checksums_that_end_past_the_footer_are_refused():
    with pytest.raises(FormatError, match="2048 checksums for"):
        Footer.decode(crafted(data_bytes=2048 * MIB, checksum_count=2048), "it")


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": DATA_BYTES - 4096},
        {"block_bytes": 4096},
        {"data_bytes": 0},
        {"data_bytes": DATA_BYTES + 64},
        {"total": 4096 + 64},
    ],
    ids=str,
)
def test_a_footer_that_contradicts_itself_is_refused(lie):
    with pytest.raises(FormatError, match="contradicts itself"):
        Footer.decode(crafted(**lie), "it")


@pytest.mark.parametrize("claimed", [0, 36, 8192, 2**64 - 1])
def test_a_footer_of_another_length_than_its_trailer_says_is_refused(claimed):
    with pytest.raises(FormatError, match="damaged"):
        Footer.decode(crafted(claimed_total=claimed), "it")


def test_a_footer_shorter_than_its_fields_is_refused():
    body = b"DSFOOT\x00\x01".ljust(64, b"\0")
    trailer = struct.pack("<8sQQII", b"DSTAIL\x00\x01", 4096, 100, zlib.crc32(body), 0)
    with pytest.raises(FormatError, match="does not begin as a footer does"):
        Footer.decode(body + trailer + struct.pack("<I", zlib.crc32(trailer)), "it")
