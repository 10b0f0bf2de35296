"""datastates args."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import (
    READABLE,
    Table,
    any_format_argument,
    argument,
    checkpoint_of,
    counted,
    iteration_option,
    json_option,
    print_json,
    reported_errors,
    say,
)
from megatron_datastates.convert.open import open_source
from megatron_datastates.errors import MissingKeyError

_ABSENT = "-"  # an argument that one of two checkpoints lacks


@app.command()
@any_format_argument
@argument(
    "second", metavar="[OTHER]", required=False, type=READABLE, help="Another one: list only what differs."
)
@click.option("--keys", metavar="PATTERN", multiple=True, help="Only arguments that match, such as '*lr*'.")
@iteration_option
@json_option
def args(
    directory: Path, second: Path | None, keys: Sequence[str], iteration: int | None, as_json: bool
) -> None:
    """Print a checkpoint's training arguments, or those that differ.

    Megatron stores the arguments of the run in every checkpoint. With two checkpoints, those are listed whose
    values differ, or that only one of them has.

    Exit codes: 0 listed, or all are equal; 1 some differ, or a checkpoint is damaged; 2 they cannot be read.

    \b
    Example: datastates args runs/gpt/iter_0001000 --keys '*parallel*'

    \b
    Example: datastates args runs/gpt runs/gpt2
    """
    with reported_errors():
        found = _arguments(directory, iteration)
        other = None if second is None else _arguments(second, iteration)
        names = _chosen(found.keys() | (other or {}).keys(), keys or ["*"])
    if other is None:
        _print_all({name: found[name] for name in names}, as_json)
        return
    differing = {
        name: (found.get(name, _Absent), other.get(name, _Absent))
        for name in names
        if not _equal(found.get(name, _Absent), other.get(name, _Absent))
    }
    _print_differing(differing, len(names), as_json)
    raise click.exceptions.Exit(1 if differing else 0)


class _Absent:
    """Stands for the value of an argument that a checkpoint lacks."""


def _arguments(directory: Path, iteration: int | None) -> dict[str, Any]:
    path = checkpoint_of(directory, iteration)  # before the imports: a wrong path is said at once
    from megatron_datastates.convert.stored_arguments import training_arguments

    return training_arguments(open_source(path))


def _chosen(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that match any pattern. Raises MissingKeyError: one matches nothing."""
    found: set[str] = set()
    for pattern in patterns:
        some = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not some:
            raise MissingKeyError(
                f"no training argument matches {pattern!r}: expected a name such as 'hidden_size', or a "
                "pattern (* matches anything)"
            )
        found.update(some)
    return sorted(found)


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two values are the same: 1 is not True, and NaN equals NaN."""
    return type(one) is type(other) and (one is other or repr(one) == repr(other))


def _text(value: Any) -> str:
    return _ABSENT if value is _Absent else value if isinstance(value, str) else json.dumps(value)


def _print_all(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        say(f"{name}: {_text(value)}")


def _print_differing(differing: dict[str, tuple[Any, Any]], count: int, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                name: [None if value is _Absent else value for value in pair]
                for name, pair in differing.items()
            }
        )
        return
    table = Table("argument", "first", "second")
    for name, pair in differing.items():
        table.add(name, *map(_text, pair))
    if differing:
        table.print()
    verb = "differs" if len(differing) == 1 else "differ"
    say(f"{counted(len(differing), 'argument')} of {count:,} {verb}")
