"""Entries of the tail of a data file: what has a size that is not known when layouts are made.

Belongs here: their records in the footer, and refusing false claims. Does not belong here: what frames
decode to (codecs.py).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import NamedTuple

from megatron_datastates.errors import FormatError, UnsupportedFormatError
from megatron_datastates.format.codecs import CODECS, NONE, PLANES, frame_count, frame_lengths
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.values import decode_name

_ENTRY = struct.Struct("<QQQBBHIII32s")
_OBJECT_1 = struct.Struct("<QQI")  # in format 1, which has objects only
SHA256_BYTES = 32
NOT_RECORDED = bytes(SHA256_BYTES)
_MOST_BYTES = 1 << 62  # of what an entry decodes to


class Kind(enum.IntEnum):
    """What an entry holds."""

    OBJECT = 1  # what torch.save writes
    STREAM = 2  # bytes that a state provider yields
    FRAGMENT = 3  # the elements of one fragment of an encoded tensor


Digest = bytes  # in a class that has a field of that name
_KINDS = frozenset(Kind)


class TailEntry(NamedTuple):
    """One object, stream or encoded fragment, and where its bytes are. A tuple, as a save makes hundreds."""

    kind: int
    name: str  # its key; empty for a fragment
    offset: int  # in the file
    stored_bytes: int
    bytes: int  # logical ones: of what it decodes to
    codec: int = NONE
    item_bytes: int = 0  # for byte planes
    frame_sizes: tuple[int, ...] = ()  # as stored; none without a codec
    sha256: Digest = NOT_RECORDED  # of the logical bytes


def encode_tail(entries: Iterable[TailEntry], version: int) -> bytes:
    """Returns the records of a footer, each with its name and the sizes of its frames."""
    parts = []
    for entry in entries:
        name, frames = entry.name.encode(), entry.frame_sizes
        if version == 1:
            parts += [_OBJECT_1.pack(entry.offset, entry.stored_bytes, len(name)), name]
            continue
        record = _ENTRY.pack(
            entry.offset, entry.stored_bytes, entry.bytes, entry.kind, entry.codec, entry.item_bytes,
            len(name), len(frames), 0, entry.sha256
        )  # fmt: skip
        parts += [record, name, struct.pack(f"<{len(frames)}I", *frames)]
    return b"".join(parts)


def decode_tail(
    body: bytes, at: int, count: int, data_bytes: int, version: int, where: str
) -> tuple[list[TailEntry], int]:
    """Returns the entries that begin at byte `at` of a footer, and where they end.

    Args:
        count: how many entries the footer says that it has.
        data_bytes: of the data file, before its footer.
        where: names the footer in messages.

    Raises:
        FormatError: what they claim cannot be true.
        UnsupportedFormatError: an entry has a kind that this release does not know.
    """
    size = (_OBJECT_1 if version == 1 else _ENTRY).size
    if count > (len(body) - at) // size:
        raise FormatError(f"{where} is damaged: it names {count} entries, more than it has room for")
    entries = []
    for _ in range(count):
        if at + size > len(body):
            raise FormatError(f"{where} is damaged: it ends within its entries")
        entry, at = _decode_object_1(body, at, where) if version == 1 else _decode_entry(body, at, where)
        if entry.offset < HEADER_BYTES or entry.offset + entry.stored_bytes > data_bytes:
            raise FormatError(
                f"{where} is damaged: {describe(entry)} of {entry.stored_bytes} bytes at {entry.offset} "
                f"leaves the data, bytes [{HEADER_BYTES}, {data_bytes})"
            )
        entries.append(entry)
    named = [(entry.kind, entry.name) for entry in entries if entry.kind != Kind.FRAGMENT]
    if len(set(named)) != len(named):
        raise FormatError(f"{where} is damaged: it names an object or a stream twice")
    return entries, at


def _decode_object_1(body: bytes, at: int, where: str) -> tuple[TailEntry, int]:
    offset, size, length = _OBJECT_1.unpack_from(body, at)
    name, end = _decode_name(body, at + _OBJECT_1.size, length, where)
    return TailEntry(Kind.OBJECT, name, offset, size, size), end


def _decode_entry(body: bytes, at: int, where: str) -> tuple[TailEntry, int]:
    offset, stored, logical, kind, codec, item_bytes, length, frames, _, sha256 = _ENTRY.unpack_from(body, at)
    if kind not in _KINDS:
        raise UnsupportedFormatError(
            f"{where} has an entry of kind {kind}, which this release does not know: "
            "update this installation of megatron_datastates."
        )
    name, end = _decode_name(body, at + _ENTRY.size, length, where)
    if end + 4 * frames > len(body):
        raise FormatError(f"{where} is damaged: an entry of {frames} frames is longer than the footer")
    sizes = struct.unpack_from(f"<{frames}I", body, end)
    entry = TailEntry(kind, name, offset, stored, logical, codec, item_bytes, sizes, sha256)
    if kind == Kind.FRAGMENT and name:
        raise FormatError(f"{where} is damaged: an encoded fragment has the name {name!r}, expected none")
    _check_sizes(entry, where)
    return entry, end + 4 * frames


def _check_sizes(entry: TailEntry, where: str) -> None:
    """Raises FormatError if stored bytes, logical bytes and frames do not add up."""
    what = f"{where} is damaged: {describe(entry)}"
    if entry.bytes >= _MOST_BYTES:
        raise FormatError(f"{what} is said to have {entry.bytes} bytes")
    if entry.codec not in CODECS:  # what its numbers mean is unknown, and nobody can read it
        return
    if entry.codec == NONE:
        if entry.frame_sizes or entry.stored_bytes != entry.bytes:
            raise FormatError(
                f"{what} has no codec, but {len(entry.frame_sizes)} frames, and {entry.stored_bytes} stored "
                f"for {entry.bytes} logical bytes; expected no frame and the same number of bytes"
            )
        return
    if entry.codec == PLANES and entry.item_bytes == 0:
        raise FormatError(f"{what} has items of 0 bytes")
    if len(entry.frame_sizes) != frame_count(entry.bytes) or sum(entry.frame_sizes) != entry.stored_bytes:
        raise FormatError(
            f"{what} has {len(entry.frame_sizes)} frames of {sum(entry.frame_sizes)} bytes together; "
            f"expected {frame_count(entry.bytes)}, for {entry.bytes} logical bytes, of {entry.stored_bytes}"
        )
    if any(not 0 < n <= most for n, most in zip(entry.frame_sizes, frame_lengths(entry.bytes), strict=True)):
        raise FormatError(f"{what} has a frame without bytes, or one that is longer than what it decodes to")


def _decode_name(body: bytes, at: int, length: int, where: str) -> tuple[str, int]:
    end = at + length
    if end > len(body):
        raise FormatError(f"{where} is damaged: a name of {length} bytes is longer than the footer")
    return decode_name(body[at:end], where), end


def describe(entry: TailEntry) -> str:
    """Names an entry in messages."""
    if entry.kind == Kind.FRAGMENT:
        return "an encoded fragment"
    return f"{'object' if entry.kind == Kind.OBJECT else 'stream'} {entry.name!r}"
