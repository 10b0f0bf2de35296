"""datastates export."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_datastates.cli.hugging_face import Wanted, export_to_hugging_face
from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    PLACED,
    Size,
    advancing,
    any_format_argument,
    argument,
    cannot,
    checkpoint_of,
    counted,
    iteration_option,
    json_option,
    keys_option,
    memory_option,
    print_json,
    say,
)
from megatron_datastates.convert.hf import FLOATS
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import CorruptDataError, DataStatesError
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.convert.sources.source import Source


@app.command()
@any_format_argument
@argument(
    "target",
    type=PLACED,
    help="Directory to create, or msc://PROFILE/PATH. It must not exist yet.",
)
@keys_option
@click.option(
    "--stacked", is_flag=True, help="Keep layers that are stored as one stacked tensor in one tensor."
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    type=Size(1),
    default="5GB",
    help="Largest size of one file, such as 2GB.",
)
@memory_option
@click.option("--hf", is_flag=True, help="Write a folder that Hugging Face's transformers loads.")
@click.option(
    "--dtype",
    metavar="DTYPE",
    type=click.Choice(FLOATS),
    help="With --hf: convert to float32, bfloat16 or float16 (default: as stored).",
)
@click.option(
    "--vocab-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --hf: words in the vocabulary (default: what the stored arguments say).",
)
@click.option(
    "--tokenizer", metavar="DIR", type=PATH, help="With --hf: copy the tokenizer's files from here."
)
@iteration_option
@json_option
def export(
    directory: Path,
    target: Path,
    keys: Sequence[str],
    stacked: bool,
    max_shard_size: int,
    memory: int,
    hf: bool,
    dtype: str | None,
    vocab_size: int | None,
    tokenizer: Path | None,
    iteration: int | None,
    as_json: bool,
) -> None:
    """Write a model's weights as safetensors files.

    Tensors keep Megatron's names, one tensor per layer; the experts of a layer stay stacked in one tensor.
    Without --keys, exports all tensors except the optimizer's. --keys 'optimizer.state.*' exports optimizer
    state by parameter, in whatever layout it is stored. A tensor larger than --max-shard-size gets a
    file of its own.

    --hf writes config.json and Hugging Face's names, from any format and sharding: Llama, Qwen 2 and 3 (dense
    or with experts), Mixtral, GPT-2. Another architecture is refused with the arguments that differ. Weights
    keep their values; the vocabulary loses its padding.

    Exit codes: 0 written; 1 the checkpoint is damaged; 2 it cannot be exported, or 130 interrupted (nothing
    was written).

    \b
    Example: datastates export runs/gpt/iter_0001000 gpt-1000 --max-shard-size 2GB

    \b
    Example: datastates export runs/llama/iter_0001000 llama-hf --hf --tokenizer tokenizers/llama
    """
    try:
        directory = checkpoint_of(directory, iteration)
        if hf or dtype or vocab_size or tokenizer:
            wanted = Wanted(dtype or "", vocab_size or 0, tokenizer, max_shard_size, memory, as_json)
            export_to_hugging_face(directory, target, wanted, possible=hf and not (keys or stacked))
            return
        from megatron_datastates.convert.sinks.safetensors import choose_weights
        from megatron_datastates.convert.sinks.safetensors import export as export_weights

        source = _with_states(open_source(directory), keys)
        weights = choose_weights(source, keys, stacked=stacked)
        with advancing("exporting", sum(weight.bytes for weight in weights)) as progress:
            exported = export_weights(
                source,
                target,
                weights,
                shard_bytes=max_shard_size,
                memory_bytes=memory,
                progress=progress,
            )
    except CorruptDataError as error:
        cannot(error)
    except (DataStatesError, OSError) as error:
        # With --hf, a FormatError also says that arguments and tensors do not fit a known architecture.
        cannot(error, 2 if hf else None)
    if as_json:
        print_json({"target": str(target)} | dataclasses.asdict(exported))
        return
    say(
        f"{target}: {counted(exported.tensors, 'tensor')}, {size_text(exported.tensor_bytes)}, "
        f"in {counted(len(exported.files), 'file')}"
    )


def _with_states(source: Source, patterns: Sequence[str]) -> Source:
    """Returns a view with optimizer state by parameter, if a pattern asks for what is stored in buckets."""
    from megatron_datastates.convert.sources.by_parameter import ByParameterSource
    from megatron_datastates.pipeline.loading.optimizer import PREFIX, has_optimizer_maps

    asked = any(pattern.startswith(f"{PREFIX}.") for pattern in patterns)
    in_buckets = source.checkpoint is not None and has_optimizer_maps(source.checkpoint)
    return ByParameterSource(source) if asked and in_buckets else source
