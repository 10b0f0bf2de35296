"""Forged checkpoints of torch_dist: what DCP's `.metadata` claims, and archives in its `.distcp` files."""

from __future__ import annotations

import functools
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from tests.faults.campaign import forging, forging_objects
from tests.faults.campaign.forging import Draw, Forgery

STATE = {
    "w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "c": torch.arange(10, dtype=torch.int16),
    "s": torch.tensor(1.5, dtype=torch.bfloat16),
}
INDEX, FILE = ".metadata", "__0_0.distcp"


@functools.cache
def sound() -> dict[str, bytes]:
    """Returns the files that DCP wrote."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({**STATE, "o": [1, 2]}, storage_writer=dcp.FileSystemWriter(folder))
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return found | {"metadata.json": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'}


def _lie(draw: Draw, metadata: Any) -> str:
    """Changes one thing in DCP's own objects."""
    key = draw(st.sampled_from(sorted(STATE)))
    entry = metadata.state_dict_metadata[key]
    if not hasattr(entry, "chunks") or not metadata.storage_data:
        return "nothing more"
    index = draw(st.sampled_from(sorted(metadata.storage_data, key=str)))
    info = metadata.storage_data[index]
    what = draw(
        st.sampled_from(
            [
                "size",
                "chunk",
                "chunk",
                "path",
                "offset",
                "offset",
                "length",
                "key",
                "double",
                "type",
                "drop",
                "dtype",
                "other place",
            ]
        )
    )
    numbers = st.one_of(forging.NUMBERS, st.integers(-2, len(sound()[FILE]) + 10))
    if what == "size":
        entry.size = torch.Size([]) if draw(st.booleans()) else (draw(numbers), 6)
    elif what == "chunk" and entry.chunks:
        chunk = draw(st.sampled_from(entry.chunks))
        name = draw(st.sampled_from(["offsets", "sizes"]))
        object.__setattr__(chunk, name, tuple(draw(numbers) for _ in getattr(chunk, name)))
    elif what == "path":
        object.__setattr__(info, "relative_path", draw(forging.WORDS))
    elif what in ("offset", "length"):
        object.__setattr__(info, what, draw(numbers))
    elif what == "key":
        metadata.state_dict_metadata[draw(forging.WORDS | st.none() | st.integers())] = entry
    elif what == "double" and entry.chunks:
        entry.chunks.append(entry.chunks[0])
    elif what == "type":
        metadata.state_dict_metadata[key] = draw(st.none() | st.integers() | st.just(info))
    elif what == "drop":
        del metadata.storage_data[index]
    elif what == "dtype":
        entry.properties.dtype = draw(st.sampled_from([torch.float64, torch.int8, torch.qint8, torch.uint8]))
    elif what == "other place":
        metadata.storage_data[index] = metadata.storage_data[
            draw(st.sampled_from(sorted(metadata.storage_data, key=str)))
        ]
    return f"{what} of {key}"


def metadata(draw: Draw) -> Forgery:
    files = dict(sound())
    found = pickle.loads(files[INDEX])
    reported = "; ".join(_lie(draw, found) for _ in range(draw(st.integers(1, 2))))
    files[INDEX] = pickle.dumps(found)
    return Forgery(".metadata", reported, files, None)


def hostile_metadata(draw: Draw) -> Forgery:
    files = dict(sound())
    kind, pickled = forging_objects.program(draw)
    if draw(st.booleans()):  # honest in front of it, or after it
        pickled = files[INDEX][:-1] + b"0" + pickled.removeprefix(b"\x80\x04").removeprefix(b"\x80\x02")
    files[INDEX] = pickled
    return Forgery("pickle of .metadata", f"{kind}: {pickled[-300:]!r}", files, None)


def archives(draw: Draw) -> Forgery:
    """Replaces a tensor's archive by another one; the metadata says where it lies."""
    files = dict(sound())
    found = pickle.loads(files[INDEX])
    key = draw(st.sampled_from([*sorted(STATE), "o"]))
    index = next(i for i in found.storage_data if i.fqn == key)
    if draw(st.booleans()):
        kind, pickled = forging_objects.program(draw)
        data = forging_objects.archive(draw, pickled)
    else:
        kind = "another tensor"
        buffer = io.BytesIO()
        shape = draw(st.sampled_from([(4, 6), (6, 4), (10,), (), (0,), (24,)]))
        other = torch.zeros(shape, dtype=draw(st.sampled_from([torch.float32, torch.int16, torch.bfloat16])))
        torch.save(
            draw(st.sampled_from([other, other.t() if len(shape) == 2 else other, [other], other.bool()])),
            buffer,
        )
        data = buffer.getvalue()
    info = found.storage_data[index]
    object.__setattr__(info, "offset", len(files[FILE]))
    object.__setattr__(info, "length", len(data))
    files[FILE] += data
    files[INDEX] = pickle.dumps(found)
    return Forgery("archive in .distcp", f"{index.fqn}: {kind}", files, None)


def tensor(files: dict[str, bytes], key: str) -> torch.Tensor | None:
    """Returns what torch unpickles of the places that the metadata names (the oracle); None if it fails."""
    try:
        found = pickle.loads(files[INDEX])
        entry = found.state_dict_metadata[key]
        made = torch.zeros(tuple(entry.size), dtype=entry.properties.dtype)
        seen = torch.zeros(tuple(entry.size), dtype=torch.int32)
        for chunk in entry.chunks:
            info = next(
                i
                for k, i in found.storage_data.items()
                if k.fqn == key and tuple(k.offset or ()) in (tuple(chunk.offsets), ())
            )
            data = files[info.relative_path][info.offset : info.offset + info.length]
            part = torch.load(io.BytesIO(data), weights_only=True)
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if part.dtype != made.dtype or part.shape != made[place].shape:
                return None
            made[place] = part
            seen[place] += 1
        return made if bool((seen == 1).all()) else None
    except Exception:
        return None


FORGERIES = (metadata, hostile_metadata, metadata, archives)
