"""The command `datastates`. Each sub-command is a module of its own."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from megatron_datastates.cli import (  # they add themselves
    cat,
    convert,
    diff,
    export,
    listing,
    prune,
    repair,
    show,
    verify,
)
from megatron_datastates.cli.shared import app
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options

__all__ = ["cat", "convert", "diff", "export", "listing", "main", "prune", "repair", "show", "verify"]


@app.callback()
def _describe() -> None:
    """Looks into checkpoints saved with --ckpt-format datastates."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and keys need not be text that it knows
        sys.stdout.reconfigure(errors="backslashreplace")


@app.command("options")
def list_options(
    *, markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False
) -> None:
    """List the --datastates-* options of training runs.

    Example: datastates options
    """
    if markdown:
        print("| option | |\n|---|---|")
    for name, spec in Options.specs().items():
        flag, text = f"--datastates-{name.replace('_', '-')}", spec.help.replace("%%", "%")
        if markdown:
            values = spec.metavar.replace("|", " \\| ")
            print(f"| `{flag}`<br>{values} | {text[0].upper()}{text[1:]}. |")
        else:
            print(f"{flag} {spec.metavar}\n    {text}")
    if not markdown:
        print(f"Each has a twin in the environment: {ENVIRONMENT_PREFIX}SLOT_SIZE=8MiB, and so on.")


def main() -> None:
    """The console script."""
    app()
