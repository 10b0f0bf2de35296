"""datastates plan: formulas against published models, reading arguments, and refusals.

tests/e2e/test_plan.py compares plans with real checkpoints.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_datastates.errors import OptionError
from megatron_datastates.sizing.arguments import read_arguments
from megatron_datastates.sizing.model import stages
from megatron_datastates.sizing.planning import (
    HELD_MICROSECONDS,
    HELD_MS,
    Grid,
    Storage,
    plan_arguments,
)
from tests.unit.command import run

LLAMA_3_8B = shlex.split("""
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 128256
    --bf16 --use-distributed-optimizer
""")
MIXTRAL_8X7B = shlex.split("""
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 32000 --num-experts 8
    --bf16 --use-distributed-optimizer
""")
GPT_2 = shlex.split("""
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024
    --vocab-size 50257 --make-vocab-size-divisible-by 1 --bf16
""")
GPT_2_PARAMETERS = 124_439_808
SCRIPT = """#!/bin/bash
# A script as Megatron-LM has them.
HIDDEN=4096
NUM_LAYERS="32"
GPT_MODEL_ARGS=(
    --num-layers $NUM_LAYERS   # a comment
    --hidden-size ${HIDDEN} --swiglu
    --vocab-size=128256
)
MORE="--bf16 --use-distributed-optimizer"
torchrun --nproc-per-node 8 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} $MORE \\
    --num-attention-heads 32
"""
YAML = "MODEL_ARGS:\n  --num-layers: 32\n  hidden_size: 4096\n  --swiglu: true\n  --bf16: false\n"


def parameters(words: list[str], tensor: int = 1, pipeline: int = 1) -> int:
    return sum(part.stored for part in stages(read_arguments([], words), tensor, pipeline))


@pytest.mark.parametrize(
    ("words", "count"),
    [(LLAMA_3_8B, 8_030_261_248), (MIXTRAL_8X7B, 46_702_792_704), (GPT_2, GPT_2_PARAMETERS)],
    ids=["Llama 3 8B", "Mixtral 8x7B", "GPT-2"],
)
def test_published_models_have_their_published_number_of_parameters(words: list[str], count: int) -> None:
    assert parameters(words) == count


def test_the_number_of_parameters_does_not_depend_on_the_layout() -> None:
    words = [*LLAMA_3_8B, "--make-vocab-size-divisible-by", "1"]
    assert parameters(words, 8, 4) == parameters(LLAMA_3_8B)


def measured_held() -> dict[str, tuple[float, int]]:
    """Returns milliseconds, and the tensors of a rank, of the saves that README's table has."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"

    def in_loop(file: str, part: str) -> float:
        cases = json.loads((results / file).read_text())["parts"][part]["cases"]
        return float(cases["datastates async, every 1"]["blocked_ms_per_save"])

    gpu = json.loads((results / "gpu-h100-80gb-hbm3-2026-11-27-2.json").read_text())["parts"]["training"]
    way = gpu["ways"]["datastates async, tmpfs"]
    return {
        "an H100": (way["held_ms"], way["report"][0]["providers"][""]["tensors"]),
        "one rank": (in_loop("training-one-rank.json", "large, DP 1"), 3084),
        "two ranks": (in_loop("training-two-ranks.json", "large, DP 2"), 3084 // 2),
    }


def test_the_trainer_is_held_for_about_as_long_as_was_measured() -> None:
    """In Megatron's loop with one rank: on 2 CPU cores, and on an H100, whose rank polls through NCCL."""
    found = measured_held()
    for measured, tensors in (found["an H100"], found["one rank"]):
        predicted = HELD_MS + HELD_MICROSECONDS * tensors / 1000
        assert 0.9 * measured < predicted < 2 * measured


def test_the_plan_and_the_page_quote_what_the_readme_says() -> None:
    held = {name: f"{measured:.0f} ms" for name, (measured, _) in measured_held().items()}
    root = Path(__file__).parents[2]
    table = [line for line in (root / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = {"one rank": "one rank", "two ranks": "two ranks", "an H100": "loop on a GPU held"}
    for name, row in rows.items():
        line = next(line for line in table if row in line and ("blocked" in line or "held" in line))
        assert f"| {held[name]}" in line
    page = (root / "docs" / "commands.md").read_text()
    for text in (run("plan", "--params", "1B")[1], page):
        assert f"easured were {held['an H100']} on an H100" in text.replace("](../README.md#how-fast)", "")
        assert f"on 2 CPU cores {held['one rank']} with one rank" in text
        assert f"{held['two ranks']} with two" in text


def test_the_vocabulary_is_padded_for_the_tensor_parallel_size() -> None:
    words = [*LLAMA_3_8B, "--vocab-size", "128257"]
    assert parameters(words, 2) - parameters(LLAMA_3_8B) == 2 * 4096 * (128512 - 128256)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["--quick-geglu"], 12 * (768 + 1) * 3072),  # another matrix, and its bias
        (["--attention-output-gate"], 12 * (768 + 1) * 768),
        (["--use-rotary-position-embeddings"], -1024 * 768),
        (["--tokenizer-type", "NullTokenizer"], 0),  # since Megatron 0.18
        (["--tokenizer-type", "NullMultimodalTokenizer"], 768),
        (["--padded-vocab-size", "50304"], (50304 - 50257) * 768),
        (["--padded-vocab-size", "50304", "--no-pad-vocab-size"], (50304 - 50257) * 768),
        (["--softmax-type", "vanilla", "--spec", "local"], 0),
    ],
    ids=str,
)
def test_flags_that_change_the_model_count(words: list[str], more: int) -> None:
    assert parameters([*GPT_2, *words]) == GPT_2_PARAMETERS + more


