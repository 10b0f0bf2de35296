"""Forged manifests, indexes, headers, footers, optimizer maps and metadata.json: all checksums are right."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from hypothesis import strategies as st

from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.format.footer import TRAILER_BYTES
from megatron_datastates.format.tables import Directory
from megatron_datastates.format.tail import TailEntry
from megatron_datastates.format.values import MANIFEST_NAME, Extent
from tests.faults.campaign import forging
from tests.faults.campaign.forging import NUMBERS, OTHER_SAVE, SAVE, WORDS, Draw, Forgery, stored
from tests.unit.by_hand import block_checksums, object_entries

ENTRY_BYTES = 72  # of a record in a footer
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within a JSON value."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [place for key, child in children for place in [(*at, key), *_places(child, (*at, key))]]


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def lie_in_json(draw: Draw, value: Any, lies: int = 3) -> tuple[str, str]:
    """Changes a few things in a JSON value; returns its text, and what was done."""
    reported = []
    for _ in range(draw(st.integers(1, lies))):
        places = _places(value)
        if not places:
            break  # all of it was dropped
        place = draw(st.sampled_from(places))
        parent, key, old = _at(value, place[:-1]), place[-1], _at(value, place)
        what = draw(st.sampled_from(["number", "word", "any", "double", "drop", "swap", "one off"]))
        if what == "drop":
            del parent[key]
        elif what == "double" and isinstance(parent, list):
            parent.insert(draw(st.integers(0, len(parent))), json.loads(json.dumps(old)))
        elif what == "swap" and isinstance(parent, list):
            parent.reverse()
        elif what == "one off" and isinstance(old, int):
            parent[key] = old + draw(st.sampled_from([1, -1, 4096, -4096, 64]))
        else:
            strategy = {"number": NUMBERS, "word": WORDS}.get(what, JSON_VALUES)
            parent[key] = draw(strategy)
        reported.append(f"{what} at {'.'.join(map(str, place))}")
    text = json.dumps(value)
    if draw(st.integers(0, 9)) == 0:  # a name twice: the last one counts, or none
        text = text.replace("{", '{"rank": 1, "name": "x", "format_version": 9, ', 1)
        reported.append("names twice")
    if draw(st.integers(0, 19)) == 0:
        text = text.replace("{", '{"more": ' + "[" * 100_000 + "]" * 100_000 + ", ", 1)
        reported.append("deep nesting")
    return text, "; ".join(reported)


def manifest_bytes(text: str, version: int = 2) -> bytes:
    body = text.encode("utf-8", "surrogatepass")
    return b"datastates-manifest %d %d %08x\n" % (version, len(body), zlib.crc32(body)) + body


def _manifest(files: dict[str, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files[MANIFEST_NAME].split(b"\n", 1)[1])
    return found


def manifest(draw: Draw) -> Forgery:
    claims, files = forging.honest()
    value = _manifest(files)
    value["others"] = [{"name": draw(WORDS), "bytes": 3, "sha256": "0" * 64}] if draw(st.booleans()) else []
    text, reported = lie_in_json(draw, value)
    files[MANIFEST_NAME] = manifest_bytes(text, draw(st.sampled_from([2, 2, 2, 1, 0, 3, 999_999_999])))
    return Forgery("manifest", reported, files, claims)


def foreign_file(draw: Draw) -> Forgery:
    """Returns a data file that another save, or another rank, wrote; the manifest describes it as it is."""
    claims, files = forging.honest()
    value = _manifest(files)
    place, rank = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    save = draw(st.sampled_from([SAVE, OTHER_SAVE]))
    noise = bytes(reversed(claims.data[place]))
    data = forging.with_header(noise, rank, save)
    sealed = forging.seal(data, claims.extents[place], rank, save)
    if (save, rank) == (
        SAVE,
        place,
    ):  # only its content is another one; so its checksum in the manifest shows it
        entry = value["files"][place]
    else:
        entry = forging.resealed_entry(value["files"][place]["name"], place, sealed)
    name = draw(st.sampled_from([entry["name"], OTHER_SAVE.data_file_name(place), SAVE.data_file_name(7)]))
    named = draw(st.sampled_from([place, place, rank]))
    value["files"][place] = entry | {"name": name, "rank": named}
    if (save, rank) == (SAVE, named) and rank != place:
        claims.data[place] = data  # all agree: that `verify` finds two files of a rank is all there is to it
    files[name] = sealed
    files[MANIFEST_NAME] = manifest_bytes(json.dumps(value))
    return Forgery("foreign file", f"{name} is of {save}, rank {rank}, in place of {place}", files, claims)


# -- index ----------------------------------------------------------------------------------------------


def _lie_in_row(draw: Draw, claims: forging.Claims) -> str:
    tensor = draw(st.sampled_from(claims.tensors))
    what = draw(
        st.sampled_from(
            [
                "offset",
                "shape",
                "file",
                "place",
                "place",
                "global",
                "dtype",
                "name",
                "double",
                "drop",
                "dimensions",
                "shift",
                "object",
                "row twice",
            ]
        )
    )
    fragment = draw(st.sampled_from(tensor.fragments)) if tensor.fragments else [[], [], 0, 0]
    words = {"offset": 0, "shape": 1}
    number = draw(NUMBERS) % (1 << 63)
    if what in words and fragment[words[what]]:
        fragment[words[what]][draw(st.integers(0, len(fragment[0]) - 1))] = draw(NUMBERS)
    elif what == "file":
        fragment[2] = draw(st.sampled_from([0, 1, 2, 3, 1 << 31, 1 << 32, 1 << 33]))
    elif what == "place":
        fragment[3] = draw(st.one_of(NUMBERS, st.integers(4000, len(claims.data[0]) + 100)))
    elif what == "global" and tensor.shape:
        tensor.shape[draw(st.integers(0, len(tensor.shape) - 1))] = number
    elif what == "dtype":
        tensor.dtype = draw(st.integers(0, 24) | st.sampled_from([65535]))
    elif what == "name":
        tensor.name = draw(WORDS).encode("utf-8", "surrogatepass") or draw(st.binary(max_size=6))
    elif what == "double" and tensor.fragments:
        tensor.fragments.append([list(fragment[0]), list(fragment[1]), *fragment[2:]])
    elif what == "drop":
        tensor.fragments = tensor.fragments[1:]
    elif what == "dimensions":
        more = draw(st.sampled_from([1, 2, 62, 63, 64, 65]))
        tensor.shape += [1] * more
        for each in tensor.fragments:
            each[0], each[1] = each[0] + [0] * more, each[1] + [1] * more
    elif what == "shift" and fragment[0]:
        fragment[0][0] += draw(st.sampled_from([1, -1]))
    elif what == "object":
        at = draw(st.integers(0, len(claims.objects) - 1))
        name = draw(st.sampled_from([claims.objects[at][0], b"", b"\xff", b"w", b"../outside/secret"]))
        claims.objects[at] = (name, draw(st.sampled_from([0, 1, 2, (1 << 32) - 1])))
    elif what == "row twice":
        claims.tensors.append(tensor)
    return f"{what} of {tensor.name[:40]!r}"


def index(draw: Draw) -> Forgery:
    claims = forging.base()
    reported = [_lie_in_row(draw, claims) for _ in range(draw(st.integers(1, 3)))]
    files = forging.data_files(claims)
    if draw(st.booleans()):
        claims.tensors.sort(key=lambda tensor: tensor.name)
    counted = draw(st.sampled_from([2, 2, 2, 0, 1, 3, (1 << 32) - 1]))
    data = forging.index_bytes(claims, draw(st.booleans()), counted)
    return Forgery("index", f"{'; '.join(reported)}; {counted} files", forging.assemble(files, data), claims)


def index_tables(draw: Draw) -> Forgery:
    """Numbers of the directory itself: counts, sizes, versions; or sections that unpack to another size."""
    claims, _ = forging.honest()
    files = forging.data_files(claims)
    if draw(st.booleans()):
        plain = bytes(draw(st.sampled_from([0, 8, 1 << 12, 1 << 20, 64 << 20])))
        section = zlib.compress(plain, 9) + draw(st.sampled_from([b"", b"\0"]))
        tensor = draw(st.sampled_from(claims.tensors))
        width = 16 * (len(tensor.shape) + 1)
        count = draw(st.sampled_from([len(plain) // width, len(plain) // width + 1, 1, 1 << 40, 1 << 60]))
        data = _with_section(claims, tensor, section, count)
        claims.tensors.remove(tensor)
        return Forgery(
            "index section",
            f"{len(plain)} bytes packed as {count} fragments",
            forging.assemble(files, data),
            claims,
        )
    data = bytearray(forging.index_bytes(claims))
    rows = [48 + 8 + 40 * n + at for n in range(len(claims.tensors)) for at in (0, 4, 6, 8, 16)]
    at, size = draw(
        st.sampled_from(
            [(8, 4), (12, 4), (16, 4), (20, 4), *((n, 8) for n in (24, 32, 40, 48)), *((n, 4) for n in rows)]
        )
    )
    data[at : at + size] = (draw(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    return Forgery("index tables", f"{size} bytes at {at}", forging.assemble(files, bytes(data)), claims)


def _with_section(claims: forging.Claims, tensor: forging.Tensor, section: bytes, count: int) -> bytes:
    data = bytearray(forging.index_bytes(claims, True, 2, **{tensor.name.decode(): section}))
    directory = Directory(bytes(data), "an index", len(data))
    row = 56 + 40 * directory.key_names().index(tensor.name)
    struct.pack_into("<Q", data, row + 8, count)
    return bytes(data)


# -- data files -----------------------------------------------------------------------------------------


def footer(draw: Draw) -> Forgery:
    """Fields and entries; the manifest has the footer's checksum."""
    claims = forging.base()
    files = forging.data_files(claims)
    rank = draw(st.integers(0, 1))
    reported = [
        draw(st.sampled_from(["extent", "extent", "entry", "name", "checksums", "field"])) for _ in range(2)
    ]
    fields: dict[str, Any] = {}
    for what in reported:
        extents = claims.extents[rank]
        key = draw(st.sampled_from(sorted(extents)))
        if what == "extent":
            near = st.integers(4000, len(claims.data[rank]) + 10)
            extents[key] = (draw(NUMBERS | near) % (1 << 64), draw(NUMBERS | near) % (1 << 64))
        elif what == "name":
            word = draw(WORDS).encode("utf-8", "replace").decode()
            extents[word] = extents.pop(key)
        elif what == "checksums":
            known = block_checksums(claims.data[rank])
            fields["block_checksums"] = draw(
                st.sampled_from([b"", known, known * 2, known[:-4], known * 20_000])
            )
        else:
            name = draw(
                st.sampled_from(["data_bytes", "world_size", "incompatible", "compatible", "format_version"])
            )
            fields[name] = draw(NUMBERS) % (1 << (64 if name == "data_bytes" else 32))
    if "entry" in reported:
        fields["entries"] = _lie_in_entry(draw, claims.extents[rank])
    files[rank] = forging.seal(claims.data[rank], claims.extents[rank], rank, **fields)
    return Forgery(
        "footer", f"{reported} {fields.keys()}", forging.assemble(files, forging.index_bytes(claims)), claims
    )


