"""A state of which every byte follows from (iteration, name, index), and the judge of what a load returns.

The judge knows no checksum and no manifest: it looks at bytes in memory, after Megatron's own
`dist_checkpointing.load`. A checkpoint is exactly one iteration bit for bit, or it is refused with an error
that names its directory; all else is a violation. Global shapes do not depend on the number of ranks, so
any number (1, 2 or 4) loads what any number saved.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

PIECES = 4  # of what is divided among ranks: their number divides this
OBJECT_BYTES = 3_000
POISON = 0xA5
_GLANCE = 16  # elements by which most iterations differ
Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One tensor of the state.

    `split`: the axes along which ranks divide it; none for one that all hold. `lazy`: it is a parameter,
    which Megatron's loop changes in steps only. `turned`: in memory its axes are in the opposite order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    split: tuple[int, ...] = ()
    lazy: bool = False
    turned: bool = False

    def parts(self, rank: int, ranks: int) -> list[tuple[int, int, int]]:
        """Returns (axis, place, number of places) along each axis in `split`."""
        if len(self.split) == 2:
            rows = 2 if ranks == PIECES else 1
            columns = ranks // rows
            return [(self.split[0], rank // columns, rows), (self.split[1], rank % columns, columns)]
        return [(axis, rank, ranks) for axis in self.split]

    @functools.cache  # noqa: B019  (a kind lives as long as the process)
    def index(self, rank: int, ranks: int) -> npt.NDArray[np.uint64]:
        """Returns the place of each element of a rank's part in the global tensor."""
        found = np.zeros((1,) * len(self.shape), np.uint64)
        part = {axis: (place, places) for axis, place, places in self.parts(rank, ranks)}
        for axis, size in enumerate(self.shape):
            place, places = part.get(axis, (0, 1))
            step = size // places
            along = np.arange(place * step, (place + 1) * step, dtype=np.uint64)
            shape = [1] * len(self.shape)
            shape[axis] = step
            found = found * np.uint64(size) + along.reshape(shape)
        return found


KINDS = (
    Kind("weight", torch.float32, (8, 100_003), (0,), lazy=True),
    Kind("grid", torch.bfloat16, (128, 3_004), (0, 1)),
    Kind("quantized", torch.int8, (3, PIECES * 77_777), (1,), lazy=True),
    Kind("turned", torch.float64, (PIECES * 51, 301), (0,), turned=True),
    Kind("same", torch.bfloat16, (33,)),
    Kind("scalar", torch.float32, ()),
    Kind("one", torch.int8, (1,)),
    Kind("nothing", torch.int64, (0, 7)),
)


def _bits(
    iteration: int, name: str, index: npt.NDArray[np.uint64], itemsize: int
) -> npt.NDArray[np.signedinteger]:
    """Returns `itemsize` bytes for each index, by a mixer of splitmix64's kind."""
    seed = zlib.crc32(name.encode()) << 32 | iteration
    mixed = index.reshape(-1) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed * 0xD1B54A32D192ED03 & (1 << 64) - 1)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed.astype(f"<i{itemsize}").reshape(index.shape)


