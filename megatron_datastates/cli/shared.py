"""What all sub-commands share: the application, where it prints, and how it ends.

Exit codes: 0 good, 1 the checkpoint is faulty, 2 it cannot be done; then nothing was written, and one line
says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron_datastates.config import parse_bytes
from megatron_datastates.errors import OptionError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
out = Console()
notes = Console(stderr=True)

Directory = Annotated[Path, typer.Argument(help="A checkpoint, such as CKPT/iter_0000100.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Keys = Annotated[
    list[str],
    typer.Option("--keys", metavar="PATTERN", help="Only tensors like this (*, ?, [..]); may be repeated."),
]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Of tensors, held at a time, such as 512MiB.")
]


def progress_bar(verb: str, disable: bool = False) -> Progress:
    """Of a long job: bytes, rate and the time that is left, on standard error if that is a terminal."""
    bars = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(verb, *bars, console=notes, transient=True, disable=disable or not notes.is_terminal)


def cannot(error: Exception, code: int = 2) -> NoReturn:
    """Ends the command: it cannot be done, for this reason."""
    notes.print(f"datastates: {error}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def parse_size(option: str, text: str) -> int:
    """Bytes. Raises OptionError."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{option} {text}: {error}") from None