def _lie_in_entry(draw: Draw, extents: dict[str, tuple[int, int]]) -> list[TailEntry]:
    """Kinds, codecs, frames and sizes that are not those of an object as it is stored."""
    entries = object_entries({key: Extent(0, *extent) for key, extent in extents.items()})
    at = draw(st.integers(0, len(entries) - 1))
    size = entries[at].stored_bytes % (1 << 32)
    lies: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.integers(0, 255),
        "codec": st.sampled_from([1, 2, 3, 255]),
        "bytes": NUMBERS | st.sampled_from([0, 1 << 20, (1 << 20) + 1, 1 << 40, 1 << 61]),
        "item_bytes": st.sampled_from([0, 1, 4, 65535]),
        "frame_sizes": st.sampled_from([(), (size,), (size, 0), (0, size), (1,) * 1000, ((1 << 32) - 1,)]),
        "sha256": st.binary(min_size=32, max_size=32),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(lies)), min_size=1, max_size=4, unique=True))
    lied: dict[str, Any] = {name: draw(lies[name]) for name in chosen}
    if "bytes" in lied:
        lied["bytes"] %= 1 << 64
    entries[at] = entries[at]._replace(**lied)
    return entries


def footer_bytes(draw: Draw) -> Forgery:
    """Changes any number in a footer, header or trailer; every checksum over it is made anew."""
    claims, files = forging.honest()
    value = _manifest(files)
    rank = draw(st.integers(0, 1))
    name = value["files"][rank]["name"]
    data = bytearray(files[name])
    end = struct.unpack_from("<Q", data, len(data) - 28)[0]
    where = draw(st.sampled_from(["header", "footer", "footer", "trailer"]))
    begin = {"header": 0, "footer": end, "trailer": len(data) - 36}[where]
    at = begin + draw(st.integers(0, {"header": 11, "footer": 30, "trailer": 7}[where])) * 4
    size = draw(st.sampled_from([1, 4, 8]))
    data[at : at + size] = (draw(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    _reseal(data, end)
    files[name] = bytes(data)
    value["files"][rank]["footer_crc"] = struct.unpack_from("<I", data, len(data) - 12)[0]
    files[MANIFEST_NAME] = manifest_bytes(json.dumps(value))
    # A footer can say that objects lie elsewhere; what it says is compared with what it said.
    for each in claims.extents[rank] if where == "footer" else ():
        claims.extents[rank] = {**claims.extents[rank], each: _extent_in(bytes(data), end, each)}
    return Forgery(f"{where} bytes", f"{size} bytes at {at} of {name}", files, claims)


def _extent_in(data: bytes, end: int, key: str) -> tuple[int, int]:
    at = data.find(key.encode(), end)
    return struct.unpack_from("<QQ", data, at - ENTRY_BYTES) if at > 0 else (0, 0)


def _reseal(data: bytearray, end: int) -> None:
    struct.pack_into("<I", data, 4092, zlib.crc32(data[:4092]))
    place, checksums = _place_of_checksums(bytes(data[end:])), block_checksums(bytes(data[:end]))
    if place is not None:
        data[end + place : end + place + len(checksums)] = checksums
    struct.pack_into("<I", data, len(data) - 12, zlib.crc32(data[end : len(data) - TRAILER_BYTES]))
    struct.pack_into("<I", data, len(data) - 4, zlib.crc32(data[len(data) - TRAILER_BYTES : len(data) - 4]))


def _place_of_checksums(footer: bytes) -> int | None:
    """Returns the place after the entries, as the footer counts them now; None if that leads nowhere."""
    (entries,) = struct.unpack_from("<I", footer, 56)
    at = 88
    for _ in range(min(entries, 10)):
        if at + ENTRY_BYTES > len(footer):
            return None
        name, frames = struct.unpack_from("<II", footer, at + 28)
        at += ENTRY_BYTES + name + 4 * frames
    return at if at + 4 <= len(footer) - TRAILER_BYTES else None


# -- documents ------------------------------------------------------------------------------------------


def optimizer_map(draw: Draw) -> Forgery:
    value = forging.optimizer_map()
    if draw(st.booleans()):
        shard = {
            "key": "q",
            "global_shape": [2],
            "offset": [0],
            "shape": [2],
            "start": 1,
            "strides": [2],
            "main": True,
        }
        value["buckets"][0]["parameters"].append({"name": "q", "begin": 14, "end": 20, "shards": [shard]})
    text, reported = lie_in_json(draw, value, lies=2)
    claims = forging.base({forging.MAP_KEY: stored([text])})
    files = forging.data_files(claims)
    return Forgery("optimizer map", reported, forging.assemble(files, forging.index_bytes(claims)), claims)


def metadata_json(draw: Draw) -> Forgery:
    claims, files = forging.honest()
    text, reported = lie_in_json(draw, json.loads(forging.METADATA))
    if draw(st.booleans()):
        text, reported = json.dumps(draw(JSON_VALUES)), "any value"
    files[METADATA_NAME] = text.encode("utf-8", "surrogatepass")
    return Forgery("metadata.json", reported, files, claims)


FORGERIES = (
    manifest,
    index,
    footer,
    foreign_file,
    manifest,
    index_tables,
    optimizer_map,
    footer_bytes,
    index,
    metadata_json,
)
