"""Makes the golden checkpoints of a format, once per format and before its first release.

    .venv/bin/python -m tests.golden.make_golden NEW_DIRECTORY

The files under tests/golden/format-N are never made again: they stand for files that users have. This makes
those of format 2; those of format 1 were made by an earlier version of it.

one-rank   written by the saver: every dtype, a scalar, an empty tensor, objects, block checksums
two-ranks  made by hand: tensors in fragments over two files, one of them without checksums, and
           compatible features that no release knows
tails      made by hand (format 2): encoded tensors, streams and objects with every codec, in two files of one
           rank, of which one is an earlier save's; providers

The files of tests/golden/near were made by `make_near`: the list of jobs, and which nodes wrote a save.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_datastates.config import MIB, Options
from megatron_datastates.format.codecs import NONE, PLANES, ZSTD
from megatron_datastates.format.index import Index, build_index
from megatron_datastates.format.manifest import ProviderEntry
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import DTYPES, Extent, Fragment, SaveId
from megatron_datastates.pipeline.near.nodes import NODES_NAME, NodeEntry, Nodes
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.jobs import Job, note_job
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Mutability, StateProvider, StateReader
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.tensors import TensorProvider
from tests.unit.by_hand import Part, write_checkpoint
from tests.unit.encoded import PartBuilder, write_one_rank
from tests.unit.states import Chained

RUN_ID = 0x0011223344556677
OPTIONS = Options(staging_memory=8 * MIB, slot_size=MIB)
SHAPES: dict[str, tuple[int, ...]] = dict.fromkeys(DTYPES, (3, 5)) | {"scalar": (), "empty": (0, 3)}
OBJECTS: dict[str, Any] = {
    "common_state/shard_0_1": [{"iteration": 1234, "args": {"lr": 0.5, "name": "é"}}],
    "rng/shard_0_1": [[b"\0\1\2", None, True, -(2**40)]],
}


def pattern(key: str) -> bytes:
    """Returns the bytes of a tensor of the first checkpoint; not random, as torch's generators may change."""
    number, size = list(SHAPES).index(key), torch.Size(SHAPES[key]).numel() * dtype_of(key).itemsize
    data = bytes((7 * i + 13 * number + 1) % 251 for i in range(size))
    return bytes(byte % 2 for byte in data) if key == "bool" else data


def dtype_of(key: str) -> torch.dtype:
    return getattr(torch, key) if key in DTYPES else torch.float32


def tensor(key: str) -> torch.Tensor:
    data = torch.frombuffer(bytearray(pattern(key) or b"\0"), dtype=torch.uint8)[: len(pattern(key))]
    return data.view(dtype_of(key)).reshape(SHAPES[key])


class Objects:
    """A provider that has only objects."""

    def __init__(self, objects: list[ObjectSource]) -> None:
        self._objects = objects

    def entries(self) -> list[ObjectSource]:
        return self._objects

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


def one_rank_state(objects: list[ObjectSource]) -> StateProvider:
    """Returns a state of two groups whose order in the file is the reverse of that in the state."""
    lazy = {key: tensor(key) for key in SHAPES if "float" in key}
    eager = {key: tensor(key) for key in SHAPES if "float" not in key}
    tensors = (TensorProvider(lazy, Mutability.AT_FENCE), TensorProvider(eager, Mutability.NOW))
    return Chained(*tensors, Objects(objects))


def save_one_rank(directory: Path, objects: list[ObjectSource]) -> None:
    with mock.patch("secrets.randbits", return_value=RUN_ID):
        saver = Saver(OPTIONS, SaveSession())
        extras = PublicationExtras(parallel={"tensor": 1, "data": 1})
        publication = saver.start(directory, one_rank_state(objects), iteration=1234, extras=extras)
        assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()


# -- two ranks --------------------------------------------------------------------------------------------

