"""Objects that are read in windows: what a window holds is given back when it cannot be fetched."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from megatron_datastates.config import MIB
from megatron_datastates.engine.fetching import read_through_windows
from megatron_datastates.errors import StorageError
from megatron_datastates.plan.reads import ReadSpans
from tests.support.descriptors import open_files


def test_an_object_larger_than_files_may_be_is_named_and_nothing_stays_open() -> None:
    def words(value: int) -> np.ndarray:
        return np.array([value], np.uint64)

    spans = ReadSpans(
        files=words(0),
        offsets=words(0),
        rows=words(1),
        row_bytes=words(1),
        file_steps=words(1),
        targets=words(0),
        target_steps=words(1),
        on_device=np.array([False]),
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(StorageError, match="data file object cannot be read: File too large"):
            read_through_windows([(Path("object"), 8 * MIB)], spans, lambda *_: None, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert open_files(Path("/memfd:datastates-window")) == []
