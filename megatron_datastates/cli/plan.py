"""datastates plan."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    PATH,
    argument,
    cannot,
    counted,
    json_option,
    print_json,
    say,
    say_rows,
)
from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.memory import POOL_SHARE
from megatron_datastates.errors import DataStatesError, OptionError, some_of
from megatron_datastates.option_text import parse_bytes
from megatron_datastates.sizing.arguments import Arguments, flags_in, read_arguments
from megatron_datastates.sizing.planning import (
    Grid,
    Plan,
    Storage,
    plan_arguments,
    plan_parameters,
    precision_of,
)
from megatron_datastates.units import size_text

_POSITIVE = click.IntRange(min=1)
_SHORTEST, _LONGEST = 1e-6, 1e9  # seconds of an iteration
_FEWEST = 1000  # parameters: `--params 70` lacks its unit
_MOST_NAMES = 12
_MARGIN = 1.25  # between the time of a save and the interval that is advised
_SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_FLAGS = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
    "expert_tensor": "expert-tensor-parallel-size",
}


class _Plan(click.Command):
    """The command; says where Megatron's arguments belong if one is given as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            text = f"{error.message.rstrip('.')}. Megatron's arguments come after `--`."
            raise click.NoSuchOption(error.option_name, text, error.possibilities, ctx) from None


@app.command(cls=_Plan)
@argument("words", metavar="[-- MEGATRON'S ARGUMENTS]", nargs=-1, help="They override --arguments.")
@click.option(
    "--arguments",
    "files",
    metavar="FILE",
    type=PATH,
    multiple=True,
    help="A script, an argument file or YAML; may be repeated.",
)
@click.option(
    "--params",
    "parameters",
    metavar="N",
    help="Number of parameters, such as 70B (Adam, bf16), in place of a model's arguments. Only the parallel "
    "sizes are then read from --arguments and from what follows `--`.",
)
@click.option("--tp", metavar="N", type=_POSITIVE, help="Tensor-parallel size; by default the arguments'.")
@click.option("--pp", metavar="N", type=_POSITIVE, help="Pipeline-parallel size; by default the arguments'.")
@click.option("--dp", metavar="N", type=_POSITIVE, default=1, help="Data-parallel size.")
@click.option("--cp", metavar="N", type=_POSITIVE, help="Context-parallel size; by default the arguments'.")
@click.option("--ep", metavar="N", type=_POSITIVE, help="Expert-parallel size; by default the arguments'.")
@click.option("--rate", metavar="RATE", default="2GB/s", help="Write rate of the storage, such as 2GB/s.")
@click.option(
    "--rate-per",
    type=click.Choice(["rank", "node", "all"]),
    default="node",
    help="Whether --rate is that of a rank, of a node, or of all nodes together.",
)
@click.option("--ranks-per-node", metavar="N", type=_POSITIVE, default=8, help="Number of ranks on a node.")
@click.option(
    "--copy-rate", metavar="RATE", default="20GB/s", help="Rate at which a rank copies from device to host."
)
@click.option(
    "--iteration-seconds",
    "iteration",
    metavar="SECONDS",
    type=float,
    help="Duration of an iteration; prints the interval in iterations, too.",
)
@json_option
def plan(
    words: Sequence[str],
    files: Sequence[Path],
    parameters: str | None,
    tp: int | None,
    pp: int | None,
    dp: int,
    cp: int | None,
    ep: int | None,
    rate: str,
    rate_per: str,
    ranks_per_node: int,
    copy_rate: str,
    iteration: float | None,
    as_json: bool,
) -> None:
    """Estimate what saves will cost, before a run starts.

    Prints bytes, files, memory, times, and options to set.

    The model comes from Megatron's arguments (after `--`, or in a file: a shell script, an argument file, or
    lines `key: value`), or from a number of parameters. Known are GPT models: grouped queries, SwiGLU,
    experts, tied embeddings. Arguments that change a model in other ways are refused. All
    assumptions are printed.

    Exit codes: 0 estimated; 2 it cannot be done.

    \b
    Examples:
        datastates plan --params 70B --tp 8 --pp 4 --dp 8 --rate 10GB/s
        datastates plan --arguments train.sh --dp 16 --rate 2GB/s --rate-per rank --iteration-seconds 4
        datastates plan --dp 2 -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu \\
            --vocab-size 128256 --bf16 --use-distributed-optimizer --position-embedding-type rope
    """
    try:
        source = click.get_current_context().get_parameter_source("rate")
        is_given = source is not click.core.ParameterSource.DEFAULT
        storage = Storage(_rate("--rate", rate), rate_per, ranks_per_node, is_given)
        if iteration is not None and not _SHORTEST <= iteration <= _LONGEST:
            raise OptionError(
                f"--iteration-seconds {iteration:g}: expected a number from {_SHORTEST:g} to {_LONGEST:g}"
            )
        given = {"tensor": tp, "pipeline": pp, "context": cp, "expert": ep}
        if parameters is None and not files and not words:
            raise OptionError(
                "describe the model: --params 70B, --arguments FILE, or `-- MEGATRON'S ARGUMENTS`"
            )
        if words and not words[0].startswith("-"):
            raise OptionError(
                f"{words[0]}: expected an argument of Megatron, which begins with --. A file of them is "
                f"given by --arguments {words[0].removeprefix('@')}"
            )
        own = {name[2:] for option in plan.params for name in option.opts if name.startswith("--")}
        for flag in sorted(flags_in(words) & own):  # Megatron has no arguments of these names
            raise OptionError(f"--{flag} is an option of `datastates plan`: give it before `--`")
        arguments = read_arguments(files, words)
        made = _made(arguments, parameters, given, dp, storage, _rate("--copy-rate", copy_rate))
    except DataStatesError as error:
        cannot(error)
    if as_json:
        print_json(dataclasses.asdict(made) | {"shortest_interval_seconds": made.write_seconds})
    else:
        _print(made, iteration)


