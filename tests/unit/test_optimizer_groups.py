"""Parameter groups of a checkpoint, found in either place and matched with those of another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.errors import FormatError, MismatchError
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer_groups import (
    StoredOptions,
    equal,
    from_common_state,
    from_objects,
    matched,
    reshardable_common_state,
)
from tests.unit.states import new_saver, save

NAMES = ("wd_mult", "lr_mult", "is_expert_parallel")
PREFIX = "optimizer.distributed.dp_group_idx_"
DECAYED = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "lr": 0.5, "step": 7}
PLAIN = DECAYED | {"wd_mult": 0.0}
EXPERT = DECAYED | {"is_expert_parallel": True}


def stored(*groups: dict[str, Any]) -> StoredOptions:
    return StoredOptions(groups, {})


def checkpoint(directory: Path, objects: dict[str, Any]) -> Checkpoint:
    """Of objects that Megatron stores as lists of one element."""
    saver = new_saver()
    save(
        saver,
        directory,
        {"a": torch.ones(1)},
        {f"{key}/shard_0_1": [value] for key, value in objects.items()},
    )
    saver.close()
    return Checkpoint.open(directory)


def of_groups(*each: dict[str, Any], prefix: str = PREFIX) -> dict[str, Any]:
    """The objects of data-parallel groups, each with a map."""
    return {
        f"{prefix}{number}.{name}": value
        for number, objects in enumerate(each)
        for name, value in {**objects, "datastates_map": "text", "per_bucket_numel": [1]}.items()
    }


def options(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": list(groups)}}


# -- finding ------------------------------------------------------------------------------------------------


def test_objects_of_all_groups_are_read_and_equal_ones_count_once(tmp_path: Path) -> None:
    scaler = {"scale": torch.tensor([2.0]), "growth_tracker": 3}
    objects = of_groups(
        options(DECAYED, PLAIN) | {"grad_scaler": scaler}, options(PLAIN) | {"grad_scaler": scaler}
    )
    found = from_objects(checkpoint(tmp_path / "c", objects | {"rng_state": 1}))
    assert found.groups == (DECAYED, PLAIN)
    assert found.others.keys() == {"grad_scaler"} and equal(found.others["grad_scaler"], scaler)


def test_objects_of_one_optimizer_of_a_chain_are_kept_apart(tmp_path: Path) -> None:
    objects = {
        **of_groups(options(DECAYED), prefix=f"chained_0.{PREFIX}"),
        **of_groups(options(EXPERT), prefix=f"chained_1.{PREFIX}"),
    }
    opened = checkpoint(tmp_path / "c", objects)
    assert [from_objects(opened, link).groups for link in (0, 1, None)] == [
        (DECAYED,), (EXPERT,), (DECAYED, EXPERT)
    ]  # fmt: skip


def test_groups_with_different_scalers_are_refused(tmp_path: Path) -> None:
    objects = of_groups(*(options(PLAIN) | {"grad_scaler": {"scale": torch.tensor([x])}} for x in (1.0, 2.0)))
    with pytest.raises(FormatError, match="data-parallel groups store different values of 'grad_scaler'"):
        from_objects(checkpoint(tmp_path / "c", objects))


@pytest.mark.parametrize("value", [None, [], {"param_groups": {}}, {"param_groups": [1]}])
def test_what_is_no_list_of_groups_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        FormatError, match=r"dp_group_idx_0.optimizer/shard_0_1 has no list of parameter groups"
    ):
        from_objects(checkpoint(tmp_path / "c", of_groups({"optimizer": value})))


def test_common_states_of_any_optimizer_have_groups() -> None:
    step = torch.tensor(7.0)
    group = {key: value for key, value in DECAYED.items() if key != "step"} | {"params": [1]}
    kinds = {
        "distributed": {"optimizer": {"param_groups": [DECAYED]}, "grad_scaler": 5},
        "mixed": {"optimizer": {"param_groups": [group], "state": {"common_step": step}}, "grad_scaler": 5},
        "chained": {0: {"optimizer": {"param_groups": [DECAYED]}, "grad_scaler": 5}},
    }
    for kind, optimizer in kinds.items():
        found = from_common_state({"optimizer": optimizer, "model": {"param_groups": [PLAIN]}})
        assert found == StoredOptions((DECAYED,), {"grad_scaler": 5}), kind
    plain = {"param_groups": [group], "state": {"common_step": 7}}
    assert from_common_state({"optimizer": plain}).groups == (DECAYED,)
    assert from_common_state({}).groups == ()


# -- matching -----------------------------------------------------------------------------------------------


def test_a_group_gets_the_stored_options_of_the_same_identity() -> None:
    own = {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "lr": 0.0}
    assert matched(own, stored(DECAYED, PLAIN), NAMES) == PLAIN


def test_experts_without_a_group_of_their_own_take_the_one_of_the_others() -> None:
    own = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": True}
    assert matched(own, stored(DECAYED, PLAIN), NAMES) == EXPERT
    assert matched(own | {"is_expert_parallel": False}, stored(EXPERT), NAMES) == DECAYED


TWO = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"a": TWO.clone(), "b": [1, (2, None)]}, True),
        ({"a": TWO + 1, "b": [1, (2, None)]}, False),
        ({"a": TWO.double(), "b": [1, (2, None)]}, False),
        ({"a": 1.0, "b": [1, (2, None)]}, False),
        ({"a": TWO}, False),
        ({"a": TWO, "b": [1, (2, None)], "c": 1}, False),
        ({"a": TWO, "b": [1, (3, None)]}, False),
        ({"a": TWO, "b": [1]}, False),
        ({"a": TWO, "b": [1, (2, None), 3]}, False),
        ({"a": TWO, "b": [True, (2, None)]}, False),
        ({"a": TWO, "b": 1}, False),
        ([TWO, [1, (2, None)]], False),
    ],
)
def test_options_are_equal_in_every_part_and_of_one_kind(other: Any, same: bool) -> None:
    one = {"a": TWO, "b": [1, (2, None)]}
    assert equal(one, other) is equal(other, one) is same


def test_names_of_nemo_and_options_that_are_not_set_are_the_same() -> None:
    found = matched(
        {"pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "max_lr": None}, stored(PLAIN), (*NAMES[:2], "max_lr")
    )
    assert found == {key: value for key, value in PLAIN.items() if key != "is_expert_parallel"}


def test_no_group_is_guessed() -> None:
    with pytest.raises(
        MismatchError, match=r"no parameter group with \{'wd_mult': 3.0\}, as the optimizer has"
    ):
        matched({"wd_mult": 3.0}, stored(DECAYED, PLAIN), NAMES)


def test_stored_groups_that_differ_are_refused() -> None:
    with pytest.raises(MismatchError, match="'step' is 7 in one, and 8 in another"):
        matched(DECAYED, stored(DECAYED, DECAYED | {"step": 8}), NAMES)


# -- the common state of a checkpoint by parameter ----------------------------------------------------------


def test_the_common_state_says_that_the_optimizer_is_fully_reshardable(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "c", of_groups(options(DECAYED, PLAIN) | {"grad_scaler": 5}))
    before = {
        "args": 1,
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": True},
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
    }
    assert reshardable_common_state(opened, [before]) == [
        {
            "args": 1,
            "content_metadata": {
                "distrib_optim_sharding_type": "fully_reshardable",
                "chained_optim_avoid_prefix": True,
                "singleton_local_shards": True,
            },
            "optimizer": {
                "optimizer": {"param_groups": [DECAYED, PLAIN]},
                "grad_scaler": 5,
                "param_state_sharding_type": "fully_reshardable",
            },
        }
    ]


@pytest.mark.parametrize("common", [None, [], [{}], [{"content_metadata": {}}], [[]], "text"])
def test_another_common_state_is_refused(tmp_path: Path, common: Any) -> None:
    opened = checkpoint(tmp_path / "c", of_groups(options(DECAYED)))
    with pytest.raises(FormatError, match="expected 'dp_reshardable'"):
        reshardable_common_state(opened, common)


def test_classes_are_the_runs_own(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, of_groups(options(DECAYED | {"cpu_optimizer_cls": torch.optim.SGD})))
    found = from_objects(kept)
    assert found.groups == (DECAYED,) and found.step == 7
    own = DECAYED | {"step": 0, "cpu_optimizer_cls": torch.optim.AdamW}
    assert matched(own, found, NAMES) == DECAYED | {"cpu_optimizer_cls": torch.optim.AdamW}
