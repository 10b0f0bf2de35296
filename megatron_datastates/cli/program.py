"""What `datastates` does before any sub-command: --version, and the output's encoding."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from megatron_datastates.cli.shared import app

__all__ = ["app"]


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # takes 40 ms, of every command

        print(f"datastates {importlib.metadata.version('megatron-datastates')}")
        raise typer.Exit


@app.callback()
def _describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """List, inspect, verify, repair, convert, export, compare and prune Megatron-Core checkpoints.

    Before a run, `plan` estimates what saves will cost; after it, `report` shows what they did cost.
    `datastates COMMAND --help` explains a command, with an example.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of a path or a key
        sys.stdout.reconfigure(errors="backslashreplace")
