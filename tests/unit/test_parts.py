"""Layers from keys, and boxes of tensors."""

import pytest

from megatron_datastates.convert.parts import choose_keys, group_of, is_weight, parts_of
from megatron_datastates.errors import MissingKeyError


def test_a_stacked_key_is_a_part_for_each_layer_with_its_number_in_the_name():
    parts = parts_of("decoder.layers.mlp.linear_fc1.weight", (2, 8, 4))
    assert [part.name for part in parts] == [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(2)]
    assert [part.layer for part in parts] == [("decoder.layers", 0), ("decoder.layers", 1)]
    assert [(part.offset, part.shape) for part in parts] == [((0, 0, 0), (1, 8, 4)), ((1, 0, 0), (1, 8, 4))]


def test_a_numbered_key_is_one_layers_whole_tensor():
    (part,) = parts_of("mtp.layers.3.transformer_layer.mlp.weight", (8, 4))
    assert (part.layer, part.shape, part.stacked) == (("mtp.layers", 3), (8, 4), False)


@pytest.mark.parametrize("key", ["output_layer.weight", "decoder.sublayers.weight", "embedding.weight"])
def test_a_key_without_layers_belongs_to_none(key: str):
    (part,) = parts_of(key, (8, 4))
    assert (part.layer, part.name, part.shape) == (None, key, (8, 4))


@pytest.mark.parametrize("prefix", ["optimizer.state.exp_avg.", "chained_1.optimizer.state.exp_avg."])
def test_an_optimizers_state_belongs_to_the_layer_of_its_parameter(prefix: str):
    key = f"{prefix}decoder.layers.mlp.weight"
    assert parts_of(key, (1, 4))[0].layer == parts_of("decoder.layers.mlp.weight", (1, 4))[0].layer
    assert group_of(key) == "optimizer exp_avg" and not is_weight(key)


def test_a_bucket_is_of_the_state_that_its_key_ends_with():
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg_sq"
    assert group_of(key) == "optimizer exp_avg_sq"


def test_a_pattern_that_matches_nothing_is_refused_with_keys_that_exist():
    assert choose_keys(["a.w", "b.w", "b.x"], ["b.*", "*.w"], "ck") == ["a.w", "b.w", "b.x"]
    with pytest.raises(MissingKeyError, match=r"no tensor in ck matches 'c\*': expected a key such as 'a.w'"):
        choose_keys(["a.w"], ["a.*", "c*"], "ck")
