"""Layers from keys, and boxes of tensors."""

import pytest

from megatron_datastates.convert.parts import (
    choose_parts,
    group_of,
    is_weight,
    parts_of,
    place_of,
    stacked_key,
)
from megatron_datastates.errors import MissingKeyError
from megatron_datastates.format.values import is_of_optimizer


def test_a_stacked_key_is_a_part_for_each_layer_with_its_number_in_the_name():
    parts = parts_of("decoder.layers.mlp.linear_fc1.weight", (2, 8, 4))
    assert [part.name for part in parts] == [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(2)]
    assert [part.layer for part in parts] == [("decoder.layers", 0), ("decoder.layers", 1)]
    assert [(part.offset, part.shape) for part in parts] == [((0, 0, 0), (1, 8, 4)), ((1, 0, 0), (1, 8, 4))]


def test_a_numbered_key_is_one_layers_whole_tensor():
    (part,) = parts_of("mtp.layers.3.transformer_layer.mlp.weight", (8, 4))
    assert (part.layer, part.shape, part.stacked) == (("mtp.layers", 3), (8, 4), False)


def test_a_stack_of_no_layers_is_one_part():
    (part,) = parts_of("decoder.layers.w", (0, 3))
    assert (part.name, part.shape, part.stacked) == ("decoder.layers.w", (0, 3), False)


@pytest.mark.parametrize("key", ["output_layer.weight", "decoder.sublayers.weight", "embedding.weight"])
def test_a_key_without_layers_belongs_to_none(key: str):
    (part,) = parts_of(key, (8, 4))
    assert (part.layer, part.name, part.shape) == (None, key, (8, 4))


@pytest.mark.parametrize("prefix", ["optimizer.state.exp_avg.", "chained_1.optimizer.state.exp_avg."])
def test_an_optimizers_state_belongs_to_the_layer_of_its_parameter(prefix: str):
    key = f"{prefix}decoder.layers.mlp.weight"
    assert parts_of(key, (1, 4))[0].layer == parts_of("decoder.layers.mlp.weight", (1, 4))[0].layer
    assert group_of(key) == "optimizer exp_avg" and not is_weight(key)


@pytest.mark.parametrize("prefix", ["optimizer.state.", "optimizer.1.state.", "optim.state."])
@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_a_state_may_be_named_after_its_parameter_as_dcp_does(prefix: str, state: str):
    (part,) = parts_of(f"{prefix}decoder.layers.3.mlp.weight.{state}", (4,))
    assert part.layer == ("decoder.layers", 3) and place_of(part.name, None) == "decoder.layers.3.mlp"
    assert group_of(part.name) == f"optimizer {state}" and not is_weight(part.name)


def test_megatron_fsdp_may_have_states_of_any_name():
    key = "optimizer.state.module.module.module.output_layer.weight.row_norms"
    assert group_of(key) == "optimizer row_norms"
    assert place_of(key, None) == "module.module.module.output_layer"


def test_a_tensor_of_a_random_generator_is_neither_a_weight_nor_of_the_optimizer():
    key = "rng_state.(0, 0).0.torch_rng_state"
    assert group_of(key) == "random generators" and not is_weight(key) and not is_of_optimizer(key)
    assert is_weight("model.rng_state.weight")


def test_a_bucket_is_of_the_state_that_its_key_ends_with():
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg_sq"
    assert group_of(key) == "optimizer exp_avg_sq"


def test_state_of_megatron_fsdp_is_of_the_state_that_its_key_ends_with():
    assert group_of("optimizer.state.module.module.decoder.layers.0.w.exp_avg") == "optimizer exp_avg"


SHAPES = {"a.w": (4,), "b.w": (4,), "b.x": (4,), "decoder.layers.mlp.weight": (3, 8)}


def chosen(*patterns: str) -> dict[str, list[str]]:
    found = choose_parts(SHAPES, patterns, "ck")
    return {key: [part.name for part in choice.parts] for key, choice in found.items()}


def test_a_pattern_matches_keys_as_they_are_stored_and_layers_by_their_names():
    assert chosen("b.*", "*.w") == {key: [key] for key in ("a.w", "b.w", "b.x")}
    layers = [f"decoder.layers.{n}.mlp.weight" for n in range(3)]
    assert chosen("decoder.*") == {"decoder.layers.mlp.weight": layers}
    assert chosen("decoder.layers.1.*") == {"decoder.layers.mlp.weight": layers[1:2]}
    assert chosen("decoder.layers.[02].mlp.*", "decoder.layers.mlp.weight") == {
        "decoder.layers.mlp.weight": layers
    }
    assert chosen().keys() == SHAPES.keys()


def test_a_pattern_that_matches_nothing_is_refused_with_keys_that_exist():
    with pytest.raises(MissingKeyError, match=r"no tensor in ck matches 'c\*': expected a key such as 'a.w'"):
        chosen("a.*", "c*")
    with pytest.raises(MissingKeyError, match=r"decoder\.layers\.3\.\*"):
        chosen("decoder.layers.3.*")


def test_an_absurd_number_of_layers_is_one_part():
    assert len(parts_of("decoder.layers.w", (1 << 50, 1))) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.3.mlp.weight", ("decoder.layers.mlp.weight", 3)),
        ("optimizer.state.exp_avg.decoder.layers.0.w", ("optimizer.state.exp_avg.decoder.layers.w", 0)),
        ("decoder.layers.mlp.weight", None),
        ("embedding.weight", None),
    ],
)
def test_the_key_of_a_layer_is_that_without_its_number(name: str, expected: tuple[str, int] | None):
    assert stacked_key(name) == expected
