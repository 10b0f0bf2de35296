"""The program `datastates`: the group that each sub-command adds itself to, and how it is run."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from typing import Any, NoReturn

import click

_NAME = "datastates"
_NEEDED = ("torch", "numpy")  # by commands that read tensors or objects
_COMPLETION = "_DATASTATES_COMPLETE"  # the environment variable that the shells' scripts set


def _show_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        context.exit(_complete(f"{shell}_source"))


def _complete(instruction: str) -> int:
    from click.shell_completion import shell_complete

    return shell_complete(app, {}, _NAME, _COMPLETION, instruction)


class _Commands(click.Group):
    """Reports a wrong option or argument of a command as any other error: in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from megatron_datastates.cli.shared import note

            message = " ".join(error.format_message().split())
            end = "" if message.endswith((".", "?")) else "."
            note(f"datastates: {message}{end} See `{(error.ctx or ctx).command_path} --help`")
            raise click.exceptions.Exit(error.exit_code) from None


@click.group(
    _NAME,
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(
    None,
    "--version",
    "-V",
    package_name="megatron-datastates",
    message=f"{_NAME} %(version)s",
    help="Print the version and exit.",
)
@click.option(
    "--show-completion",
    metavar="SHELL",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_show_completion,
    help="Print the script that completes command lines in bash, zsh or fish.",
)
def app() -> None:
    """List, inspect, verify, repair, convert, export, compare and prune Megatron-Core checkpoints.

    Before a run, `plan` estimates what saves will cost, and `preflight` tries them; after it, `report` shows
    what they did cost.
    `datastates COMMAND --help` explains a command, with an example.

    \b
    Examples:
        datastates ls runs/gpt
        datastates verify runs/gpt
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of a path or a key
        sys.stdout.reconfigure(errors="backslashreplace")


def _keep_imports_quiet() -> None:
    """Keeps what others warn of from standard error, which is for what a user has to know."""
    warnings.filterwarnings(
        "ignore", "ComplexHalf support is experimental"
    )  # torch's, at the first such tensor
    warnings.filterwarnings("ignore", r"Glyph .* missing from font")  # matplotlib's, of a name in a plot
    # Of packages that make no difference to a command: stored objects may need an import of megatron.core.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def run_program() -> NoReturn:
    """Runs a command line; raises SystemExit.

    Does what click's `main` does, but lets interrupts and errors pass, which entry.py reports.
    """
    _keep_imports_quiet()
    instruction = os.environ.get(_COMPLETION)
    if instruction:
        sys.exit(_complete(instruction))
    try:
        with app.make_context(_NAME, sys.argv[1:]) as context:
            app.invoke(context)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        command = f"{_NAME} {sys.argv[1]}"
        print(
            f"{command} needs {error.name}, which is not installed here: pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(0)
