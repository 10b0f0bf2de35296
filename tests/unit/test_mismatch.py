"""What a load asks for and the checkpoint does not have: see also tests/multirank and tests/faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

import megatron_datastates as ds
from megatron_datastates.mcore.load.mismatch import first_mismatch, tensors_left_out
from megatron_datastates.mcore.training import load as loads
from megatron_datastates.pipeline.saver import Saver
from tests.unit.states import save
from tests.unit.test_optimizer_state import BUCKET


def test_a_key_of_a_tensor_and_of_an_object_is_refused(saver: Saver, tmp_path: Path) -> None:
    """The format allows it, and DCP has one name for both."""
    save(saver, tmp_path, {"w": torch.ones(3), "v": torch.ones(3)}, {"w": 1})
    checkpoint = ds.open(tmp_path)
    asked = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(3), replica_id=0) for key in ("v", "w")}
    assert first_mismatch(checkpoint, [asked["v"]]) is None
    problem = str(first_mismatch(checkpoint, [asked["v"], asked["w"]]))
    assert "'w' is both a tensor and an object" in problem and "megatron_datastates.open(...)" in problem


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16])
def test_remainders_of_main_parameters_are_no_main_parameters(
    wanted: torch.dtype, saver: Saver, tmp_path: Path
) -> None:
    """A precision-aware optimizer stores, as int16, only the bits that bfloat16 weights lack."""
    key = f"optimizer.distributed.dp_group_idx_0.{BUCKET}.param"
    save(saver, tmp_path, {key: torch.arange(4, dtype=torch.int16)})
    checkpoint = ds.open(tmp_path)

    def problem(dtype: torch.dtype) -> str | None:
        asked = ShardedTensor.from_rank_offsets(key, torch.zeros(4, dtype=dtype), replica_id=0)
        return first_mismatch(checkpoint, [asked])

    assert problem(torch.int16) is None
    text = str(problem(wanted))
    assert f"{key!r} has only the remainders" in text and "--use-precision-aware-optimizer" in text
    assert "--no-load-optim" in text


class Counted(list[Any]):
    """What one rank requests, which counts how often somebody looks at it."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.looks += 1
        return super().__iter__()


RANKS, STAGES = 4096, 8


@pytest.mark.parametrize(
    "stage_of", [lambda rank: rank * STAGES // RANKS, lambda rank: rank % STAGES], ids=["blocks", "in turn"]
)
def test_a_model_that_lacks_nothing_is_seen_in_a_few_ranks_of_many(
    stage_of: Callable[[int], int], saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 looks, and all others wait: of 16,384 ranks with 600 items each, to look at all takes 2 s."""
    keys = [f"decoder.layers.{layer}.weight" for layer in range(STAGES)]
    save(saver, tmp_path, {key: torch.ones(1) for key in keys})
    checkpoint = ds.open(tmp_path)
    everyone = [Counted([SimpleNamespace(key=keys[stage_of(rank)])]) for rank in range(RANKS)]
    monkeypatch.setattr(Counted, "looks", 0)
    assert tensors_left_out(checkpoint, everyone) == []
    assert Counted.looks <= RANKS // STAGES


@pytest.mark.parametrize("ranks", [0, 1, 2, 5, 16])
def test_each_rank_is_looked_at_before_a_tensor_is_said_to_be_left_out(
    ranks: int, saver: Saver, tmp_path: Path
) -> None:
    keys = [f"decoder.layers.{layer:02}.weight" for layer in range(ranks + 1)]
    save(saver, tmp_path, {key: torch.ones(1) for key in [*keys, "optimizer.state.exp_avg.decoder.weight"]})
    everyone = [[SimpleNamespace(key=keys[rank])] for rank in range(ranks)]
    assert tensors_left_out(ds.open(tmp_path), everyone) == keys[ranks:]


def test_a_local_checkpoint_of_other_sizes_is_not_said_to_lack_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron has loaded no directory then, and the checkpoint in --load resumes with any sizes."""
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: SimpleNamespace(finetune=False))

    def original() -> None:
        raise RuntimeError(f"(TP, PP) mismatch: {loads._REFUSAL}")

    with pytest.raises(RuntimeError, match="leave out --non-persistent-ckpt-type") as found:
        loads.wrap_load_checkpoint(original)
    assert "None" not in str(found.value) and "optimizer map" not in str(found.value)