def test_biases_may_be_off_by_their_name_in_files_of_arguments(tmp_path: Path) -> None:
    """As `datastates args` prints them."""
    (tmp_path / "args").write_text("add_bias_linear: false\nswiglu: true\n")
    found = read_arguments([tmp_path / "args"], GPT_2)
    assert stages(found, 1, 1) == stages(
        read_arguments([], [*GPT_2, "--swiglu", "--disable-bias-linear"]), 1, 1
    )
    (tmp_path / "args").write_text("add_bias_linear: true\n")
    assert sum(part.stored for part in stages(read_arguments([tmp_path / "args"], GPT_2), 1, 1)) == (
        GPT_2_PARAMETERS
    )


@pytest.mark.parametrize(
    ("virtual", "experts"),
    [
        ([], [2, 2]),
        (["--num-layers-per-virtual-pipeline-stage", "1"], [4, 0]),
        (["--num-virtual-stages-per-pipeline-rank", "4"], [4, 0]),
        (["--num-virtual-stages-per-pipeline-rank", "2"], [2, 2]),
        (["--num-virtual-stages-per-pipeline-rank", "1"], [2, 2]),
    ],
    ids=str,
)
def test_virtual_stages_have_layers_that_do_not_follow_each_other(
    virtual: list[str], experts: list[int]
) -> None:
    words = [*MIXTRAL_8X7B, "--num-layers", "8", "--moe-layer-freq", "2", *virtual]
    found = stages(read_arguments([], words), 1, 2)
    assert [stage.experts for stage in found] == [n * 8 * 3 * 4096 * 14336 for n in experts]


def test_without_the_parallel_save_the_first_data_parallel_rank_stores_the_weights() -> None:
    plans = [
        plan_arguments(read_arguments([], [*LLAMA_3_8B, *more]), Grid(data=8), Storage(1e9), 1e9)
        for more in ([], ["--no-ckpt-fully-parallel-save"])
    ]
    assert plans[1].checkpoint_bytes == plans[0].checkpoint_bytes
    assert plans[1].largest_rank_bytes - plans[0].largest_rank_bytes == pytest.approx(
        2 * 8_030_261_248 * 7 / 8, abs=1
    )
    assert plans[1].write_seconds == pytest.approx(plans[0].write_seconds)  # a node has all ranks
    assert any("the first data-parallel one stores weights" in text for text in plans[1].assumptions)


DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
NOT_PARALLEL = "--no-ckpt-fully-parallel-save"
EFFICIENT = "--distrib-optim-fully-reshardable-mem-efficient"


@pytest.mark.parametrize(
    ("words", "weights", "states", "said"),
    [
        ([DISTRIBUTED, NOT_PARALLEL], 1, 8, "stores weights (--no"),
        ([RESHARDABLE, DISTRIBUTED], 8, 8, "evenly"),
        ([RESHARDABLE, DISTRIBUTED, NOT_PARALLEL], 1, 1, "stores weights and optimizer state (--no"),
        ([NOT_PARALLEL], 1, 1, "stores weights and optimizer state (--no"),
        (
            [RESHARDABLE, DISTRIBUTED, EFFICIENT],
            8,
            1,
            f"evenly; the first one stores optimizer state ({EFFICIENT})",
        ),
        ([EFFICIENT], 8, 8, "evenly"),
        ([EFFICIENT, DISTRIBUTED], 8, 8, "evenly"),
    ],
)
def test_what_is_not_spread_is_stored_by_the_first_data_parallel_rank(
    words: list[str], weights: int, states: int, said: str
) -> None:
    model = [word for word in LLAMA_3_8B if word != DISTRIBUTED]
    arguments = read_arguments([], [*model, *words])
    plan = plan_arguments(arguments, Grid(tensor=2, data=8), Storage(1e9, ranks_per_node=4), 1e9)
    one = 8_030_261_248 // 2
    assert plan.largest_rank_bytes == pytest.approx(2 * one / weights + 12 * one / states, rel=1e-3)
    # Of 4 ranks, 2 are of the first data-parallel rank.
    on_node = 2 * one * (2 if weights == 1 else 4 / 8) + 12 * one * (2 if states == 1 else 4 / 8)
    assert plan.write_seconds * 1e9 == pytest.approx(on_node, rel=1e-3)
    assert sum(said in text for text in plan.assumptions) == 1


@pytest.mark.parametrize(
    ("pattern", "sparse"), [("([1]*3+[0]*1)*8", 24), ("([0]*1+[1]*31)", 31), ("[0]*2+[1]*30", 30)]
)
def test_patterns_of_experts_may_have_parentheses(pattern: str, sparse: int, tmp_path: Path) -> None:
    script = shlex.join([*MIXTRAL_8X7B, "--moe-layer-freq"])
    (tmp_path / "train.sh").write_text(f"ARGS=({script} '{pattern}')\npython pretrain_gpt.py ${{ARGS[@]}}\n")
    found = stages(read_arguments([tmp_path / "train.sh"], []), 1, 1)[0].experts
    assert found == sparse * 8 * 3 * 4096 * 14336


def test_a_model_stores_14_bytes_for_each_parameter() -> None:
    plan = plan_arguments(read_arguments([], LLAMA_3_8B), Grid(data=8), Storage(1e9), 1e9)
    assert (plan.weight_bytes, plan.optimizer_bytes) == (2 * 8_030_261_248, 12 * 8_030_261_248)


@pytest.mark.parametrize(
    ("words", "weight", "state"),
    [
        ([], 2, 12),
        (["--optimizer", "sgd"], 2, 8),
        (["--no-save-optim"], 2, 0),
        (["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"], 2, 12),
    ],
)
def test_bytes_of_a_parameter_depend_on_the_optimizer(words: list[str], weight: int, state: int) -> None:
    plan = plan_arguments(read_arguments([], [*GPT_2, *words]), Grid(), Storage(1e9), 1e9)
    assert plan.weight_bytes == weight * GPT_2_PARAMETERS
    assert plan.optimizer_bytes == state * GPT_2_PARAMETERS


