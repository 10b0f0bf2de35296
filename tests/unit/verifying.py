"""Parts of checkpoints built by hand; what verify finds in them, why repair refuses, what a load reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_datastates as ds
from megatron_datastates.errors import RepairRefusedError
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import OPTIONS, SMALL, bits

OBJECT = ObjectSource("x", 7, Mutability.NEVER).serialize()
A, B = bytes(range(1, 9)), bytes(range(11, 19))
TWO = [Part(pieces=[(4096, A)]), Part(pieces=[(4096, B)])]


def w(offset: int, size: int, total: int = 16):
    return fragment("w", [total], [offset], [size])


def faults(directory: Path) -> list[str]:
    return verify(directory, options=OPTIONS).faults


def refusal(directory: Path) -> str:
    """Returns why repair refuses, which changes nothing then."""
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(RepairRefusedError) as error:
        repair(directory, options=OPTIONS)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    return str(error.value)


def read(directory: Path, key: str = "w") -> bytes:
    return bits(ds.open(directory, **SMALL).read_tensor(key))


def whole(directory: Path, parts: list[Part] = TWO, **fields):
    return write_checkpoint(directory, parts, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]), **fields)
