"""datastates options."""

from __future__ import annotations

import click

from megatron_datastates.cli.program import app
from megatron_datastates.cli.shared import say
from megatron_datastates.config import ENVIRONMENT_PREFIX, Options


@app.command("options")
@click.option("--markdown", is_flag=True, help="Print them as a Markdown table.")
def list_options(*, markdown: bool) -> None:
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
            say(f"    {text}")
    if not markdown:
        example = f"{ENVIRONMENT_PREFIX}SLOT_SIZE=8MiB"
        say(f"Each can also be set by an environment variable, such as {example}.")
