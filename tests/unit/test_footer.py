"""Footers with valid checksums and false contents."""

from __future__ import annotations

import struct
import zlib

import pytest

from megatron_datastates.errors import FormatError
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.values import BLOCK_BYTES

DATA_BYTES = 2 * BLOCK_BYTES


def crafted(
    objects: bytes = b"",
    object_count: int = 0,
    checksums: bytes = b"",
    checksum_count: int = 0,
    data_bytes: int = DATA_BYTES,
    block_bytes: int = BLOCK_BYTES,
    total: int = 4096,
    offset: int | None = None,
    claimed_total: int | None = None,
) -> bytes:
    """Returns a footer with valid checksums, made as FORMAT.md says and not by the code under test."""
    fields = struct.pack(
        "<8sIIIIQQQIIQQ16s", b"DSFOOT\x00\x01", 1, 0, 0, block_bytes, data_bytes, 5, 1, 0, 1,
        object_count, checksum_count, bytes(16),
    )  # fmt: skip
    body = (fields + objects + checksums).ljust(total - 36, b"\0")
    at = data_bytes if offset is None else offset
    end = len(body) + 36 if claimed_total is None else claimed_total
    trailer = struct.pack("<8sQQII", b"DSTAIL\x00\x01", at, end, zlib.crc32(body), 0)
    return body + trailer + struct.pack("<I", zlib.crc32(trailer))


def stored(key: bytes, offset: int, size: int, length: int | None = None) -> bytes:
    return struct.pack("<QQI", offset, size, len(key) if length is None else length) + key


def test_a_footer_made_as_the_document_says_is_read():
    data = crafted(stored(b"key", 4096, 10), 1, bytes(range(8)), 2)
    footer = Footer.decode(data, "it")
    assert (footer.objects["key"].offset, footer.objects["key"].bytes) == (4096, 10)
    assert footer.block_checksums == bytes(range(8))
    assert footer.encode() == data


@pytest.mark.parametrize(
    "entry",
    [
        stored(b"key", DATA_BYTES, 1),
        stored(b"key", 4096, 2**64 - 1),
        stored(b"key", 2**64 - 1, 2**64 - 1),
        stored(b"key", DATA_BYTES - 1, 2),
        stored(b"key", 0, 8),  # the header
        stored(b"key", 4095, 1),
        stored(b"key", 4096, 1, length=2**32 - 1),
    ],
)
def test_an_object_outside_the_data_is_refused(entry):
    with pytest.raises(FormatError, match="leaves the data"):
        Footer.decode(crafted(entry, 1), "it")


@pytest.mark.parametrize("count", [1000, 2**32, 2**64 - 1])
def test_an_absurd_count_of_objects_is_refused(count):
    with pytest.raises(FormatError, match="more than it has room for"):
        Footer.decode(crafted(stored(b"key", 4096, 1), count), "it")


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
