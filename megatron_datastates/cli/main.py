"""The command `datastates`, whole, as --help and completion need it. For one sub-command, see entry.py.

Each sub-command is a module, which imports what it needs when it runs.
"""

from __future__ import annotations

import importlib

from megatron_datastates.cli.entry import MODULES, main
from megatron_datastates.cli.program import app

__all__ = ["app", "main"]

for module in MODULES.values():  # each adds its sub-command to `app`
    importlib.import_module(f"megatron_datastates.cli.{module}")
