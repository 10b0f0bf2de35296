"""The command `datastates`. Each sub-command is a module of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_datastates.cli import (  # each adds its sub-command to `app`
    cat,
    convert,
    diff,
    export,
    listing,
    plan,
    prune,
    repair,
    report,
    show,
    verify,
)
from megatron_datastates.cli.entry import main
from megatron_datastates.cli.shared import app
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options

__all__ = [
    "cat",
    "convert",
    "diff",
    "export",
    "listing",
    "main",
    "plan",
    "prune",
    "repair",
    "report",
    "show",
    "verify",
]


@app.command("options")
def list_options(
    *, markdown: Annotated[bool, typer.Option("--markdown", help="Print them as a Markdown table.")] = False
) -> None:
    """List the --datastates-* options of training runs.

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
            print(f"{flag} {spec.metavar}\n    {text}")
    if not markdown:
        print(f"Each can also be set by an environment variable, such as {ENVIRONMENT_PREFIX}SLOT_SIZE=8MiB.")
