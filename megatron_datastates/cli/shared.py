"""The parts that all sub-commands share: the application, its output, common arguments, and exit codes.

Exit codes: 0 success, 1 the checkpoint is faulty or differs, 2 the command cannot be carried out. With 2,
nothing was written, and one line on standard error says why.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megatron_datastates.config import MIB, parse_bytes
from megatron_datastates.errors import OptionError, StorageError, printable

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
# Without markup: rich would interpret brackets and colons in keys and paths.
out = Console(markup=False, emoji=False, highlight=False)
notes = Console(stderr=True, markup=False, emoji=False, highlight=False)
_ANY_WIDTH = 1 << 16
_LEAST_MEMORY_BYTES = MIB  # with less, a tensor would be read in a vast number of tiny pieces


def readable(directory: Path) -> Path:
    """Checks a directory argument: ends the command with exit code 2 if its path is not valid UTF-8."""
    from megatron_datastates.convert.open import require_utf8  # which imports torch

    try:
        require_utf8(directory)
    except StorageError as error:
        cannot(error)
    return directory


Directory = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Directory of a datastates checkpoint, such as runs/gpt/iter_0001000.",
        callback=readable,
    ),
]
AnyFormat = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Directory of a checkpoint, such as runs/gpt/iter_0001000; its format is detected.",
        callback=readable,
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a training run, as given to --save.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Keys = Annotated[
    list[str],
    typer.Option(
        "--keys",
        metavar="PATTERN",
        help="Only tensors whose key matches this shell pattern (*, ?, [..]); may be given several times.",
    ),
]
Memory = Annotated[
    str,
    typer.Option("--memory", metavar="SIZE", help="Tensor data to hold in memory at a time, at least 1MiB."),
]


def progress_bar(verb: str, disable: bool = False) -> Progress:
    """Makes the progress bar of a long job: bytes, rate, time left.

    It is shown on standard error, and only if that is a terminal.
    """
    bars = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(verb, *bars, console=notes, transient=True, disable=disable or not notes.is_terminal)


def say(text: str) -> None:
    """Prints text to standard output; control characters become escapes."""
    out.print(printable(text, keep="\n"), soft_wrap=True)


def note(text: str) -> None:
    """Prints one line to standard error; control characters become escapes."""
    notes.print(printable(text), soft_wrap=True)


def add_row(table: Table, *cells: str) -> None:
    """Adds a row to a table; control characters become escapes."""
    table.add_row(*map(printable, cells))


def print_json(value: Any) -> None:
    """Prints a value as strict JSON, in which NaN and infinity are null.

    Raises:
        RecursionError: the value is nested too deeply, or contains itself.
    """
    print(json.dumps(_strict(value)))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(table: Table) -> None:
    """Prints a table at its full width: a truncated key is of no use."""
    Console(width=_ANY_WIDTH, markup=False, emoji=False, highlight=False).print(table)


def binary_size(count: int) -> str:
    """Formats a number of bytes for people, such as `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def cannot(error: Exception, code: int = 2) -> NoReturn:
    """Ends the command with an exit code, after one line on standard error that says why."""
    text = " ".join(str(error).split("\n"))
    note(f"datastates: {text}")
    raise typer.Exit(code)


def parse_size(option: str, text: str) -> int:
    """Reads the size given to `option`; returns bytes. Raises OptionError."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{option} {text}: {error}") from None


def parse_memory(text: str) -> int:
    """Reads the size given to --memory; returns bytes. Raises OptionError."""
    size = parse_size("--memory", text)
    if size < _LEAST_MEMORY_BYTES:
        raise OptionError(f"--memory {text}: expected at least {_LEAST_MEMORY_BYTES // MIB}MiB")
    return size
