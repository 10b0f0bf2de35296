"""Models of Megatron's, exported for transformers and imported again: what they predict, and their bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.parts import is_weight
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining
from tests.unit.command import run

transformers = pytest.importorskip("transformers")


def words(text: str) -> list[str]:
    return text.split()


VOCABULARY = 101  # padded to 104 rows, or to 112 with two tensor-parallel ranks
COMMON = words(
    """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --micro-batch-size 1
    --global-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --hidden-dropout 0 --attention-dropout 0"""
)
LLAMA = words(
    """--normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 500000
    --swiglu --disable-bias-linear --ffn-hidden-size 48 --group-query-attention --num-query-groups 2"""
)
UNTIED = ["--untie-embeddings-and-output-weights"]
EXPERTS = ["--num-experts", "4", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "2"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
MIXED = ["--moe-layer-freq", "[0,1,1,0]"]
SHARED = ["--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate"]

# model_type, arguments, layout; the first has the most kinds of layers
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3_moe": ("qwen3_moe", [*LLAMA, *UNTIED, *EXPERTS, "--qk-layernorm", *MIXED], PP2),
    "llama": ("llama", [*LLAMA, *UNTIED], TP2),
    "llama-tied-with-biases": ("llama", [x for x in LLAMA if x != "--disable-bias-linear"], PP2),
    "llama-scaled": ("llama", [*LLAMA, "--use-rope-scaling", "--kv-channels", "16"], PP2),
    "qwen2": ("qwen2", [*LLAMA, "--add-qkv-bias"], TP2),
    "qwen3": ("qwen3", [*LLAMA, *UNTIED, "--qk-layernorm", "--kv-channels", "16"], PP2),
    "mixtral": ("mixtral", [*LLAMA, *UNTIED, *EXPERTS], EP2),
    "qwen2_moe": (
        "qwen2_moe",
        [*LLAMA, *UNTIED, *EXPERTS, "--add-qkv-bias", *SHARED, "--moe-router-pre-softmax"],
        EP2,
    ),
    "gpt2": ("gpt2", ["--no-bias-gelu-fusion"], TP2),
    "gpt2-untied": ("gpt2", UNTIED, PP2),
}
TOKENS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
Forge = Callable[..., None]


@pytest.fixture
def ranks(forge: RankForge, tmp_path: Path) -> Forge:
    """Runs a function of hf_rank.py."""

    def start(function: str, *arguments: Any, count: int) -> None:
        everything = [str(a) if isinstance(a, Path) else a for a in arguments]
        logs = tmp_path / f"logs-{function}-{len(list(tmp_path.iterdir()))}"
        forge.run(
            f"hf_rank:{function}", ranks=count, logs=logs, arguments=everything, timeout_seconds=90
        ).succeeded()

    return start


def prediction(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the logits of the model that transformers loads from a folder, which must be complete."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=dtype
    )
    wrong = {kind: names for kind, names in info.items() if names}
    assert not wrong, wrong
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns all weights; of the vocabulary's, those of words."""
    source = open_source(checkpoint)
    found = {key: source.read_tensor(key) for key in source.tensors if is_weight(key)}
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {key: one[:VOCABULARY] if key in padded else one for key, one in found.items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("case", CASES)
def test_transformers_predicts_what_megatron_does(case: str, ranks: Forge, tmp_path: Path) -> None:
    model_type, arguments, layout = CASES[case]
    arguments = [*COMMON, *arguments]
    ranks("save", [*arguments, *layout], tmp_path / "ck", {}, count=2)
    checkpoint = tmp_path / "ck/datastates"
    ranks("predict", arguments, checkpoint, TOKENS.tolist(), tmp_path / "logits.pt", {}, count=1)
    expected = torch.load(tmp_path / "logits.pt")[..., :VOCABULARY]

    for format in ("datastates", "torch_dist"):
        code, out, err = run("export", tmp_path / "ck" / format, tmp_path / format, "--hf")
        assert code == 0, out + err
    assert json.loads((tmp_path / "datastates/config.json").read_text())["model_type"] == model_type
    assert (tmp_path / "datastates/model.safetensors").read_bytes() == (
        tmp_path / "torch_dist/model.safetensors"
    ).read_bytes()
    found = prediction(tmp_path / "datastates")

    assert found.shape == expected.shape
    scale = expected.abs().max().item()
    assert (found - expected).abs().max().item() < 1e-5 * scale, "sums are in another order, not more"

    code, out, err = run("import", tmp_path / "datastates", tmp_path / "run", "--transformer-impl", "local")
    assert code == 0, out + err
    assert_same_bits(weights(tmp_path / "run/release"), weights(checkpoint))


def test_a_training_starts_from_an_imported_model(pretraining: Pretraining, tmp_path: Path) -> None:
    model = [*LLAMA, *UNTIED, "--vocab-size", "128"]  # without padding, so that all rows are known
    made = Checkpoints(tmp_path / "made")
    pretraining.run(*LAYOUTS["tp2"], *model, "--save", made.root, "--ckpt-format", "datastates")
    assert run("export", made.at(4), tmp_path / "hf", "--hf")[0] == 0
    code, out, err = run("import", tmp_path / "hf", tmp_path / "run", "--transformer-impl", "local", "--json")
    assert code == 0, err
    flags = [word for flag in json.loads(out)["arguments"] for word in flag.split()]

    again = ["--ckpt-format", "datastates", *LAYOUTS["pp2"], "--load"]
    started = pretraining.run(
        *again, tmp_path / "run", "--save", tmp_path / "run", "--vocab-size", "128", *flags
    )
    tuned = pretraining.run(*again, made.root, "--finetune", *model)

    assert "loading release distributed checkpoint" in started.log
    for ours, expected in zip(started.ranks, tuned.ranks, strict=True):
        assert ours.begun_at == expected.begun_at == 0
        names = [name for name in expected.begun if name.startswith("model") or name.endswith(" param")]
        assert len(names) > 10
        assert {name: ours.begun[name] for name in names} == {name: expected.begun[name] for name in names}
    assert Checkpoints(tmp_path / "run").tracked() == 4
