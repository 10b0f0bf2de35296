"""What all sub-commands share: the application, where it prints, and how it ends.

Exit codes: 0 good, 1 the checkpoint is faulty, 2 it cannot be done; then nothing was written, and one line
says why.
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
from megatron_datastates.convert.open import require_utf8
from megatron_datastates.errors import OptionError, StorageError, printable

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
# Keys and paths are printed as they are, whatever rich would make of their brackets and colons.
out = Console(markup=False, emoji=False, highlight=False)
notes = Console(stderr=True, markup=False, emoji=False, highlight=False)
_ANY_WIDTH = 1 << 16
_LEAST_MEMORY_BYTES = MIB  # with less, so few elements are read at a time that it never ends


def readable(directory: Path) -> Path:
    """For arguments."""
    try:
        require_utf8(directory)
    except StorageError as error:
        cannot(error)
    return directory


Directory = Annotated[
    Path, typer.Argument(help="A checkpoint, such as CKPT/iter_0000100.", callback=readable)
]
AnyFormat = Annotated[Path, typer.Argument(help="A checkpoint of any format.", callback=readable)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of text; a number that is not finite is null.")
]
Keys = Annotated[
    list[str],
    typer.Option("--keys", metavar="PATTERN", help="Only tensors like this (*, ?, [..]); may be repeated."),
]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Of tensors, held at a time, such as 512MiB.")
]


def progress_bar(verb: str, disable: bool = False) -> Progress:
    """Of a long job: bytes, rate and the time that is left, on standard error if that is a terminal."""
    bars = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(verb, *bars, console=notes, transient=True, disable=disable or not notes.is_terminal)


def say(text: str) -> None:
    """Prints text to standard output, as it is but for control characters."""
    out.print(printable(text, keep="\n"), soft_wrap=True)


def note(text: str) -> None:
    """Prints one line to standard error, likewise."""
    notes.print(printable(text), soft_wrap=True)


def add_row(table: Table, *cells: str) -> None:
    """Adds a row to a table, likewise."""
    table.add_row(*map(printable, cells))


def print_json(value: Any) -> None:
    """JSON has no NaN and no infinity: they are null. Raises RecursionError."""
    print(json.dumps(_strict(value)))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(table: Table) -> None:
    """As wide as it is: a key that is cut is of no use."""
    Console(width=_ANY_WIDTH, markup=False, emoji=False, highlight=False).print(table)


def binary_size(count: int) -> str:
    """For people: `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def cannot(error: Exception, code: int = 2) -> NoReturn:
    """Ends the command: it cannot be done, for this reason."""
    text = " ".join(str(error).split("\n"))
    note(f"datastates: {text}")
    raise typer.Exit(code)


def parse_size(option: str, text: str) -> int:
    """Bytes. Raises OptionError."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{option} {text}: {error}") from None


def parse_memory(text: str) -> int:
    """Bytes of --memory. Raises OptionError."""
    size = parse_size("--memory", text)
    if size < _LEAST_MEMORY_BYTES:
        raise OptionError(f"--memory {text}: it takes at least {_LEAST_MEMORY_BYTES // MIB} MiB")
    return size
