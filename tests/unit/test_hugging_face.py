"""Export to a folder of Hugging Face's, and back: what is refused, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.convert.hf import export as exporter
from megatron_datastates.convert.open import open_source
from tests.unit.command import run
from tests.unit.hf_models import GPT2, LLAMA, MIXTRAL, arguments, exported, save, state
from tests.unit.states import bits

VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight"}


def refused(checkpoint: Path, target: Path, *options: str) -> str:
    code, out, err = run("export", checkpoint, target, "--hf", *options)
    assert code == 2 and not out and not target.exists()
    return str(err)


def weights(checkpoint: Path) -> dict[str, bytes]:
    source = open_source(checkpoint)
    cut = {key: 11 if key in VOCABULARY else None for key in source.tensors}
    return {key: bits(source.read_tensor(key)[: cut[key]]) for key in source.tensors}


@pytest.mark.parametrize("values", [LLAMA, MIXTRAL, GPT2], ids=["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("to", ["datastates", "torch_dist"])
def test_an_exported_model_is_imported_with_the_same_bits(
    values: dict[str, Any], to: str, tmp_path: Path
) -> None:
    stored = arguments(values)
    checkpoint = save(tmp_path / "ck", stored, state(stored))
    exported(checkpoint, tmp_path / "hf", "--max-shard-size", "1000")
    code, out, err = run("import", tmp_path / "hf", tmp_path / "run", "--to", to)
    assert code == 0, out + err
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "release"
    assert open_source(tmp_path / "run/release").format == to
    assert weights(tmp_path / "run/release") == weights(checkpoint)
    assert exported(tmp_path / "run/release", tmp_path / "again").keys()
    one, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "again"))
    assert one == other


@pytest.mark.parametrize("values", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_layers_and_experts_with_keys_of_their_own_are_the_same_model(
    values: dict[str, Any], tmp_path: Path
) -> None:
    stored = arguments(values)
    stacked = exported(save(tmp_path / "stacked", stored, state(stored)), tmp_path / "one")
    apart = exported(save(tmp_path / "apart", stored, state(stored, apart=True)), tmp_path / "other")
    assert {name: bits(one) for name, one in stacked.items()} == {
        name: bits(one) for name, one in apart.items()
    }


def test_an_import_has_the_keys_that_each_implementation_of_layers_asks_for(tmp_path: Path) -> None:
    stored = arguments(MIXTRAL)
    exported(save(tmp_path / "ck", stored, state(stored)), tmp_path / "hf")
    found = {}
    for name in ("local", "transformer_engine"):
        code, out, _ = run("import", tmp_path / "hf", tmp_path / name, "--transformer-impl", name)
        assert code == 0 and ("--transformer-impl local" in out) == (name == "local")
        found[name] = open_source(tmp_path / name / "release")
    local, engine = found["local"], found["transformer_engine"]
    assert local.tensors.keys() - engine.tensors.keys() == {"decoder.layers.mlp.linear_fc1.layer_norm_weight"}
    assert engine.tensors.keys() - local.tensors.keys() == {"decoder.layers.pre_mlp_layernorm.weight"}
    extra = "_extra_state/shard"
    assert f"decoder.layers.mlp.experts.experts.linear_fc1.{extra}_1.2_2.3" in local.objects
    assert f"decoder.layers.self_attention.linear_qkv.{extra}_1_2" in local.objects
    assert set(engine.objects) > set(local.objects)
    assert f"decoder.final_layernorm.{extra}_0_1" in engine.objects
    assert f"decoder.layers.self_attention.core_attention.{extra}_0_2" in engine.objects


def test_queries_keys_values_and_gates_are_taken_out_of_what_they_are_stored_in(tmp_path: Path) -> None:
    stored = arguments(LLAMA)
    tensors = state(stored)
    found = exported(save(tmp_path / "ck", stored, tensors), tmp_path / "hf")
    # Two groups of two queries, a key and a value, of four rows each.
    groups = tensors["decoder.layers.self_attention.linear_qkv.weight"][1].reshape(2, 4, 4, 8)
    parts = {"q": groups[:, :2], "k": groups[:, 2], "v": groups[:, 3]}
    for name, part in parts.items():
        assert torch.equal(found[f"model.layers.1.self_attn.{name}_proj.weight"], part.reshape(-1, 8)), name
    gated = tensors["decoder.layers.mlp.linear_fc1.weight"][0]
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], gated[:12])
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], gated[12:])
    assert torch.equal(found["lm_head.weight"], tensors["output_layer.weight"][:11])


@pytest.mark.parametrize("values", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_tiny_blocks_make_the_same_files(values: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    stored = arguments(values)
    checkpoint = save(tmp_path / "ck", stored, state(stored))
    exported(checkpoint, tmp_path / "whole")
    source = open_source(checkpoint)
    exporter.export_model(source, tmp_path / "parts", exporter.read_model(source), memory_bytes=200)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_dtype_converts_and_one_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    stored = arguments(LLAMA)
    tensors = state(stored)
    checkpoint = save(tmp_path / "ck", stored, tensors)
    found = exported(checkpoint, tmp_path / "hf", "--dtype", "float32")
    assert all(one.dtype == torch.float32 for one in found.values())
    assert torch.equal(found["model.norm.weight"], tensors["decoder.final_layernorm.weight"].float())
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "float32"

    tensors["decoder.final_layernorm.weight"][3] = 1e6
    too_large = save(tmp_path / "large", stored, tensors)
    text = refused(too_large, tmp_path / "out", "--dtype", "float16")
    assert "'model.norm.weight' has numbers that float16 cannot hold" in text


def test_norms_that_are_stored_around_zero_become_norms_around_one(tmp_path: Path) -> None:
    stored = arguments(LLAMA, layernorm_zero_centered_gamma=True)
    tensors = state(stored)
    found = exported(save(tmp_path / "ck", stored, tensors), tmp_path / "hf", "--dtype", "float32")
    stacked = tensors["decoder.layers.self_attention.linear_qkv.layer_norm_weight"]
    assert torch.equal(found["model.layers.0.input_layernorm.weight"], stacked[0].float() + 1)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            {"multi_latent_attention": True},
            "differs from llama in its arguments: multi_latent_attention is True",
        ),
        ({"normalization": "LayerNorm"}, "in its arguments: normalization is 'LayerNorm', not 'RMSNorm'"),
        ({"squared_relu": True, "swiglu": False}, "swiglu is False, not True"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5, not 1.0"),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, "rope_scaling_factor is 32.0, not 8.0"),
        ({"window_size": (4, 0)}, "window_size is [4, 0], not None"),
    ],
)
def test_another_architecture_is_refused_with_the_arguments_that_differ(
    others: dict[str, Any], text: str, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / "ck", arguments(LLAMA, **others), state(arguments(LLAMA)))
    assert text in refused(checkpoint, tmp_path / "hf")


def test_tensors_that_do_not_fit_the_arguments_are_refused(tmp_path: Path) -> None:
    stored = arguments(LLAMA)
    norm = "decoder.final_layernorm.weight"
    cases = {
        "has 1 tensors that llama lacks, such as 'mtp.norm'": {"mtp.norm": torch.ones(2)},
        "'decoder.final_layernorm.weight' has shape [9], but the stored arguments ask for [8]": {
            norm: torch.ones(9)
        },
        "has dtype float8_e4m3fn, expected one of": {norm: torch.ones(8).to(torch.float8_e4m3fn)},
    }
    for number, (text, change) in enumerate(cases.items()):
        checkpoint = save(tmp_path / f"ck{number}", stored, state(stored) | change)
        assert text in refused(checkpoint, tmp_path / "hf")
    without = {key: one for key, one in state(stored).items() if key != norm}
    text = refused(save(tmp_path / "without", stored, without), tmp_path / "hf")
    assert "lacks 'decoder.final_layernorm.weight', which its arguments ask for" in text


def test_a_checkpoint_without_arguments_is_refused(tmp_path: Path) -> None:
    import megatron_datastates as ds

    ds.save({"embedding.word_embeddings.weight": torch.ones(2, 2)}, tmp_path / "ck")
    assert "no training arguments" in refused(tmp_path / "ck", tmp_path / "hf")


@pytest.mark.parametrize("frequency", [0, -1, [1], "x"])
def test_a_frequency_of_experts_that_says_nothing_is_refused(frequency: Any, tmp_path: Path) -> None:
    stored = arguments(MIXTRAL)
    tensors = state(stored)
    stored.moe_layer_freq = frequency
    text = refused(save(tmp_path / "ck", stored, tensors), tmp_path / "hf")
    assert f"the stored argument moe_layer_freq is {frequency!r}, expected a number, or 2 that are" in text


def test_an_unknown_size_of_the_vocabulary_keeps_all_rows_and_says_so(tmp_path: Path) -> None:
    stored = arguments(LLAMA)
    tensors = state(stored)
    del stored.vocab_size
    checkpoint = save(tmp_path / "ck", stored, tensors)
    code, _, err = run("export", checkpoint, tmp_path / "hf", "--hf")
    assert code == 0 and "all 13 rows of the embedding" in err and "--tokenizer DIR" in err
    assert len(exported(checkpoint, tmp_path / "cut", "--vocab-size", "12")["lm_head.weight"]) == 12
    assert "the embedding has only 13 rows" in refused(checkpoint, tmp_path / "no", "--vocab-size", "14")
    for none in ("0", "-3"):
        code, _, err = run("export", checkpoint, tmp_path / "no", "--hf", "--vocab-size", none)
        assert code == 2 and "'--vocab-size'" in err and not (tmp_path / "no").exists()


def test_a_size_of_the_vocabulary_that_the_tokenizer_does_not_go_by_is_not_believed(tmp_path: Path) -> None:
    stored = arguments(LLAMA, tokenizer_type="HuggingFaceTokenizer", padded_vocab_size=13)
    found = exported(save(tmp_path / "ck", stored, state(arguments(LLAMA))), tmp_path / "hf")
    assert len(found["lm_head.weight"]) == 13


def test_files_of_no_bytes_are_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "ck", arguments(LLAMA), state(arguments(LLAMA)))
    assert "expected at least 1B" in refused(checkpoint, tmp_path / "hf", "--max-shard-size", "0")


@pytest.mark.parametrize("options", [["--dtype", "float32"], ["--hf", "--stacked"], ["--hf", "--keys", "*"]])
def test_options_that_do_not_go_together_are_refused(options: list[str], tmp_path: Path) -> None:
    code, _, err = run("export", tmp_path, tmp_path / "out", *options)
    assert code == 2 and "--tokenizer apply with --hf only, and --keys and --stacked without it" in err


def test_the_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    stored = arguments(LLAMA)
    checkpoint = save(tmp_path / "ck", stored, state(stored))
    assert "there is no such directory" in refused(
        checkpoint, tmp_path / "hf", "--tokenizer", str(tmp_path / "tokens")
    )
    (tmp_path / "tokens").mkdir()
    assert "has no file of a tokenizer" in refused(
        checkpoint, tmp_path / "hf", "--tokenizer", str(tmp_path / "tokens")
    )
    (tmp_path / "tokens/tokenizer.json").write_text("{}")
    (tmp_path / "tokens/model.safetensors").write_text("not copied")
    exported(checkpoint, tmp_path / "hf", "--tokenizer", str(tmp_path / "tokens"))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
