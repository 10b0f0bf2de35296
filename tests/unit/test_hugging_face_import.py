"""Import from a folder of Hugging Face's: what is refused, and what is left alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_datastates.convert.hf.folder import Stored
from megatron_datastates.convert.hf.run import import_model
from megatron_datastates.convert.hf.source import HuggingFaceSource
from megatron_datastates.convert.planning import Plan
from megatron_datastates.convert.sinks.sink import Progress
from megatron_datastates.errors import StorageError
from tests.unit.command import run
from tests.unit.hf_models import LLAMA, arguments, exported, save, state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored = arguments(LLAMA)
    exported(save(tmp_path / "ck", stored, state(stored)), tmp_path / "hf")
    return tmp_path / "hf"


def rewritten(path: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Writes a safetensors file again; `change` may change its header, and returns its data."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    rest = change(header, data[end:])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def not_imported(folder: Path, run_directory: Path) -> str:
    code, out, err = run("import", folder, run_directory)
    assert code == 2 and not out and not (run_directory / "release").exists()
    return str(err)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', which is not known"),
        ({"mlp_bias": True}, "mlp_bias is True, not False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ({"sliding_window": 16}, "sliding_window is 16, not None"),
        ({"rope_theta": 10000.5}, "rope_theta is 10000.5: Megatron takes whole numbers"),
        ({"rope_theta": float("inf")}, "rope_theta is inf: Megatron takes whole numbers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "the factor of rope_scaling is 2.5: Megatron"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5}}},
            "Megatron has no rotary embeddings with",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "Megatron has no rotary embeddings with"),
        ({"rms_norm_eps": None}, "norm_epsilon is None, expected a number"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776, expected at most 65536"),
        ({"num_hidden_layers": 1 << 16}, "lacks tensors: it has 21, and config.json asks for at least 65536"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "Megatron has no rotary embeddings with"),
        (
            {"quantization_config": {}},
            "hf: config.json describes a model that is not known: quantization_config is {}, and must be",
        ),
        ({"num_hidden_layers": None}, "num_layers is None, expected a positive integer"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            "num_attention_heads is 0, expected a positive integer",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of 3"),
        ({"vocab_size": "11"}, "vocab_size is '11'"),
        ({"hidden_size": 16}, "has shape [8], but config.json asks for [16]"),
        ({"num_hidden_layers": 1}, "has 9 tensors that llama lacks, such as 'model.layers.1."),
        ({"num_hidden_layers": 3}, "lacks 'model.layers.2.input_layernorm.weight', which its config.json"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    change: dict[str, Any], text: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert text in not_imported(folder, tmp_path / "run")


def test_a_tied_output_that_differs_from_the_embedding_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert "'lm_head.weight' differs from 'model.embed_tokens.weight', but" in not_imported(
        folder, tmp_path / "run"
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert run("import", folder, tmp_path / "run")[0] == 0


def test_a_model_that_is_saved_again_meanwhile_gives_no_mixture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, times = folder / "model.safetensors", Stored.read_into, itertools.count()

    def saved_again(self: Stored, begin: int, target: Any) -> None:
        read(self, begin, target)
        os.utime(path, (time := next(times), time))

    monkeypatch.setattr(Stored, "read_into", saved_again)
    assert "model.safetensors has changed since it was opened: a" in not_imported(folder, tmp_path / "run")


def test_newer_and_older_ways_to_write_a_config_are_read(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_scaling"], config["head_dim"], config["rope_theta"]
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "model_type": "mistral"}
    config["num_attention_heads"], config["num_key_value_heads"], config["sliding_window"] = 2, 1, None
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn."
        rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
        tensors |= {f"{name}{one}.weight": torch.randn(n, 8).bfloat16() for one, n in rows.items()}
        tensors[f"{name}o_proj.weight"] = torch.randn(8, 8).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, out, err = run("import", folder, tmp_path / "run", "--json")
    assert code == 0, err
    flags = json.loads(out)["arguments"]
    assert {"--kv-channels 4", "--num-query-groups 1", "--rotary-base 500000"} <= set(flags)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[:-1], "the file is truncated: it has"),
        (lambda data: data[:4], "the file is truncated"),
        (lambda data: b"\xff" * 8 + data[8:], "the file is truncated: its header"),
        (lambda data: data[:8] + b"[" + data[9:], "is damaged"),
        (lambda data: data.replace(b'"shape":[8]', b'"shape":[7]'), "do not hold a tensor of shape"),
        (lambda data: data.replace(b'"BF16"', b'"BF17"'), "is damaged"),
    ],
)
def test_damaged_files_are_refused(damage: Any, text: str, folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert text in not_imported(folder, tmp_path / "run")


def overlapping(header: dict[str, Any], data: bytes) -> bytes:
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"][
        "data_offsets"
    ]
    return data


def after_a_gap(header: dict[str, Any], data: bytes) -> bytes:
    for one in header.values():
        if "data_offsets" in one:
            one["data_offsets"] = [offset + 16 for offset in one["data_offsets"]]
    return bytes(16) + data


def as_integers(header: dict[str, Any], data: bytes) -> bytes:
    for one in header.values():
        if "dtype" in one:
            one["dtype"] = "I16"
    return data


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (overlapping, "is damaged: a tensor begins at byte"),
        (after_a_gap, "is damaged: a tensor begins at byte"),
        (lambda header, data: data + b"rest", "and its last tensor ends at"),
        (as_integers, "has dtype int16, expected one of float32, bfloat16, float16"),
    ],
)
def test_files_that_the_library_refuses_and_integers_are_refused(
    change: Any, text: str, folder: Path, tmp_path: Path
) -> None:
    rewritten(folder / "model.safetensors", change)
    assert text in not_imported(folder, tmp_path / "run")


def test_a_file_that_is_named_as_megatrons_metadata_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    (folder / "metadata.json").write_text('{"model": "ours"}')
    assert run("import", folder, tmp_path / "one")[0] == 0
    assert "model" not in json.loads((tmp_path / "one/release/metadata.json").read_text())
    (folder / "metadata.json").write_text("[1, 2]")
    assert run("import", folder, tmp_path / "other")[0] == 0


def test_an_index_that_leads_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../ck/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no weight_map of file names" in not_imported(folder, tmp_path / "run")


def test_files_that_do_not_agree_on_where_a_tensor_is_are_refused(folder: Path, tmp_path: Path) -> None:
    whole, index = load_file(folder / "model.safetensors"), folder / "model.safetensors.index.json"
    names = sorted(whole)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({names[0]: torch.zeros_like(whole[names[0]])}, folder / "b.safetensors")
    places = dict.fromkeys(names, "a.safetensors")
    index.write_text(json.dumps({"weight_map": places | {names[0]: "b.safetensors"}}))
    assert "is in a.safetensors and in b.safetensors" in not_imported(folder, tmp_path / "run")
    save_file({name: whole[name] for name in names[1:]}, folder / "a.safetensors")
    index.write_text(json.dumps({"weight_map": places | {names[1]: "b.safetensors"}}))
    assert f"'{names[0]}' is in b.safetensors, and " in not_imported(folder, tmp_path / "run")
    index.write_text(json.dumps({"weight_map": places | {names[0]: "b.safetensors"}}))
    assert run("import", folder, tmp_path / "good")[0] == 0
    save_file(whole, folder / "model.safetensors")
    assert "remove the one that is not the model's" in not_imported(folder, tmp_path / "run")


def test_a_run_that_has_checkpoints_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
    assert "has a latest_checkpointed_iteration.txt" in not_imported(folder, tmp_path / "run")


def test_a_run_that_has_iterations_and_no_tracker_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run/iter_0000007").mkdir(parents=True)
    assert "has checkpoints, such as iter_0000007" in not_imported(folder, tmp_path / "run")


@pytest.mark.parametrize("tracked", [False, True])
def test_a_training_that_begins_to_save_during_the_import_keeps_its_tracker(
    tracked: bool, folder: Path, tmp_path: Path
) -> None:
    tracker = tmp_path / "run/latest_checkpointed_iteration.txt"

    def start(plan: Plan) -> Progress:
        (tmp_path / "run/iter_0000500").mkdir(parents=True)
        if tracked:
            tracker.write_text("500")
        return lambda done: None

    with (
        contextlib.closing(HuggingFaceSource(folder)) as source,
        pytest.raises(StorageError, match="has iter_0000500, which anot"),
    ):
        import_model(source, tmp_path / "run", start=start)
    assert tracker.read_text() == "500" if tracked else not tracker.exists()


def test_an_import_that_lacks_only_its_tracker_is_named(folder: Path, tmp_path: Path) -> None:
    assert run("import", folder, tmp_path / "run")[0] == 0
    (tmp_path / "run/latest_checkpointed_iteration.txt").unlink()
    code, _, err = run("import", folder, tmp_path / "run")
    assert code == 2 and "run/release is complete, and only" in err and "write the word release into" in err
