"""DCP's load, which Megatron's planner drives, of encoded tensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron_datastates.mcore.load.reader import DataStatesReader
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.unit.encoded import MOMENT, OBJECTS, PLAIN, WEIGHT
from tests.unit.encoded import directory as directory
from tests.unit.states import OPTIONS, bits


def load(directory: Path, state: dict[str, object]) -> None:
    reader = DataStatesReader(Checkpoint.open(directory, OPTIONS))
    dcp.load(state, storage_reader=reader)


def test_encoded_tensors_are_loaded_in_place_with_plain_ones_and_objects(directory):
    state = {
        "weight": torch.zeros_like(WEIGHT),
        "moment": torch.zeros_like(MOMENT),
        "plain": torch.zeros_like(PLAIN),
        "state": None,
    }
    targets = dict(state)
    load(directory, state)
    for key, tensor in (("weight", WEIGHT), ("moment", MOMENT), ("plain", PLAIN)):
        assert state[key] is targets[key]
        assert bits(state[key]) == bits(tensor)
    assert state["state"] == OBJECTS["state"]


def test_targets_of_other_dtypes_and_strides_are_filled(directory):
    wide, turned = torch.zeros(len(MOMENT), dtype=torch.float64), torch.zeros(*WEIGHT.shape[::-1]).T
    load(directory, {"moment": wide, "weight": turned})
    assert torch.equal(wide, MOMENT.to(torch.float64))
    assert bits(turned) == bits(WEIGHT)
