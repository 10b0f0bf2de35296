"""The entry point of the console script: starts at once where the command needs no torch.

Loading torch takes seconds, and some commands only compute with numbers; these are listed here.
"""

from __future__ import annotations

import importlib
import sys

_WITHOUT_TORCH = ("plan", "report")


def main() -> None:
    """Runs the command line, after importing the named command, or all of them."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    module = name if name in _WITHOUT_TORCH else "main"
    importlib.import_module(f"megatron_datastates.cli.{module}")
    from megatron_datastates.cli.shared import app

    app()