def _made(
    arguments: Arguments,
    parameters: str | None,
    given: dict[str, int | None],
    data: int,
    storage: Storage,
    copy_rate: float,
) -> Plan:
    sizes = {name: given.get(name) or arguments.number(flag, 1) for name, flag in _FLAGS.items()}
    if not arguments.text(_FLAGS["expert_tensor"], ""):
        # Megatron's default; without experts neither matters, and --params says nothing of them.
        has_experts = parameters is None and arguments.has("num-experts")
        sizes["expert_tensor"] = sizes["tensor"] if has_experts else 1
    grid = Grid(data=data, **sizes)
    if parameters is not None:
        known = read_arguments([], ["--bf16", "--use-distributed-optimizer"])
        made = plan_parameters(_count(parameters), grid, precision_of(known), storage, copy_rate)
    else:
        made = plan_arguments(arguments, grid, storage, copy_rate)
    if arguments.defaults:
        texts = [f"{name}={value}" for name, value in arguments.defaults.items()]
        made.assumptions.append(
            f"defaults of the script: {some_of(texts, _MOST_NAMES)}; the environment is not read"
        )
    unused = arguments.unused()
    if unused:
        names = some_of([f"--{flag}" for flag in unused], _MOST_NAMES)
        made.assumptions.append(f"without an effect here: {names}")
    return made


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]?)", text)
    scale = _SCALES.get(match[2].lower()) if match else None
    if match is None or scale is None or not _FEWEST <= float(match[1]) * scale < 1e16:
        raise OptionError(f"--params {text}: expected a number of parameters such as 70B, 350M or 1.5T")
    return round(float(match[1]) * scale)