def test_float32_stores_no_copy_of_its_parameters_without_the_distributed_optimizer() -> None:
    words = [word for word in GPT_2 if word != "--bf16"]
    plan = plan_arguments(read_arguments([], words), Grid(), Storage(1e9), 1e9)
    assert (plan.weight_bytes, plan.optimizer_bytes) == (4 * GPT_2_PARAMETERS, 8 * GPT_2_PARAMETERS)


def test_the_last_stage_has_an_optimizer_state_for_tied_embeddings() -> None:
    words = [*GPT_2, "--use-distributed-optimizer"]
    one, two = (
        plan_arguments(read_arguments([], words), Grid(pipeline=size), Storage(1e9), 1e9) for size in (1, 2)
    )
    assert two.optimizer_bytes - one.optimizer_bytes == 12 * 50257 * 768
    assert two.weight_bytes == one.weight_bytes


def test_each_tensor_parallel_rank_has_an_optimizer_state_for_what_is_replicated() -> None:
    sizes = {}
    for more in ([], ["--dist-ckpt-optim-fully-reshardable"]):
        words = [*LLAMA_3_8B, "--make-vocab-size-divisible-by", "1", *more]
        sizes[len(more)] = plan_arguments(read_arguments([], words), Grid(tensor=8), Storage(1e9), 1e9)
    norms = (32 * 2 + 1) * 4096
    assert sizes[0].optimizer_bytes - sizes[1].optimizer_bytes == 12 * norms * 7
    assert sizes[0].weight_bytes == sizes[1].weight_bytes


@pytest.mark.parametrize(("per", "seconds"), [("rank", 14.0), ("node", 56.0), ("all", 224.0)])
def test_the_time_to_write_depends_on_who_has_the_rate(per: str, seconds: float) -> None:
    # 16 ranks on 4 nodes, 14 GB each.
    sizes = ["--params", "16B", "--tp", 2, "--pp", 2, "--dp", 4, "--ranks-per-node", 4]
    code, out, _ = run("plan", *sizes, "--rate", "1GB/s", "--rate-per", per, "--json")
    plan = json.loads(out)
    assert code == 0 and plan["write_seconds"] == pytest.approx(seconds, rel=0.001)
    assert plan["shortest_interval_seconds"] == plan["write_seconds"]
    assert plan["files"] == 16 + 3 and plan["staging_bytes_per_rank"] == 14 << 30
    assert plan["checkpoint_bytes"] == pytest.approx(224e9, rel=0.001)


@pytest.mark.parametrize(("bits", "size"), [("16Gbit/s", "2GB/s"), ("16 Gibit", "2GiB/s")])
def test_a_rate_may_be_in_bits(bits: str, size: str) -> None:
    one, other = (
        json.loads(run("plan", "--params", "16B", "--rate", rate, "--json")[1]) for rate in (bits, size)
    )
    assert one["write_seconds"] == other["write_seconds"]


def test_a_single_iteration_is_singular() -> None:
    _, printed, _ = run("plan", "--params", "1B", "--rate", "100GB/s", "--iteration-seconds", 2)
    assert ", 1 iteration; with a margin" in printed


def test_a_shell_script_and_arguments_after_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    found = read_arguments([tmp_path / "train.sh"], ["--num-layers", "16"])
    assert [found.number(flag) for flag in ("num-layers", "hidden-size", "vocab-size")] == [16, 4096, 128256]
    assert found.number("num-attention-heads") == 32
    assert found.has("swiglu") and found.has("bf16") and found.has("use-distributed-optimizer")


def test_lines_of_keys_and_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(YAML)
    found = read_arguments([tmp_path / "model.yaml"], [])
    assert [found.number(flag) for flag in ("num-layers", "hidden-size")] == [32, 4096]
    assert found.has("swiglu") and not found.has("bf16")


