"""Header, footer, trailer and manifest: the same tests over all of them.

Decoding damaged bytes returns the value that was encoded or raises our own errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.codecs import FRAME_BYTES, NONE, PLANES, ZSTD
from megatron_datastates.format.footer import TRAILER_BYTES, Footer, decode_trailer
from megatron_datastates.format.header import HEADER_BYTES, Header
from megatron_datastates.format.manifest import FileEntry, IndexEntry, Manifest, OtherFile
from megatron_datastates.format.tail import Kind, TailEntry
from megatron_datastates.format.values import ALIGNMENT, BLOCK_BYTES, FORMAT_VERSION, Extent, SaveId
from tests.unit.by_hand import SAVE, object_entries

REFUSED = (FormatError, UnsupportedFormatError)
WORD, LONG = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SAVE_IDS = st.builds(SaveId, LONG, st.integers(1, 2**64 - 1))


@dataclasses.dataclass(frozen=True)
class Codec:
    """A value, its bytes, and how they are decoded."""

    name: str
    value: Any
    decode: Callable[[bytes], Any]
    with_features: Callable[[int, int, int], bytes]  # version, incompatible, compatible -> bytes

    @property
    def data(self) -> bytes:
        return self.with_features(FORMAT_VERSION, 0, 0)


def header(version: int = FORMAT_VERSION, incompatible: int = 0, compatible: int = 0) -> Header:
    return Header(SAVE, 3, 8, incompatible, compatible, version, 5 if version > 1 else 0)


def footer(version: int = FORMAT_VERSION, incompatible: int = 0, compatible: int = 0) -> Footer:
    entries = object_entries({"common/shard_0_1": Extent(0, 8192, 100), "é": Extent(0, 12288, 0)})
    if version > 1:
        entries += [
            TailEntry(Kind.STREAM, "é", 12288, 70, FRAME_BYTES + 40, ZSTD, 0, (30, 40), b"s" * 32),
            TailEntry(Kind.FRAGMENT, "", 12352, 64, 64, PLANES, 2, (64,)),
        ]
    checksums = bytes(range(8))
    return Footer(
        SAVE, 3, 8, BLOCK_BYTES + ALIGNMENT, b"0123456789abcdef", entries, checksums,
        incompatible, compatible, version, 5 if version > 1 else 0
    )  # fmt: skip


def manifest(version: int = FORMAT_VERSION, incompatible: int = 0, compatible: int = 0) -> Manifest:
    return Manifest(
        run_id="0123456789abcdef",
        ordinal=3,
        world_size=2,
        created="2026-01-01T00:00:00+00:00",
        index=IndexEntry("index-" + "0" * 32, 100, 50, "0" * 64),
        files=[FileEntry(SAVE.data_file_name(1), 1, 8192, 4096, 7)],
        iteration=100,
        parallel={"tensor": 2},
        others=[OtherFile("metadata.json", 10, "1" * 64)],
        writer={"torch": "2.11.0"},
        format_version=version,
        incompatible=incompatible,
        compatible=compatible,
    )


CODECS = [
    Codec("header", header(), lambda data: Header.decode(data, "it"), lambda *f: header(*f).encode()),
    Codec("footer", footer(), lambda data: Footer.decode(data, "it"), lambda *f: footer(*f).encode()),
    Codec("manifest", manifest(), lambda data: Manifest.decode(data, "it"), lambda *f: manifest(*f).encode()),
]
over_codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def flips(data: bytes) -> Iterator[bytes]:
    """Yields copies of `data` with one byte changed: every byte, with all bits flipped and with one."""
    for at in range(len(data)):
        for mask in (0xFF, 1 << at % 8):
            yield data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def refused_or_equal(codec: Codec, data: bytes) -> bool:
    try:
        return codec.decode(data) == codec.value
    except REFUSED:
        return True


@over_codecs
def test_decoding_returns_what_was_encoded(codec):
    assert codec.decode(codec.data) == codec.value


@over_codecs
def test_every_truncation_is_refused(codec):
    for length in range(len(codec.data)):
        with pytest.raises(FormatError):
            codec.decode(codec.data[:length])


@over_codecs
def test_no_flipped_byte_goes_unnoticed(codec):
    assert all(refused_or_equal(codec, data) for data in flips(codec.data))


@over_codecs
@given(data=st.binary(max_size=200))
def test_other_bytes_are_refused(codec, data):
    with pytest.raises(FormatError):
        codec.decode(data)


@over_codecs
@given(data=st.binary(max_size=200))
def test_other_bytes_after_the_magic_are_refused(codec, data):
    with pytest.raises(FormatError):
        codec.decode(codec.data[:8] + data)


@over_codecs
def test_format_1_is_decoded(codec):
    value = codec.decode(codec.with_features(1, 0, 0))
    assert value.format_version == 1
    assert type(value).encode(value) == codec.with_features(1, 0, 0)


@over_codecs
@pytest.mark.parametrize("version", [3, 0, 9])
def test_another_format_version_is_refused_and_says_to_update(codec, version):
    with pytest.raises(UnsupportedFormatError, match=f"format {version}.*reads formats 1 and 2.*update"):
        codec.decode(codec.with_features(version, 0, 0))


@over_codecs
@pytest.mark.parametrize("bits", [1, 1 << 31, 6])
def test_unknown_incompatible_features_are_refused_and_named(codec, bits):
    with pytest.raises(UnsupportedFormatError, match=rf"features {bits:#x};.*update"):
        codec.decode(codec.with_features(FORMAT_VERSION, bits, 0))


@over_codecs
@pytest.mark.parametrize("bits", [1, 1 << 31, 6])
def test_unknown_compatible_features_are_ignored(codec, bits):
    decoded = codec.decode(codec.with_features(FORMAT_VERSION, 0, bits))
    assert decoded.compatible == bits
    assert type(codec.value).encode(decoded) == codec.with_features(FORMAT_VERSION, 0, bits)


@over_codecs
def test_an_error_names_the_file(codec):
    decode = type(codec.value).decode
    for data in (b"", codec.data[:-1], codec.with_features(3, 0, 0)):
        with pytest.raises(REFUSED, match="the/file"):
            decode(data, "the/file")


@given(st.builds(Header, SAVE_IDS, WORD, WORD, st.just(0), WORD, group=WORD))
def test_headers_round_trip(header):
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert Header.decode(data, "it") == header


@st.composite
def entries_within(draw, data_bytes):
    """Entries of every kind and codec, with an unknown codec too."""
    kind, codec = draw(st.sampled_from(Kind)), draw(st.sampled_from([NONE, ZSTD, PLANES, 200]))
    offset = draw(st.integers(ALIGNMENT, data_bytes))
    stored, frames = draw(st.integers(0, min(data_bytes - offset, FRAME_BYTES))), ()
    logical = stored
    if codec != NONE and stored > 1:
        frames = (1, stored - 1)
        logical = FRAME_BYTES + draw(st.integers(stored - 1, FRAME_BYTES))
    name = "" if kind == Kind.FRAGMENT else draw(st.text(min_size=1, max_size=20))
    sha256, item_bytes = draw(st.binary(min_size=32, max_size=32)), draw(st.integers(1, 2**16 - 1))
    codec = codec if frames else NONE
    return TailEntry(kind, name, offset, stored, logical, codec, item_bytes, frames, sha256)


@st.composite
def footers(draw):
    data_bytes = ALIGNMENT * draw(st.integers(1, 2000))
    entries = draw(st.lists(entries_within(data_bytes), max_size=5, unique_by=lambda e: (e.kind, e.name)))
    count = draw(st.sampled_from([0, -(-data_bytes // BLOCK_BYTES)]))
    checksums = draw(st.binary(min_size=4 * count, max_size=4 * count))
    digest = draw(st.binary(min_size=16, max_size=16))
    group = draw(WORD)
    return Footer(draw(SAVE_IDS), draw(WORD), draw(WORD), data_bytes, digest, entries, checksums, group=group)


@given(footers())
def test_footers_round_trip(footer):
    data = footer.encode()
    decoded = Footer.decode(data, "it")
    assert decoded == footer
    assert [*decoded.objects.values(), *decoded.streams.values(), *decoded.fragments] == sorted(
        footer.entries, key=lambda entry: entry.kind
    )
    assert len(data) % ALIGNMENT == 0
    assert decode_trailer(data[-TRAILER_BYTES:], "it") == (footer.data_bytes, len(data), decoded.crc)


def test_every_truncated_trailer_is_refused():
    trailer = footer().encode()[-TRAILER_BYTES:]
    for length in range(TRAILER_BYTES):
        with pytest.raises(FormatError, match="never sealed, or it was truncated"):
            decode_trailer(trailer[:length], "it")


def test_no_flipped_byte_of_a_trailer_goes_unnoticed():
    for data in flips(footer().encode()[-TRAILER_BYTES:]):
        with pytest.raises(FormatError):
            decode_trailer(data, "it")
