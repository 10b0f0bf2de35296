"""A checkpoint with all that tails hold: encoded tensors, streams and objects, with and without codecs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_datastates.format.codecs import NONE, PLANES, ZSTD
from megatron_datastates.format.index import Index, build_index
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tail import Kind, TailEntry
from megatron_datastates.format.values import MANIFEST_NAME, Extent, Fragment, SaveId
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.plan.layout import align_up
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.by_hand import SAVE, Part, data_file, encoded_entry, file_entry, manifest_of, write_checkpoint
from tests.unit.states import OPTIONS

MIB = 1 << 20
ROWS, COLUMNS, CUT = 1500, 1001, 900  # a row has 4004 bytes: frames end within rows and within elements


def noise(count: int, seed: int) -> np.ndarray:
    """Returns bytes of which a codec can save about a half."""
    values = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    values[::2] = 7
    return values


WEIGHT = torch.from_numpy(noise(ROWS * COLUMNS * 4, 1).view(np.float32).reshape(ROWS, COLUMNS))
MOMENT = torch.arange(2**19 + 3).to(torch.bfloat16)  # its frames end with zstd's smallest
PLAIN = torch.arange(64, dtype=torch.int64)
TENSORS = {"weight": WEIGHT, "moment": MOMENT, "plain": PLAIN, "empty": torch.zeros(0, 3)}
STREAMS = {
    "log": noise(2 * MIB + MIB // 2 + 1, 2).tobytes(),
    "raw": bytes(range(256)) * 5000,
    "planes": noise(MIB + 7, 3).tobytes(),
    "none": b"",
}
OBJECTS: dict[str, Any] = {"state": ["a" * 100_000, 1, None], "log": [2]}


class PartBuilder:
    """Builds the tail of one data file, and what the index says of it."""

    def __init__(self, file: int) -> None:
        self.file, self.at = file, 8192
        self.entries: list[tuple[TailEntry, bytes]] = []
        self.objects: list[str] = []
        self.streams: list[str] = []
        self.fragments: list[tuple[Fragment, Extent]] = []

    def add(self, kind: Kind, name: str, data: bytes, codec: int, item_bytes: int = 1) -> None:
        entry, stored = encoded_entry(kind, name, self.at, data, codec, item_bytes)
        self.entries.append((entry, stored))
        self.at = align_up(self.at + len(stored), 64)
        {Kind.OBJECT: self.objects, Kind.STREAM: self.streams}.get(kind, []).append(name)

    def add_fragment(self, key: str, whole: torch.Tensor, rows: slice, codec: int) -> None:
        part = whole[rows]
        dtype = str(whole.dtype).removeprefix("torch.")
        offset = (rows.start or 0, *(0 for _ in whole.shape[1:]))
        fragment = Fragment(key, dtype, tuple(whole.shape), offset, tuple(part.shape))
        number = sum(entry.kind == Kind.FRAGMENT for entry, _ in self.entries)
        self.fragments.append((fragment, Extent(self.file, number, fragment.bytes)))
        data = part.contiguous().view(torch.uint8).numpy().tobytes()
        self.add(Kind.FRAGMENT, "", data, codec, whole.element_size())

    def part(self, group: int = 0, **fields: Any) -> Part:
        return Part(align_up(self.at, 4096), entries=self.entries, footer={"group": group, **fields})


def builders() -> list[PartBuilder]:
    one, two = PartBuilder(0), PartBuilder(1)
    one.add(Kind.STREAM, "log", STREAMS["log"], ZSTD)
    one.add_fragment("weight", WEIGHT, slice(0, CUT), PLANES)
    one.add(Kind.OBJECT, "log", stored_object("log"), NONE)
    one.add_fragment("empty", TENSORS["empty"], slice(0, 0), PLANES)
    one.add_fragment("moment", MOMENT, slice(0, None), ZSTD)
    two.add(Kind.STREAM, "raw", STREAMS["raw"], NONE)
    two.add(Kind.STREAM, "planes", STREAMS["planes"], PLANES, 4)
    two.add(Kind.STREAM, "none", b"", ZSTD)
    two.add_fragment("weight", WEIGHT, slice(CUT, None), NONE)
    two.add(Kind.OBJECT, "state", stored_object("state"), ZSTD)
    return [one, two]


def stored_object(key: str) -> bytes:
    return ObjectSource(key, OBJECTS[key], Mutability.NEVER).serialize()


def index_over(parts: Iterable[PartBuilder], plain: Iterable[tuple[Fragment, Extent]] = ()) -> Index:
    parts = list(parts)
    fragments = [item for part in parts for item in part.fragments]
    return build_index(
        [*fragments, *plain],
        {key: part.file for part in parts for key in part.objects},
        {key: part.file for part in parts for key in part.streams},
        {fragment.key for fragment, _ in fragments},
    )


def write_encoded(directory: Path, parts: list[PartBuilder] | None = None, **fields: Any) -> Manifest:
    """Writes the checkpoint of TENSORS, STREAMS and OBJECTS."""
    parts = parts or builders()
    plain = Fragment("plain", "int64", (64,), (0,), (64,))
    index = index_over(parts, [(plain, Extent(1, 4096, 512))])
    made = [
        part.part(layout_digest=hashlib.sha256(index.own_index(part.file)).digest()[:16]) for part in parts
    ]
    made[1].pieces = [(4096, PLAIN.numpy().tobytes())]
    return write_checkpoint(directory, made, index, **fields)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoded") / "c"
    write_encoded(path)
    return path


def opened(path: Path) -> Checkpoint:
    return Checkpoint.open(path, OPTIONS)


def content_digest(data: bytes) -> str:
    """Returns the digest as FORMAT.md says."""
    blocks = (data[max(at, 4096) : at + MIB] for at in range(0, len(data), MIB))
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


EARLIER = SaveId(SAVE.run_id, 1)


def write_shared(directory: Path, earlier: SaveId = EARLIER) -> Manifest:
    """Writes a checkpoint of one rank with two files; that of group 3 is of an earlier save."""
    return write_one_rank(directory, builders(), [(0, SAVE), (3, earlier)])


def write_one_rank(
    directory: Path, parts: list[PartBuilder], written: list[tuple[int, SaveId]], **fields: Any
) -> Manifest:
    """Writes a checkpoint of rank 0, each file with group and save; the first save is the manifest's."""
    index, published = index_over(parts), written[0][1]
    directory.mkdir(parents=True)
    files = []
    for part, (group, save) in zip(parts, written, strict=True):
        own = hashlib.sha256(index.own_index(part.file)).digest()[:16]
        made = part.part(group, layout_digest=own)
        data = data_file(made, 0, 1, save, **made.footer)
        digest = content_digest(data[: made.data_bytes])
        shared = {"save_id": "" if save == published else str(save), "content_sha256": digest}
        files.append(file_entry(data, 0, save, group=group, **(shared if group else {})))
        (directory / files[-1].name).write_bytes(data)
    encoded = index.encode(packed=True)
    manifest = manifest_of(files, encoded, published, world_size=1, **fields)
    (directory / manifest.index.name).write_bytes(encoded)
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest
