"""datastates export --hf, and datastates import."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    FORMATS,
    LOCAL_READABLE,
    READABLE,
    advancing,
    argument,
    conversion_memory_option,
    counted,
    json_option,
    note,
    print_json,
    progress_bar,
    reported_errors,
    require_directory,
    say,
    say_as_is,
)
from megatron_datastates.convert.hf import LOCAL, TRANSFORMER_ENGINE
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import OptionError
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.units import size_text

if TYPE_CHECKING:
    from megatron_datastates.convert.hf.source import HuggingFaceSource
    from megatron_datastates.convert.planning import Plan
    from megatron_datastates.convert.sinks.sink import Progress


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The options of an export."""

    dtype: str
    vocab_size: int
    tokenizer: Path | None
    shard_bytes: int  # of a file, at most
    memory_bytes: int
    as_json: bool


def export_to_hugging_face(directory: Path, target: Path, wanted: Wanted, possible: bool) -> None:
    """Exports a model and prints what was written.

    Args:
        possible: the other options allow it.
    """
    if not possible:
        raise OptionError(
            "--dtype, --vocab-size and --tokenizer apply with --hf only, and --keys and --stacked without it"
        )
    from megatron_datastates.convert.hf.export import export_model, read_model

    source = open_source(directory)
    model = read_model(source, dtype=wanted.dtype, vocab_size=wanted.vocab_size)
    with advancing("exporting", sum(tensor.bytes for tensor in model.tensors)) as progress:
        exported = export_model(
            source,
            target,
            model,
            tokenizer=wanted.tokenizer,
            shard_bytes=wanted.shard_bytes,
            memory_bytes=wanted.memory_bytes,
            progress=progress,
        )
    family = model.family
    notes = [*model.notes]
    if wanted.tokenizer is None:
        notes.append("tokenizer: not written; --tokenizer DIR copies its files")
    if wanted.as_json:
        found = dataclasses.asdict(exported) | {"model_type": family.model_type, "notes": notes}
        print_json({"target": str(target)} | found)
        return
    say(
        f"{target}: {family.architecture}, {model.dtype}: {counted(exported.tensors, 'tensor')}, "
        f"{size_text(exported.tensor_bytes)}, in {counted(len(exported.files), 'file')}"
    )
    for one in notes:
        note(one)


@app.command("import")
@argument("source", metavar="FOLDER", type=LOCAL_READABLE, help="A Hugging Face model folder.")
@argument(
    "target",
    metavar="RUN",
    type=READABLE,
    help="Directory of the run to start, or msc://PROFILE/PATH, as given to --load.",
)
@click.option("--to", metavar="FORMAT", type=FORMATS, default=BACKEND, help="datastates or torch_dist.")
@click.option(
    "--transformer-impl",
    metavar="NAME",
    type=click.Choice([TRANSFORMER_ENGINE, LOCAL]),
    default=TRANSFORMER_ENGINE,
    help="As in the training run: transformer_engine or local.",
)
@conversion_memory_option
@json_option
def import_hugging_face(
    source: Path, target: Path, to: str, transformer_impl: str, memory: int, as_json: bool
) -> None:
    """Start a training from a Hugging Face model folder.

    Writes RUN/release, with the weights alone, bit for bit, and prints Megatron's arguments for this model.
    pretrain_gpt.py --load RUN then starts at iteration 0. Takes the architectures that export --hf writes,
    and Mistral without a sliding window; another is refused with what differs.

    Exit codes: 0 imported; 2 it cannot be imported; 130 interrupted.

    \b
    Example: datastates import llama-hf runs/tuned
    """
    with reported_errors(2):
        require_directory(source, "a Hugging Face model folder")  # before torch is imported
    from megatron_datastates.convert.hf.arguments import command_line
    from megatron_datastates.convert.hf.run import import_model
    from megatron_datastates.convert.hf.source import HuggingFaceSource

    with (
        reported_errors(2),
        contextlib.closing(HuggingFaceSource(source, transformer_impl)) as opened,
        progress_bar("importing") as progress,
    ):
        flags = command_line(opened.arguments)
        if transformer_impl == LOCAL:  # not Megatron's default, and the weights have its keys
            flags.append(f"--transformer-impl {LOCAL}")

        def start(plan: Plan) -> Progress:
            task = progress.add_task("", total=plan.bytes)
            return lambda done: progress.advance(task, done)

        plan = import_model(opened, target, format=to, limits=Limits(memory), start=start)
    _print_imported(plan, flags, opened, as_json)


def _print_imported(plan: Plan, flags: list[str], source: HuggingFaceSource, as_json: bool) -> None:
    run, count = plan.target.parent, len(source.tensors)
    if as_json:
        found = {"target": str(plan.target), "format": plan.format, "tensors": count}
        print_json(found | {"bytes": plan.bytes, "arguments": flags})
        return
    size = size_text(plan.bytes)
    say(f"{plan.target}: {source.family.model_type}: {counted(count, 'tensor')}, {size}")
    note("Start the training with these arguments, and those of its tokenizer:")
    say_as_is(" ".join(["--load", shlex.quote(str(run)), *flags]))