def test_a_file_for_yaml_cfg_has_names_of_the_transformer_config(tmp_path: Path) -> None:
    model = "num_layers: 32\n  hidden_size: 4096\n  ffn_hidden_size: 14336\n  num_attention_heads: 32"
    kinds = (
        "num_query_groups: 8\n  activation_func: swiglu\n  gated_linear_unit: False\n  add_bias_linear: False"
    )
    experts = "num_moe_experts: 8\n  kv_channels: null\n  normalization: RMSNorm"
    outside = "vocab_size: 32000\nposition_embedding_type: rope\nuntie_embeddings_and_output_weights: True\n"
    outside += "group_query_attention: False\nspec: null\n"  # as Megatron's example has it
    (tmp_path / "model.yaml").write_text(f"language_model:\n  {model}\n  {kinds}\n  {experts}\n{outside}")
    found = read_arguments([tmp_path / "model.yaml"], [])
    assert sum(part.stored for part in stages(found, 1, 1)) == parameters(MIXTRAL_8X7B)
    assert found.unused() == ["gated-linear-unit"]  # whose value does not matter where swiglu says it


def test_a_gated_unit_of_another_activation_has_two_projections(tmp_path: Path) -> None:
    text = "language_model:\n  activation_func: gelu\n  gated_linear_unit: true\n  swiglu: true\n"
    (tmp_path / "model.yaml").write_text(text)
    found = read_arguments([tmp_path / "model.yaml"], GPT_2)
    more = 12 * 4 * 768 * (768 + 1)
    assert sum(part.stored for part in stages(found, 1, 1)) == GPT_2_PARAMETERS + more


@pytest.mark.parametrize("flag", ["--position-embedding-type none", "position_embedding_type: none"])
def test_a_model_without_positions_has_no_parameters_for_them(flag: str, tmp_path: Path) -> None:
    (tmp_path / "model").write_text(flag)
    found = read_arguments([tmp_path / "model"], [])
    words = [word for word in GPT_2 if word not in ("--max-position-embeddings", "1024")]
    found = read_arguments([tmp_path / "model"], words)
    assert sum(part.stored for part in stages(found, 1, 1)) == GPT_2_PARAMETERS - 1024 * 768


def test_a_deprecated_flag_for_the_parallel_save_is_no_error() -> None:
    code, out, _ = run("plan", "--", *GPT_2, "--ckpt-fully-parallel-save")
    assert code == 0 and "Megatron spreads weights over data-parallel ranks" in out


