"""What a load asks for and the checkpoint does not have: see also tests/multirank and tests/faults."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.dist_checkpointing import ShardedTensor

import megatron_datastates as ds
from megatron_datastates.mcore.load.mismatch import first_mismatch
from megatron_datastates.pipeline.saver import Saver
from tests.unit.states import save


def test_a_key_of_a_tensor_and_of_an_object_is_refused(saver: Saver, tmp_path: Path) -> None:
    """The format allows it, and DCP has one name for both."""
    save(saver, tmp_path, {"w": torch.ones(3), "v": torch.ones(3)}, {"w": 1})
    checkpoint = ds.open(tmp_path)
    asked = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(3), replica_id=0) for key in ("v", "w")}
    assert first_mismatch(checkpoint, [asked["v"]]) is None
    problem = str(first_mismatch(checkpoint, [asked["v"], asked["w"]]))
    assert "'w' is both a tensor and an object" in problem and "megatron_datastates.open(...)" in problem
