"""What config.json and stored arguments say about a model: as transformers takes it, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_datastates.convert.hf.arguments import Arguments, command_line, model_arguments
from megatron_datastates.convert.hf.config_json import config_json, read_config
from megatron_datastates.convert.hf.families import family_of
from megatron_datastates.errors import DataStatesError, FormatError, UnsupportedFormatError
from tests.unit.command import run
from tests.unit.hf_models import GPT2, LLAMA, MIXTRAL, arguments, save, state
from tests.unit.states import bits

# What save_pretrained of transformers 5.23.0 wrote for small models of each architecture.
SAVED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hf_configs.json").read_text())
YARN = {"rope_type": "yarn", "factor": 2.0}
STRANGE = [None, "x", -1, 0, 1.5, 1 << 70, True, [1], ["a"], [[1], [1]], {}]


@pytest.mark.parametrize("name", SAVED)
def test_what_transformers_saves_is_imported_and_exported_again(name: str, tmp_path: Path) -> None:
    family, a = read_config(SAVED[name])
    stored = arguments({**vars(a)})
    weights = state(stored, apart=0 in a.moe_layer_freq)
    checkpoint = save(tmp_path / "ck", stored, weights)
    assert run("export", checkpoint, tmp_path / "hf", "--hf")[0] == 0
    (tmp_path / "hf/config.json").write_text(json.dumps(SAVED[name]))
    code, out, err = run("import", tmp_path / "hf", tmp_path / "run")
    assert code == 0, out + err
    assert run("export", tmp_path / "run", tmp_path / "again", "--hf")[0] == 0
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert {key: bits(tensor) for key, tensor in one.items()} == {
        key: bits(tensor) for key, tensor in other.items()
    }
    assert read_config(json.loads((tmp_path / "again/config.json").read_text())) == (family, a)


def changed(name: str, **members: Any) -> dict[str, Any]:
    return {**SAVED[name], **members}


def without(name: str, member: str) -> dict[str, Any]:
    return {key: value for key, value in SAVED[name].items() if key != member}


def test_two_names_of_the_number_of_experts_must_agree() -> None:
    _, a = read_config(changed("qwen3_moe", num_experts=4))
    assert a.num_experts == 4
    assert read_config({**without("qwen3_moe", "num_local_experts"), "num_experts": 4})[1] == a
    with pytest.raises(UnsupportedFormatError, match="num_experts is 3, not 4"):
        read_config(changed("qwen3_moe", num_experts=3))


def test_layers_are_dense_by_name_or_between_the_steps() -> None:
    _, a = read_config(changed("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2))
    assert a.moe_layer_freq == (0, 1, 0, 0, 0, 1)


def test_of_two_scalings_that_of_rope_scaling_counts() -> None:
    _, a = read_config(changed("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert a.rotary_seq_len_interpolation_factor == 4 and a.rotary_base == 10000
    with pytest.raises(UnsupportedFormatError, match="no rotary embeddings with rope_scaling"):
        read_config(changed("llama", rope_scaling=YARN))


def test_scaling_and_interpolation_together_are_refused() -> None:
    stored = vars(arguments(LLAMA, use_rope_scaling=True, rotary_seq_len_interpolation_factor=4))
    with pytest.raises(UnsupportedFormatError, match="rotary_seq_len_interpolation_factor is 4, not None"):
        family_of(model_arguments(stored), stored)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (without("mistral", "sliding_window"), r"is 4096, not None \(transformers assumes so where sliding"),
        (changed("mistral", sliding_window=16, use_sliding_window=False), "sliding_window is 16, not None"),
        (changed("mixtral", sliding_window=16, use_sliding_window=False), "sliding_window is 16, not None"),
        (changed("qwen2", sliding_window=16, use_sliding_window=True), "sliding_window is 16, not None"),
    ],
)
def test_a_sliding_window_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=text):
        read_config(config)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert read_config(changed("qwen2", sliding_window=16))[1] == read_config(SAVED["qwen2"])[1]


def test_more_experts_for_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(FormatError, match="moe_router_topk is 5, expected at most 4"):
        read_config(changed("qwen3_moe", num_experts_per_tok=5))
    with pytest.raises(FormatError, match="moe_router_topk is 4, expected at most 3"):
        model_arguments(vars(arguments(MIXTRAL, moe_router_topk=4)))


def test_a_member_of_another_type_is_an_error_of_ours() -> None:
    for name, config in SAVED.items():
        for member in config:
            for value in STRANGE:
                try:
                    family, a = read_config(changed(name, **{member: value}))
                except DataStatesError:
                    continue
                assert config_json(family, a, "float32")


def test_an_argument_of_another_type_is_an_error_of_ours() -> None:
    others = {"moe_router_load_balancing_type": "aux_loss", "tensor_model_parallel_size": 1}
    for values in (LLAMA, MIXTRAL, GPT2):
        stored = vars(arguments(values, padded_vocab_size=13, **others))
        for name in stored:
            for value in STRANGE:
                try:
                    a = model_arguments(stored | {name: value})
                    assert config_json(family_of(a, stored | {name: value}), a, "float32")
                except DataStatesError:
                    continue


def test_values_that_change_nothing_are_taken() -> None:
    plain = {"mtp_num_layers": 0, "moe_router_topk_scaling_factor": 1.0, "moe_router_num_groups": 1}
    stored = vars(arguments(MIXTRAL, **plain))
    assert family_of(model_arguments(stored), stored).model_type == "mixtral"
    with pytest.raises(UnsupportedFormatError, match="mtp_num_layers is 1, not None"):
        family_of(model_arguments(stored), stored | {"mtp_num_layers": 1})


def test_a_limited_capacity_of_experts_is_noted(tmp_path: Path) -> None:
    stored = arguments(MIXTRAL, moe_expert_capacity_factor=0.5)
    checkpoint = save(tmp_path / "ck", stored, state(arguments(MIXTRAL)))
    code, _, err = run("export", checkpoint, tmp_path / "hf", "--hf")
    assert code == 0 and "with --moe-expert-capacity-factor 0.5, Megatron drops tokens" in err


def test_arguments_of_gpt2_with_squared_relu_are_accepted_by_megatron() -> None:
    """It refuses --squared-relu beside a fused gelu, which is its default where layers have biases."""
    flags = command_line(Arguments(**GPT2, squared_relu=True))
    assert {"--squared-relu", "--no-bias-gelu-fusion"} <= set(flags)
    assert "--no-bias-gelu-fusion" not in command_line(Arguments(**GPT2, bias_gelu_fusion=True))


def test_a_model_with_experts_is_compared_with_architectures_that_have_some() -> None:
    a = Arguments(**MIXTRAL, moe_router_pre_softmax=True)
    with pytest.raises(UnsupportedFormatError, match="mixtral in its arguments: moe_router_pre_softmax is"):
        family_of(a, {})