def test_a_file_of_arguments_may_say_that_saves_are_not_parallel(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("ckpt_fully_parallel_save: false\n")
    code, out, _ = run("plan", "--arguments", tmp_path / "run.yaml", "--", *GPT_2)
    assert code == 0 and "the first data-parallel one stores weights" in out


def test_only_a_shells_comments_are_passed_over(tmp_path: Path) -> None:
    script = (
        "# python old.py \\\n#  --add-qkv-bias \\\nMORE='--swiglu' # --fp16\nCOUNT=${#MORE}\n"
        "python pretrain_gpt.py --wandb-exp-name run#7 --bf16 \\\n --qk-layernorm $MORE;# --quick-geglu\n"
    )
    (tmp_path / "train.sh").write_text(script)
    found = read_arguments([tmp_path / "train.sh"], [])
    assert all(found.has(flag) for flag in ("swiglu", "bf16", "qk-layernorm"))
    assert not any(found.has(flag) for flag in ("fp16", "quick-geglu", "add-qkv-bias"))
    assert found.text("wandb-exp-name", "") == "run#7"


@pytest.mark.parametrize("word", ["no", "off", "False", "null", "~", "None", "0"])
def test_words_for_off_set_nothing(word: str, tmp_path: Path) -> None:
    flags = ("mtp_num_layers", "multi_latent_attention", "swiglu", "num_experts")
    (tmp_path / "model.yaml").write_text("".join(f"{flag}: {word}\n" for flag in flags))
    found = read_arguments([tmp_path / "model.yaml"], GPT_2)
    assert not found.has("swiglu") and sum(part.stored for part in stages(found, 1, 1)) == GPT_2_PARAMETERS


def test_variables_with_defaults_and_several_assignments_in_a_line_are_read(tmp_path: Path) -> None:
    script = (
        "PP=2; TP=4\nWIDTH=${WIDTH:-512}\nARGS='--swiglu'\nOTHER=0\nEMPTY=\n"
        'MORE="\n  --bf16\n  --fp16"\nMORE="$MORE --quick-geglu"\nEMPTY="$EMPTY --add-qkv-bias"\n'
    )
    flags = (
        "--hidden-size $WIDTH --num-layers ${LAYERS:-8} --num-attention-heads ${TP:-2} --ffn-hidden-size $PP"
    )
    (tmp_path / "train.sh").write_text(f"{script}python pretrain_gpt.py {flags}; echo done\n")
    found = read_arguments([tmp_path / "train.sh"], [])
    names = ("hidden-size", "num-layers", "num-attention-heads", "ffn-hidden-size")
    assert [found.number(name) for name in names] == [512, 8, 4, 2]
    assert all(found.has(flag) for flag in ("swiglu", "bf16", "fp16", "quick-geglu", "add-qkv-bias"))


def test_the_defaults_of_a_script_are_named_and_the_environment_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "4")
    script = "TP=${TP:-2}\nPP=1\n"
    flags = "--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-8}"
    (tmp_path / "train.sh").write_text(f"{script}python pretrain_gpt.py {flags} {shlex.join(GPT_2)}\n")
    code, out, _ = run("plan", "--arguments", tmp_path / "train.sh", "--dp", 4, "--cp", 2)
    assert code == 0 and "ranks           16 on 2 nodes: TP 2, PP 1, DP 4, EP 1, CP 2\n" in out
    assert "defaults of the script: TP=2; the environment is not read" in out