def _rate(option: str, text: str) -> float:
    """Returns bytes a second. A small b is refused: it may stand for bits."""
    size = text.removesuffix("/s")
    if re.search("[a-zA-Z]b$", size):
        raise OptionError(f"{option} {text}: write a rate in bytes as 2GB/s, and one in bits as 2Gbit/s")
    is_bits = size.endswith("bit")
    try:
        rate = parse_bytes(f"{size[:-3]}B" if is_bits else size)
    except ValueError:
        rate = 0
    if rate == 0 or size.isdecimal():  # a number alone would be bytes: nobody means that
        raise OptionError(f"{option} {text}: expected a rate above 0 and its unit, such as 2GB/s")
    return rate / 8 if is_bits else float(rate)


def _print(made: Plan, iteration: float | None) -> None:
    say_rows(_rows(made))
    say()
    for text in _advice(made, iteration):
        say(text)
    say()
    say("Assumptions:")
    for text in made.assumptions:
        say(f"    {text}", 6)


def _rows(made: Plan) -> list[tuple[str, str]]:
    parts = (
        (made.weight_bytes, "weights"),
        (made.optimizer_bytes, "optimizer"),
        (made.object_bytes, "objects"),
    )
    shares = ", ".join(f"{size_text(count)} {name}" for count, name in parts)
    return [
        ("parameters", f"{made.parameters:,}"),
        ("ranks", f"{made.ranks:,} on {counted(made.nodes, 'node')}: {_sizes_text(made.parallelism)}"),
        ("a checkpoint", f"{size_text(made.checkpoint_bytes)} ({shares})"),
        ("files", f"{made.files:,}: one for each rank, index, manifest, metadata.json"),
        (
            "a rank",
            f"{size_text(made.mean_rank_bytes)} on average, {size_text(made.largest_rank_bytes)} at most",
        ),
        (
            "copied in",
            f"{_seconds(made.copy_seconds)} to host memory, beside the next forward and backward pass; the "
            "optimizer's step waits if that is not over",
        ),
        ("written in", _seconds(made.write_seconds)),
        (
            "trainer held",
            f"about {made.held_ms:.0f} ms by an asynchronous save of "
            f"{counted(made.largest_rank_tensors, 'tensor')} on a rank; by the first one longer",
        ),
        (
            "staging memory",
            f"{_memory(made.staging_bytes_per_rank)} a rank, "
            f"{_memory(made.staging_bytes_per_node)} a node hold all of it. The default takes it where a "
            f"node has {_memory(math.ceil(made.staging_bytes_per_node / POOL_SHARE))} free",
        ),
    ]


def _sizes_text(sizes: dict[str, int]) -> str:
    """Formats the parallel sizes, those of one rank too: they may be defaults that nobody has chosen."""
    names = {"TP": "tensor", "PP": "pipeline", "DP": "data", "EP": "expert"}
    if sizes["context"] > 1:
        names["CP"] = "context"
    return ", ".join(f"{short} {sizes[name]:,}" for short, name in names.items())


def _advice(made: Plan, iteration: float | None) -> list[str]:
    lines = [f"Shortest interval that the disk sustains: {_seconds(made.write_seconds)}"]
    advised = made.write_seconds * _MARGIN
    if iteration is not None:
        steps = counted(math.ceil(made.write_seconds / iteration), "iteration")
        # The option is to be copied: without commas.
        lines[0] += f", {steps}; with a margin, --save-interval {math.ceil(advised / iteration)}"
    else:
        lines[0] += f"; with a margin, save every {_seconds(advised)} or less often"
    lines += [
        "Options:",
        "    --ckpt-format datastates --async-save "
        f"--datastates-staging-memory {made.staging_bytes_per_rank >> 30}GiB "
        "--datastates-report-file report.jsonl",
        "    With less staging memory a shard streams through it, and the optimizer may wait for the disk.",
    ]
    return lines


def _memory(count: int) -> str:
    """Formats memory in the unit of --datastates-staging-memory."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1000:.1f} ms"
