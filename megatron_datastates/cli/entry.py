"""The entry point of the console script: starts at once where the command needs no torch.

Loading torch takes seconds, and some commands only compute with numbers; these are listed here.
"""

from __future__ import annotations

import importlib
import io
import sys

from megatron_datastates.cli.shared import app

_WITHOUT_TORCH = ("plan", "report")


@app.callback()
def _describe() -> None:
    """List, inspect, verify, repair, convert, export, compare and prune Megatron-Core checkpoints.

    Before a run, `plan` estimates what saves will cost; after it, `report` shows what they did cost.
    `datastates COMMAND --help` explains a command, with an example.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of a path or a key
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Runs the command line, after importing the named command, or all of them."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    module = name if name in _WITHOUT_TORCH else "main"
    importlib.import_module(f"megatron_datastates.cli.{module}")
    app()