def test_what_is_appended_to_a_variable_is_read(tmp_path: Path) -> None:
    script = (
        "ARGS=(--num-layers 12)\nARGS+=(\n  --hidden-size 512\n)\nMORE='--bf16'\nMORE+=' --swiglu'\n"
        'WIDTH=4\nWIDTH+=096\npython pretrain_gpt.py "${ARGS[@]}" $MORE --ffn-hidden-size $WIDTH\n'
    )
    (tmp_path / "train.sh").write_text(script)
    found = read_arguments([tmp_path / "train.sh"], [])
    names = ("num-layers", "hidden-size", "ffn-hidden-size")
    assert [found.number(name) for name in names] == [12, 512, 4096]
    assert found.has("bf16") and found.has("swiglu")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--", *GPT_2[2:]], "--num-layers: expected a whole number above 0, found nothing"),
        (
            ["--", "--num-layers", "32", "--hidden-size", "4096"],
            "--num-attention-heads, --max-position-embeddings, --vocab-size: expected whole numbers above 0",
        ),
        (
            ["--", *GPT_2, "--vocab-size", "null", "--tokenizer-type", "HuggingFaceTokenizer"],
            "--vocab-size: expected a whole number above 0, found nothing; the tokenizer is not read: append "
            "--vocab-size N",
        ),
        (
            ["--", *GPT_2, "--num-layers", "$LAYERS"],
            "--num-layers: expected a whole number above 0, found '$LAYERS'",
        ),
        (["--", *GPT_2, "--num-layers", "9" * 5000], "a whole number above 0, found 5000 characters"),
        (["--", *GPT_2, "--num-layers", "9" * 12], "--num-layers 999999999999: expected at most 100000"),
        *(
            (
                ["--pp", "2", "--", *GPT_2, f"--num-{flag}", "4"],
                f"--num-{flag} 4: expected a divisor of the 6 layers of a stage",
            )
            for flag in ("layers-per-virtual-pipeline-stage", "virtual-stages-per-pipeline-rank")
        ),
        (["--pp", "5", "--", *GPT_2], "--num-layers 12: expected a multiple of the pipeline-parallel size 5"),
        (["--ep", "3", "--", *GPT_2], "expert parallel 3 x 1: expected a divisor of the 1 ranks"),
        (
            ["--", *GPT_2, "--multi-latent-attention"],
            "--multi-latent-attention: `datastates plan` has no formula",
        ),
        (["--", *GPT_2, "--mtp-num-layers", "1"], "--mtp-num-layers: `datastates plan` has no formula"),
        (["--", *GPT_2, "--spec", "package.module", "spec"], "--spec: `datastates plan` has no formula"),
        (["--", *GPT_2, "--softmax-type", "learnable"], "--softmax-type: `datastates plan` has no formula"),
        (
            ["--", *GPT_2, "--heterogeneous-layers-config-encoded-json", "{}"],
            "--heterogeneous-layers-config-encoded-json: `datastates plan` has no formula",
        ),
        (["--", *GPT_2, "--no-pad-vocab-size"], "--no-pad-vocab-size: expected --padded-vocab-size"),
        (["--tp", "5", "--", *GPT_2], "--num-attention-heads 12: expected a multiple of"),
        (
            ["--tp", "3", "--", *GPT_2, "--group-query-attention", "--num-query-groups", "2"],
            "--num-query-groups 2: expected a multiple or a divisor",
        ),
        (["--tp", "4", "--", *GPT_2, "--ffn-hidden-size", "6"], "--ffn-hidden-size 6: expected a multiple"),
        (["--ep", "16", "--dp", "16", "--", *MIXTRAL_8X7B], "--num-experts 8: expected a multiple of"),
        (["--ep", "2", "--dp", "2", "--", *GPT_2], "expert parallel 2: expected a model with --num-experts"),
        (
            ["--", *GPT_2, "--optimizer", "sgd", "--use-distributed-optimizer"],
            "--optimizer sgd: Megatron has no distributed optimizer for it",
        ),
        *(
            (
                ["--", *GPT_2, "--optimizer", name],
                f"--optimizer {name}: `datastates plan` has no formula for its state: {way}",
            )
            for name, way in (
                (
                    "muon",
                    "saves work with it; leave it out for an upper estimate, as Adam's state is not smaller",
                ),
                ("dist_muon", "saves work with it; leave it out"),
                ("soap", "expected adam or sgd"),
            )
        ),
        (["--", *MIXTRAL_8X7B, "--moe-layer-freq", "__import__('os')"], "--moe-layer-freq"),
        (["--", *MIXTRAL_8X7B, "--moe-layer-freq", "[1]*31"], "with 32 elements"),
        (["--params", "many"], "--params many: expected a number of parameters such as 70B"),
        (["--params", "7B", "--rate", "fast"], "--rate fast"),
        (["--params", "7B", "--rate", "0"], "expected a rate above 0"),
        (["--params", "7B", "--rate", "10"], "and its unit, such as 2GB/s"),
        *(
            (
                ["--params", "7B", option, rate],
                f"{option} {rate}: write a rate in bytes as 2GB/s, and one in bits as 2Gbit/s",
            )
            for option, rate in (("--rate", "2Gb/s"), ("--rate", "2gb"), ("--copy-rate", "2Gib/s"))
        ),
        (["--params", "7B", "--rate-per", "disk"], "'disk' is not one of 'rank', 'node', 'all'"),
        *(
            (["--params", "7B", "--iteration-seconds", seconds], f"--iteration-seconds {seconds}: expected")
            for seconds in ("0", "nan", "inf", "1e-300")
        ),
        (["--arguments", "none.sh"], "none.sh: No such file or directory"),
        (["train.args", "--dp", "2"], "A file of them is given by --arguments train.args"),
        (["@train.args"], "A file of them is given by --arguments train.args"),
        (["--", *GPT_2, "--swigluu"], "--swigluu: no such argument of Megatron; did you mean --swiglu?"),
        (["--", *GPT_2, "--rate", "1GB/s"], "--rate is an option of `datastates plan`: give it before `--`"),
        (["--", *GPT_2, "--dp", "2"], "--dp is an option of `datastates plan`"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(words: list[str], reason: str) -> None:
    code, out, err = run("plan", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


MLA = ["--num-layers", "61", "--multi-latent-attention", "--pipeline-model-parallel-size", "16"]


def test_with_a_number_of_parameters_the_model_in_the_arguments_has_no_effect() -> None:
    words = [
        "--num-experts",
        "256",
        "--spec",
        "a",
        "b",
        "--tensor-model-parallel-size",
        "2",
        "--optimizer",
        "muon",
    ]
    options = ["--params", "671B", "--dp", 8, "--ep", 16]
    code, out, err = run("plan", *options, "--", *MLA, *words)
    assert (code, err) == (0, "") and "ranks           256 on 32 nodes" in out
    assert (
        "without an effect here: --multi-latent-attention, --num-experts, --num-layers, --optimizer, --spec"
        in out
    )
    assert "model with 151 layers, a guess from --params" in out


@pytest.mark.parametrize("words", [MLA, ["--pipeline-model-parallel-size", "5"]], ids=["formula", "layers"])
def test_a_model_without_a_formula_can_be_estimated_from_its_parameters(words: list[str]) -> None:
    code, _, err = run("plan", "--", *GPT_2, *words)
    assert code == 2 and err.endswith(
        "; give --params N, such as 671B, and the parallel sizes for an estimate that spreads parameters "
        "evenly\n"
    )


def test_megatrons_arguments_without_two_dashes_before_them_are_refused() -> None:
    code, out, err = run("plan", "--num-layers", "32", "--hidden-size", "4096")
    assert (code, out) == (2, "") and "'--num-layers'. Megatron's arguments come after `--`." in err


def test_a_model_that_is_no_whole_number_of_layers_is_refused() -> None:
    with pytest.raises(OptionError):
        parameters([*GPT_2, "--num-layers", "0"])


def test_the_plan_says_what_to_set_and_what_it_assumes() -> None:
    code, out, err = run(
        "plan",
        "--params",
        "70B",
        "--tp",
        8,
        "--pp",
        4,
        "--dp",
        8,
        "--rate",
        "10GB/s",
        "--iteration-seconds",
        2,
    )
    assert (code, err) == (0, "")
    for text in (
        "980 GB (140 GB weights, 840 GB optimizer",
        "259: one for each rank",
        "2 iterations; with a margin, --save-interval 2",
        "--datastates-staging-memory 4GiB",
        "by the first one longer",
        "held: 10 ms and 1.2 us a tensor",
        "an assumption",
    ):
        assert text in out


def test_the_plan_names_arguments_without_an_effect() -> None:
    others = [word for number in range(14) for word in (f"--unrelated-{number:02d}", "1")]
    _, printed, _ = run("plan", "--", *GPT_2, "--lr", "1e-4", *others)
    assert "without an effect here: --lr, --unrelated-00" in printed.replace("\n      ", " ")
    assert "and 3 more" in printed.replace("\n      ", " ")


def test_one_node_and_one_rank_are_singular() -> None:
    _, printed, _ = run("plan", "--params", "1B", "--dp", "1", "--ranks-per-node", "1")
    assert (
        "ranks           1 on 1 node: TP 1, PP 1, DP 1, EP 1\n" in printed
        and "each node of 1 rank," in printed
    )