PIECES: list[tuple[int, int, Fragment]] = [  # file, offset, fragment
    (0, 4096, Fragment("cut", "int16", (4, 4), (0, 0), (2, 3))),
    (0, 4160, Fragment("cut", "int16", (4, 4), (2, 0), (2, 4))),
    (1, 4096, Fragment("cut", "int16", (4, 4), (0, 3), (2, 1))),
    (1, 4160, Fragment("rows", "float32", (3, 2), (1, 0), (2, 2))),
    (0, 4224, Fragment("rows", "float32", (3, 2), (0, 0), (1, 2))),
    (1, 4224, Fragment("layers.0.weight", "uint8", (1, 3), (0, 0), (1, 3))),
]


def whole(key: str) -> torch.Tensor:
    """Returns a whole tensor of the second checkpoint."""
    fragment = next(piece for _, _, piece in PIECES if piece.key == key)
    count = torch.Size(fragment.global_shape).numel()
    return torch.arange(1, count + 1).to(getattr(torch, fragment.dtype)).reshape(fragment.global_shape)


def piece_bytes(fragment: Fragment) -> bytes:
    box = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.shape, strict=True))
    return whole(fragment.key)[box].contiguous().numpy().tobytes()


def two_ranks_index(objects: Mapping[str, int]) -> Index:
    entries = [(piece, Extent(file, offset, piece.bytes)) for file, offset, piece in PIECES]
    return build_index(entries, objects)


def make_two_ranks(directory: Path) -> None:
    parts = [Part(pieces=[(at, piece_bytes(p)) for file, at, p in PIECES if file == rank]) for rank in (0, 1)]
    parts[0].checksums = False
    parts[1].data_bytes = 12288
    data = ObjectSource("object", {"rank": 1}, Mutability.NOW).serialize()
    parts[1].objects = {"object": (8192, data)}
    unknown = {"compatible": 1 << 30}
    parts[1].footer = unknown
    index = two_ranks_index({"object": 1})
    write_checkpoint(directory, parts, index, SaveId(2**64 - 1, 7), iteration=None, **unknown)


# -- tails ------------------------------------------------------------------------------------------------

GRID = torch.arange(600_000, dtype=torch.int64).reshape(600, 1000) // 1000  # 4.6 MiB that compress well
STREAM = b"".join(b"%d\n" % (n // 1000) for n in range(400_000))
EARLIER = SaveId(RUN_ID, 1)
PROVIDERS = [
    ProviderEntry("", "MegatronState"),
    ProviderEntry("grid", "Compressed(NamedState)", {"cast_from": "float64"}),
]


def make_tails(directory: Path) -> None:
    one, two = PartBuilder(0), PartBuilder(1)
    one.add_fragment("grid", GRID, slice(0, 400), PLANES)
    one.add(Kind.STREAM, "stream", STREAM, ZSTD)
    one.add(Kind.OBJECT, "object", ObjectSource("object", [7] * 9000, Mutability.NOW).serialize(), PLANES, 4)
    two.add(Kind.STREAM, "plain", b"plain", NONE)
    two.add_fragment("grid", GRID, slice(400, None), ZSTD)
    two.add_fragment("small", GRID[:2, :3], slice(0, None), PLANES)
    write_one_rank(directory, [one, two], [(0, SaveId(RUN_ID, 2)), (12, EARLIER)], providers=PROVIDERS)


# -- beside checkpoints -----------------------------------------------------------------------------------

JOBS = [Job(1, 0), Job(RUN_ID, 1234, SaveId(1, 9)), Job(2**64 - 1, 10**18 - 1, SaveId(RUN_ID, 2))]
NODES = Nodes(1, [NodeEntry("node-a", [0, 1]), NodeEntry("", []), NodeEntry("é", [2, 16383])])


def make_near(directory: Path) -> None:
    for job in JOBS:
        note_job(directory, SaveId(job.run_id, 1), job.origin, resumed=job.resumed)
    (directory / NODES_NAME).write_bytes(NODES.encode())


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir()
    save_one_rank(target / "one-rank", [ObjectSource(k, v, Mutability.NOW) for k, v in OBJECTS.items()])
    make_two_ranks(target / "two-ranks")
    make_tails(target / "tails")


if __name__ == "__main__":
    main()
