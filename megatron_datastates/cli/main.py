"""The command `datastates`. Each sub-command is a module, which imports what it needs when it runs."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from megatron_datastates.cli import (  # each adds its sub-command to `app`
    args,
    cat,
    convert,
    diff,
    export,
    hugging_face,
    listing,
    plan,
    prune,
    repair,
    report,
    show,
    trend,
    verify,
)
from megatron_datastates.cli.entry import main
from megatron_datastates.cli.shared import app, say, say_folded
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options

__all__ = [
    "app",
    "args",
    "cat",
    "convert",
    "diff",
    "export",
    "hugging_face",
    "listing",
    "main",
    "plan",
    "prune",
    "repair",
    "report",
    "show",
    "trend",
    "verify",
]


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


@app.command("options")
def list_options(
    *, markdown: Annotated[bool, typer.Option("--markdown", help="Print them as a Markdown table.")] = False
) -> None:
    """List the --datastates-* options of training runs.

    Exit codes: 0 listed.

    \b
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
            say(f"{flag} {spec.metavar}")
            say_folded(f"    {text}", 4)
    if not markdown:
        example = f"{ENVIRONMENT_PREFIX}SLOT_SIZE=8MiB"
        say_folded(f"Each can also be set by an environment variable, such as {example}.")
