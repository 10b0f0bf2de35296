r"""Pretrains a tiny GPT as Megatron-LM's `pretrain_gpt.py` does, without a Megatron-LM checkout.

    torchrun --nproc-per-node 2 recipes/cpu/run.py \
        recipes/pretrain_tiny.py $(cat recipes/tiny.args) \
        --tensor-model-parallel-size 2 --save CKPT --ckpt-format datastates

All arguments except `--step-delay-ms` are Megatron's own. The script does not depend on the checkpoint
format: it calls `megatron.training.pretrain` as the stock script of megatron-core 0.19 does (and, where
`pretrain` differs, as those of 0.17 and 0.18), so what works here works there. The model is
megatron-core's GPTModel with local layer specs, dense or with experts (`--num-experts`), with or without
multi-token prediction (`--mtp-num-layers`). The data is synthetic: counting sequences, predictable enough
for the loss to fall within a few dozen iterations.
"""

import argparse
import inspect
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

Batch = dict[str, torch.Tensor]


class CountingSequences(torch.utils.data.Dataset[Batch]):
    """A data set whose sample i counts in steps of 1 to 4, modulo the vocabulary; i determines all of it."""

    def __init__(self, samples: int, tokens: int, vocabulary: int) -> None:
        self._samples, self._tokens, self._vocabulary = samples, tokens, vocabulary

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        start, stride = index * 37, 1 + index % 4
        positions = torch.arange(self._tokens + 1)
        text = (start + stride * positions) % self._vocabulary
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": positions[:-1]}


def datasets(samples: list[int | None], vp_stage: int | None = None) -> tuple[CountingSequences | None, ...]:
    """Makes the train, validation and test sets, from which every rank reads batches of its own."""
    args = get_args()
    made = [CountingSequences(n, args.seq_length, args.vocab_size) if n else None for n in samples]
    return tuple(made)


datasets.is_distributed = True  # type: ignore[attr-defined]


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> GPTModel:
    """Builds the model, as Megatron's model provider, for releases whose `pretrain` takes one."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    local: dict[str, Any] = {"use_transformer_engine": False, "vp_stage": vp_stage}
    layers = get_gpt_decoder_block_spec(config, normalization=config.normalization, **local)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, **local) if config.mtp_num_layers else None,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        **kwargs,
    )


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Computes the losses of one micro-batch. Middle pipeline stages read it too, but do not use it."""
    time.sleep(get_args().step_delay_ms / 1000)
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(mean_loss, batch["labels"].numel())


def mean_loss(
    tokens: int, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns what Megatron's schedules expect: the summed loss, the number of tokens, both for the log."""
    loss = losses.float().sum()
    count = torch.tensor(tokens, dtype=torch.int, device=loss.device)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the one argument of this script that is not Megatron's."""
    group = parser.add_argument_group("tiny")
    group.add_argument(
        "--step-delay-ms",
        type=float,
        default=0.0,
        help="milliseconds to sleep in every forward step, so that there is time to kill a run half way",
    )
    return parser


def main() -> None:
    """Pretrains with the arguments of the command line."""
    # Megatron's wheel has no Makefile to build its dataset helpers with, and this data needs none.
    dataset_utils.compile_helpers = lambda: None
    asked = inspect.signature(pretrain).parameters
    call: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if asked["model_provider"].default is inspect.Parameter.empty:
        call["model_provider"] = build_model
    if "cfg_container" in asked:
        call["cfg_container"] = _configure(describe_model="model_provider" not in call)
    else:
        call["extra_args_provider"] = add_arguments
    pretrain(**call)


def _configure(describe_model: bool) -> Any:
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_arguments)
    model = argument_utils.gpt_config_from_args(args) if describe_model else None
    return argument_utils.pretrain_cfg_container_from_args(args, model)


if __name__ == "__main__":
    main()
