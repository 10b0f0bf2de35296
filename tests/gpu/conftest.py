"""Staging engines on the real driver. The tests of this folder are deselected without a GPU."""

from collections.abc import Iterator

import pytest
import torch

from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[StagingEngine]:
    """An engine with a pool of 1 GiB, in which no test has to wait for a slot."""
    torch.cuda.init()
    made = StagingEngine(Options(staging_memory=GIB, slot_size=4 * MIB))
    yield made
    FENCE.forget()
    made.close()


@pytest.fixture
def slow_engine() -> Iterator[StagingEngine]:
    """An engine that copies 32 MiB a second."""
    made = StagingEngine(Options(staging_memory=GIB, slot_size=MIB, copy_limit=32 * MIB))
    yield made
    FENCE.forget()
    made.close()


@pytest.fixture
def small_engine() -> Iterator[StagingEngine]:
    """An engine with two slots of 1 MiB."""
    made = StagingEngine(Options(staging_memory=2 * MIB, slot_size=MIB))
    yield made
    FENCE.forget()
    made.close()