def tensor(kind: Kind, iteration: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns a rank's part of a tensor of that iteration."""
    bits = _bits(iteration, kind.name, kind.index(rank, ranks), kind.dtype.itemsize)
    found = torch.from_numpy(bits).view(kind.dtype)
    if kind.turned:
        found = found.T.contiguous().T
    return torch.nn.Parameter(found, requires_grad=False) if kind.lazy else found


def thing(name: str, iteration: int | None) -> dict[str, Any] | None:
    """Returns an object of that iteration."""
    if iteration is None:
        return None
    bits = _bits(iteration, name, np.arange(OBJECT_BYTES, dtype=np.uint64), 1)
    return {"iteration": iteration, "name": name, "bytes": bits.tobytes()}


def pieces(rank: int, ranks: int) -> range:
    """Returns the pieces of `own` that a rank holds."""
    return range(rank * PIECES // ranks, (rank + 1) * PIECES // ranks)


def state(iteration: int | None) -> dict[str, Any]:
    """Returns a rank's part of the state for `dist_checkpointing`; without an iteration, one to load into."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for kind in KINDS:
        parts = kind.parts(rank, ranks)
        if iteration is None:
            data = torch.empty(kind.index(rank, ranks).shape, dtype=kind.dtype)
            memory(data)[:] = POISON
        else:
            data = tensor(kind, iteration, rank, ranks)
        replica = 0 if parts else rank
        found[kind.name] = ShardedTensor.from_rank_offsets(kind.name, data, *parts, replica_id=replica)
    found["shared"] = ShardedObject("shared", thing("shared", iteration), (1,), (0,), replica_id=rank)
    for piece in pieces(rank, ranks):
        own = thing(f"own{piece}", iteration)
        found[f"own{piece}"] = ShardedObject("own", own, (PIECES,), (piece,))
    return found | {"common": thing("common", iteration), "iteration": iteration}


def memory(data: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor, in place if it is contiguous."""
    flat = data.detach().contiguous().reshape(-1)
    found: Bytes = (flat if flat.numel() else flat.new_empty(0, dtype=torch.int8)).view(torch.uint8).numpy()
    return found


def overwrite(sharded: dict[str, Any], *, lazy: bool) -> None:
    """Fills the lazy tensors, or all others and the objects, with what no iteration has."""
    for kind in KINDS:
        if kind.lazy == lazy:
            data = sharded[kind.name].data.detach()
            memory(data.T if kind.turned else data)[:] = POISON
    if not lazy:
        for item in sharded.values():
            if isinstance(item, ShardedObject):
                item.data["iteration"] = -1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a directory is: "whole" (with its iteration), "refused" or "violated" (with the reason)."""

    what: str
    iteration: int | None = None
    why: str = ""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Verdict:
        return cls(**fields)


def judge(directory: Path, candidates: Collection[int]) -> Verdict:
    """Loads what all ranks saved there, and says what it is. Collective; each rank judges its own part."""
    try:
        found = dist_checkpointing.load(state(None), str(directory), validate_access_integrity=False)
    except CheckpointingException as error:
        if directory.name in str(error):
            return Verdict("refused", why=str(error))
        return Verdict("violated", why=f"the refusal does not name {directory.name}: {error}")
    except Exception as error:
        return Verdict(
            "violated", why=f"{directory.name}: refused unclearly: {type(error).__name__}: {error}"
        )
    return decide(found, candidates, dist.get_rank(), dist.get_world_size())


def decide(found: dict[str, Any], candidates: Collection[int], rank: int, ranks: int) -> Verdict:
    """Returns which iteration a rank's part of a loaded state is, by its bytes alone."""
    matches = {name: sorted(set(fits)) for name, fits in _matches(found, candidates, rank, ranks)}
    torn = [name for name, fits in matches.items() if not fits]
    if torn:
        shares = _torn(found, torn[0], candidates, rank, ranks)
        return Verdict("violated", why=f"{torn[0]} is of no iteration: {shares}")
    common = set(candidates).intersection(*map(set, matches.values()))
    if len(common) != 1:
        return Verdict("violated", why=f"mixed iterations: {matches}")
    return Verdict("whole", common.pop())


def _matches(
    found: dict[str, Any], candidates: Collection[int], rank: int, ranks: int
) -> Iterator[tuple[str, list[int]]]:
    for kind in KINDS:
        data = found[kind.name]
        begin = kind.index(rank, ranks).reshape(-1)[:_GLANCE]
        glance = memory(data.reshape(-1)[:_GLANCE])
        likely = [
            each
            for each in candidates
            if np.array_equal(glance, _bits(each, kind.name, begin, kind.dtype.itemsize).view(np.uint8))
        ]
        wanted = {each: tensor(kind, each, rank, ranks) for each in likely}
        yield kind.name, [each for each in likely if _same(data, wanted[each])]
    for name in ["shared", "common", *(f"own{piece}" for piece in pieces(rank, ranks))]:
        yield name, [each for each in candidates if found[name] == thing(name, each)]
    yield "iteration", [each for each in candidates if found["iteration"] == each]


def _same(data: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        data.dtype == wanted.dtype
        and data.shape == wanted.shape
        and np.array_equal(memory(data), memory(wanted))
    )


def _torn(found: dict[str, Any], name: str, candidates: Collection[int], rank: int, ranks: int) -> str:
    """Returns how much of a tensor is of which iteration."""
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        return repr(found[name])[:200]
    stored = memory(found[name])
    shares = {}
    for each in candidates:
        wanted = memory(tensor(kind, each, rank, ranks))
        if len(wanted) == len(stored):
            shares[each] = int(np.count_nonzero(wanted == stored))
    poison = int(np.count_nonzero(stored == POISON))
    return f"of {len(stored)} bytes, alike: {shares}, as before the load: {poison}"
